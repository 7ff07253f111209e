//! A process with an engine, and the thread that watches it. However a sidecar ends, its writes are reported only once the
//! process is gone: from then on it reads no memory of ours.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Read},
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Child, ChildStderr, Stdio},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use kvferry_arena::Buffer;
use kvferry_transport::slots::{EngineError, WriteId};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{Shutdown, shutdown},
    process::{Pid, Signal, kill_process_group},
};

use super::{
    packets::{self, Order, Ready, Report},
    python::{self, GIVEN_UP, NAME, Tuned},
};
use crate::{Address, outcomes::Outcomes, sender::lock};

/// For Python to load the package, and to answer.
const ANSWER: Duration = Duration::from_secs(30);
/// After which a sidecar that has not said how a write ended hangs.
const HANGS: Duration = GIVEN_UP.saturating_add(Duration::from_secs(10));
/// Between two looks at whether it hangs.
const LOOK: Duration = Duration::from_secs(1);
/// Between two questions for notifications.
const LISTEN: Duration = Duration::from_millis(1);
/// Notifications that nobody has heard; more are not kept.
const UNHEARD: usize = 1024;
/// Lines of its log that are logged, and bytes of one.
const LINES: u32 = 200;
const LINE: usize = 500;

/// A process with an engine. Dropping it ends the process, and waits for that.
#[derive(Debug)]
pub(super) struct Sidecar {
    socket: Arc<OwnedFd>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    outcomes: Outcomes,
}

#[derive(Debug, Default)]
struct State {
    ready: Option<Ready>,
    registered: BTreeSet<Address>,
    heard: Vec<Vec<u8>>,
    /// When it was last asked what it has heard, and whether it has not said so.
    asked: Option<Instant>,
    listening: bool,
    /// When writes were told that have not ended.
    moving: BTreeMap<WriteId, Instant>,
    /// It ends when no write is under way.
    leaving: bool,
    ended: Option<End>,
}

/// Why it has ended.
#[derive(Clone, Debug)]
enum End {
    Missing(String),
    Failed(String),
}

impl Sidecar {
    /// Starts a process. It is told what to do without waiting for it; how writes end is in `outcomes`.
    pub(super) fn start(tuned: Tuned, outcomes: &Outcomes) -> Result<Self, EngineError> {
        let failed = |error: String| failed("be started", error);
        let (socket, theirs) = packets::pair().map_err(|error| failed(error.to_string()))?;
        let socket = Arc::new(socket);
        let shared =
            Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), outcomes: outcomes.clone() });
        let watch =
            Watch { tuned, socket: Arc::clone(&socket), shared: Arc::clone(&shared), log: Log::default() };
        // The kernel ends the process with the thread that starts it.
        let thread = thread::Builder::new()
            .name("mooncake-watch".into())
            .spawn(move || watch.run(theirs))
            .map_err(|error| failed(error.to_string()))?;
        Ok(Self { socket, shared, thread: Some(thread) })
    }

    pub(super) fn ended(&self) -> bool {
        lock(&self.shared.state).ended.is_some()
    }

    /// Waits until the engine runs.
    pub(super) fn ready(&self) -> Result<Ready, EngineError> {
        self.wait("be started", |state| state.ready.clone())
    }

    /// Makes memory known that others may write.
    pub(super) fn open(&self, address: Address, memory: &Buffer) -> Result<(), EngineError> {
        const ACTION: &str = "register memory";
        let length = memory.len().0;
        self.tell(ACTION, &Order::Memory { address, length, open: true }, Some(memory))?;
        self.wait(ACTION, |state| state.registered.contains(&address).then_some(()))
    }

    /// Makes memory known that is only read.
    pub(super) fn lend(&self, address: Address, memory: &Buffer) -> Result<(), EngineError> {
        let length = memory.len().0;
        self.tell("register memory", &Order::Memory { address, length, open: false }, Some(memory))
    }

    /// Tells it of a write. Its outcome comes in any case, unless this fails.
    pub(super) fn write(
        &self,
        id: WriteId,
        order: &Order<'_>,
        with: Option<&Buffer>,
    ) -> Result<(), EngineError> {
        let mut state = lock(&self.shared.state);
        if let Some(end) = &state.ended {
            return Err(end.error("write"));
        }
        state.moving.insert(id, Instant::now());
        self.shared.outcomes.begin(id);
        drop(state);
        // One that cannot be told has ended, or is about to, and the outcome says so.
        let _ = self.tell("write", order, with);
        Ok(())
    }

    pub(super) fn notify(&self, peer: &str, mailbox: Address, message: &str) -> Result<(), EngineError> {
        self.tell("send a notification", &Order::Notify { peer, mailbox, message }, None)
    }

    /// What has come since the last call. It is asked again meanwhile.
    pub(super) fn heard(&self) -> Result<Vec<Vec<u8>>, EngineError> {
        let mut state = lock(&self.shared.state);
        let heard = std::mem::take(&mut state.heard);
        let due = state.asked.is_none_or(|asked| asked.elapsed() > LISTEN);
        if state.ended.is_none() && due && !state.listening {
            (state.asked, state.listening) = (Some(Instant::now()), true);
            drop(state);
            self.tell("hear notifications", &Order::Listen {}, None)?;
        }
        Ok(heard)
    }

    /// Ends it as soon as no write is under way.
    pub(super) fn leave(&self) {
        let mut state = lock(&self.shared.state);
        state.leaving = true;
        if state.moving.is_empty() {
            self.end();
        }
    }

    /// Ends it, without waiting.
    pub(super) fn end(&self) {
        // Its thread sees that, and does the rest.
        let _ = shutdown(&*self.socket, Shutdown::Both);
    }

    /// A sidecar that takes nothing is ended.
    fn tell(
        &self,
        action: &'static str,
        order: &Order<'_>,
        with: Option<&Buffer>,
    ) -> Result<(), EngineError> {
        let fd = with.map(Buffer::fd).transpose();
        let sent = fd.and_then(|fd| {
            packets::send(&self.socket, order, fd.as_ref().map(AsFd::as_fd)).map_err(io::Error::from)
        });
        sent.map_err(|error| {
            self.end();
            match &lock(&self.shared.state).ended {
                Some(end) => end.error(action),
                None => failed(action, format!("it takes no orders: {error}")),
            }
        })
    }

    fn wait<T>(
        &self,
        action: &'static str,
        mut found: impl FnMut(&State) -> Option<T>,
    ) -> Result<T, EngineError> {
        let deadline = Instant::now() + ANSWER;
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(found) = found(&state) {
                return Ok(found);
            }
            if let Some(end) = &state.ended {
                return Err(end.error(action));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.end();
                return Err(failed(action, format!("it does not answer within {ANSWER:?}")));
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        self.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl End {
    fn error(&self, action: &'static str) -> EngineError {
        match self {
            Self::Missing(reason) => python::missing(reason.clone()),
            Self::Failed(reason) => failed(action, reason.clone()),
        }
    }
}

pub(super) fn failed(action: &'static str, reason: impl Into<String>) -> EngineError {
    EngineError::Failed { engine: NAME, action, reason: reason.into() }
}

/// The thread of a sidecar.
struct Watch {
    tuned: Tuned,
    socket: Arc<OwnedFd>,
    shared: Arc<Shared>,
    log: Log,
}

impl Watch {
    fn run(mut self, theirs: OwnedFd) {
        let mut command = python::command(self.tuned);
        command.stdin(theirs).stdout(Stdio::null()).stderr(Stdio::piped());
        // Ctrl-C is for our process, which ends this one.
        command.process_group(0);
        let end = match command.spawn() {
            Ok(mut child) => {
                // Its end of the socket goes here, so that its own end is seen.
                drop(command);
                let end = self.watch(&mut child);
                kill(&mut child);
                let _ = child.wait();
                end.unwrap_or_else(|| End::Failed(self.log.epitaph()))
            }
            Err(error) => {
                End::Missing(format!("`{}` cannot be run: {error}", command.get_program().display()))
            }
        };
        let mut state = lock(&self.shared.state);
        let reason = match &end {
            End::Missing(reason) | End::Failed(reason) => reason,
        };
        for id in std::mem::take(&mut state.moving).keys() {
            self.shared.outcomes.end(*id, Err(reason.clone()));
        }
        state.ended = Some(end);
        self.shared.changed.notify_all();
    }

    /// Until the process has ended or must end. `None` when it ended by itself or was told to.
    fn watch(&mut self, child: &mut Child) -> Option<End> {
        let started = Instant::now();
        let mut stderr = child.stderr.take()?;
        let mut logs = true;
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(stderr.as_fd(), PollFlags::IN),
            ];
            let watched = if logs { &mut fds[..] } else { &mut fds[..1] };
            let wait = Timespec::try_from(LOOK).unwrap_or_default();
            match poll(watched, Some(&wait)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Some(End::Failed(error.to_string())),
            }
            let [said, logged] = fds.map(|fd| !fd.revents().is_empty());
            if logged {
                logs = self.log.take(&mut stderr);
            }
            if said {
                match packets::receive(&self.socket) {
                    Ok(Some(report)) => {
                        if let Some(end) = self.hears(report) {
                            return Some(end);
                        }
                    }
                    // What it wrote last may say why.
                    Ok(None) => {
                        kill(child);
                        while logs && readable(&stderr) {
                            logs = self.log.take(&mut stderr);
                        }
                        return None;
                    }
                    Err(reason) => return Some(End::Failed(reason)),
                }
            }
            if let Some(reason) = self.hangs(started) {
                return Some(End::Failed(reason));
            }
        }
    }

    fn hangs(&self, started: Instant) -> Option<String> {
        let state = lock(&self.shared.state);
        if state.ready.is_none() && started.elapsed() > ANSWER {
            return Some(format!("it has not started within {ANSWER:?}"));
        }
        if state.listening && state.asked.is_some_and(|asked| asked.elapsed() > ANSWER) {
            return Some(format!("it has not answered within {ANSWER:?}"));
        }
        let late = state.moving.values().any(|since| since.elapsed() > HANGS);
        late.then(|| format!("it has not said within {HANGS:?} how a write ended"))
    }

    /// What the sidecar is ended for, if it is.
    fn hears(&mut self, report: Report) -> Option<End> {
        let mut state = lock(&self.shared.state);
        match report {
            Report::Missing { reason } => return Some(End::Missing(reason)),
            Report::Ready(ready) => {
                state.ready = Some(ready);
                // What engines log when they start explains no end.
                self.log.last.clear();
            }
            Report::Registered { address } => {
                state.registered.insert(address);
            }
            Report::Heard { messages } => {
                state.listening = false;
                let room = UNHEARD.saturating_sub(state.heard.len());
                state.heard.extend(messages.iter().filter_map(|text| unhex(text)).take(room));
            }
            Report::Settled { ids } => {
                for id in ids.into_iter().map(WriteId) {
                    if state.moving.remove(&id).is_some() {
                        self.shared.outcomes.end(id, Ok(()));
                    }
                }
                if state.leaving && state.moving.is_empty() {
                    return Some(End::Failed("it was told to forget the peer".into()));
                }
            }
            // What else it has under way nobody knows: it ends, and then nothing is read here any more.
            Report::Failed { id, reason } => {
                let log = self.log.last.as_str();
                let quoted = if log.is_empty() { String::new() } else { format!("; it logged: {log}") };
                return Some(End::Failed(format!("write {id} failed, {reason}{quoted}")));
            }
        }
        self.shared.changed.notify_all();
        None
    }
}

/// Ends a process that has not been waited for, and what it has started: an interpreter may be a script that starts one.
fn kill(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.kill();
}

/// True when something has come, or comes at once: whoever holds the other end may hold it for ever.
fn readable(from: &ChildStderr) -> bool {
    let wait = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    matches!(poll(&mut [PollFd::from_borrowed_fd(from.as_fd(), PollFlags::IN)], Some(&wait)), Ok(1))
}

/// What it logs.
#[derive(Debug, Default)]
struct Log {
    line: Vec<u8>,
    last: String,
    lines: u32,
}

impl Log {
    /// Takes what is there; false at the end.
    fn take(&mut self, from: &mut ChildStderr) -> bool {
        let mut bytes = [0; 4096];
        let Ok(len @ 1..) = from.read(&mut bytes) else { return false };
        for byte in bytes.iter().take(len) {
            match byte {
                b'\n' => self.end_line(),
                _ if self.line.len() < LINE => self.line.push(*byte),
                _ => {}
            }
        }
        true
    }

    fn end_line(&mut self) {
        let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
        if self.lines < LINES {
            tracing::debug!(engine = NAME, "{line}");
        }
        self.lines = self.lines.saturating_add(1);
        if !line.trim().is_empty() {
            self.last = line;
        }
    }

    /// Why it has ended, as far as anybody knows.
    fn epitaph(&self) -> String {
        match self.last.as_str() {
            "" => "its process has ended".into(),
            last => format!("its process has ended; it logged: {last}"),
        }
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<_>> = text.chars().map(|digit| digit.to_digit(16)).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).ok()).collect()
}
