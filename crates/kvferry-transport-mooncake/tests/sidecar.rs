//! Mooncake's own engine under our transport.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

#[path = "../../../tests/component.rs"]
mod component;

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Read, Write as _},
    process::{Command, ExitCode, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use component::{Component, tests};
use kvferry_arena::Buffer;
use kvferry_plan::Bytes;
use kvferry_transport::{
    DeviceId, MemoryKind, Setup, Transport, TransportError, contract,
    slots::{BlockEngine, BlockSpan, EngineError, EnginePeer, Progress, SlotOptions, WriteId},
};
use kvferry_transport_mooncake::sidecar::{SidecarEngine, Tuned, located, start};
use libtest_mimic::Arguments;

const PATIENCE: Duration = Duration::from_secs(60);
const SIZE: usize = 3 << 20;
const WORKER: &str = "KVFERRY_TEST_WORKER";

const TESTS: [(&str, fn()); 9] = [
    ("blocks_and_lists_of_blocks_are_exact", exact),
    ("notifications_go_both_ways", notifications),
    ("nonsense_is_refused", nonsense),
    ("a_killed_source_fails_its_writes_and_no_others", killed_source),
    ("a_killed_target_is_replaced", killed_target),
    ("a_write_to_a_stopped_target_settles_when_it_goes_on", stopped),
    ("a_write_to_a_target_that_hangs_fails_and_is_over", hangs),
    ("nothing_is_left_of_a_killed_process", killed_process),
    ("two_ends_that_have_met_and_are_idle_use_no_cpu", idle),
];

fn main() -> ExitCode {
    if std::env::var_os(WORKER).is_some() {
        worker();
        return ExitCode::SUCCESS;
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let checks = contract::CHECKS.iter().map(|(name, check)| {
        let run = || {
            check(&begin);
            assert_eq!(children(), Vec::<u32>::new());
        };
        (format!("contract::{name}"), Box::new(run) as Box<_>)
    });
    let there = located().map_err(|error| error.to_string());
    let tests = tests(&TESTS).into_iter().chain(checks).collect();
    component::run(&arguments, vec![Component { name: "mooncake", there, tests }], Vec::new())
}

fn begin(setup: Setup) -> Result<Arc<dyn Transport>, TransportError> {
    Ok(Arc::new(start(setup, small())?))
}

fn small() -> SlotOptions {
    SlotOptions { slot: Bytes(64 << 10), slots: 4, staging: 4, window: 2, kept: 2 }
}

/// Processes that a process has started, which are not zombies.
fn children_of(parent: u32) -> Vec<u32> {
    let stat = |pid: u32| fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    let all =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let ours = |pid: &u32| {
        stat(*pid).is_some_and(|stat| {
            let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
            fields[1] == parent.to_string()
        })
    };
    all.filter(ours).collect()
}

fn children() -> Vec<u32> {
    children_of(std::process::id())
}

fn signal(name: &str, pid: u32) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let since = Instant::now();
    while !holds() {
        assert!(since.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn pattern(step: usize) -> Vec<u8> {
    (0..SIZE).map(|i| ((i * step + 7) % 251) as u8).collect()
}

/// An engine with memory, and the process that others write to.
struct End {
    engine: SidecarEngine,
    memory: Arc<Buffer>,
    span: BlockSpan,
    target: u32,
    heard: Vec<Vec<u8>>,
}

impl End {
    fn start() -> Self {
        let before: BTreeSet<_> = children().into_iter().collect();
        let mut engine = SidecarEngine::new(Tuned::Blocks).unwrap();
        let target = children().into_iter().find(|pid| !before.contains(pid)).unwrap();
        let memory = Arc::new(Buffer::new("test", Bytes(SIZE as u64)).unwrap());
        let span = engine.register(Arc::clone(&memory), MemoryKind::Host, DeviceId(0)).unwrap();
        Self { engine, memory, span, target, heard: Vec::new() }
    }

    fn part(&self, at: usize, len: usize) -> BlockSpan {
        self.span.part(Bytes(at as u64), Bytes(len as u64)).unwrap()
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; SIZE];
        self.memory.read(Bytes(0), &mut bytes).unwrap();
        bytes
    }

    fn connect(&mut self, other: &mut Self) -> EnginePeer {
        self.engine.connect(&other.engine.metadata().unwrap()).unwrap()
    }

    fn end_of(&mut self, write: WriteId) -> Result<(), EngineError> {
        let mut outcome = Ok(Progress::Moving);
        until("a write never ended", || {
            outcome = self.engine.poll(write);
            outcome != Ok(Progress::Moving)
        });
        self.engine.release(write);
        outcome.map(drop)
    }

    /// Writes all of our memory to the same place there.
    fn write(&mut self, peer: EnginePeer, other: &Self) -> Result<(), EngineError> {
        let write = self.engine.write(peer, self.span, other.span)?;
        self.end_of(write)
    }

    fn hears(&mut self, message: &[u8]) {
        until("a notification never came", || {
            self.heard.extend(self.engine.notifications().unwrap());
            self.heard.iter().any(|heard| heard == message)
        });
    }
}

fn exact() {
    let (mut source, mut target) = (End::start(), End::start());
    let peer = source.connect(&mut target);
    source.memory.write(Bytes(0), &pattern(31)).unwrap();
    // Many at once, of which none touches its neighbours.
    let cuts = [0, 1, 3, 100, 1252, 66_000, SIZE / 2, SIZE];
    for pair in cuts.windows(2).step_by(2).chain(cuts[1..].windows(2).step_by(2)) {
        let (from, to) = (source.part(pair[0], pair[1] - pair[0]), target.part(pair[0], pair[1] - pair[0]));
        let writes: Vec<_> = (0..4).map(|_| source.engine.write(peer, from, to).unwrap()).collect();
        for write in writes {
            source.end_of(write).unwrap();
        }
        assert!(target.bytes()[pair[0]..pair[1]] == pattern(31)[pair[0]..pair[1]]);
    }
    assert!(target.bytes() == pattern(31));
    // Rows that change places.
    source.memory.write(Bytes(0), &pattern(17)).unwrap();
    let rows = SIZE / 1152;
    let pairs: Vec<_> = (0..rows)
        .map(|row| (source.part(row * 1152, 1152), target.part((rows - 1 - row) * 1152, 1152)))
        .collect();
    let write = source.engine.write_each(peer, &pairs).unwrap();
    source.end_of(write).unwrap();
    let (ours, theirs) = (source.bytes(), target.bytes());
    for row in 0..rows {
        let there = (rows - 1 - row) * 1152;
        assert!(theirs[there..there + 1152] == ours[row * 1152..(row + 1) * 1152], "{row}");
    }
    // To itself.
    let own = source.engine.metadata().unwrap();
    let own = source.engine.connect(&own).unwrap();
    let (from, to) = (source.part(0, SIZE / 2), source.part(SIZE / 2, SIZE / 2));
    let write = source.engine.write(own, from, to).unwrap();
    source.end_of(write).unwrap();
    assert!(source.bytes()[SIZE / 2..] == pattern(17)[..SIZE / 2]);
    drop((source, target));
    assert_eq!(children(), Vec::<u32>::new());
}

fn notifications() {
    let (mut a, mut b) = (End::start(), End::start());
    let (to_b, to_a) = (a.connect(&mut b), b.connect(&mut a));
    for message in [&b"a to b"[..], b"", &[0, 255, 10, 34], &[7; 1000]] {
        a.engine.notify(to_b, message).unwrap();
        b.hears(message);
        b.engine.notify(to_a, message).unwrap();
        a.hears(message);
    }
}

fn nonsense() {
    let (mut source, mut target) = (End::start(), End::start());
    let (from, to, nobody) = (source.span, target.span, EnginePeer(99));
    assert!(source.engine.write(nobody, from, to).is_err());
    assert!(source.engine.write_each(nobody, &[(from, to)]).is_err());
    assert!(source.engine.notify(nobody, b"x").is_err());
    assert!(source.engine.poll(WriteId(99)).is_err());
    let elsewhere = br#"{"engine":"192.0.2.1:15000","mailbox":1}"#;
    for metadata in [&b"nonsense"[..], b"", &elsewhere[..], &[0xff]] {
        assert!(source.engine.connect(metadata).is_err());
    }
    let peer = source.connect(&mut target);
    for span in [
        BlockSpan { address: from.address + 1, ..from },
        BlockSpan { address: from.address - 1, ..from },
        BlockSpan { address: u64::MAX, ..from },
        BlockSpan { len: Bytes(u64::MAX), ..from },
        BlockSpan { len: Bytes(0), ..from },
    ] {
        assert!(source.engine.write(peer, span, BlockSpan { len: span.len, ..to }).is_err(), "{span:?}");
        assert!(source.engine.write_each(peer, &[(span, BlockSpan { len: span.len, ..to })]).is_err());
    }
    assert!(source.engine.write(peer, from, target.part(0, 1)).is_err());
    assert!(source.engine.write_each(peer, &[]).is_err());
    // What is not registered there is written to nobody.
    let past = BlockSpan { address: to.address + 1, ..to };
    let write = source.engine.write(peer, from, past).unwrap();
    let error = source.end_of(write).unwrap_err().to_string();
    // The refusal, or that the target hung up while the rest was sent.
    let said = ["not within any registered buffer", "rejected", "writeBody failed"];
    assert!(said.iter().any(|said| error.contains(said)), "{error}");
    assert!(target.bytes() == vec![0; SIZE]);
    source.engine.disconnect(peer);
    assert!(source.engine.write(peer, from, to).is_err());
    let peer = source.connect(&mut target);
    source.write(peer, &target).unwrap();
}

/// The process that writes for an engine, once it has written.
fn source_of(known: &[&End]) -> u32 {
    let known: BTreeSet<_> = known.iter().map(|end| end.target).collect();
    let others: Vec<_> = children().into_iter().filter(|pid| !known.contains(pid)).collect();
    assert_eq!(others.len(), 1);
    others[0]
}

fn killed_source() {
    let (mut source, mut target, mut other) = (End::start(), End::start(), End::start());
    source.memory.write(Bytes(0), &pattern(5)).unwrap();
    let peer = source.connect(&mut target);
    source.write(peer, &target).unwrap();
    let sidecar = source_of(&[&source, &target, &other]);
    let elsewhere = source.connect(&mut other);
    // The other peer takes what it is sent meanwhile.
    let untouched = source.engine.write(elsewhere, source.span, other.span).unwrap();
    signal("-STOP", sidecar);
    let writes: Vec<_> =
        (0..8).map(|_| source.engine.write(peer, source.span, target.span).unwrap()).collect();
    signal("-KILL", sidecar);
    for write in writes {
        assert!(source.end_of(write).unwrap_err().to_string().contains("its process has ended"));
    }
    assert!(!children().contains(&sidecar));
    source.end_of(untouched).unwrap();
    assert!(other.bytes() == pattern(5));
    // The connection is over, and the next one is not.
    assert!(source.write(peer, &target).is_err());
    source.engine.disconnect(peer);
    let peer = source.connect(&mut target);
    source.memory.write(Bytes(0), &pattern(3)).unwrap();
    source.write(peer, &target).unwrap();
    assert!(target.bytes() == pattern(3));
}

fn killed_target() {
    let (mut source, mut target) = (End::start(), End::start());
    let peer = source.connect(&mut target);
    source.write(peer, &target).unwrap();
    signal("-KILL", target.target);
    until("a dead target takes writes", || source.write(peer, &target).is_err());
    source.engine.disconnect(peer);
    let peer = source.connect(&mut target);
    source.memory.write(Bytes(0), &pattern(3)).unwrap();
    source.write(peer, &target).unwrap();
    assert!(target.bytes() == pattern(3));
    source.engine.notify(peer, b"written").unwrap();
    target.hears(b"written");
}

fn stopped() {
    let (mut source, mut target) = (End::start(), End::start());
    let peer = source.connect(&mut target);
    source.write(peer, &target).unwrap();
    source.memory.write(Bytes(0), &pattern(5)).unwrap();
    signal("-STOP", target.target);
    let writes: Vec<_> =
        (0..8).map(|_| source.engine.write(peer, source.span, target.span).unwrap()).collect();
    thread::sleep(Duration::from_millis(300));
    let moving = |write: &WriteId| source.engine.poll(*write).unwrap() == Progress::Moving;
    assert!(writes.iter().all(moving), "a process that is stopped acknowledged a write");
    // Forgetting the peer ends none of them.
    source.engine.disconnect(peer);
    signal("-CONT", target.target);
    for write in writes {
        source.end_of(write).unwrap();
    }
    assert!(target.bytes() == pattern(5));
    let (ours, theirs) = (source.target, target.target);
    until("a process stays that nobody needs", || children().iter().all(|pid| [ours, theirs].contains(pid)));
}

/// A write that failed is over: memory that it was to read is used for something else, which comes nowhere.
fn hangs() {
    let (mut source, mut target) = (End::start(), End::start());
    let peer = source.connect(&mut target);
    source.write(peer, &target).unwrap();
    source.memory.write(Bytes(0), &[1; SIZE]).unwrap();
    signal("-STOP", target.target);
    let writes: Vec<_> =
        (0..8).map(|_| source.engine.write(peer, source.span, target.span).unwrap()).collect();
    for write in writes {
        source.end_of(write).unwrap_err();
    }
    source.memory.write(Bytes(0), &[2; SIZE]).unwrap();
    signal("-CONT", target.target);
    thread::sleep(Duration::from_millis(500));
    assert!(!target.bytes().contains(&2));
    source.engine.disconnect(peer);
    let peer = source.connect(&mut target);
    source.write(peer, &target).unwrap();
    assert!(target.bytes() == [2; SIZE]);
}

/// A process with two engines, of which one has written to the other.
fn worker() {
    let (mut source, mut target) = (End::start(), End::start());
    let peer = source.connect(&mut target);
    source.write(peer, &target).unwrap();
    let mut out = std::io::stdout();
    out.write_all(b"ready\n").unwrap();
    out.flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
}

fn killed_process() {
    for name in ["-KILL", "-TERM"] {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .env(WORKER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let sidecars = children_of(process.id());
        assert_eq!((line.as_str(), sidecars.len()), ("ready\n", 3));
        // One that cannot see it.
        signal("-STOP", sidecars[0]);
        signal(name, process.id());
        process.wait().unwrap();
        let runs = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("Mooncake"))
        };
        until("a sidecar outlives its process", || !sidecars.iter().any(runs));
    }
}

fn idle() {
    let rest = Duration::from_secs(3);
    let mut used = Duration::ZERO;
    contract::at_rest(&begin, &mut || {
        let processes: Vec<_> = children().into_iter().chain([std::process::id()]).collect();
        assert_eq!(processes.len(), 4);
        let all = || processes.iter().copied().map(cpu).sum::<Duration>();
        let before = all();
        thread::sleep(rest);
        used = all() - before;
    });
    assert!(used < rest / 20, "{used:?} of CPU in {rest:?}");
}

/// Of all threads of a process so far.
fn cpu(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
    // A hundred a second on every Linux.
    Duration::from_millis(10 * ticks)
}
