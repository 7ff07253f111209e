//! What is told once the cluster serves.

use serde_json::{Value, json};

use super::cluster::{Cluster, Row};
use crate::terminal::{self, Look, styled};

/// A table of the processes and a request to copy.
pub(super) fn text(cluster: &Cluster, model: &str, speaks: bool) -> String {
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
    let asked = "# an answer, as it comes; Ctrl-C ends the cluster";
    format!("{table}\n\n{}\n{}\n", styled(Look::Dim, asked), curl(&cluster.url, model, speaks))
}

/// A chat where the model can chat, token ids where it has no words. To be copied into a shell as it is.
fn curl(url: &str, model: &str, speaks: bool) -> String {
    let model = json!(model);
    let (path, lines) = if speaks {
        let messages = r#"[{"role": "user", "content": "Why is the sky blue?"}]"#;
        let rest =
            format!("\"messages\": {messages},\n  \"max_tokens\": 64, \"temperature\": 0, \"stream\": true");
        ("chat/completions", rest)
    } else {
        let rest =
            "\"prompt\": [1, 2, 3], \"max_tokens\": 16,\n  \"stream\": true, \"return_token_ids\": true";
        ("completions", rest.to_owned())
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
    json!({ "ready": true, "url": cluster.url, "model": model, "processes": processes })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a shell makes of the line is what was meant, in at most 80 columns.
    #[test]
    fn the_request_can_be_copied_into_a_shell() {
        for (model, speaks) in [("smollm2", true), ("llama_tiny", false), ("it's \"mine\" $(1)", true)] {
            let line = curl("http://127.0.0.1:65535", model, speaks);
            assert!(line.lines().all(|line| line.chars().count() <= terminal::WIDTH), "{line}");
            let script = line.replacen("curl", "printf '%s\\0'", 1);
            let said = std::process::Command::new("sh").args(["-c", &script]).output().unwrap().stdout;
            let words: Vec<_> = said.split(|byte| *byte == 0).collect();
            let body: Value = serde_json::from_slice(words[5]).unwrap();
            assert_eq!((words.len(), &body["model"]), (7, &json!(model)), "{line}");
            assert_eq!(body["messages"].is_array(), speaks, "{line}");
        }
    }
}
