//! What is told once the cluster serves.

use kvferry_server::PairHealth;
use serde_json::{Value, json};

use super::cluster::{Cluster, Row};
use crate::terminal::{self, Look, styled};

/// What a model understands, and is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// It can chat.
    Chat,
    /// Any text.
    Text,
    /// A text with a needle, of the built-in model that finds them.
    Needle,
    /// It has no words.
    Ids,
}

/// A table of the processes and a request to copy.
pub(super) fn text(cluster: &Cluster, model: &str, ask: Ask) -> String {
    let mut table = terminal::table();
    // The name says the role, and the layout how many ranks there are.
    table.set_header(["process", "layout", "pid", "url"]);
    for Row { instance, layout, pid, url, .. } in &cluster.rows {
        let layout = layout.as_ref().map_or_else(|| "-".into(), ToString::to_string);
        table.add_row([instance, &layout, &pid.to_string(), url]);
    }
    if let Some(layouts) = table.column_mut(1) {
        layouts.set_delimiter(',');
    }
    let mut over = terminal::table();
    over.set_header(["pair", "transport", "why that one"]);
    for PairHealth { prefill, decode, transport, why } in &cluster.pairs {
        over.add_row([&format!("{prefill} → {decode}"), transport, why]);
    }
    let refused: String = cluster.refused.iter().map(|why| terminal::wrapped(why, 2) + "\n").collect();
    let asked = "# an answer, as it comes; Ctrl-C ends the cluster";
    format!(
        "{table}\n\n{over}\n{refused}\n{}\n{}\n",
        styled(Look::Dim, asked),
        curl(&cluster.url, model, ask)
    )
}

/// A request that the model understands. To be copied into a shell as it is.
fn curl(url: &str, model: &str, ask: Ask) -> String {
    let model = json!(model);
    let (path, lines) = match ask {
        Ask::Chat => (
            "chat/completions",
            "\"messages\": [{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}],\n  \
             \"max_tokens\": 64, \"temperature\": 0, \"stream\": true",
        ),
        Ask::Text => (
            "completions",
            "\"prompt\": \"The sky is\",\n  \"max_tokens\": 64, \"temperature\": 0, \"stream\": true",
        ),
        Ask::Needle => (
            "completions",
            "\"prompt\": \"The code of the ferry is 31415. Q: The code of the ferry is \",\n  \
             \"max_tokens\": 6, \"temperature\": 0, \"stream\": true",
        ),
        Ask::Ids => (
            "completions",
            "\"prompt\": [1, 2, 3], \"max_tokens\": 16,\n  \"stream\": true, \"return_token_ids\": true",
        ),
    };
    // The shell ends a quoted text at an apostrophe, which a name may have.
    let body = format!("{{\"model\": {model},\n  {lines}}}").replace('\'', r"'\''");
    format!("curl -N {url}/v1/{path} \\\n  -H 'content-type: application/json' -d '{body}'")
}

/// The same in one line.
pub(super) fn json(cluster: &Cluster, model: &str) -> Value {
    let row = |row: &Row| {
        json!({
            "instance": row.instance,
            "role": row.role,
            "layout": row.layout.as_ref().map(ToString::to_string),
            "pid": row.pid,
            "http": row.url,
        })
    };
    let processes: Vec<Value> = cluster.rows.iter().map(row).collect();
    let Cluster { url, pairs, refused, .. } = cluster;
    json!({
        "ready": true, "url": url, "model": model, "processes": processes, "pairs": pairs, "refused": refused
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a shell makes of the line is what was meant, in at most 80 columns.
    #[test]
    fn the_request_can_be_copied_into_a_shell() {
        for (model, ask) in [
            ("smollm2", Ask::Chat),
            ("needle_kimi", Ask::Needle),
            ("llama_tiny", Ask::Ids),
            ("it's \"mine\" $(1)", Ask::Text),
        ] {
            let line = curl("http://127.0.0.1:65535", model, ask);
            assert!(line.lines().all(|line| line.chars().count() <= terminal::WIDTH), "{line}");
            let script = line.replacen("curl", "printf '%s\\0'", 1);
            let said = std::process::Command::new("sh").args(["-c", &script]).output().unwrap().stdout;
            let words: Vec<_> = said.split(|byte| *byte == 0).collect();
            let body: Value = serde_json::from_slice(words[5]).unwrap();
            assert_eq!((words.len(), &body["model"]), (7, &json!(model)), "{line}");
            assert_eq!(body["messages"].is_array(), ask == Ask::Chat, "{line}");
            assert_eq!(body["prompt"].is_array(), ask == Ask::Ids, "{line}");
        }
    }
}
