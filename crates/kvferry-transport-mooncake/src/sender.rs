//! What an engine sends to one peer, on a thread of its own.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread::{self, JoinHandle},
    time::Instant,
};

use kvferry_arena::{Buffer, Span};
use kvferry_transport::slots::WriteId;

use crate::{
    Address, Description, Lane, Limits, MooncakeError, Notification, Peer,
    lane::HangUp,
    outcomes::Outcomes,
    wire::{Request, VERSION},
};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block on its way.
pub(crate) struct Block {
    pub(crate) id: WriteId,
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) from: Span,
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
            let due = VecDeque::new();
            Sending { control, limits, outcomes, open: theirs, lane: None, due }.run(&queue);
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
    /// Sent, and without a status.
    due: VecDeque<(WriteId, Request)>,
}

impl Sending {
    /// Carries out commands, and takes statuses when there is nothing else to do.
    fn run(mut self, queue: &mpsc::Receiver<Command>) {
        loop {
            let wait = self.due.is_empty();
            let next = if wait { queue.recv().ok() } else { queue.try_recv().ok() };
            match next {
                Some(Command::Write(block)) => self.write(&block),
                Some(Command::Notify(notification)) => self.notify(&notification),
                None if wait => return,
                None => self.confirm(),
            }
        }
    }

    fn write(&mut self, block: &Block) {
        // Statuses that nobody takes must fit the buffers of the kernel.
        while self.due.len() >= self.limits.window.max(1) {
            self.confirm();
        }
        let Block { id, buffer, from, to } = block;
        match self.lane().and_then(|lane| lane.send_span(*to, buffer, *from)) {
            Ok(request) => self.due.push_back((*id, request)),
            Err(error) => {
                self.lose(&error);
                self.outcomes.end(*id, Err(error.to_string()));
            }
        }
    }

    fn confirm(&mut self) {
        let (Some((id, request)), Some((lane, _))) = (self.due.pop_front(), &mut self.lane) else { return };
        let outcome = lane.confirm(&request);
        if let Err(error) = &outcome {
            self.lose(error);
        }
        self.outcomes.end(id, outcome.map_err(|error| error.to_string()));
    }

    /// The connection is gone, and with it what was due.
    fn lose(&mut self, error: &MooncakeError) {
        self.lane = None;
        for (id, _) in std::mem::take(&mut self.due) {
            self.outcomes.end(id, Err(error.to_string()));
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
