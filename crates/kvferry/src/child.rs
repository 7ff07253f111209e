//! Processes of this program that this process starts. They end with it, whatever way it ends: each watches its standard
//! input, which only this process holds open.

use std::{
    collections::VecDeque,
    ffi::OsString,
    os::unix::process::ExitStatusExt,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use kvferry_plan::Blame;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader, Lines},
    process::{ChildStdin, ChildStdout, Command},
    task::JoinHandle,
    time::timeout,
};

use crate::failure::Failure;

/// For a process to load its model and open its ports.
const START: Duration = Duration::from_secs(180);
/// For a process to end in order.
const STOP: Duration = Duration::from_secs(5);
/// For a process to finish what it has: longer than it waits itself.
const DRAIN: Duration = Duration::from_secs(15);
/// Lines of a child's errors that are kept.
const KEPT: usize = 20;
/// Of these, how many are shown when none is an error.
const SHOWN: usize = 3;

/// The line that a process prints when it is ready.
#[derive(Deserialize)]
struct Ready {
    http: String,
}

/// A process. It is killed when this is dropped.
pub(crate) struct Child {
    role: &'static str,
    instance: String,
    pid: u32,
    process: tokio::process::Child,
    /// Held open: its end is the sign to leave.
    stdin: Option<ChildStdin>,
    stdout: Lines<BufReader<ChildStdout>>,
    errors: Errors,
}

impl Child {
    /// Starts `kvferry serve` in a role.
    pub(crate) fn start(role: &'static str, instance: &str, args: Vec<OsString>) -> Result<Self, Failure> {
        let failed =
            |why: String| Failure::new(Blame::Environment, format!("cannot start the {role} process: {why}"));
        let program = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
        // Somebody who asked for logs wants to see them as they come.
        let logging = std::env::var_os("KVFERRY_LOG").is_some();
        let mut command = Command::new(program);
        // It is told everything on its command line: what the environment says was for this process.
        for (name, _) in std::env::vars_os() {
            let log = name == "KVFERRY_LOG" || name == "KVFERRY_LOG_FORMAT";
            if name.to_string_lossy().starts_with("KVFERRY_") && !log {
                command.env_remove(name);
            }
        }
        let mut process = command
            .args(["serve", "--role", role, "--instance", instance, "--exit-with-parent"])
            .args(args)
            // Ctrl-C is for this process, which then ends the others in order.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(if logging { Stdio::inherit() } else { Stdio::piped() })
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| failed(e.to_string()))?;
        let stdout = process.stdout.take().ok_or_else(|| failed("it has no standard output".into()))?;
        let errors = Errors(process.stderr.take().map(|stderr| tokio::spawn(keep(stderr))));
        Ok(Self {
            role,
            instance: instance.to_owned(),
            pid: process.id().unwrap_or_default(),
            stdin: process.stdin.take(),
            stdout: BufReader::new(stdout).lines(),
            process,
            errors,
        })
    }

    pub(crate) fn instance(&self) -> &str {
        &self.instance
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits for the ready line; answers the URL in it.
    pub(crate) async fn ready(mut self) -> Result<(Self, String), Failure> {
        let role = self.role;
        match timeout(START, self.stdout.next_line()).await {
            Ok(Ok(Some(line))) => match serde_json::from_str::<Ready>(&line) {
                Ok(ready) => Ok((self, ready.http)),
                Err(e) => Err(Failure::new(Blame::Us, format!("the {role} process said {line:?}: {e}"))),
            },
            Err(_) => Err(Failure::new(
                Blame::Environment,
                format!("the {role} process was not ready within {} s", START.as_secs()),
            )),
            // It ended: its own words say why.
            Ok(Ok(None) | Err(_)) => {
                let status = timeout(STOP, self.process.wait()).await;
                let (blame, how) = ending(status.ok().and_then(Result::ok));
                let words = self.errors.last().await;
                Err(Failure::new(blame, format!("the {role} process {how}: {words}")))
            }
        }
    }

    /// Waits for an end that nobody asked for; answers how it came about, with the last words. May be dropped and called
    /// again before that.
    pub(crate) async fn ended(&mut self) -> String {
        let status = self.process.wait().await;
        let how = match status.ok().map(|status| (status.code(), status.signal())) {
            Some((_, Some(signal))) => format!("was ended by signal {signal}"),
            Some((Some(code), _)) => format!("ended with exit status {code}"),
            _ => "ended".into(),
        };
        format!("{how}; it said last: {}", std::mem::replace(&mut self.errors, Errors(None)).last().await)
    }

    /// Ends it, by the end of its standard input.
    pub(crate) async fn stop(mut self) {
        drop(self.stdin.take());
        self.leave(STOP).await;
    }

    /// Lets it finish what it has, then ends it.
    pub(crate) async fn drain(self) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            // One that has ended already needs no signal.
            let _ = kill_process(pid, Signal::TERM);
        }
        self.leave(DRAIN).await;
    }

    async fn leave(mut self, patience: Duration) {
        if timeout(patience, self.process.wait()).await.is_err() {
            tracing::warn!(role = self.role, pid = self.pid, "did not end by itself and is killed");
            let _ = self.process.kill().await;
        }
    }
}

/// Whom the end of a process before it was ready speaks against, and how to call that end.
fn ending(status: Option<ExitStatus>) -> (Blame, String) {
    match status.map(|status| (status.code(), status.signal())) {
        Some((_, Some(signal))) => {
            (Blame::Environment, format!("was ended by signal {signal} before it was ready; it said last"))
        }
        Some((Some(2), _)) => (Blame::Caller, "did not start".into()),
        _ => (Blame::Environment, "did not start".into()),
    }
}

/// The last lines that a child writes to its standard error, once it has ended; nothing when they are shown as they
/// come.
struct Errors(Option<JoinHandle<VecDeque<String>>>);

impl Errors {
    /// What it said last; an `error (...)` line without its head.
    async fn last(self) -> String {
        let Self(Some(reader)) = self else { return "see its standard error".into() };
        let lines: Vec<String> =
            timeout(STOP, reader).await.ok().and_then(Result::ok).unwrap_or_default().into();
        if let Some(from) = lines.iter().rposition(|line| line.starts_with("error (")) {
            let text = lines.get(from..).unwrap_or_default().join("\n");
            return text.split_once("): ").map_or(text.as_str(), |(_, rest)| rest).to_owned();
        }
        // Without an error of its own, its last words are the nearest to the reason.
        let text = lines.get(lines.len().saturating_sub(SHOWN)..).unwrap_or_default().join("\n");
        if text.is_empty() { "nothing (see its standard error with KVFERRY_LOG=info)".into() } else { text }
    }
}

async fn keep(stderr: impl AsyncRead + Unpin) -> VecDeque<String> {
    let (mut lines, mut kept) = (BufReader::new(stderr).lines(), VecDeque::new());
    while let Ok(Some(line)) = lines.next_line().await {
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(line);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn last(said: &'static str) -> String {
        Errors(Some(tokio::spawn(keep(said.as_bytes())))).last().await
    }

    #[tokio::test]
    async fn the_last_words_of_a_child_are_told() {
        let said = "a warning\nanother\nthird\nfourth\nmemory allocation of 137438953472 bytes failed\n";
        assert_eq!(last(said).await, "third\nfourth\nmemory allocation of 137438953472 bytes failed");
        assert_eq!(last("a warning\nerror (caller): the pool\nis small\n").await, "the pool\nis small");
        assert!(last("").await.starts_with("nothing"));
    }

    #[test]
    fn a_signal_is_named() {
        assert_eq!(ending(Some(ExitStatus::from_raw(2 << 8))), (Blame::Caller, "did not start".into()));
        let (blame, how) = ending(Some(ExitStatus::from_raw(6)));
        assert_eq!(blame, Blame::Environment);
        assert!(how.contains("signal 6"), "{how}");
    }
}
