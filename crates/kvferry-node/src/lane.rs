//! One peer, one transport, one thread: opens the link, plans, executes and digests in order, so that nothing of it
//! runs on the runtime and a peer that stalls stalls its own lane only.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use kvferry_plan::{Generation, PageTable, Pair, RankId, RoomKey, Rotation, SlotId, TokenRange};
use kvferry_session::{PageRef, Side, SlotRef};
use kvferry_transport::{Job, Link, PeerAddr, Transport, TransportError};
use tokio::sync::mpsc;

use crate::{
    TransportKind,
    connection::ConnId,
    core::{Event, Shared},
    work,
};

/// Which half of a chunk a piece of work is.
#[derive(Clone, Debug)]
pub(crate) enum Half {
    /// We have the bytes and push them.
    Push,
    /// We want the bytes and pull them from these pages of the source rank's pool, and from this slot.
    Pull(Vec<PageRef>, Option<SlotRef>),
    /// We have the bytes and the target pulls them: digest them.
    Digest,
}

/// One chunk of one source rank.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub(crate) key: RoomKey,
    pub(crate) serial: u64,
    /// The connection of the peer.
    pub(crate) conn: ConnId,
    pub(crate) generation: Generation,
    pub(crate) pair: Arc<Pair>,
    /// Our own pages.
    pub(crate) table: Arc<PageTable>,
    /// Our own state slot, if this chunk ends a room whose model has state.
    pub(crate) slot: Option<SlotId>,
    pub(crate) source: RankId,
    pub(crate) tokens: TokenRange,
    /// Of the source's page table.
    pub(crate) rotation: Rotation,
    /// Of all target ranks those at the target's end of this lane.
    pub(crate) targets: Arc<[RankId]>,
    pub(crate) digest: bool,
    /// When it was given to the lane.
    pub(crate) since: Instant,
    pub(crate) half: Half,
}

impl Task {
    fn side(&self) -> Side {
        match self.half {
            Half::Push | Half::Digest => Side::Source,
            Half::Pull(..) => Side::Target,
        }
    }
}

#[derive(Debug)]
enum Command {
    Link { side: Side, key: RoomKey, serial: u64 },
    Execute(Box<Task>),
    Fence { key: RoomKey, serial: u64, revoke: Option<Generation> },
}

/// The way to one peer over one transport. Dropping it closes the link.
#[derive(Debug)]
pub(crate) struct Lane {
    commands: mpsc::UnboundedSender<Command>,
    closed: Arc<AtomicBool>,
}

impl Lane {
    pub(crate) fn start(
        shared: &Arc<Shared>,
        (conn, kind): (ConnId, TransportKind),
        transport: Arc<dyn Transport>,
        peer: PeerAddr,
    ) -> Self {
        let (commands, queue) = mpsc::unbounded_channel();
        let closed = Arc::new(AtomicBool::new(false));
        let worker = Worker {
            shared: shared.clone(),
            conn,
            kind,
            transport,
            peer,
            link: None,
            closed: closed.clone(),
        };
        shared.tracker.spawn_blocking(move || worker.run(queue));
        Self { commands, closed }
    }

    /// Opens the link for a room, if it is not open; then [`Event::Linked`].
    pub(crate) fn link(&self, side: Side, key: RoomKey, serial: u64) {
        self.commands.send(Command::Link { side, key, serial }).ok();
    }

    /// Does a piece of work; its end is [`Event::Executed`].
    pub(crate) fn execute(&self, task: Task) {
        self.commands.send(Command::Execute(Box::new(task))).ok();
    }

    /// Stops what moves for a room, then revokes its grant here, if it has one; then [`Event::Fenced`].
    pub(crate) fn fence(&self, key: RoomKey, serial: u64, revoke: Option<Generation>) {
        self.commands.send(Command::Fence { key, serial, revoke }).ok();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct OpenLink {
    link: Arc<dyn Link>,
    broken: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Worker {
    shared: Arc<Shared>,
    conn: ConnId,
    kind: TransportKind,
    transport: Arc<dyn Transport>,
    peer: PeerAddr,
    link: Option<OpenLink>,
    closed: Arc<AtomicBool>,
}

impl Worker {
    fn run(mut self, mut queue: mpsc::UnboundedReceiver<Command>) {
        while let Some(command) = queue.blocking_recv() {
            match command {
                Command::Link { side, key, serial } => {
                    let result = match self.closed.load(Ordering::Relaxed) {
                        true => Err(TransportError::Closed),
                        false => self.open().map(drop),
                    };
                    let result = result.map_err(|error| error.to_string());
                    let event = Event::Linked { side, key, serial, conn: self.conn, kind: self.kind, result };
                    self.shared.events.send(event).ok();
                }
                Command::Execute(task) => {
                    if let Err(error) = self.execute(&task) {
                        report(&self.shared, &task, Err(error));
                    }
                }
                Command::Fence { key, serial, revoke } => {
                    if let Some(open) = &self.link {
                        open.link.cancel(key);
                    }
                    if let Some(generation) = revoke {
                        self.transport.revoke(key, generation);
                    }
                    self.shared.events.send(Event::Fenced { key, serial }).ok();
                }
            }
        }
        if let Some(open) = &self.link {
            open.link.close();
        }
    }

    fn execute(&mut self, task: &Task) -> Result<(), TransportError> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(TransportError::Closed);
        }
        let legs = match &task.half {
            Half::Push => work::push_legs(task)?,
            Half::Pull(pages, slot) => work::pull_legs(task, pages, *slot)?,
            Half::Digest => {
                let arena = self.shared.arena(task.source);
                let arena = arena.ok_or(TransportError::UnknownRank { rank: task.source, place: "here" })?;
                let legs = work::digest_legs(task, arena)?;
                report(&self.shared, task, Ok(legs));
                return Ok(());
            }
        };
        if legs.is_empty() {
            report(&self.shared, task, Ok(Vec::new()));
            return Ok(());
        }
        let shared = self.shared.clone();
        let open = self.open()?;
        let (broken, done_task) = (open.broken.clone(), task.clone());
        let job = Job {
            key: task.key,
            generation: task.generation,
            source: task.source,
            tokens: task.tokens,
            rotation: task.rotation,
            digest: task.digest,
            legs,
        };
        let done = Box::new(move |result: Result<Vec<_>, TransportError>| {
            let ends_link = |e: &TransportError| {
                use TransportError as E;
                matches!(
                    e,
                    E::Closed | E::PeerGone { .. } | E::Stalled { .. } | E::Protocol { .. } | E::Io { .. }
                )
            };
            if result.as_ref().is_err_and(ends_link) {
                broken.store(true, Ordering::Relaxed);
            }
            let legs = result
                .map(|reports| reports.into_iter().map(|r| work::reported(r, done_task.tokens)).collect());
            report(&shared, &done_task, legs);
        });
        open.link.execute(job, done)
    }

    /// The link; a broken one is replaced.
    fn open(&mut self) -> Result<&OpenLink, TransportError> {
        if self.link.as_ref().is_some_and(|open| open.broken.load(Ordering::Relaxed)) {
            self.link = None;
        }
        match &mut self.link {
            Some(open) => Ok(open),
            none => {
                let link = self.transport.open(&self.peer)?;
                Ok(none.insert(OpenLink { link, broken: Arc::default() }))
            }
        }
    }
}

fn report(shared: &Shared, task: &Task, result: Result<Vec<kvferry_session::Leg>, TransportError>) {
    let side = task.side();
    let event = Event::Executed {
        side,
        key: task.key,
        serial: task.serial,
        conn: task.conn,
        source: task.source,
        tokens: task.tokens,
        result: result.map_err(|e| work::cause(&e, side)),
        took: task.since.elapsed(),
    };
    shared.events.send(event).ok();
}
