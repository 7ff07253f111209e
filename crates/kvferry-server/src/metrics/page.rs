//! The page that documents the metrics, written from their descriptions.

use std::fmt::Write as _;

use super::{InstanceMetrics, RegistryMetrics};
use crate::telemetry::Phase;

const HEAD: &str = "# Metrics

Every process answers `GET /metrics` in the Prometheus text format 0.0.4. This page is written from the code (`KVFERRY_BLESS=1 cargo
test -p kvferry-server --test seeing` writes it anew), so it names what is there.

Names begin with `kvferry_`, carry their unit (`_seconds`, `_bytes`), and counters end in `_total`. Labels have few values: those that
come from outside are bounded (64 peers, 32 fields; all further ones count under `other`), and `none` stands for a request whose
other instance was never known.

Is a process worth sending work to? `GET /ready` answers 200 with `{\"ready\": true, \"reason\": null}`, or 503 with the reason: it
drains, the registry does not know it, or its scheduler or hand-off node has not answered for 15 seconds. `GET /health` says the same
and answers 200 as long as the process lives.

For each request there is one log line of the target `kvferry::room`, when it ends: room, attempt, side, peer, outcome, stage and cause
of a failure, tokens, bytes, runs, and the seconds of each stage. `KVFERRY_LOG=kvferry::room=info` shows them all (failures are shown
by default), `KVFERRY_LOG_FORMAT=json` makes each line one JSON object.
";

/// The text of `docs/metrics.md`: every metric of every role.
#[must_use]
pub fn metrics_page() -> String {
    let mut page = HEAD.to_owned();
    page.push_str("\n## Stages\n\nThe label `stage` of `kvferry_stage_seconds` and `kvferry_stage_requests`; several run at once.\n\n");
    page.push_str("| stage | of | from and to |\n|---|---|---|\n");
    for phase in Phase::ALL {
        let (of, meaning) = phase.meaning();
        let _ = writeln!(page, "| `{}` | {of} | {meaning} |", phase.name());
    }
    let instance = InstanceMetrics::new("", "", "");
    let registry = RegistryMetrics::new();
    for (title, catalogue) in
        [("Prefill, decode, mono and router", instance.catalogue()), ("Registry", registry.catalogue())]
    {
        let _ = write!(page, "\n## {title}\n\n{}", catalogue.table());
    }
    page
}
