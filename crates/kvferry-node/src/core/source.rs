//! Rooms that this node sends.

use std::sync::Arc;

use kvferry_plan::{PageTable, RankId, RoomKey, TokenRange};
use kvferry_session::{
    Abort, Action, Cause, CauseKind, Mover, Open, Outcome, PageRef, Sent, Side, Source, Time, page_span,
};
use kvferry_transport::TransportKind;

use super::{Core, Timer, Waiting};
use crate::{
    RoomError, SourceReceipt, SourceRoom,
    connection::ConnId,
    lane::{Half, Task},
    room::Slot,
    work,
};

/// A room that this node sends.
#[derive(Debug)]
pub(super) struct SourceEntry {
    pub(super) room: Source,
    pub(super) conn: Option<ConnId>,
    pub(super) armed: Option<Time>,
    serial: u64,
    table: Arc<PageTable>,
    /// Settled by the open.
    transport: Option<(TransportKind, Mover)>,
    slot: Slot<SourceReceipt>,
}

impl Core {
    pub(super) fn send(&mut self, room: SourceRoom, serial: u64, slot: Slot<SourceReceipt>) {
        let SourceRoom { key, table, tokens } = room;
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
        let ranks = self.shared.hello.descriptor.placement.ranks();
        let entry = SourceEntry {
            room: Source::new(key, tokens, ranks, limits, self.now()),
            conn: None,
            armed: None,
            serial,
            table: Arc::new(table),
            transport: None,
            slot,
        };
        self.sources.insert(key, entry);
        match self.waiting.remove(&key) {
            Some(Waiting { conn, open, .. }) => self.opened(conn, open),
            None => self.source(key, None, |_, _| {}),
        }
    }

    /// A target opens a room: it reads a room that nobody else reads, or waits for one that is not announced yet.
    pub(super) fn opened(&mut self, id: ConnId, open: Open) {
        let key = open.head.key;
        let Some(entry) = self.sources.get_mut(&key) else {
            if self.ended_sources.end(key).is_some() {
                return self.answer(id, &kvferry_session::Message::Open(open), Side::Source);
            }
            return self.wait(id, open);
        };
        match entry.conn {
            Some(conn) if conn == id => return,
            Some(_) => {
                let text = format!("room {key} is read by somebody else");
                return self.close_waiting(id, &open, Cause::new(CauseKind::Unknown, Side::Source, text));
            }
            None => {}
        }
        let Some((peer, _)) = self.conns.get(&id).and_then(|c| c.paired.as_ref()) else { return };
        let shared = peer.transports.iter().any(|e| e.name == open.transport);
        let Some(started) = self.shared.transport(&open.transport).filter(|_| shared) else {
            let text = format!("asks for the transport `{}`, which is not one of both", open.transport);
            return self.close_waiting(id, &open, Cause::new(CauseKind::Protocol, Side::Target, text));
        };
        entry.conn = Some(id);
        let mover = started.mover();
        entry.transport = Some((started.kind, mover));
        let pair = peer.pair.clone();
        self.source(key, None, |e, now| e.room.open(&open, mover, pair, now));
    }

    fn wait(&mut self, conn: ConnId, open: Open) {
        let limits = self.shared.limits.rooms;
        let key = open.head.key;
        let waits = self.waiting.values().filter(|w| w.conn == conn).count();
        if self.draining || waits >= limits.waiting {
            let text = format!("{waits} opens wait for their rooms already");
            return self.close_waiting(conn, &open, Cause::new(CauseKind::Unavailable, Side::Source, text));
        }
        if let Some(other) = self.waiting.get(&key) {
            if other.conn != conn {
                let text = format!("room {key} is waited for by somebody else");
                self.close_waiting(conn, &open, Cause::new(CauseKind::Unknown, Side::Source, text));
            }
            return;
        }
        let until = self.now() + limits.join;
        self.timers.push(until, Timer::Waiting(key));
        self.waiting.insert(key, Waiting { conn, open, until });
    }

    /// A target gives up a room that is not announced here yet: it will not be opened when it is.
    pub(super) fn aborted_early(&mut self, id: ConnId, abort: &Abort) {
        let key = abort.head.key;
        let theirs = self.waiting.get(&key).is_none_or(|w| w.conn == id);
        if theirs && !self.sources.contains_key(&key) {
            self.waiting.remove(&key);
            let now = self.now();
            self.ended_sources.bury(key, Some(abort.cause.clone()), now);
        }
    }

    pub(super) fn chunk(&mut self, key: RoomKey, serial: u64, tokens: TokenRange) {
        let Some(entry) = self.sources.get(&key).filter(|e| e.serial == serial) else { return };
        let placement = &self.shared.hello.descriptor.placement;
        let pages: Result<Vec<Vec<PageRef>>, String> = (0..)
            .map(RankId)
            .zip(&self.shared.arenas)
            .map(|(rank, arena)| work::page_refs(&entry.table, page_span(placement, rank, tokens), arena))
            .collect();
        self.source(key, Some(serial), |e, now| match pages {
            Ok(pages) => e.room.chunk(tokens, pages, now),
            Err(text) => e.room.abort(Cause::new(CauseKind::Aborted, Side::Source, text), now),
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
        while let Some(action) = entry.room.poll() {
            self.carry_out_source(&mut entry, action);
        }
        if let Some(outcome) = entry.room.outcome() {
            let outcome = outcome.clone();
            return self.end_source(key, &entry, outcome);
        }
        Self::arm(&mut self.timers, &mut entry.armed, entry.room.deadline(), Timer::Source(key));
        self.sources.insert(key, entry);
    }

    fn carry_out_source(&mut self, entry: &mut SourceEntry, action: Action) {
        let key = entry.room.key();
        let (Some(conn), Some((kind, mover)), Some(head)) = (entry.conn, entry.transport, entry.room.head())
        else {
            return;
        };
        match action {
            Action::Send(message) => {
                if let Err(error) = self.transmit(conn, &message) {
                    let text =
                        format!("{} does not fit a message: {error}; use larger chunks", message.name());
                    let now = self.now();
                    entry.room.abort(Cause::new(CauseKind::Transport, Side::Source, text), now);
                }
            }
            Action::Execute(piece) => {
                let (source, tokens) = (piece.source, piece.tokens);
                let paired = self.conns.get(&conn).and_then(|c| c.paired.as_ref());
                let task = paired.map(|(peer, _)| Task {
                    key,
                    serial: entry.serial,
                    generation: head.generation,
                    pair: peer.pair.clone(),
                    table: entry.table.clone(),
                    source,
                    tokens,
                    digest: peer.digest,
                    half: match mover {
                        Mover::Source => Half::Push,
                        Mover::Target => Half::Digest,
                    },
                });
                match (self.lane(conn, kind), task) {
                    (Some(lane), Some(task)) => lane.execute(task),
                    _ => {
                        let gone = Cause::new(CauseKind::Lost, Side::Target, "the connection is gone");
                        let now = self.now();
                        entry.room.executed(source, tokens, Err(gone), now);
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
