//! NIXL's own library under our transport, and agents of its Python package against ours. Without the library these tests
//! are named in the summary as left out; with `KVFERRY_REQUIRE=nixl` they fail.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failed unwrap is a failed test"
)]

#[path = "../../../tests/component.rs"]
mod component;

use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use component::{Component, tests};
use kvferry_arena::Buffer;
use kvferry_plan::Bytes;
use kvferry_transport::{
    DeviceId, MemoryKind, Setup, Transport, TransportError, contract,
    slots::{BlockEngine, BlockSpan, EngineError, EnginePeer, Progress, SlotOptions},
};
use kvferry_transport_nixl::{NixlEngine, located, start};
use libtest_mimic::Arguments;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
/// More than one message of any transport below.
const SIZE: usize = 3 << 20;

const TESTS: [(&str, fn()); 6] = [
    ("a_python_agent_writes_to_ours", python_writes),
    ("ours_writes_to_a_python_agent", python_is_written),
    ("a_write_to_a_stopped_agent_settles_when_it_goes_on", stopped),
    ("a_write_to_a_killed_agent_fails", killed),
    ("writes_outside_of_what_is_registered_are_refused", outside),
    ("two_ends_that_have_met_and_are_idle_use_no_cpu", idle),
];
/// In the environment of the process that [`idle`] measures.
const IDLE: &str = "KVFERRY_TEST_IDLE";

fn main() -> ExitCode {
    // UCX reads its environment when it is loaded. Plain TCP is what works in every container, and what waits for a peer
    // that is stopped.
    if std::env::var_os("UCX_TLS").is_none() {
        let us = std::env::current_exe().unwrap();
        let run = Command::new(us).args(std::env::args_os().skip(1)).env("UCX_TLS", "tcp").status().unwrap();
        return if run.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    if std::env::var_os(IDLE).is_some() {
        println!("{:?}", cpu_of_idle_ends().as_secs_f64());
        return ExitCode::SUCCESS;
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(2);
    let there = located().map(|path| path.display().to_string()).map_err(|error| error.to_string());
    let checks = contract::CHECKS
        .iter()
        .map(|(name, check)| (format!("contract::{name}"), Box::new(|| check(&begin)) as Box<_>));
    let tests = tests(&TESTS).into_iter().chain(checks).collect();
    component::run(&arguments, vec![Component { name: "nixl", there, tests }], Vec::new())
}

fn begin(setup: Setup) -> Result<Arc<dyn Transport>, TransportError> {
    Ok(Arc::new(start(setup, small())?))
}

fn small() -> SlotOptions {
    SlotOptions { slot: Bytes(64 << 10), slots: 4, staging: 4, window: 2, kept: 2 }
}

/// A Python process with an agent.
struct Python {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The interpreter of the environment that the library is from.
fn interpreter() -> PathBuf {
    let library = located().unwrap();
    let own = library.ancestors().nth(5).map(|folder| folder.join("bin/python3"));
    own.filter(|path| path.is_file()).unwrap_or_else(|| "python3".into())
}

impl Python {
    fn start(role: &str) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peer.py");
        let mut child = Command::new(interpreter())
            .arg(script)
            .args([role, &SIZE.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout }
    }

    fn hear(&mut self) -> Value {
        loop {
            let mut line = String::new();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "the Python agent has ended");
            // The package logs to the same place.
            if let Ok(said) = serde_json::from_str(&line) {
                return said;
            }
        }
    }

    fn say(&mut self, what: &Value) {
        writeln!(self.stdin, "{what}").unwrap();
    }

    fn signal(&self, name: &str) {
        let kill = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(kill.success());
    }
}

/// Our agent, with memory, and a Python agent that knows of it.
struct Pair {
    ours: NixlEngine,
    memory: Arc<Buffer>,
    span: BlockSpan,
    python: Python,
    peer: EnginePeer,
    theirs: BlockSpan,
    heard: Vec<Vec<u8>>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

fn pattern(step: usize) -> Vec<u8> {
    (0..SIZE).map(|i| ((i * step + 7) % 251) as u8).collect()
}

impl Pair {
    fn new(role: &str) -> Self {
        let mut python = Python::start(role);
        let mut ours = NixlEngine::new().unwrap();
        let memory = Arc::new(Buffer::new("test", Bytes(SIZE as u64)).unwrap());
        let span = ours.register(Arc::clone(&memory), MemoryKind::Host, DeviceId(0)).unwrap();
        let said = python.hear();
        let peer = ours.connect(&unhex(said["metadata"].as_str().unwrap())).unwrap();
        let theirs = BlockSpan { address: said["address"].as_u64().unwrap(), ..span };
        let metadata = hex(&ours.metadata().unwrap());
        python.say(&json!({ "metadata": metadata, "address": span.address }));
        Self { ours, memory, span, python, peer, theirs, heard: Vec::new() }
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let since = Instant::now();
        while !holds(self) {
            assert!(since.elapsed() < PATIENCE, "{what}");
            thread::sleep(Duration::from_micros(200));
        }
    }

    fn came(&mut self, message: &[u8]) -> bool {
        self.heard.extend(self.ours.notifications().unwrap());
        self.heard.iter().any(|heard| heard == message)
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; SIZE];
        self.memory.read(Bytes(0), &mut bytes).unwrap();
        bytes
    }

    /// Writes all of our memory to theirs.
    fn write(&mut self) -> Result<(), EngineError> {
        let (peer, span, theirs) = (self.peer, self.span, self.theirs);
        let write = self.ours.write(peer, span, theirs)?;
        let mut outcome = Ok(Progress::Moving);
        self.until("a write never ended", |pair| {
            outcome = pair.ours.poll(write);
            !matches!(outcome, Ok(Progress::Moving))
        });
        self.ours.release(write);
        outcome.map(drop)
    }
}

fn python_writes() {
    let mut pair = Pair::new("initiator");
    pair.until("no notification came with the data", |pair| pair.came(b"with the data"));
    assert!(pair.bytes() == pattern(31));
    pair.until("no notification came by itself", |pair| pair.came(b"by itself"));
    pair.ours.notify(pair.peer, b"answer").unwrap();
    let theirs = pair.python.hear();
    assert!(unhex(theirs["bytes"].as_str().unwrap()) == pattern(31));
}

fn python_is_written() {
    let mut pair = Pair::new("target");
    pair.memory.write(Bytes(0), &pattern(17)).unwrap();
    pair.write().unwrap();
    pair.ours.notify(pair.peer, b"written").unwrap();
    pair.until("the notification was not answered", |pair| pair.came(b"seen"));
    let theirs = pair.python.hear();
    assert!(unhex(theirs["bytes"].as_str().unwrap()) == pattern(17));
}

fn stopped() {
    let mut pair = Pair::new("target");
    pair.write().unwrap();
    pair.memory.write(Bytes(0), &pattern(5)).unwrap();
    pair.python.signal("-STOP");
    let (peer, span, theirs) = (pair.peer, pair.span, pair.theirs);
    let writes: Vec<_> = (0..8).map(|_| pair.ours.write(peer, span, theirs).unwrap()).collect();
    // Only a process that runs takes what comes over TCP.
    if std::env::var("UCX_TLS").is_ok_and(|tls| tls == "tcp") {
        thread::sleep(Duration::from_millis(300));
        let moving = |write: &_| pair.ours.poll(*write).unwrap() == Progress::Moving;
        assert!(writes.iter().any(moving), "24 MB came to a process that is stopped");
    }
    pair.python.signal("-CONT");
    for write in writes {
        pair.until("a write never settled", |pair| pair.ours.poll(write).unwrap() == Progress::Settled);
        pair.ours.release(write);
    }
    pair.ours.notify(pair.peer, b"written").unwrap();
    assert!(unhex(pair.python.hear()["bytes"].as_str().unwrap()) == pattern(5));
}

fn killed() {
    let mut pair = Pair::new("target");
    pair.write().unwrap();
    pair.python.signal("-KILL");
    pair.python.child.wait().unwrap();
    pair.until("the death was never noticed", |pair| pair.write().is_err());
    // The agent goes on with others.
    let mut next = Python::start("target");
    let said = next.hear();
    pair.peer = pair.ours.connect(&unhex(said["metadata"].as_str().unwrap())).unwrap();
    pair.theirs.address = said["address"].as_u64().unwrap();
    let metadata = hex(&pair.ours.metadata().unwrap());
    next.say(&json!({ "metadata": metadata, "address": 0 }));
    pair.memory.write(Bytes(0), &pattern(3)).unwrap();
    pair.write().unwrap();
    pair.ours.notify(pair.peer, b"written").unwrap();
    assert!(unhex(next.hear()["bytes"].as_str().unwrap()) == pattern(3));
}

fn outside() {
    let mut pair = Pair::new("target");
    let (peer, span, theirs) = (pair.peer, pair.span, pair.theirs);
    let past = |span: BlockSpan| BlockSpan { address: span.address + 1, ..span };
    assert!(pair.ours.write(peer, past(span), theirs).is_err(), "memory that is not ours was read");
    assert!(pair.ours.write(peer, span, past(theirs)).is_err());
    assert!(pair.ours.write(EnginePeer(99), span, theirs).is_err());
    assert!(pair.ours.notify(EnginePeer(99), b"").is_err());
    assert!(pair.ours.connect(b"nonsense").is_err());
    pair.write().unwrap();
}

/// Measured in a process in which nothing else happens.
fn idle() {
    let us = std::env::current_exe().unwrap();
    let run = Command::new(us).env(IDLE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    let seconds: f64 = said.trim().parse().unwrap_or_else(|_| panic!("{run:?}"));
    assert!(seconds < 0.1, "{seconds} s of CPU in {REST:?}");
}

const REST: Duration = Duration::from_secs(3);

fn cpu_of_idle_ends() -> Duration {
    let mut used = Duration::ZERO;
    contract::at_rest(&begin, &mut || {
        let before = cpu();
        thread::sleep(REST);
        used = cpu() - before;
    });
    used
}

/// Of all threads of this process so far.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
    // A hundred a second on every Linux.
    Duration::from_millis(10 * ticks)
}
