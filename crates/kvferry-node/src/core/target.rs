//! Rooms that this node receives.

use std::sync::Arc;

use kvferry_plan::{Generation, PageTable, RankId, RoomKey};
use kvferry_session::{
    Abort, Action, Cause, CauseKind, Head, Mover, Outcome, Received, Side, Target, TargetRoom, Time,
};
use kvferry_transport::{Grant, Landed, TransportKind};

use super::{Conn, Core, Event, Started, Timer};
use crate::{
    Receipt, Receive, RoomError,
    connection::{ConnId, Connection, Gone},
    lane::{Half, Task},
    room::Slot,
    work,
};

/// A room that this node receives. It has no machine until its peer is paired.
#[derive(Debug)]
pub(super) struct TargetEntry {
    pub(super) conn: ConnId,
    pub(super) armed: Option<Time>,
    key: RoomKey,
    serial: u64,
    asked: Receive,
    table: Arc<PageTable>,
    stage: Stage,
    slot: Slot<Receipt>,
}

#[derive(Debug)]
enum Stage {
    /// Waiting for the connection.
    Dialling,
    /// Driven by its machine.
    Open(Box<Target>, TransportKind),
    /// Ended without ever being open.
    Over(RoomError),
}

impl TargetEntry {
    pub(super) fn drive(&mut self, act: impl FnOnce(&mut Target)) {
        if let Stage::Open(room, _) = &mut self.stage {
            act(room);
        }
    }

    pub(super) fn abort(&mut self, cause: Cause, now: Time) {
        match &mut self.stage {
            Stage::Open(room, _) => room.abort(cause, now),
            Stage::Dialling => {
                self.stage = Stage::Over(RoomError::Ended { key: self.key, cause, side: Side::Target });
            }
            Stage::Over(_) => {}
        }
    }

    pub(super) fn peer_gone(&mut self, gone: &Gone, now: Time) {
        let peer = self.asked.peer.instance.clone();
        match (&mut self.stage, gone) {
            (Stage::Dialling, Gone::Refused(mismatch)) => {
                self.stage = Stage::Over(RoomError::Incompatible { peer, mismatch: mismatch.clone() });
            }
            (Stage::Dialling, gone) => {
                self.stage = Stage::Over(RoomError::Unreachable {
                    peer,
                    endpoint: self.asked.peer.endpoint.clone(),
                    reason: gone.to_string(),
                });
            }
            (Stage::Open(room, _), gone) => {
                room.peer_lost(Cause::new(CauseKind::Lost, Side::Source, gone), now);
            }
            (Stage::Over(_), _) => {}
        }
    }
}

impl Core {
    pub(super) fn receive(&mut self, asked: Receive, serial: u64, slot: Slot<Receipt>) {
        let key = asked.key;
        let reject = |reason: &str| RoomError::Rejected { key, reason: reason.into() };
        let refused = if self.draining {
            Some(RoomError::ShutDown)
        } else if self.targets.contains_key(&key) || self.ended_targets.end(key).is_some() {
            Some(reject("this attempt was started before; a retry is a new attempt"))
        } else if asked.tokens.is_empty() {
            Some(reject("a room without tokens"))
        } else {
            None
        };
        if let Some(error) = refused {
            slot.send_replace(Some(Err(error)));
            return;
        }
        let conn = self.dial(&asked);
        let table = Arc::new(asked.table.clone());
        let entry =
            TargetEntry { conn, armed: None, key, serial, asked, table, stage: Stage::Dialling, slot };
        self.targets.insert(key, entry);
        self.open(key);
    }

    /// The connection to a room's peer, dialled when there is none.
    fn dial(&mut self, asked: &Receive) -> ConnId {
        if let Some(conn) = self.dialled.get(&asked.peer) {
            return *conn;
        }
        let connection = Connection::new(&self.shared, Side::Target, Some(asked.peer.clone()));
        let id = connection.id;
        self.conns.insert(id, Conn::default());
        self.dialled.insert(asked.peer.clone(), id);
        self.shared.tracker.spawn(connection.dial(asked.peer.endpoint.clone()));
        id
    }

    /// Opens a room whose peer is paired.
    pub(super) fn open(&mut self, key: RoomKey) {
        let (limits, now) = (self.shared.limits.rooms, self.now());
        let Some(entry) = self.targets.get_mut(&key).filter(|e| matches!(e.stage, Stage::Dialling)) else {
            return;
        };
        let Some((peer, _)) = self.conns.get(&entry.conn).and_then(|c| c.paired.as_ref()) else { return };
        let wanted = entry.asked.transport.map(|kind| kind.to_string());
        let named = peer.transports.iter().find(|e| wanted.as_ref().is_none_or(|w| *w == e.name));
        let Some(started) = named.and_then(|e| self.shared.transport(&e.name)) else {
            let both: Vec<_> = peer.transports.iter().map(|e| e.name.as_str()).collect();
            let reason = format!(
                "the transport `{}` is not one of both; {} are",
                wanted.unwrap_or_default(),
                both.join(", ")
            );
            entry.stage = Stage::Over(RoomError::Rejected { key, reason });
            return self.target(key, None, |_, _| {});
        };
        let room = TargetRoom {
            head: Head { key, generation: Generation(entry.serial), from: peer.ours, to: peer.incarnation },
            pair: peer.pair.clone(),
            tokens: entry.asked.tokens,
            transport: started.transport.name().into(),
            mover: started.mover(),
            source_pages: peer.pages,
            digest: peer.digest,
        };
        entry.stage = Stage::Open(Box::new(Target::new(room, limits, now)), started.kind);
        self.target(key, None, |_, _| {});
    }

    pub(super) fn landed(&mut self, serial: u64, landed: Landed) {
        let Landed { key, source, tokens, outcome, .. } = landed;
        let result = outcome.map(|report| work::reported(report, tokens)).map_err(|error| {
            // The source sent what does not fit, unless it is our own memory.
            let at = match error {
                kvferry_transport::TransportError::Arena(_) => Side::Target,
                _ => Side::Source,
            };
            let text = format!("tokens {tokens} from source rank {source}: {error}");
            Cause { at, ..Cause::new(work::cause(&error, Side::Target).kind, at, text) }
        });
        self.target(key, Some(serial), |e, now| e.drive(|room| room.landed(source, result, now)));
    }

    /// Lets something happen to a room and carries out what its machine wants.
    pub(super) fn target(
        &mut self,
        key: RoomKey,
        serial: Option<u64>,
        act: impl FnOnce(&mut TargetEntry, Time),
    ) {
        let Some(mut entry) = self.targets.remove(&key) else { return };
        if serial.is_none_or(|serial| serial == entry.serial) {
            act(&mut entry, self.now());
        }
        while let Stage::Open(room, kind) = &mut entry.stage {
            let kind = *kind;
            match room.poll() {
                Some(action) => self.carry_out_target(&mut entry, kind, action),
                None => break,
            }
        }
        match &entry.stage {
            Stage::Over(error) => {
                let error = error.clone();
                self.say_later(&entry, &error);
                return self.end_target(&entry, Err(error));
            }
            Stage::Open(room, kind) => {
                if let Some(outcome) = room.outcome() {
                    let result = receipt(key, outcome, *kind);
                    return self.end_target(&entry, result);
                }
                let deadline = room.deadline();
                Self::arm(&mut self.timers, &mut entry.armed, deadline, Timer::Target(key));
            }
            Stage::Dialling => {}
        }
        self.targets.insert(key, entry);
    }

    /// Tells the peer of a room that was given up before there was a connection, as soon as there is one.
    fn say_later(&mut self, entry: &TargetEntry, error: &RoomError) {
        if let RoomError::Ended { key, cause, .. } = error
            && let Some(conn) = self.conns.get_mut(&entry.conn)
        {
            let head = Head {
                key: *key,
                generation: Generation(entry.serial),
                from: self.shared.hello.incarnation,
                to: entry.asked.peer.incarnation,
            };
            conn.unsaid.push(Abort { head, cause: cause.clone() });
        }
    }

    fn carry_out_target(&mut self, entry: &mut TargetEntry, kind: TransportKind, action: Action) {
        let Stage::Open(room, _) = &entry.stage else { return };
        let asked = room.room().clone();
        let (key, serial, conn, generation) = (entry.key, entry.serial, entry.conn, asked.head.generation);
        let Some(Started { transport, .. }) = self.shared.transport(&asked.transport) else { return };
        match action {
            Action::Send(message) => {
                if let Err(error) = self.transmit(conn, &message) {
                    let now = self.now();
                    entry.abort(Cause::new(CauseKind::Transport, Side::Target, error), now);
                }
            }
            Action::Grant => {
                let events = self.shared.events.clone();
                let grant = Grant {
                    key,
                    generation,
                    peer: asked.head.to,
                    ranks: (0..asked.pair.dst().ranks()).map(RankId).collect(),
                    pair: asked.pair,
                    table: PageTable::clone(&entry.table),
                    tokens: asked.tokens,
                    digest: asked.digest,
                    landed: Arc::new(move |landed| {
                        events.send(Event::Landed { serial, landed }).ok();
                    }),
                };
                let events = self.shared.events.clone();
                self.shared.tracker.spawn_blocking(move || {
                    let result = transport.grant(grant).map_err(|e| work::cause(&e, Side::Target));
                    events.send(Event::Granted { key, serial, result }).ok();
                });
            }
            Action::Execute(piece) => {
                let (source, tokens) = (piece.source, piece.tokens);
                let paired = self.conns.get(&conn).and_then(|c| c.paired.as_ref());
                let task = paired.map(|(peer, _)| Task {
                    key,
                    serial,
                    generation,
                    pair: peer.pair.clone(),
                    table: entry.table.clone(),
                    source,
                    tokens,
                    digest: peer.digest,
                    half: Half::Pull(piece.pages),
                });
                match (self.lane(conn, kind), task) {
                    (Some(lane), Some(task)) => lane.execute(task),
                    _ => {
                        let gone = Cause::new(CauseKind::Lost, Side::Source, "the connection is gone");
                        let now = self.now();
                        entry.drive(|room| room.executed(source, tokens, Err(gone), now));
                    }
                }
            }
            Action::Fence => {
                // What we pull ourselves stops on the lane; what is pushed stops at the grant.
                let lane = self.conns.get(&conn).and_then(|c| c.lanes.get(&kind));
                if let Some(lane) = lane.filter(|_| asked.mover == Mover::Target) {
                    return lane.fence(key, serial, Some(generation));
                }
                let events = self.shared.events.clone();
                self.shared.tracker.spawn_blocking(move || {
                    transport.revoke(key, generation);
                    events.send(Event::Fenced { key, serial }).ok();
                });
            }
            Action::Sever => {
                if let Some(conn) = self.conns.get_mut(&conn) {
                    conn.lanes.remove(&kind);
                }
            }
            Action::Finish => {}
        }
    }

    fn end_target(&mut self, entry: &TargetEntry, result: Result<Receipt, RoomError>) {
        let key = entry.key;
        let cause = match &result {
            Ok(_) => None,
            Err(RoomError::Ended { cause, .. }) => Some(cause.clone()),
            Err(other) => Some(Cause::new(CauseKind::Other, Side::Target, other)),
        };
        if let Err(error) = &result {
            tracing::info!(%key, %error, "receiving ended");
        }
        self.count(cause.as_ref());
        let now = self.now();
        self.ended_targets.bury(key, cause, now);
        entry.slot.send_replace(Some(result));
    }
}

fn receipt(
    key: RoomKey,
    outcome: &Outcome<Received>,
    transport: TransportKind,
) -> Result<Receipt, RoomError> {
    match outcome {
        Ok(received) => Ok(Receipt {
            first: received.first,
            bytes: received.bytes,
            planned_bytes: received.planned,
            copies: received.copies,
            seconds: received.elapsed.as_secs_f64(),
            transport,
        }),
        Err(cause) => Err(RoomError::Ended { key, cause: cause.clone(), side: Side::Target }),
    }
}
