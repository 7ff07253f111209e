//! The one task that owns all rooms. It only ever reacts: everything slow runs elsewhere and comes back as an event.

mod link;
mod source;
mod target;

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, atomic::AtomicU64},
    time::{Duration, Instant},
};

use kvferry_arena::Arena;
use kvferry_plan::{Bytes, RankId, RoomKey, TokenRange};
use kvferry_session::{
    Abort, Cause, CauseKind, Closed, Deadlines, FirstToken, Goodbye, Hello, Leg, Message, Mover, Open, Peer,
    Side, Time, Tombstones, WireError,
};
use kvferry_transport::{Landed, Transport};
use tokio::sync::{mpsc, oneshot};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{source::SourceEntry, target::TargetEntry};
use crate::{
    Ledger, Moment, Observer, PeerAddr, PeerTransport, Receipt, Receive, SourceFault, SourceReceipt,
    SourceRoom, TransportKind,
    config::Limits,
    connection::{ConnId, Gone, LastWords, News, Outbox, Remote},
    lane::Lane,
    room::Slot,
};

/// What all tasks and threads of a node share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) hello: Hello,
    /// To be committed as a source.
    pub(crate) fault: Option<SourceFault>,
    /// The ranks that live here, and their pools.
    pub(crate) hosted: Arc<[RankId]>,
    pub(crate) arenas: Vec<Arc<Arena>>,
    /// In order of preference.
    pub(crate) transports: Vec<Started>,
    pub(crate) limits: Limits,
    pub(crate) epoch: Instant,
    /// To the core, from this process: as many as the caller has rooms and chunks.
    pub(crate) events: mpsc::UnboundedSender<Event>,
    /// To the core, from peers: bounded, so that a peer waits for the core and not the core for memory.
    pub(crate) inbox: mpsc::Sender<Remote>,
    pub(crate) ledger: Mutex<Ledger>,
    /// What moves the bytes between this node and each peer.
    pub(crate) peers: Mutex<BTreeMap<ConnId, PeerTransport>>,
    /// Whoever watches.
    pub(crate) observer: OnceLock<Arc<dyn Observer>>,
    /// Numbers connections.
    pub(crate) connection: AtomicU64,
    /// Ends accepting.
    pub(crate) listen: CancellationToken,
    /// Ends everything, at once.
    pub(crate) stop: CancellationToken,
    pub(crate) tracker: TaskTracker,
}

/// A transport that was started.
#[derive(Clone, Debug)]
pub(crate) struct Started {
    pub(crate) kind: TransportKind,
    pub(crate) transport: Arc<dyn Transport>,
}

impl Started {
    /// Who executes plans, as the machines call it.
    fn mover(&self) -> Mover {
        match self.transport.mover() {
            kvferry_transport::Mover::Source => Mover::Source,
            kvferry_transport::Mover::Target => Mover::Target,
        }
    }
}

impl Shared {
    fn transport(&self, name: &str) -> Option<Started> {
        self.transports.iter().find(|t| t.transport.name() == name).cloned()
    }

    /// The pool of a rank that lives here.
    pub(crate) fn arena(&self, rank: RankId) -> Option<&Arc<Arena>> {
        self.arenas.get(self.hosted.iter().position(|r| *r == rank)?)
    }

    /// Counts a connection whose other end broke the protocol.
    pub(crate) fn count_broken(&self, how: &str) {
        *self.ledger().broken.entry(how.to_owned()).or_default() += 1;
    }

    fn saw(&self, side: Side, key: RoomKey, moment: Moment) {
        if let Some(observer) = self.observer.get() {
            observer.saw(side, key, moment);
        }
    }

    /// A piece of work is done, on one side.
    fn moved(&self, side: Side, key: RoomKey, source: RankId, legs: &[Leg], took: Duration) {
        if let Some(first) = legs.first() {
            let (bytes, copies) = legs.iter().fold((0_u64, 0_u64), |(bytes, copies), leg| {
                (bytes.saturating_add(leg.bytes().0), copies.saturating_add(leg.copies))
            });
            let moved = Moment::Moved { source, tokens: first.tokens, bytes: Bytes(bytes), copies, took };
            self.saw(side, key, moved);
        }
    }

    pub(crate) fn peers(&self) -> MutexGuard<'_, BTreeMap<ConnId, PeerTransport>> {
        // Every change is one insert or one remove.
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rooms of a connection use a transport from now on.
    fn uses(&self, id: ConnId, peer: &Peer, transport: TransportKind, why: &str) {
        let (instance, side) = (peer.instance.clone(), peer.side);
        let now = PeerTransport { peer: instance, side, transport, why: why.to_owned() };
        let before = self.peers().insert(id, now.clone());
        if before.is_none_or(|before| before.transport != transport) {
            tracing::info!(peer = %peer.instance, %side, %transport, why, "transport of a pair");
        }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Something that happened in this process. A serial names one handle's room, so that a late event of an earlier
/// room with the same key finds nobody.
#[derive(Debug)]
pub(crate) enum Event {
    Send {
        room: SourceRoom,
        serial: u64,
        slot: Slot<SourceReceipt>,
    },
    Chunk {
        key: RoomKey,
        serial: u64,
        tokens: TokenRange,
    },
    Finish {
        key: RoomKey,
        serial: u64,
        first: FirstToken,
        at: Time,
    },
    Receive {
        room: Receive,
        serial: u64,
        slot: Slot<Receipt>,
    },
    Decline {
        key: RoomKey,
        serial: u64,
        peers: Vec<PeerAddr>,
        cause: Cause,
    },
    Withhold {
        key: RoomKey,
        cause: Cause,
    },
    Abort {
        side: Side,
        key: RoomKey,
        serial: u64,
        cause: Cause,
    },
    Granted {
        key: RoomKey,
        serial: u64,
        result: Result<(), Cause>,
    },
    Landed {
        serial: u64,
        landed: Landed,
    },
    /// A room's link is open, or could not be opened.
    Linked {
        side: Side,
        key: RoomKey,
        serial: u64,
        conn: ConnId,
        kind: TransportKind,
        result: Result<(), String>,
    },
    Executed {
        side: Side,
        key: RoomKey,
        serial: u64,
        conn: ConnId,
        source: RankId,
        tokens: TokenRange,
        result: Result<Vec<Leg>, Cause>,
        took: Duration,
    },
    Fenced {
        key: RoomKey,
        serial: u64,
    },
    /// Answered when it is read.
    Ping(oneshot::Sender<()>),
    Shutdown,
}

/// What has to be looked at when its time comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Source(RoomKey),
    Target(RoomKey),
    Waiting(RoomKey, ConnId),
    /// The rooms of a node that shuts down have had their time.
    Drained,
}

/// A control connection. It has no peer while it is being dialled.
#[derive(Debug, Default)]
struct Conn {
    paired: Option<(Arc<Peer>, Outbox)>,
    /// By transport.
    lanes: HashMap<TransportKind, Lane>,
    /// Transports over which no link came about, left out until then where there are others.
    unlinked: HashMap<TransportKind, Time>,
    /// The peer takes no new rooms.
    leaving: bool,
    /// What is to be said first: aborts of rooms that were given up before there was a connection.
    unsaid: Vec<Abort>,
}

/// An open for a room that is not known here yet.
#[derive(Debug)]
struct Waiting {
    open: Open,
    until: Time,
}

#[derive(Debug)]
pub(crate) struct Core {
    shared: Arc<Shared>,
    conns: HashMap<ConnId, Conn>,
    dialled: HashMap<PeerAddr, ConnId>,
    sources: HashMap<RoomKey, SourceEntry>,
    targets: HashMap<RoomKey, TargetEntry>,
    waiting: BTreeMap<(RoomKey, ConnId), Waiting>,
    /// Opens for which a link is being opened.
    linking: BTreeMap<(RoomKey, ConnId), Open>,
    ended_sources: Tombstones,
    ended_targets: Tombstones,
    timers: Deadlines<Timer>,
    draining: bool,
}

impl Core {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let rooms = &shared.limits.rooms;
        let tombstones = || Tombstones::new(rooms.tombstone, rooms.tombstones);
        Self {
            conns: HashMap::new(),
            dialled: HashMap::new(),
            sources: HashMap::new(),
            targets: HashMap::new(),
            waiting: BTreeMap::new(),
            linking: BTreeMap::new(),
            ended_sources: tombstones(),
            ended_targets: tombstones(),
            timers: Deadlines::default(),
            draining: false,
            shared,
        }
    }

    pub(crate) async fn run(
        mut self,
        mut local: mpsc::UnboundedReceiver<Event>,
        mut remote: mpsc::Receiver<Remote>,
    ) {
        let stop = self.shared.stop.clone();
        while !(self.draining && self.sources.is_empty() && self.targets.is_empty()) {
            let next = self.timers.next().map(|at| self.shared.epoch + at.0);
            let due = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(event) = local.recv() => self.event(event),
                Some(Remote { conn, news }) = remote.recv() => self.news(conn, news),
                () = due => {}
            }
            self.tick();
            self.publish();
        }
        self.shared.listen.cancel();
        // Rooms that are still open are fenced before anybody is told that they have ended.
        let transports = self.shared.transports.clone();
        let closed = tokio::task::spawn_blocking(move || transports.iter().for_each(|t| t.transport.close()));
        closed.await.ok();
    }

    fn now(&self) -> Time {
        Time(self.shared.epoch.elapsed())
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Send { room, serial, slot } => self.send(room, serial, slot),
            Event::Receive { room, serial, slot } => self.receive(room, serial, slot),
            Event::Decline { key, serial, peers, cause } => self.decline(key, serial, &peers, &cause),
            Event::Withhold { key, cause } => self.withhold(key, &cause),
            Event::Chunk { key, serial, tokens } => self.chunk(key, serial, tokens),
            Event::Finish { key, serial, first, at } => {
                self.shared.saw(Side::Source, key, Moment::Computed);
                self.source(key, Some(serial), |e, _| e.each(|room| room.finish(first, at)));
            }
            Event::Abort { side: Side::Source, key, serial, cause } => {
                self.source(key, Some(serial), |e, now| e.each(|room| room.abort(cause.clone(), now)));
            }
            Event::Abort { side: Side::Target, key, serial, cause } => {
                self.target(key, Some(serial), |e, now| e.abort(cause, now));
            }
            Event::Granted { key, serial, result } => {
                if result.is_ok() {
                    self.shared.saw(Side::Target, key, Moment::Granted);
                }
                self.target(key, Some(serial), |e, now| e.drive(|room| room.granted(result, now)));
            }
            Event::Landed { serial, landed } => self.landed(serial, landed),
            Event::Linked { side: Side::Source, key, conn, kind, result, .. } => {
                self.reader_linked((key, conn), kind, result);
            }
            Event::Linked { side: Side::Target, key, serial, kind, result, .. } => {
                self.linked((key, serial), kind, result);
            }
            Event::Executed { side: Side::Source, key, serial, conn, source, tokens, result, took } => {
                if let Ok(legs) = &result {
                    self.shared.moved(Side::Source, key, source, legs, took);
                }
                self.source(key, Some(serial), |e, now| {
                    e.reader(conn, |room| room.executed(source, tokens, result, now));
                });
            }
            Event::Executed { side: Side::Target, key, serial, source, tokens, result, took, .. } => {
                if let Ok(legs) = &result {
                    self.shared.moved(Side::Target, key, source, legs, took);
                }
                self.target(key, Some(serial), |e, now| {
                    e.drive(|room| room.executed(source, tokens, result, now));
                });
            }
            Event::Fenced { key, serial } => {
                self.target(key, Some(serial), |e, _| e.fenced());
            }
            Event::Ping(reply) => {
                // Whoever asked may have given up.
                reply.send(()).ok();
            }
            Event::Shutdown => self.drain(),
        }
    }

    fn news(&mut self, id: ConnId, news: News) {
        match news {
            News::Paired { peer, outbox } => {
                let conn = self.conns.entry(id).or_default();
                for abort in conn.unsaid.drain(..) {
                    outbox.send(&Message::Abort(abort)).ok();
                }
                if self.draining {
                    outbox.send(&goodbye()).ok();
                }
                if let Some((choice, _)) = peer.transports.first()
                    && let Some(started) = self.shared.transport(choice.transport)
                {
                    self.shared.uses(id, &peer, started.kind, &choice.why);
                }
                conn.paired = Some((Arc::from(peer), outbox));
                for key in self.targets_of(id) {
                    self.open(key);
                }
            }
            News::Leaving => {
                if let Some(conn) = self.conns.get_mut(&id) {
                    conn.leaving = true;
                }
            }
            News::Said(message) => self.said(id, message),
            News::Declined(abort) if abort.head.to == self.shared.hello.incarnation => self.declined(&abort),
            News::Declined(_) => tracing::warn!("a room of another start was declined"),
            News::Gone(gone, last) => self.gone(id, &gone, last),
        }
    }

    fn said(&mut self, id: ConnId, message: Message) {
        let Some((peer, _)) = self.conns.get(&id).and_then(|c| c.paired.as_ref()) else { return };
        let peer = peer.clone();
        let Some(head) = message.head().copied() else {
            if let Message::Heartbeat(_) = message {
                for key in self.sources_of(id) {
                    self.source(key, None, |e, now| e.reader(id, |room| room.renew(now)));
                }
            }
            return;
        };
        if (head.from, head.to) != (peer.incarnation, peer.ours) {
            return tracing::warn!(peer = %peer.instance, kind = message.name(), "message of another start");
        }
        match (peer.side, message) {
            (Side::Source, Message::Open(open)) => self.opened(id, open),
            (Side::Source, message) => {
                // Before it is opened, only to give it up is anybody's business.
                let abort = matches!(message, Message::Abort(_));
                if abort {
                    self.linking.remove(&(head.key, id));
                }
                let ours = |e: &SourceEntry| e.read_by(id) || (e.vacant() && abort);
                if self.sources.get(&head.key).is_some_and(ours) {
                    self.source(head.key, None, |e, now| {
                        if e.read_by(id) {
                            e.reader(id, |room| room.message(&message, now));
                        } else {
                            e.unread(|room| room.message(&message, now));
                        }
                    });
                } else {
                    if let Message::Abort(abort) = &message {
                        self.aborted_early(id, abort);
                    }
                    self.answer(id, &message, Side::Source);
                }
            }
            (Side::Target, message) => {
                if self.targets.get(&head.key).is_some_and(|e| e.from(id)) {
                    match message {
                        Message::Offer(_) => self.shared.saw(Side::Target, head.key, Moment::Offered),
                        Message::Final(_) => self.shared.saw(Side::Target, head.key, Moment::Declared),
                        _ => {}
                    }
                    self.target(head.key, None, |e, now| e.drive(|room| room.message(&message, now)));
                } else {
                    self.answer(id, &message, Side::Target);
                }
            }
        }
    }

    /// Answers a message for a room that is not alive here.
    fn answer(&mut self, id: ConnId, message: &Message, side: Side) {
        let ended = match side {
            Side::Source => &self.ended_sources,
            Side::Target => &self.ended_targets,
        };
        if let Some(answer) = ended.answer(message, side) {
            self.transmit(id, &answer).ok();
        }
    }

    /// Queues a message; a connection that is gone ends its rooms by itself.
    fn transmit(&self, id: ConnId, message: &Message) -> Result<(), WireError> {
        match self.conns.get(&id).and_then(|c| c.paired.as_ref()) {
            Some((_, outbox)) => outbox.send(message),
            None => Ok(()),
        }
    }

    fn close_waiting(&mut self, conn: ConnId, open: &Open, cause: Cause) {
        let closed = Closed { head: open.head.reply(), cause: Some(cause) };
        self.transmit(conn, &Message::Closed(closed)).ok();
    }

    /// A connection has ended: so have its rooms, and its links are closed.
    fn gone(&mut self, id: ConnId, gone: &Gone, last: Option<LastWords>) {
        match gone {
            Gone::Refused(mismatch) => {
                *self.shared.ledger().refused.entry(mismatch.field.clone()).or_default() += 1;
            }
            Gone::Broken(how, _) => self.shared.count_broken(how),
            Gone::Unreachable(_) | Gone::Lost(_) => {}
        }
        // What moves stops at once: nothing waits behind a peer that does not answer.
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.lanes.clear();
        }
        self.dialled.retain(|_, conn| *conn != id);
        self.waiting.retain(|(_, conn), _| *conn != id);
        self.linking.retain(|(_, conn), _| *conn != id);
        self.shared.peers().remove(&id);
        for key in self.sources_of(id) {
            let cause = Cause::new(CauseKind::Lost, Side::Target, gone);
            self.source(key, None, |e, now| e.reader(id, |room| room.peer_lost(cause, now)));
        }
        for key in self.targets_of(id) {
            let peer = self.conns.get(&id).and_then(|c| c.paired.as_ref()).map(|(peer, _)| peer.incarnation);
            self.target(key, None, |e, now| e.peer_gone(id, peer, gone, now));
        }
        let conn = self.conns.remove(&id).unwrap_or_default();
        if let Some(LastWords { to, outbox }) = last {
            for mut abort in conn.unsaid {
                abort.head.to = to;
                outbox.send(&Message::Abort(abort)).ok();
            }
        }
        if let Some((peer, _)) = conn.paired
            && !self
                .conns
                .values()
                .any(|c| c.paired.as_ref().is_some_and(|(p, _)| p.incarnation == peer.incarnation))
        {
            for Started { transport, .. } in &self.shared.transports {
                transport.forget(peer.incarnation);
            }
        }
    }

    fn sources_of(&self, id: ConnId) -> Vec<RoomKey> {
        self.sources.iter().filter(|(_, e)| e.read_by(id)).map(|(key, _)| *key).collect()
    }

    fn targets_of(&self, id: ConnId) -> Vec<RoomKey> {
        self.targets.iter().filter(|(_, e)| e.from(id)).map(|(key, _)| *key).collect()
    }

    /// The lane of a room, started when it is first needed.
    fn lane(&mut self, id: ConnId, kind: TransportKind) -> Option<&Lane> {
        let Conn { paired, lanes, .. } = self.conns.get_mut(&id)?;
        let (peer, _) = paired.as_ref()?;
        Some(match lanes.entry(kind) {
            Entry::Occupied(lane) => lane.into_mut(),
            Entry::Vacant(place) => {
                let Started { transport, .. } = self.shared.transports.iter().find(|t| t.kind == kind)?;
                let (_, at) = peer.transports.iter().find(|(c, _)| c.transport == transport.name())?;
                let addr = kvferry_transport::PeerAddr {
                    endpoint: at.address.clone(),
                    incarnation: peer.incarnation,
                    descriptor: peer.descriptor.clone(),
                };
                place.insert(Lane::start(&self.shared, (id, kind), transport.clone(), addr))
            }
        })
    }

    /// Looks at everything that is due.
    fn tick(&mut self) {
        let now = self.now();
        while let Some(timer) = self.timers.pop_due(now) {
            match timer {
                Timer::Source(key) => self.source(key, None, |e, now| {
                    e.armed = None;
                    e.each(|room| room.tick(now));
                }),
                Timer::Target(key) => self.target(key, None, |e, now| {
                    e.armed = None;
                    e.drive(|room| room.tick(now));
                }),
                Timer::Drained => self.end_all(),
                Timer::Waiting(key, conn) => {
                    if self.waiting.get(&(key, conn)).is_some_and(|w| w.until <= now)
                        && let Some(Waiting { open, .. }) = self.waiting.remove(&(key, conn))
                    {
                        let text = format!(
                            "room {key} was not announced within {:?}",
                            self.shared.limits.rooms.join
                        );
                        self.close_waiting(conn, &open, Cause::new(CauseKind::Unknown, Side::Source, text));
                    }
                }
            }
        }
        self.ended_sources.sweep(now);
        self.ended_targets.sweep(now);
    }

    /// Makes sure that somebody looks at a room at `deadline`.
    fn arm(timers: &mut Deadlines<Timer>, armed: &mut Option<Time>, deadline: Option<Time>, timer: Timer) {
        if let Some(at) = deadline
            && armed.is_none_or(|armed| at < armed)
        {
            timers.push(at, timer);
            *armed = Some(at);
        }
    }

    /// Takes no new rooms and says so; the loop ends with the last room, which has some time to end by itself.
    fn drain(&mut self) {
        if std::mem::replace(&mut self.draining, true) {
            return;
        }
        for (_, outbox) in self.conns.values().filter_map(|c| c.paired.as_ref()) {
            outbox.send(&goodbye()).ok();
        }
        for ((_, conn), Waiting { open, .. }) in std::mem::take(&mut self.waiting) {
            let cause = Cause::new(CauseKind::Unavailable, Side::Source, "the node is shutting down");
            self.close_waiting(conn, &open, cause);
        }
        self.timers.push(self.now() + self.shared.limits.drain, Timer::Drained);
    }

    /// Ends all rooms.
    fn end_all(&mut self) {
        let cause = |side| Cause::new(CauseKind::Unavailable, side, "the node is shutting down");
        for key in self.sources.keys().copied().collect::<Vec<_>>() {
            self.source(key, None, |e, now| e.each(|room| room.abort(cause(Side::Source), now)));
        }
        for key in self.targets.keys().copied().collect::<Vec<_>>() {
            self.target(key, None, |e, now| e.abort(cause(Side::Target), now));
        }
    }

    fn publish(&self) {
        let mut ledger = self.shared.ledger();
        let count = |n: usize| n as u64;
        ledger.sending = count(self.sources.len());
        ledger.receiving = count(self.targets.len());
        ledger.waiting = count(self.waiting.len() + self.linking.len());
        ledger.leases = count(self.sources.values().filter(|e| e.leased()).count());
        ledger.connections = count(self.conns.values().filter(|c| c.paired.is_some()).count());
        ledger.tombstones = count(self.ended_sources.len() + self.ended_targets.len());
    }

    /// Counts a room that has ended.
    fn count(&self, cause: Option<&Cause>) {
        let mut ledger = self.shared.ledger();
        match cause {
            None => ledger.completed += 1,
            Some(cause) => *ledger.failed.entry(format!("{:?}", cause.kind).to_lowercase()).or_default() += 1,
        }
    }
}

fn goodbye() -> Message {
    Message::Goodbye(Goodbye { reason: "shutting down".into() })
}
