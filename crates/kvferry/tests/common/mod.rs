//! Running the binary from tests.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

/// A run of the binary.
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    /// The one JSON object that was printed.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}\n{}\n{}", self.stdout, self.stderr))
    }

    /// Everything, for messages of failed assertions.
    pub(crate) fn all(&self) -> String {
        format!("exit {:?}\n--- stdout\n{}--- stderr\n{}", self.code, self.stdout, self.stderr)
    }
}

/// The binary, with an environment in which nothing of this machine's is found by chance.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.args(args).env("NO_COLOR", "1").env("COLUMNS", "100").stdin(Stdio::null());
    for name in [
        "KVFERRY_LOG",
        "KVFERRY_LOG_FORMAT",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "KVFERRY_MODEL_URL",
        "HF_ENDPOINT",
        "HF_TOKEN",
    ] {
        command.env_remove(name);
    }
    command
}

/// Runs the binary to its end.
pub(crate) fn kvferry(args: &[&str]) -> Run {
    finish(command(args).output().unwrap())
}

/// A suite refuses options that change what its cases find, rather than ignore them.
pub(crate) fn assert_suite_keeps_its_own_options(suite: &[&str]) {
    for option in [
        &["--state-slots", "1"][..],
        &["--no-prefix-cache"],
        &["--pool-tokens", "100"],
        &["--chunk", "7"],
        &["--model", "embedded:llama_tiny"],
    ] {
        let run = kvferry(&[suite, option].concat());
        assert_eq!(run.code, Some(2), "{}", run.all());
        assert!(run.all().contains(option[0]), "{}", run.all());
    }
}

pub(crate) fn finish(output: Output) -> Run {
    Run {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Writes `count` token ids below `vocab` as a JSON list; `seed` makes lists differ.
pub(crate) fn ids_file(folder: &Path, count: usize, vocab: u32, seed: u32) -> PathBuf {
    let ids: Vec<u32> = (0..count as u32).map(|i| (i * 7919 + seed * 104_729 + 3) % vocab).collect();
    let path = folder.join(format!("ids-{count}-{seed}.json"));
    std::fs::write(&path, serde_json::to_string(&ids).unwrap()).unwrap();
    path
}

/// No line is wider than 80 columns, but for words that are.
pub(crate) fn assert_narrow(text: &str) {
    for line in text.lines() {
        let narrow = line.chars().count() <= 80 || !line.trim().contains(' ');
        assert!(narrow, "{} columns: {line}\n---\n{text}", line.chars().count());
    }
}

/// What must hold of every demo that proves bit equality.
pub(crate) fn assert_proven(run: &Run) -> Value {
    assert_eq!(run.code, Some(0), "{}", run.all());
    let report = run.json();
    assert_eq!(report["proven"], true, "{report:#}");
    assert_eq!(report["tokens_equal"], true, "{report:#}");
    assert_eq!(report["decode_prompt_tokens_computed"], 0, "{report:#}");
    assert_eq!(report["transfer"]["bytes"], report["transfer"]["planned_bytes"], "{report:#}");
    assert!(report["transfer"]["bytes"].as_u64().unwrap() > 0, "{report:#}");
    assert_eq!(report["findings"], serde_json::json!([]), "{report:#}");
    report
}

/// A process of a cluster that a test starts itself. Killed when dropped.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) url: String,
    pub(crate) instance: String,
}

impl Server {
    /// Starts `kvferry serve` and waits for its ready line.
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[])
    }

    /// The same with more environment.
    pub(crate) fn start_with(args: &[&str], env: &[(&str, &str)]) -> Self {
        let mut child = command(&[&["serve"], args].concat())
            .env("KVFERRY_LOG", "off")
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let ready = ready(&mut child);
        let text = |key: &str| ready[key].as_str().unwrap().to_owned();
        Self { child, url: text("http"), instance: text("instance") }
    }

    /// Sends SIGTERM and waits for the end; the exit code.
    pub(crate) fn terminate(mut self) -> Option<i32> {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        wait_until("the process ends", || self.child.try_wait().unwrap().is_some());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The line that a process prints once it serves; its standard output and error have to be pipes.
pub(crate) fn ready(child: &mut Child) -> Value {
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    if line.is_empty() {
        panic!("it did not start: {}", std::io::read_to_string(child.stderr.take().unwrap()).unwrap());
    }
    let ready: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}"));
    assert_eq!(ready["ready"], true);
    ready
}

/// Waits for a condition, not for a time.
pub(crate) fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < deadline, "waited too long: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
