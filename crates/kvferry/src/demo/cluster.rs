//! The processes of a demo: a registry, a prefill and a decode instance, children of this one. They end with it,
//! whatever way it ends: each watches its standard input, which only this process holds open.

use std::{
    collections::VecDeque,
    ffi::OsString,
    os::unix::process::ExitStatusExt,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use kvferry_plan::{Blame, InstanceId, LayoutSpec};
use kvferry_registry::{Client, Group};
use kvferry_server::{InstanceClient, Leg};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader, Lines},
    process::{ChildStdin, ChildStdout, Command},
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::{
    args::{DemoArgs, name_of},
    failure::Failure,
    model::Located,
};

/// For a process to load its model and open its ports.
const START: Duration = Duration::from_secs(180);
/// For instances to reach the registry.
const REGISTER: Duration = Duration::from_secs(10);
/// For a process to end in order.
const STOP: Duration = Duration::from_secs(5);
/// Lines of a child's errors that are kept.
const KEPT: usize = 20;
/// Of these, how many are shown when none is an error.
const SHOWN: usize = 3;

/// An instance as the demo speaks to it.
pub(super) struct Handle {
    pub(super) client: InstanceClient,
    pub(super) group: Group,
    layout: LayoutSpec,
    pid: u32,
}

impl Handle {
    /// As one side of a room.
    pub(super) fn leg(&self) -> Leg {
        Leg { instance: self.group.instance.clone(), client: self.client.clone() }
    }
}

/// The running processes.
pub(super) struct Cluster {
    pub(super) prefill: Handle,
    pub(super) decode: Handle,
    transport: String,
    children: Vec<Child>,
}

impl Cluster {
    /// Starts the processes and waits until they know each other.
    pub(super) async fn start(args: &DemoArgs, model: &Located) -> Result<Self, Failure> {
        let registry = Child::start("registry", Vec::new())?;
        let (registry, url) = registry.ready().await?;
        let instance = |role: &'static str, layout: &LayoutSpec| {
            let mut list: Vec<OsString> = vec!["--registry".into(), url.clone().into()];
            list.extend(["--model".into(), model.argument(), "--layout".into(), layout.to_string().into()]);
            list.extend(args.engine.to_args());
            Child::start(role, list)
        };
        let (prefill, decode) = (instance("prefill", &args.prefill)?, instance("decode", &args.decode)?);
        let ((prefill, prefill_url), (decode, decode_url)) =
            tokio::try_join!(prefill.ready(), decode.ready())?;
        let registry_client = Client::new(&url)?;
        let handle = async |child: &Child, url: &str, layout: &LayoutSpec| {
            let group = registered(&registry_client, &child.instance()).await?;
            let client = InstanceClient::new(url)?;
            Ok::<_, Failure>(Handle { client, group, layout: layout.clone(), pid: child.pid })
        };
        let cluster = Self {
            prefill: handle(&prefill, &prefill_url, &args.prefill).await?,
            decode: handle(&decode, &decode_url, &args.decode).await?,
            transport: name_of(&args.engine.transport),
            children: vec![prefill, decode, registry],
        };
        Ok(cluster)
    }

    /// What runs: names and facts.
    pub(super) fn describe(&self) -> [(&'static str, String); 3] {
        let width = [&self.prefill, &self.decode]
            .map(|at| at.layout.to_string().len())
            .into_iter()
            .max()
            .unwrap_or(0);
        let facts = |at: &Handle| {
            let (layout, ranks) = (at.layout.to_string(), at.group.ranks);
            format!("{layout:<width$}  {ranks} rank{}  pid {}", if ranks == 1 { " " } else { "s" }, at.pid)
        };
        [
            ("prefill", facts(&self.prefill)),
            ("decode", facts(&self.decode)),
            ("hand-off over", self.transport.clone()),
        ]
    }

    /// Ends the processes in order.
    pub(super) async fn stop(self) {
        for child in self.children {
            child.stop().await;
        }
    }
}

/// Waits until the registry knows `instance`.
async fn registered(registry: &Client, instance: &InstanceId) -> Result<Group, Failure> {
    let look = async {
        loop {
            if let Some(group) = registry.find(instance).await? {
                return Ok(group);
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(REGISTER, look).await.unwrap_or_else(|_| {
        Err(Failure::new(
            Blame::Environment,
            format!(
                "{instance} did not register within {} s; is the machine overloaded?",
                REGISTER.as_secs()
            ),
        ))
    })
}

/// The line that a process prints when it is ready.
#[derive(Deserialize)]
struct Ready {
    http: String,
}

/// A process. It is killed when this is dropped.
struct Child {
    role: &'static str,
    pid: u32,
    process: tokio::process::Child,
    /// Held open: its end is the sign to leave.
    stdin: Option<ChildStdin>,
    stdout: Lines<BufReader<ChildStdout>>,
    errors: Errors,
}

impl Child {
    fn start(role: &'static str, args: Vec<OsString>) -> Result<Self, Failure> {
        let failed =
            |why: String| Failure::new(Blame::Environment, format!("cannot start the {role} process: {why}"));
        let program = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
        // Somebody who asked for logs wants to see them as they come.
        let logging = std::env::var_os("KVFERRY_LOG").is_some();
        let mut process = Command::new(program)
            .args(["serve", "--role", role, "--exit-with-parent"])
            .args(args)
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
            pid: process.id().unwrap_or_default(),
            stdin: process.stdin.take(),
            stdout: BufReader::new(stdout).lines(),
            process,
            errors,
        })
    }

    fn instance(&self) -> InstanceId {
        InstanceId(format!("{}-0", self.role))
    }

    /// Waits for the ready line; answers the URL in it.
    async fn ready(mut self) -> Result<(Self, String), Failure> {
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

    async fn stop(mut self) {
        drop(self.stdin.take());
        if timeout(STOP, self.process.wait()).await.is_err() {
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
