//! Engines of Mooncake's own Python package, and its benchmark, against ours, in both roles.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

#[path = "../../../tests/component.rs"]
mod component;
mod memory;

use std::{
    io::{BufRead, BufReader, Write as _},
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use component::{Component, tests};
use kvferry_plan::Bytes;
use kvferry_transport_mooncake::{
    Address, Description, Lane, Limits, MooncakeError, Notification, Peer, Read, Target, Write,
    sidecar::INSTALL,
};
use libtest_mimic::Arguments;
use memory::{BASE, Memory, pattern};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
const SIZE: usize = 3 << 20;
/// Of the benchmark; it has 2 threads with batches of 16.
const BLOCK: usize = 65536;

const TESTS: [(&str, fn()); 6] = [
    ("a_python_engine_writes_and_reads_ours", python_initiates),
    ("ours_writes_and_reads_a_python_engine", python_is_target),
    ("the_benchmark_writes_and_reads_ours", bench_initiates),
    ("ours_writes_and_reads_the_benchmark", bench_is_target),
    ("a_killed_target_fails_soon", killed_target),
    ("a_killed_initiator_costs_nobody_else", killed_initiator),
];

fn main() -> ExitCode {
    let there = interpreter().map(|path| path.display().to_string());
    let there = there.map_err(|why| format!("{why}; {INSTALL}"));
    let package = Component { name: "mooncake", there, tests: tests(&TESTS) };
    component::run(&Arguments::from_args(), vec![package], Vec::new())
}

/// A Python that has the package.
fn interpreter() -> Result<PathBuf, String> {
    let named = std::env::var_os("KVFERRY_PYTHON").map(PathBuf::from);
    let active = std::env::var_os("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("bin/python3"));
    let path = named.or(active).ok_or("no virtual environment is active")?;
    let tried = Command::new(&path).args(["-c", "import mooncake.engine"]).output();
    let tried = tried.map_err(|error| format!("{} cannot be run: {error}", path.display()))?;
    let said = String::from_utf8_lossy(&tried.stderr);
    let last = said.lines().last().unwrap_or("it says nothing");
    if tried.status.success() { Ok(path) } else { Err(format!("{}: {last}", path.display())) }
}

/// Another process.
struct Process {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start(command: &mut Command) -> Self {
        command.env("MC_FORCE_TCP", "1").env("MC_TCP_PROGRESS_TIMEOUT_SEC", "10");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout }
    }

    fn python(role: &str, size: usize) -> (Self, Value) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peer.py");
        let mut command = Command::new(interpreter().unwrap());
        command.env("MC_LOG_LEVEL", "ERROR");
        let mut python = Self::start(command.arg(script).args([role, &size.to_string()]));
        let first = python.hear();
        (python, first)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.stdout.read_line(&mut line).unwrap() > 0, "the process has ended");
        line
    }

    /// What the script says. The package logs to the same place.
    fn hear(&mut self) -> Value {
        loop {
            if let Ok(said) = serde_json::from_str::<Value>(&self.line())
                && let Some(what) = said.get("kvferry")
            {
                return what.clone();
            }
        }
    }

    fn say(&mut self, what: &Value) {
        writeln!(self.stdin, "{what}").unwrap();
    }
}

fn limits() -> Limits {
    Limits { stall: Duration::from_secs(20), connect: Duration::from_secs(20), ..Limits::default() }
}

fn start(memory: &Arc<Memory>) -> Target {
    let ranges: Arc<Memory> = Arc::clone(memory);
    Target::start(Ipv4Addr::LOCALHOST.into(), ranges, limits()).unwrap()
}

fn us() -> Description {
    Description { name: "127.0.0.1:1".into(), data_port: 1, version: 2, regions: Vec::new() }
}

/// An engine that was started, with a way to its memory.
struct Engine {
    peer: Peer,
    theirs: Description,
    lane: Lane,
    address: Address,
}

fn reach(control: &str) -> Engine {
    let control: SocketAddr = control.parse().unwrap();
    let peer = Peer::new(control, limits()).unwrap();
    peer.probe().unwrap();
    let theirs = peer.metadata(&us()).unwrap();
    let lane = peer.lane(&theirs).unwrap();
    let address = theirs.regions.first().unwrap().address;
    Engine { peer, theirs, lane, address }
}

/// Writes what lies `step` by `step`, in rows, and reads it again.
fn write_and_read(engine: &mut Engine, bytes: &[u8], row: usize) {
    let at = |i: usize| Address(engine.address.0 + (i * row) as u64);
    let writes: Vec<_> =
        bytes.chunks(row).enumerate().map(|(i, bytes)| Write { address: at(i), bytes }).collect();
    engine.lane.write(&writes).unwrap();
    let mut back = vec![0; bytes.len()];
    let mut reads: Vec<_> =
        back.chunks_mut(row).enumerate().map(|(i, into)| Read { address: at(i), into }).collect();
    engine.lane.read(&mut reads).unwrap();
    assert!(back == bytes, "rows of {row}");
}

fn refused(engine: &mut Engine, at: u64, len: usize) {
    let bytes = vec![9; len];
    let refused = engine.lane.write(&[Write { address: Address(at), bytes: &bytes }]).unwrap_err();
    assert!(matches!(refused, MooncakeError::Refused { .. }), "{refused}");
    engine.lane = engine.peer.lane(&engine.theirs).unwrap();
}

fn python_initiates() {
    let memory = Arc::new(Memory::new(SIZE));
    let target = start(&memory);
    let (mut python, _) = Process::python("initiator", SIZE);
    python.say(&json!({ "peer": target.address().to_string(), "address": BASE }));
    let said = python.hear();
    let expected =
        json!({ "probe": 0, "wrote": 0, "read": 0, "outside": [-1, -1, -1], "again": 0, "same": true });
    assert_eq!(said, expected);
    assert!(memory.bytes() == pattern(31, SIZE));
    let note = Notification { name: "python".into(), message: "with the data".into() };
    assert_eq!(*memory.heard.lock().unwrap(), [note]);
    assert!(target.stats().refused >= 3);
}

fn python_is_target() {
    let (mut python, first) = Process::python("target", SIZE);
    let mut engine = reach(first["control"].as_str().unwrap());
    assert_eq!(engine.address.0, first["address"].as_u64().unwrap());
    for (step, row) in [(3, 1152), (5, 73_728), (17, SIZE)] {
        write_and_read(&mut engine, &pattern(step, SIZE), row);
    }
    let end = engine.address.0 + SIZE as u64;
    for (at, len) in [(end, 1), (end - 1, 2), (engine.address.0 - 1, 1), (0, 1)] {
        refused(&mut engine, at, len);
    }
    engine.peer.notify(&Notification { name: "kvferry".into(), message: "written".into() }).unwrap();
    let said = python.hear();
    assert_eq!(said["heard"], json!([["kvferry", "written"]]));
    let theirs = said["bytes"].as_str().unwrap();
    let ours: String = pattern(17, SIZE).iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(theirs == ours, "what the engine has is not what was written");
}

/// The benchmark of the package, with memory for all of its blocks.
fn bench(options: &[&str]) -> Process {
    let (_python, first) = Process::python("target", 64);
    let mut command = Command::new(first["bench"].as_str().unwrap());
    command
        .args(["--metadata_server=P2PHANDSHAKE", "--protocol=tcp", "--local_server_name=127.0.0.1"])
        .args(["--threads=2", "--batch_size=16", &format!("--block_size={BLOCK}"), "--duration=1"])
        .args(options)
        .stderr(Stdio::piped());
    Process::start(&mut command)
}

fn bench_initiates() {
    let memory = Arc::new(Memory::new(2 * 16 * BLOCK));
    let target = start(&memory);
    for operation in ["write", "read"] {
        let peer = format!("--segment_id={}", target.address());
        let operation_is = format!("--operation={operation}");
        let mut bench = bench(&["--mode=initiator", "--buffer_size=8388608", &peer, &operation_is]);
        assert!(bench.child.wait().unwrap().success());
        let stats = target.stats();
        let moved = if operation == "write" { stats.landed } else { stats.served };
        assert!(moved >= Bytes(BLOCK as u64) && stats.refused == 0, "{operation}: {stats:?}");
    }
}

fn bench_is_target() {
    let mut bench = bench(&["--mode=target", "--buffer_size=8388608"]);
    let stderr = BufReader::new(bench.child.stderr.take().unwrap());
    let (found, control) = mpsc::channel();
    // All that it says is taken: it would end with the pipe.
    thread::spawn(move || {
        for line in stderr.lines().map_while(Result::ok) {
            if let Some((_, port)) = line.split_once("listening on 127.0.0.1:") {
                let _ = found.send(format!("127.0.0.1:{}", port.trim()));
            }
        }
    });
    let control = control.recv_timeout(PATIENCE).unwrap();
    let peer = Peer::new(control.parse().unwrap(), limits()).unwrap();
    let since = Instant::now();
    // It says so before it listens, describes itself later, and has memory later still.
    while peer.metadata(&us()).map_or(true, |theirs| theirs.regions.is_empty()) {
        assert!(since.elapsed() < PATIENCE, "the benchmark never had memory");
        thread::sleep(Duration::from_millis(20));
    }
    let mut engine = reach(&control);
    for (step, row) in [(3, 1152), (5, SIZE)] {
        write_and_read(&mut engine, &pattern(step, SIZE), row);
    }
}

fn killed_target() {
    let (mut python, first) = Process::python("target", SIZE);
    let mut engine = reach(first["control"].as_str().unwrap());
    let bytes = pattern(3, SIZE);
    write_and_read(&mut engine, &bytes, SIZE);
    let killer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        python.child.kill().unwrap();
        python
    });
    let since = Instant::now();
    let error = loop {
        if let Err(error) = engine.lane.write(&[Write { address: engine.address, bytes: &bytes }]) {
            break error;
        }
        assert!(since.elapsed() < PATIENCE, "the death was never noticed");
    };
    assert!(matches!(error, MooncakeError::Gone { .. }), "{error}");
    let gone = engine.peer.probe().unwrap_err();
    assert!(matches!(gone, MooncakeError::Gone { .. }), "{gone}");
    drop(killer.join().unwrap());
}

fn killed_initiator() {
    let memory = Arc::new(Memory::new(SIZE));
    let target = start(&memory);
    let (mut python, _) = Process::python("endless", SIZE);
    python.say(&json!({ "peer": target.address().to_string(), "address": BASE }));
    let since = Instant::now();
    while target.stats().landed < Bytes(SIZE as u64) {
        assert!(since.elapsed() < PATIENCE, "nothing was written");
        thread::sleep(Duration::from_millis(5));
    }
    python.child.kill().unwrap();
    drop(python);
    // What it had sent still lands.
    let landed = loop {
        let before = target.stats().landed;
        thread::sleep(Duration::from_millis(200));
        if target.stats().landed == before {
            break before;
        }
        assert!(since.elapsed() < PATIENCE, "writes of a dead process never end");
    };
    let mut engine = reach(&target.address().to_string());
    write_and_read(&mut engine, &pattern(3, SIZE), 4096);
    assert_eq!(target.stats().landed.0, landed.0 + SIZE as u64);
    assert!(memory.bytes() == pattern(3, SIZE));
}
