//! What an engine sends to one peer, on a thread of its own.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread::{self, JoinHandle},
    time::Instant,
};

use kvferry_arena::Buffer;
use kvferry_plan::Bytes;
use kvferry_transport::slots::WriteId;

use crate::{
    Address, Description, Lane, Limits, MooncakeError, Notification, Peer, Write, lane::HangUp, wire::VERSION,
};

/// How writes stand; `None` while one is under way.
pub(crate) type Outcomes = Arc<Mutex<BTreeMap<WriteId, Option<Result<(), String>>>>>;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block on its way.
pub(crate) struct Block {
    pub(crate) id: WriteId,
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) at: Bytes,
    pub(crate) len: Bytes,
    pub(crate) to: Address,
}

enum Command {
    Write(Block),
    Notify(Notification),
}

/// Connections that closing ends; `None` once closed.
type Open = Arc<Mutex<Option<Vec<HangUp>>>>;

/// Sends to one peer, in order, until it is dropped and everything has gone.
#[derive(Debug)]
pub(crate) struct Sender {
    commands: mpsc::Sender<Command>,
    thread: Thread,
}

/// The thread of a sender.
#[derive(Debug)]
pub(crate) struct Thread {
    open: Open,
    handle: JoinHandle<()>,
}

impl Thread {
    pub(crate) fn finished(&self) -> bool {
        self.handle.is_finished()
    }

    /// Breaks off whatever is sent, and waits until the thread has ended.
    pub(crate) fn close(self) {
        for connection in lock(&self.open).take().into_iter().flatten() {
            connection.hang_up();
        }
        let _ = self.handle.join();
    }
}

impl Sender {
    /// Nothing is sent before there is something to send.
    pub(crate) fn start(control: SocketAddr, limits: &Limits, outcomes: Outcomes) -> io::Result<Self> {
        let (commands, queue) = mpsc::channel();
        let open = Open::new(Mutex::new(Some(Vec::new())));
        let (limits, theirs) = (limits.clone(), Arc::clone(&open));
        let handle = thread::Builder::new().name("mooncake-out".into()).spawn(move || {
            let mut sending = Sending { control, limits, outcomes, open: theirs, lane: None };
            while let Ok(first) = queue.recv() {
                sending.run(first, &queue);
            }
        })?;
        Ok(Self { commands, thread: Thread { open, handle } })
    }

    /// False when the thread has ended.
    pub(crate) fn write(&self, block: Block) -> bool {
        self.commands.send(Command::Write(block)).is_ok()
    }

    /// False when the thread has ended.
    pub(crate) fn notify(&self, notification: Notification) -> bool {
        self.commands.send(Command::Notify(notification)).is_ok()
    }

    /// Takes no more; what was taken is sent.
    pub(crate) fn leave(self) -> Thread {
        self.thread
    }
}

struct Sending {
    control: SocketAddr,
    limits: Limits,
    outcomes: Outcomes,
    open: Open,
    lane: Option<(Lane, Instant)>,
}

impl Sending {
    /// Carries out a command, and with a write all others that wait: they go out one behind the other.
    fn run(&mut self, first: Command, queue: &mpsc::Receiver<Command>) {
        let mut blocks = Vec::new();
        for command in [first].into_iter().chain(queue.try_iter()) {
            match command {
                Command::Write(block) => blocks.push(block),
                Command::Notify(notification) => self.notify(&notification),
            }
        }
        if blocks.is_empty() {
            return;
        }
        let outcome = self.write(&blocks).map_err(|error| error.to_string());
        if outcome.is_err() {
            self.lane = None;
        }
        let mut outcomes = lock(&self.outcomes);
        for block in &blocks {
            // Nobody may want to know any more.
            if let Some(known) = outcomes.get_mut(&block.id) {
                *known = Some(outcome.clone());
            }
        }
    }

    fn notify(&self, notification: &Notification) {
        let sent = self.peer().and_then(|peer| peer.notify(notification));
        if let Err(error) = sent {
            tracing::warn!(%error, "a notification was not delivered");
        }
    }

    fn peer(&self) -> Result<Peer, MooncakeError> {
        Peer::new(self.control, self.limits.clone())
    }

    fn write(&mut self, blocks: &[Block]) -> Result<(), MooncakeError> {
        let copies: Vec<_> = blocks.iter().map(Block::bytes).collect();
        let writes: Vec<_> =
            blocks.iter().zip(&copies).map(|(block, bytes)| Write { address: block.to, bytes }).collect();
        let lane = self.lane()?;
        lane.write(&writes)
    }

    /// A connection, unless the peer may have closed the one that there is because it was idle.
    fn lane(&mut self) -> Result<&mut Lane, MooncakeError> {
        let fresh = self.lane.take().filter(|(_, used)| used.elapsed() < self.limits.idle / 2);
        let lane = match fresh {
            Some((lane, _)) => lane,
            None => self.connect()?,
        };
        let (lane, _) = self.lane.insert((lane, Instant::now()));
        Ok(lane)
    }

    fn connect(&self) -> Result<Lane, MooncakeError> {
        let peer = self.peer()?;
        // Engines do not look at it, and ours is named by the transport.
        let us =
            Description { name: "127.0.0.1:0".into(), data_port: 0, version: VERSION, regions: Vec::new() };
        let lane = peer.lane(&peer.metadata(&us)?)?;
        let hang_up = lane.hang_up()?;
        match &mut *lock(&self.open) {
            Some(open) => *open = vec![hang_up],
            None => hang_up.hang_up(),
        }
        Ok(lane)
    }
}

impl Block {
    /// A copy: what is sent is not read again from memory that may be used for something else after a failure.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len.index()];
        // It was found in this buffer, so it is inside.
        let read = self.buffer.read(self.at, &mut bytes);
        debug_assert!(read.is_ok(), "{read:?}");
        bytes
    }
}
