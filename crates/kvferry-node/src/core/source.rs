//! Rooms that this node sends.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvferry_plan::{Bytes, PageTable, RankId, RoomKey, Rotation, SlotId, Token, TokenRange};
use kvferry_session::{
    Abort, Action, Cause, CauseKind, Message, Mover, Open, Outcome, PageRef, Peer, Sent, Side, Source, Time,
};

use super::{Core, Shared, Timer, Waiting};
use crate::{
    Moment, RoomError, SourceReceipt, SourceRoom, TransportKind,
    connection::ConnId,
    fault::misdealt,
    lane::{Half, Task},
    room::Slot,
    work,
};

/// A room that this node sends. A target in several processes has a reader for each; while ranks of it are missing
/// there is one more, which nobody has opened yet and from which the next is copied.
#[derive(Debug)]
pub(super) struct SourceEntry {
    pub(super) armed: Option<Time>,
    key: RoomKey,
    serial: u64,
    table: Arc<PageTable>,
    rotation: Rotation,
    /// The request's state slot, and where the prompt ends whose state it is.
    state: Option<(SlotId, Token)>,
    readers: Vec<Reader>,
    /// The last token of the room.
    end: Token,
    /// One reader has failed and the others were told.
    failed: bool,
    /// The fault that is to be committed has been.
    faulted: bool,
    slot: Slot<SourceReceipt>,
}

#[derive(Debug)]
struct Reader {
    room: Source,
    /// Settled by the open.
    opened: Option<Opened>,
}

#[derive(Debug)]
struct Opened {
    conn: ConnId,
    peer: Arc<Peer>,
    kind: TransportKind,
    mover: Mover,
}

impl Reader {
    fn is_at(&self, id: ConnId) -> bool {
        self.opened.as_ref().is_some_and(|o| o.conn == id)
    }
}

impl SourceEntry {
    pub(super) fn each(&mut self, mut act: impl FnMut(&mut Source)) {
        self.readers.iter_mut().for_each(|r| act(&mut r.room));
    }

    /// The reader at the other end of a connection.
    pub(super) fn reader(&mut self, id: ConnId, act: impl FnOnce(&mut Source)) {
        if let Some(reader) = self.readers.iter_mut().find(|r| r.is_at(id)) {
            act(&mut reader.room);
        }
    }

    /// The reader that nobody has opened yet.
    pub(super) fn unread(&mut self, act: impl FnOnce(&mut Source)) {
        if let Some(reader) = self.readers.iter_mut().find(|r| r.opened.is_none()) {
            act(&mut reader.room);
        }
    }

    pub(super) fn read_by(&self, id: ConnId) -> bool {
        self.readers.iter().any(|r| r.is_at(id))
    }

    pub(super) fn vacant(&self) -> bool {
        self.readers.iter().any(|r| r.opened.is_none())
    }

    pub(super) fn leased(&self) -> bool {
        self.readers.iter().any(|r| r.room.leased())
    }

    /// True for the first process that opens the room, and for the others of the same target instance.
    fn takes(&self, peer: &Peer) -> bool {
        let mut joined = self.readers.iter().filter_map(|r| r.opened.as_ref());
        let fits = |other: &Peer| {
            other.instance == peer.instance
                && other.descriptor == peer.descriptor
                && !other.ranks.iter().any(|rank| peer.ranks.contains(rank))
        };
        self.vacant() && joined.all(|o| fits(&o.peer))
    }

    fn join(&mut self, open: &Open, opened: Opened, now: Time) {
        let (mover, pair) = (opened.mover, opened.peer.pair.clone());
        let Some(vacant) = self.readers.iter_mut().find(|r| r.opened.is_none()) else { return };
        let next = Reader { room: vacant.room.clone(), opened: None };
        vacant.opened = Some(opened);
        vacant.room.open(open, mover, pair.clone(), now);
        let joined = self.readers.iter().filter_map(|r| r.opened.as_ref()).map(|o| o.peer.ranks.len());
        if (joined.sum::<usize>() as u64) < u64::from(pair.dst().ranks()) {
            self.readers.push(next);
        }
    }

    /// A request that one process of the target cannot have is of no use to the others: they are told. True when
    /// that happened now.
    fn spread(&mut self, now: Time) -> bool {
        let Some(cause) = self.readers.iter().find_map(|r| r.room.failure()).cloned() else { return false };
        if std::mem::replace(&mut self.failed, true) {
            return false;
        }
        self.each(|room| room.abort(cause.clone(), now));
        true
    }

    /// How the room ended, once every reader has.
    fn outcome(&self) -> Option<Outcome<Sent>> {
        let mut sum = Sent { bytes: Bytes(0), copies: 0, exposed: Duration::ZERO };
        let mut failure = None;
        for reader in &self.readers {
            match reader.room.outcome()? {
                Ok(sent) => {
                    sum.bytes = Bytes(sum.bytes.0.saturating_add(sent.bytes.0));
                    sum.copies = sum.copies.saturating_add(sent.copies);
                    sum.exposed = sum.exposed.max(sent.exposed);
                }
                Err(cause) => failure = failure.or(Some(cause.clone())),
            }
        }
        Some(failure.map_or(Ok(sum), Err))
    }

    /// The pages and the rotation by which a rank of ours goes: the request's, unless a fault says otherwise.
    fn dealt(&self, shared: &Shared, rank: RankId) -> (Arc<PageTable>, Rotation) {
        let placement = &shared.hello.descriptor.placement;
        let by = shared.fault.map_or(self.rotation, |fault| fault.rotation(placement, rank, self.rotation));
        match by == self.rotation {
            true => (self.table.clone(), by),
            false => (Arc::new(misdealt(&self.table, placement, by)), by),
        }
    }

    /// Whether a fault makes a rank of ours read other pages than its own.
    fn reads_others(&self, shared: &Shared, rank: RankId, tokens: TokenRange) -> bool {
        let placement = &shared.hello.descriptor.placement;
        let read = |table: &PageTable, rotation| -> Vec<_> {
            let entries = placement.entries(rank, tokens, rotation);
            entries
                .iter()
                .map(|k| table.0.get(usize::try_from(k).ok()?).map(|p| placement.local_page(*p)))
                .collect()
        };
        let (table, rotation) = self.dealt(shared, rank);
        read(&table, rotation) != read(&self.table, self.rotation)
    }

    /// A fault is committed: counted once a room.
    fn fault(&mut self, shared: &Shared) {
        if !std::mem::replace(&mut self.faulted, true) {
            shared.ledger().faults += 1;
        }
    }

    fn deadline(&self) -> Option<Time> {
        self.readers.iter().filter_map(|r| r.room.deadline()).min()
    }
}

impl Core {
    pub(super) fn send(&mut self, room: SourceRoom, serial: u64, slot: Slot<SourceReceipt>) {
        let SourceRoom { key, table, slot: state, tokens, prompt } = room;
        let reject = |reason: &str| RoomError::Rejected { key, reason: reason.into() };
        let refused = if self.draining {
            Some(RoomError::ShutDown)
        } else if let Some(Some(cause)) = self.ended_sources.end(key) {
            Some(RoomError::Ended { key, cause: cause.clone(), side: Side::Source })
        } else if self.sources.contains_key(&key) || self.ended_sources.end(key).is_some() {
            Some(reject("this attempt was started before; a retry is a new attempt"))
        } else if tokens.is_empty() {
            Some(reject("a room without tokens"))
        } else {
            None
        };
        if let Some(error) = refused {
            slot.send_replace(Some(Err(error)));
            return;
        }
        let limits = self.shared.limits.rooms;
        let ranks = self.shared.hosted.to_vec();
        let refs = state.map_or(Ok(Vec::new()), |slot| work::slot_refs(slot, &self.shared.arenas));
        let refs = match refs {
            Ok(refs) => refs,
            Err(reason) => {
                slot.send_replace(Some(Err(reject(&reason))));
                return;
            }
        };
        let rotation = match self.shared.hello.descriptor.placement.rotation(&table) {
            Ok(rotation) => rotation,
            Err(error) => {
                slot.send_replace(Some(Err(reject(&error.reason))));
                return;
            }
        };
        let room = Source::new(key, tokens, ranks, limits, self.now());
        let room = room.with_prompt(prompt).with_state(refs).with_rotation(rotation);
        let entry = SourceEntry {
            armed: None,
            key,
            serial,
            table: Arc::new(table),
            rotation,
            state: state.map(|slot| (slot, tokens.end)),
            readers: vec![Reader { room, opened: None }],
            end: tokens.end,
            failed: false,
            faulted: false,
            slot,
        };
        self.sources.insert(key, entry);
        for conn in self.waiting_for(key) {
            if let Some(Waiting { open, .. }) = self.waiting.remove(&(key, conn)) {
                self.bind(conn, open);
            }
        }
        self.source(key, None, |_, _| {});
    }

    /// A target reads a room that nobody else reads, or waits for one that is not announced yet.
    pub(super) fn bind(&mut self, id: ConnId, open: Open) {
        let key = open.head.key;
        let Some(entry) = self.sources.get_mut(&key) else {
            if self.ended_sources.end(key).is_some() {
                return self.answer(id, &Message::Open(open), Side::Source);
            }
            return self.wait(id, open);
        };
        if entry.read_by(id) {
            return;
        }
        let Some((peer, _)) = self.conns.get(&id).and_then(|c| c.paired.as_ref()) else { return };
        if !entry.takes(peer) {
            let text = format!("room {key} is read by somebody else");
            return self.close_waiting(id, &open, Cause::new(CauseKind::Unknown, Side::Source, text));
        }
        let common = peer.transports.iter().find(|(c, _)| c.transport == open.transport);
        let Some((started, (choice, _))) = self.shared.transport(&open.transport).zip(common) else {
            let text = format!("asks for the transport `{}`, which is not one of both", open.transport);
            return self.close_waiting(id, &open, Cause::new(CauseKind::Protocol, Side::Target, text));
        };
        let first = peer.transports.first().is_some_and(|(first, _)| first == choice);
        let why = if first { choice.why.clone() } else { "decode asks for it".into() };
        self.shared.uses(id, peer, started.kind, &why);
        let paired = Moment::Paired { peer: peer.instance.clone(), transport: started.kind };
        let opened = Opened { conn: id, peer: peer.clone(), kind: started.kind, mover: started.mover() };
        self.shared.saw(Side::Source, key, paired);
        self.source(key, None, |e, now| e.join(&open, opened, now));
    }

    fn waiting_for(&self, key: RoomKey) -> Vec<ConnId> {
        let all = (key, ConnId(0))..=(key, ConnId(u64::MAX));
        self.waiting.range(all).map(|((_, conn), _)| *conn).collect()
    }

    fn wait(&mut self, conn: ConnId, open: Open) {
        let limits = self.shared.limits.rooms;
        let key = open.head.key;
        let waits = self.waiting.keys().filter(|(_, c)| *c == conn).count();
        if self.draining || waits >= limits.waiting {
            let text = format!("{waits} opens wait for their rooms already");
            return self.close_waiting(conn, &open, Cause::new(CauseKind::Unavailable, Side::Source, text));
        }
        if self.waiting.contains_key(&(key, conn)) {
            return;
        }
        let until = self.now() + limits.join;
        self.timers.push(until, Timer::Waiting(key, conn));
        self.waiting.insert((key, conn), Waiting { open, until });
    }

    /// A target gives up a room that is not announced here yet: it will not be opened when it is.
    pub(super) fn aborted_early(&mut self, id: ConnId, abort: &Abort) {
        let key = abort.head.key;
        self.waiting.remove(&(key, id));
        if self.waiting_for(key).is_empty() && !self.sources.contains_key(&key) {
            let now = self.now();
            self.ended_sources.bury(key, Some(abort.cause.clone()), now);
        }
    }

    /// A peer that does not fit will not open a room. One that somebody reads is not its to end.
    pub(super) fn declined(&mut self, abort: &Abort) {
        let key = abort.head.key;
        match self.sources.get(&key) {
            Some(entry) if entry.vacant() => {
                let message = Message::Abort(abort.clone());
                self.source(key, None, |e, now| e.unread(|room| room.message(&message, now)));
            }
            Some(_) => {}
            None if self.waiting_for(key).is_empty() => {
                let now = self.now();
                self.ended_sources.bury(key, Some(abort.cause.clone()), now);
            }
            None => {}
        }
    }

    /// A room will not be computed here: whoever has opened it is told.
    pub(super) fn withhold(&mut self, key: RoomKey, cause: &Cause) {
        if self.sources.contains_key(&key) || self.ended_sources.end(key).is_some() {
            return;
        }
        let now = self.now();
        self.ended_sources.bury(key, Some(cause.clone()), now);
        for conn in self.waiting_for(key) {
            if let Some(Waiting { open, .. }) = self.waiting.remove(&(key, conn)) {
                self.close_waiting(conn, &open, cause.clone());
            }
        }
    }

    pub(super) fn chunk(&mut self, key: RoomKey, serial: u64, tokens: TokenRange) {
        let Some(entry) = self.sources.get(&key).filter(|e| e.serial == serial) else { return };
        let placement = &self.shared.hello.descriptor.placement;
        let hosted = self.shared.hosted.iter().copied();
        let pages: Result<Vec<Vec<PageRef>>, String> = hosted
            .zip(&self.shared.arenas)
            .map(|(rank, arena)| {
                let (table, rotation) = entry.dealt(&self.shared, rank);
                work::page_refs(&table, placement.entries(rank, tokens, rotation), placement, arena)
            })
            .collect();
        self.source(key, Some(serial), |e, now| match pages {
            Ok(pages) => e.each(|room| room.chunk(tokens, pages.clone(), now)),
            Err(text) => {
                let cause = Cause::new(CauseKind::Aborted, Side::Source, text);
                e.each(|room| room.abort(cause.clone(), now));
            }
        });
    }

    /// Lets something happen to a room and carries out what its machine wants.
    pub(super) fn source(
        &mut self,
        key: RoomKey,
        serial: Option<u64>,
        act: impl FnOnce(&mut SourceEntry, Time),
    ) {
        let Some(mut entry) = self.sources.remove(&key) else { return };
        if serial.is_none_or(|serial| serial == entry.serial) {
            act(&mut entry, self.now());
        }
        loop {
            let mut readers = std::mem::take(&mut entry.readers);
            for reader in &mut readers {
                while let Some(action) = reader.room.poll() {
                    self.carry_out_source(&mut entry, reader, action);
                }
            }
            entry.readers = readers;
            if !entry.spread(self.now()) {
                break;
            }
        }
        if let Some(outcome) = entry.outcome() {
            return self.end_source(key, &entry, outcome);
        }
        let deadline = entry.deadline();
        Self::arm(&mut self.timers, &mut entry.armed, deadline, Timer::Source(key));
        self.sources.insert(key, entry);
    }

    fn carry_out_source(&mut self, entry: &mut SourceEntry, reader: &mut Reader, action: Action) {
        let key = entry.key;
        let (Some(Opened { conn, peer, kind, mover }), Some(head)) = (&reader.opened, reader.room.head())
        else {
            return;
        };
        let (conn, kind) = (*conn, *kind);
        match action {
            Action::Send(Message::Final(manifest))
                if self.shared.fault.is_some_and(|fault| fault.drops(&manifest, entry.end)) =>
            {
                entry.fault(&self.shared);
            }
            Action::Send(message) => {
                if let Err(error) = self.transmit(conn, &message) {
                    let text =
                        format!("{} does not fit a message: {error}; use larger chunks", message.name());
                    let now = self.now();
                    reader.room.abort(Cause::new(CauseKind::Transport, Side::Source, text), now);
                }
            }
            Action::Execute(piece) => {
                let (source, tokens) = (piece.source, piece.tokens);
                let (table, _) = entry.dealt(&self.shared, source);
                if entry.reads_others(&self.shared, source, tokens) {
                    entry.fault(&self.shared);
                }
                let task = Task {
                    key,
                    serial: entry.serial,
                    conn,
                    generation: head.generation,
                    pair: peer.pair.clone(),
                    table,
                    slot: entry.state.and_then(|(slot, end)| (tokens.end == end).then_some(slot)),
                    source,
                    tokens,
                    rotation: piece.rotation,
                    targets: peer.ranks.clone().into(),
                    digest: peer.digest,
                    since: Instant::now(),
                    half: match mover {
                        Mover::Source => Half::Push,
                        Mover::Target => Half::Digest,
                    },
                };
                match self.lane(conn, kind) {
                    Some(lane) => lane.execute(task),
                    None => {
                        let gone = Cause::new(CauseKind::Lost, Side::Target, "the connection is gone");
                        let now = self.now();
                        reader.room.executed(source, tokens, Err(gone), now);
                    }
                }
            }
            Action::Fence => {
                if let Some(lane) = self.conns.get(&conn).and_then(|c| c.lanes.get(&kind)) {
                    lane.fence(key, entry.serial, None);
                }
            }
            Action::Sever => {
                if let Some(conn) = self.conns.get_mut(&conn) {
                    conn.lanes.remove(&kind);
                }
            }
            Action::Grant | Action::Finish => {}
        }
    }

    fn end_source(&mut self, key: RoomKey, entry: &SourceEntry, outcome: Outcome<Sent>) {
        let cause = outcome.as_ref().err();
        if let Some(cause) = cause {
            tracing::info!(%key, %cause, "sending ended");
        }
        self.count(cause);
        let now = self.now();
        self.ended_sources.bury(key, cause.cloned(), now);
        entry.slot.send_replace(Some(match outcome {
            Ok(sent) => Ok(SourceReceipt {
                bytes: sent.bytes,
                copies: sent.copies,
                exposed_seconds: sent.exposed.as_secs_f64(),
            }),
            Err(cause) => Err(RoomError::Ended { key, cause, side: Side::Source }),
        }));
    }
}
