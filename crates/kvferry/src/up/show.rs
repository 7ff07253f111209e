//! What is told once the cluster serves.

use serde_json::{Value, json};

use super::cluster::{Cluster, Row};
use crate::terminal::{self, Look, styled};

/// A table of the processes and a request to copy.
pub(super) fn text(cluster: &Cluster, model: &str, speaks: bool) -> String {
    let mut table = terminal::table();
    table.set_header(["name", "role", "layout", "ranks", "pid", "url"]);
    for Row { instance, role, layout, pid, url } in &cluster.rows {
        let (layout, ranks) =
            layout.as_ref().map_or_else(|| ("-".into(), "-".into()), |l| (l.to_string(), l.tp.to_string()));
        table.add_row([instance.as_str(), role, &layout, &ranks, &pid.to_string(), url]);
    }
    let asked = "# an answer, as it comes; Ctrl-C ends the cluster";
    format!("{table}\n\n{}\n{}\n", styled(Look::Dim, asked), curl(&cluster.url, model, speaks))
}

/// A chat where the model can chat, token ids where it has no words.
fn curl(url: &str, model: &str, speaks: bool) -> String {
    let (path, body) = if speaks {
        let messages = json!([{ "role": "user", "content": "Why is the sky blue?" }]);
        let body = json!({ "model": model, "messages": messages, "max_tokens": 64, "stream": true });
        ("chat/completions", body)
    } else {
        let body = json!({
            "model": model, "prompt": [1, 2, 3], "max_tokens": 16, "stream": true, "return_token_ids": true
        });
        ("completions", body)
    };
    format!("curl -N {url}/v1/{path} -H 'content-type: application/json' -d '{body}'")
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
