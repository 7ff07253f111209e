//! The thread that uses an engine: it takes commands, asks for the progress of writes, and hears notifications. It sleeps
//! while nothing is under way.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Condvar, Mutex, PoisonError, Weak,
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use kvferry_arena::Buffer;
use rustix::event::{EventfdFlags, eventfd};

use super::engine::{BlockEngine, BlockSpan, EngineError, EnginePeer, Gate, Progress, WriteId};
use crate::{DeviceId, MemoryKind, local::lock};

/// Between two looks at writes that are under way.
const LOOK: Duration = Duration::from_micros(50);
/// Between two looks at notifications when nothing is under way: nobody may fill our memory with them.
const IDLE: Duration = Duration::from_secs(1);

/// Wakes a thread that waits for a socket, too.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn ring(&self) {
        // It can only fail when it has been rung so often that nobody can have missed it.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub(super) fn quiet(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// How a write has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// All of it is there.
    Settled,
    /// Nobody knows what still arrives.
    Lost(String),
}

/// Told once of the end of a write, on the agent's thread.
pub(super) type Ended = Box<dyn FnOnce(End) + Send>;

enum Command {
    Register(Arc<Buffer>, MemoryKind, DeviceId, mpsc::Sender<Result<BlockSpan, EngineError>>),
    Metadata(mpsc::Sender<Result<Vec<u8>, EngineError>>),
    Connect(Vec<u8>, mpsc::Sender<Result<EnginePeer, EngineError>>),
    Disconnect(EnginePeer),
    Write(EnginePeer, BlockSpan, BlockSpan, Ended),
    Notify(EnginePeer, Vec<u8>, mpsc::Sender<Result<(), EngineError>>),
    Expect(Weak<Expected>),
    Close,
}

/// A notification that somebody waits for.
#[derive(Debug)]
pub(super) struct Expected {
    message: Vec<u8>,
    came: Mutex<bool>,
    changed: Condvar,
}

impl Expected {
    /// True when it has come within `limit`.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut came = lock(&self.came);
        while !*came {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            came = self.changed.wait_timeout(came, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// An engine and its thread.
#[derive(Debug)]
pub(super) struct Agent {
    commands: mpsc::Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    gate: Option<Arc<dyn Gate>>,
    writes_alone: bool,
}

impl Agent {
    pub(super) fn start(name: &str, engine: Box<dyn BlockEngine>) -> io::Result<Self> {
        let (commands, queue) = mpsc::channel();
        let (gate, writes_alone) = (engine.gate(), engine.writes_alone());
        let driver = Driver { engine, moving: Vec::new(), expected: Vec::new() };
        let thread = thread::Builder::new().name(name.into()).spawn(move || driver.run(&queue))?;
        Ok(Self { commands, thread: Mutex::new(Some(thread)), gate, writes_alone })
    }

    /// The engine's.
    pub(super) fn gate(&self) -> Option<Arc<dyn Gate>> {
        self.gate.clone()
    }

    /// The engine's.
    pub(super) fn writes_alone(&self) -> bool {
        self.writes_alone
    }

    pub(super) fn register(&self, memory: Arc<Buffer>) -> Result<BlockSpan, EngineError> {
        self.ask(|reply| Command::Register(memory, MemoryKind::Host, DeviceId(0), reply))
    }

    pub(super) fn metadata(&self) -> Result<Vec<u8>, EngineError> {
        self.ask(Command::Metadata)
    }

    pub(super) fn connect(&self, metadata: Vec<u8>) -> Result<EnginePeer, EngineError> {
        self.ask(|reply| Command::Connect(metadata, reply))
    }

    pub(super) fn disconnect(&self, peer: EnginePeer) {
        let _ = self.commands.send(Command::Disconnect(peer));
    }

    pub(super) fn notify(&self, peer: EnginePeer, message: Vec<u8>) -> Result<(), EngineError> {
        self.ask(|reply| Command::Notify(peer, message, reply))
    }

    /// Writes `local` to `remote`; `ended` is called also when the agent is closed meanwhile or before.
    pub(super) fn write(&self, peer: EnginePeer, local: BlockSpan, remote: BlockSpan, ended: Ended) {
        let write = Command::Write(peer, local, remote, ended);
        if let Err(mpsc::SendError(Command::Write(.., ended))) = self.commands.send(write) {
            ended(End::Lost("the agent is closed".into()));
        }
    }

    /// From now on listens for a notification of exactly these bytes, until the answer is dropped.
    pub(super) fn expect(&self, message: Vec<u8>) -> Arc<Expected> {
        let expected = Arc::new(Expected { message, came: Mutex::new(false), changed: Condvar::new() });
        let _ = self.commands.send(Command::Expect(Arc::downgrade(&expected)));
        expected
    }

    /// Closes the engine, and waits for that. Writes that have not settled are lost.
    pub(super) fn close(&self) {
        let _ = self.commands.send(Command::Close);
        if let Some(thread) = lock(&self.thread).take().filter(|t| t.thread().id() != thread::current().id())
        {
            let _ = thread.join();
        }
    }

    fn ask<T>(
        &self,
        command: impl FnOnce(mpsc::Sender<Result<T, EngineError>>) -> Command,
    ) -> Result<T, EngineError> {
        let (reply, answer) = mpsc::channel();
        let _ = self.commands.send(command(reply));
        let closed = |_| EngineError::Failed {
            engine: "the agent",
            action: "be asked",
            reason: "it is closed".into(),
        };
        answer.recv().map_err(closed)?
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.close();
    }
}

struct Driver {
    engine: Box<dyn BlockEngine>,
    moving: Vec<(WriteId, Ended)>,
    expected: Vec<Weak<Expected>>,
}

impl Driver {
    fn run(mut self, commands: &mpsc::Receiver<Command>) {
        loop {
            self.expected.retain(|expected| expected.strong_count() > 0);
            let idle = self.moving.is_empty() && self.expected.is_empty();
            let mut next = match commands.recv_timeout(if idle { IDLE } else { LOOK }) {
                Ok(command) => Some(command),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            // Notifications are heard when somebody waits for one, and else once in a while.
            let hear = !self.expected.is_empty() || (idle && next.is_none());
            let mut closing = false;
            while let Some(command) = next {
                closing |= matches!(command, Command::Close);
                self.carry_out(command);
                // To start a write may take as long as to move the block: others may have settled meanwhile.
                self.look();
                next = commands.try_recv().ok();
            }
            if closing {
                break;
            }
            self.look();
            if hear {
                self.hear();
            }
        }
        let Self { engine, moving, .. } = self;
        drop(engine);
        for (_, ended) in moving {
            ended(End::Lost("the agent was closed before the write had settled".into()));
        }
    }

    fn carry_out(&mut self, command: Command) {
        // Whoever asked may have gone.
        match command {
            Command::Register(memory, kind, device, reply) => {
                let _ = reply.send(self.engine.register(memory, kind, device));
            }
            Command::Metadata(reply) => {
                let _ = reply.send(self.engine.metadata());
            }
            Command::Connect(metadata, reply) => {
                let _ = reply.send(self.engine.connect(&metadata));
            }
            Command::Disconnect(peer) => self.engine.disconnect(peer),
            Command::Write(peer, local, remote, ended) => match self.engine.write(peer, local, remote) {
                Ok(write) => self.moving.push((write, ended)),
                Err(error) => ended(End::Lost(error.to_string())),
            },
            Command::Notify(peer, message, reply) => {
                let _ = reply.send(self.engine.notify(peer, &message));
            }
            Command::Expect(expected) => self.expected.push(expected),
            Command::Close => {}
        }
    }

    /// Ends what has settled or failed.
    fn look(&mut self) {
        for (write, ended) in std::mem::take(&mut self.moving) {
            let end = match self.engine.poll(write) {
                Ok(Progress::Moving) => {
                    self.moving.push((write, ended));
                    continue;
                }
                Ok(Progress::Settled) => End::Settled,
                Err(error) => End::Lost(error.to_string()),
            };
            self.engine.release(write);
            ended(end);
        }
    }

    fn hear(&mut self) {
        match self.engine.notifications() {
            Ok(messages) => {
                for expected in self.expected.iter().filter_map(Weak::upgrade) {
                    if messages.contains(&expected.message) {
                        *lock(&expected.came) = true;
                        expected.changed.notify_all();
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "notifications cannot be heard"),
        }
    }
}
