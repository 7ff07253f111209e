//! `kvferry doctor`: what this machine can do, and what is missing with the command that gets it. It looks and tries, it
//! changes nothing. Not for measuring (`bench`).

mod machine;
mod tools;

use std::{io::IsTerminal, process::ExitCode};

use clap::Args;
use serde::Serialize;

use crate::{
    failure::Failure,
    terminal::{self, Look, styled},
};

/// Columns of a state and the gap behind it.
const STATE: usize = 9;
/// Columns in front of a further line of a command, and of a path that has its own.
const CONTINUED: usize = STATE + 3;

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct DoctorArgs {
    /// Do not try to reach the Python package index
    #[arg(long)]
    offline: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// How a thing stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// As `demo` and `up` need it.
    Ok,
    /// Good to know; nothing of today's `demo` and `up` needs it.
    Info,
    /// `demo` or `up` does not work without it.
    Missing,
}

/// One thing that was looked at.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    what: &'static str,
    state: State,
    says: String,
    /// What to run or change.
    remedy: Option<String>,
}

impl Finding {
    fn new(what: &'static str, state: State, says: impl Into<String>) -> Self {
        Self { what, state, says: says.into(), remedy: None }
    }

    fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }
}

#[derive(Serialize)]
struct Report {
    /// Nothing is missing.
    ready: bool,
    findings: Vec<Finding>,
}

/// Looks at everything.
pub(crate) async fn run(args: DoctorArgs) -> Result<ExitCode, Failure> {
    if !args.offline && std::io::stderr().is_terminal() {
        terminal::note("asking the package index; a few seconds ...");
    }
    let mut findings = machine::look();
    findings.extend(tools::look(args.offline).await);
    let ready = findings.iter().all(|finding| finding.state != State::Missing);
    let report = Report { ready, findings };
    if args.json {
        let text = serde_json::to_string_pretty(&report)
            .map_err(|e| Failure::new(kvferry_plan::Blame::Us, format!("cannot write JSON: {e}")))?;
        terminal::line(text);
    } else {
        show(&report);
    }
    Ok(if ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn show(report: &Report) {
    let width = report.findings.iter().map(|finding| finding.what.len()).max().unwrap_or(0);
    for Finding { what, state, says, remedy } in &report.findings {
        let (look, state) = match state {
            State::Ok => (Look::Good, "ok"),
            State::Info => (Look::Dim, "info"),
            State::Missing => (Look::Bad, "missing"),
        };
        let indent = STATE + width + 2;
        // A path is there to be copied: one that is too long for its column has the whole line, as commands have.
        let says = match says.rsplit_once(' ') {
            Some((front, path)) if indent + path.chars().count() > terminal::WIDTH => {
                format!("{front}\n{:CONTINUED$}{path}", "")
            }
            _ => says.clone(),
        };
        // Padded before it is coloured, since colours have no width.
        let row = format!("{}  {what:width$}  {says}", styled(look, format_args!("{state:7}")));
        terminal::paragraph(row, indent);
        if let Some(remedy) = remedy {
            // Commands are long and are to be copied: they have the whole line.
            let lines: Vec<_> = remedy.lines().map(str::trim_start).collect();
            let remedy = lines.join(&format!("\n{:CONTINUED$}", ""));
            terminal::paragraph(format_args!("{:STATE$}-> {remedy}", ""), CONTINUED);
        }
    }
    terminal::line(match report.ready {
        true => styled(Look::Good, "everything that demo and up need is there"),
        false => styled(Look::Bad, "something that demo or up needs is missing: see above"),
    });
}
