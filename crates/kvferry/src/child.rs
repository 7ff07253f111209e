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
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    process::{ChildStdin, Command},
    sync::oneshot,
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
/// Of these, how many are shown when it did not say why it ends.
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
    /// The URL in its ready line, once it has printed that.
    announced: oneshot::Receiver<String>,
    errors: Errors,
}

impl Child {
    /// Starts `kvferry serve` in a role.
    pub(crate) fn start(role: &'static str, instance: &str, args: Vec<OsString>) -> Result<Self, Failure> {
        let failed =
            |why: String| Failure::new(Blame::Environment, format!("cannot start {instance}: {why}"));
        let program = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
        // Somebody who asked for logs wants to see them as they come.
        let logging = std::env::var_os("KVFERRY_LOG").is_some();
        let mut command = Command::new(program);
        // It is told everything on its command line: what the environment says was for this process.
        for (name, _) in std::env::vars_os() {
            let kept = ["KVFERRY_LOG", "KVFERRY_LOG_FORMAT", "KVFERRY_NIXL_LIB", "KVFERRY_PYTHON"]
                .iter()
                .any(|kept| name == *kept);
            if name.to_string_lossy().starts_with("KVFERRY_") && !kept {
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
        let (ready, announced) = oneshot::channel();
        // Ends with the process.
        tokio::spawn(announce(stdout, ready));
        let errors = Errors(process.stderr.take().map(|stderr| tokio::spawn(keep(stderr))));
        Ok(Self {
            role,
            instance: instance.to_owned(),
            pid: process.id().unwrap_or_default(),
            stdin: process.stdin.take(),
            announced,
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
        let failed = |blame, how| Failure::new(blame, format!("{} {how}", self.instance));
        match timeout(START, &mut self.announced).await {
            Ok(Ok(http)) => Ok((self, http)),
            Err(_) => Err(failed(Blame::Environment, format!("was not ready within {} s", START.as_secs()))),
            // It ended: its own words say why.
            Ok(Err(_)) => {
                let status = timeout(STOP, self.process.wait()).await.ok().and_then(Result::ok);
                let caller = status.and_then(|status| status.code()) == Some(2);
                let words = self.errors.last().await;
                let words =
                    words.unwrap_or_else(|| "it did not say why; KVFERRY_LOG=info shows its log".into());
                let blame = if caller { Blame::Caller } else { Blame::Environment };
                Err(failed(blame, ending(status, Some(words), "did not start")))
            }
        }
    }

    /// Waits for an end that nobody asked for; answers how it came about, with the last words. May be dropped and called
    /// again before that.
    pub(crate) async fn ended(&mut self) -> String {
        let status = self.process.wait().await.ok();
        let code = status.and_then(|status| status.code()).unwrap_or_default();
        let words = std::mem::replace(&mut self.errors, Errors(None)).last().await;
        ending(status, words, &format!("ended with exit status {code}"))
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

/// How an end came about, `otherwise` where no signal made it, with the last words if there are any.
fn ending(status: Option<ExitStatus>, words: Option<String>, otherwise: &str) -> String {
    let how = match status.and_then(|status| status.signal()) {
        Some(signal) => format!("was ended by signal {signal}"),
        None => otherwise.to_owned(),
    };
    match words {
        Some(words) => format!("{how}: {words}"),
        None => how,
    }
}

/// What a child writes to its standard error; nothing when it is shown as it comes.
struct Errors(Option<JoinHandle<VecDeque<String>>>);

impl Errors {
    /// What it said of its end: an `error (...)` line without its head, or else lines that are not its log's, such as a
    /// panic's. What it logged earlier is not why it ended.
    async fn last(self) -> Option<String> {
        let lines: Vec<String> = timeout(STOP, self.0?).await.ok()?.ok()?.into();
        if let Some(from) = lines.iter().rposition(|line| line.starts_with("error (")) {
            let text = lines.get(from..).unwrap_or_default().join("\n");
            return Some(text.split_once("): ").map_or(text.as_str(), |(_, rest)| rest).to_owned());
        }
        let said: Vec<_> = lines.into_iter().filter(|line| !is_log(line)).collect();
        let last = said.get(said.len().saturating_sub(SHOWN)..).unwrap_or_default();
        (!last.is_empty()).then(|| last.join("\n"))
    }
}

/// Whether a line is one of the log: a moment and a level, or a JSON object.
fn is_log(line: &str) -> bool {
    let mut words = line.split_ascii_whitespace();
    let dated = words.next().is_some_and(|first| first.ends_with('Z') && first.starts_with("20"));
    let level = words.next().is_some_and(|word| ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"].contains(&word));
    (dated && level) || line.starts_with("{\"timestamp\"")
}

/// Tells the URL of the ready line, and reads on to the end: libraries write to standard output too (UCX what it warns of), and
/// would wait for a reader. What they write in pieces may stand before our line.
async fn announce(stdout: impl AsyncRead + Unpin, ready: oneshot::Sender<String>) {
    let (mut lines, mut ready) = (BufReader::new(stdout).split(b'\n'), Some(ready));
    while let Ok(Some(line)) = lines.next_segment().await {
        let object = line.iter().rposition(|byte| *byte == b'{').and_then(|at| line.get(at..));
        if let Some(Ready { http }) = object.and_then(|text| serde_json::from_slice(text).ok())
            && let Some(ready) = ready.take()
        {
            // Whoever waited may have given up.
            ready.send(http).ok();
        }
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

    async fn last(said: &'static str) -> Option<String> {
        Errors(Some(tokio::spawn(keep(said.as_bytes())))).last().await
    }

    #[tokio::test]
    async fn the_last_words_of_a_child_are_told() {
        let said = "one\nanother\nthird\nfourth\nmemory allocation of 137438953472 bytes failed\n";
        let told = last(said).await.unwrap();
        assert_eq!(told, "third\nfourth\nmemory allocation of 137438953472 bytes failed");
        let said = "a warning\nerror (caller): the pool\nis small\n";
        assert_eq!(last(said).await.as_deref(), Some("the pool\nis small"));
        assert_eq!(last("").await, None);
    }

    #[tokio::test]
    async fn what_libraries_write_is_not_taken_for_the_ready_line() {
        let announced = async |said: &'static [u8]| {
            let (ready, announced) = oneshot::channel();
            announce(said, ready).await;
            announced.await
        };
        let said = b"[1796082742.7] UCX WARN\n\xff{\"pid\": 1}\n[a half {\"http\": \"a\"}\n line]\n{\"http\": \"b\"}\n";
        assert_eq!(announced(said).await.unwrap(), "a");
        assert!(announced(b"[only this]\n").await.is_err());
    }

    #[tokio::test]
    async fn old_warnings_are_no_last_words() {
        let text = "2026-11-30T09:10:00.123456Z  WARN kvferry_node: decode-0 does not answer\n";
        assert_eq!(last(text).await, None);
        let json = "{\"timestamp\":\"2026-11-30T09:10:00.1Z\",\"level\":\"WARN\",\"message\":\"x\"}\n";
        assert_eq!(last(json).await, None);
        let panic = "2026-11-30T09:10:00.1Z ERROR kvferry: x\nthread 'main' panicked at src/x.rs:1:1:\nno\n";
        assert_eq!(last(panic).await.as_deref(), Some("thread 'main' panicked at src/x.rs:1:1:\nno"));
    }

    #[test]
    fn a_signal_is_named() {
        assert_eq!(ending(Some(ExitStatus::from_raw(2 << 8)), None, "did not start"), "did not start");
        let killed = ending(Some(ExitStatus::from_raw(6)), Some("out of memory".into()), "did not start");
        assert_eq!(killed, "was ended by signal 6: out of memory");
    }
}
