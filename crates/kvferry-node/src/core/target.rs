//! Rooms that this node receives.

use std::{sync::Arc, time::Instant};

use kvferry_plan::{Generation, Incarnation, Mismatch, PageTable, RankId, RoomKey};
use kvferry_session::{
    Abort, Action, Cause, CauseKind, Head, Message, Mover, Outcome, Peer, Received, Side, SourceProcess,
    Target, TargetRoom, Time,
};
use kvferry_transport::{Grant, Landed, Refusal, TransportError};

use super::{Conn, Core, Event, Started, Timer, link::Chosen};
use crate::{
    Moment, PeerAddr, Receipt, Receive, RoomError, TransportKind,
    connection::{ConnId, Connection, Gone},
    lane::{Half, Task},
    room::Slot,
    work,
};

/// A room that this node receives. It has no machine until all of its peers are paired.
#[derive(Debug)]
pub(super) struct TargetEntry {
    pub(super) armed: Option<Time>,
    pub(super) key: RoomKey,
    pub(super) serial: u64,
    /// In the order of the peers that were asked for.
    pub(super) conns: Vec<ConnId>,
    pub(super) asked: Receive,
    table: Arc<PageTable>,
    pub(super) stage: Stage,
    /// Transports over which no link came about for this room, and why.
    pub(super) tried: Vec<(TransportKind, Cause)>,
    /// Why it uses the transport that it uses.
    why: String,
    /// Fences that have not reported.
    fences: usize,
    slot: Slot<Receipt>,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// Waiting for connections.
    Dialling,
    /// Waiting for links over this transport, to so many peers.
    Linking(Started, usize),
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

    /// True when the room comes from the peer of that connection.
    pub(super) fn from(&self, id: ConnId) -> bool {
        self.conns.contains(&id)
    }

    /// One fence has reported.
    pub(super) fn fenced(&mut self) {
        self.fences = self.fences.saturating_sub(1);
        if self.fences == 0 {
            self.drive(Target::fenced);
        }
    }

    pub(super) fn abort(&mut self, cause: Cause, now: Time) {
        match &mut self.stage {
            Stage::Open(room, _) => room.abort(cause, now),
            Stage::Dialling | Stage::Linking(..) => self.end(cause),
            Stage::Over(_) => {}
        }
    }

    /// Ends without having been open.
    pub(super) fn end(&mut self, cause: Cause) {
        self.stage = Stage::Over(RoomError::Ended { key: self.key, cause, side: Side::Target });
    }

    /// The connection to a peer is gone, which has `started` if it was ever paired.
    pub(super) fn peer_gone(&mut self, id: ConnId, started: Option<Incarnation>, gone: &Gone, now: Time) {
        let place = self.conns.iter().position(|c| *c == id);
        let Some(addr) = place.and_then(|at| self.asked.peers.get(at)) else { return };
        let peer = addr.instance.clone();
        match (&mut self.stage, gone) {
            (Stage::Dialling, Gone::Refused(mismatch)) => {
                self.stage = Stage::Over(RoomError::Incompatible { peer, mismatch: mismatch.clone() });
            }
            (Stage::Dialling, gone) => {
                self.stage = Stage::Over(RoomError::Unreachable {
                    peer,
                    endpoint: addr.endpoint.clone(),
                    reason: gone.to_string(),
                });
            }
            (Stage::Open(room, _), gone) => {
                let process = started.unwrap_or(addr.incarnation);
                let kind = match gone {
                    Gone::Refused(_) => CauseKind::Incompatible,
                    _ => CauseKind::Lost,
                };
                room.peer_lost(process, Cause::new(kind, Side::Source, gone), now);
            }
            (Stage::Linking(..), gone) => self.end(Cause::new(CauseKind::Lost, Side::Source, gone)),
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
        } else if asked.peers.is_empty() {
            Some(reject("a room without peers"))
        } else {
            None
        };
        if let Some(error) = refused {
            slot.send_replace(Some(Err(error)));
            return;
        }
        let conns = asked.peers.iter().map(|peer| self.dial(peer)).collect();
        let table = Arc::new(asked.table.clone());
        let entry = TargetEntry {
            armed: None,
            key,
            serial,
            conns,
            asked,
            table,
            stage: Stage::Dialling,
            tried: Vec::new(),
            why: String::new(),
            fences: 0,
            slot,
        };
        self.targets.insert(key, entry);
        self.open(key);
    }

    /// The connection to a peer, dialled when there is none.
    fn dial(&mut self, peer: &PeerAddr) -> ConnId {
        if let Some(conn) = self.dialled.get(peer) {
            return *conn;
        }
        let connection = Connection::new(&self.shared, Side::Target, Some(peer.clone()));
        let id = connection.id;
        self.conns.insert(id, Conn::default());
        self.dialled.insert(peer.clone(), id);
        self.shared.tracker.spawn(connection.dial(peer.endpoint.clone()));
        id
    }

    /// Opens a room whose peers are all paired.
    pub(super) fn open(&mut self, key: RoomKey) {
        let Some(mut entry) = self.targets.remove(&key) else { return };
        if matches!(entry.stage, Stage::Dialling)
            && let Some(peers) = self.paired(&entry)
        {
            let leaving = entry.conns.iter().filter_map(|id| self.conns.get(id)).any(|c| c.leaving);
            if leaving {
                let text = "the peer is shutting down and takes no new rooms; look for another";
                entry.end(Cause::new(CauseKind::Unavailable, Side::Source, text));
            } else {
                match whole(&peers).and_then(|()| self.choose(&entry, &peers)) {
                    Err(reason) => entry.stage = Stage::Over(RoomError::Rejected { key, reason }),
                    Ok(None) => {
                        let cause = entry.tried.last().map(|(_, cause)| cause.clone());
                        let none = || Cause::new(CauseKind::Link, Side::Target, "no transport is left");
                        entry.end(cause.unwrap_or_else(none));
                    }
                    Ok(Some(Chosen { started, why, others })) => {
                        entry.why = why;
                        entry.stage = match started.mover() {
                            Mover::Target if others => self.link(&entry, started),
                            _ => self.begin(&entry, &peers, &started),
                        };
                    }
                }
            }
        }
        self.targets.insert(key, entry);
        self.target(key, None, |_, _| {});
    }

    /// The peers of a room, when all of them are paired.
    fn paired(&self, entry: &TargetEntry) -> Option<Vec<Arc<Peer>>> {
        let paired = |id: &ConnId| self.conns.get(id)?.paired.as_ref().map(|(peer, _)| peer.clone());
        entry.conns.iter().map(paired).collect()
    }

    /// The links of a room are open.
    pub(super) fn linked_all(&mut self, key: RoomKey, started: &Started) {
        let Some(mut entry) = self.targets.remove(&key) else { return };
        // A connection that is gone has ended the room.
        if let Some(peers) = self.paired(&entry) {
            entry.stage = self.begin(&entry, &peers, started);
        }
        self.targets.insert(key, entry);
        self.target(key, None, |_, _| {});
    }

    /// The machine of a room whose peers make up one instance.
    fn begin(&mut self, entry: &TargetEntry, peers: &[Arc<Peer>], started: &Started) -> Stage {
        let (limits, now, key) = (self.shared.limits.rooms, self.now(), entry.key);
        let Some(first) = peers.first() else {
            let reason = "a room without peers".into();
            return Stage::Over(RoomError::Rejected { key, reason });
        };
        let process = |peer: &Arc<Peer>| SourceProcess {
            incarnation: peer.incarnation,
            ranks: peer.ranks.clone(),
            pages: peer.pages,
            slots: peer.slots,
        };
        let room = TargetRoom {
            key,
            generation: Generation(entry.serial),
            from: first.ours,
            sources: peers.iter().map(process).collect(),
            targets: self.shared.hosted.to_vec(),
            pair: first.pair.clone(),
            tokens: entry.asked.tokens,
            transport: started.transport.name().into(),
            mover: started.mover(),
            digest: first.digest,
            prompt: entry.asked.prompt,
        };
        for (id, peer) in entry.conns.iter().zip(peers) {
            self.shared.uses(*id, peer, started.kind, &entry.why);
        }
        let paired = Moment::Paired { peer: first.instance.clone(), transport: started.kind };
        self.shared.saw(Side::Target, key, paired);
        Stage::Open(Box::new(Target::new(room, limits, now)), started.kind)
    }

    pub(super) fn landed(&mut self, serial: u64, landed: Landed) {
        let Landed { key, source, tokens, outcome, .. } = landed;
        let took = outcome.as_ref().map(|report| report.took).unwrap_or_default();
        let result = outcome.map(|report| work::reported(report, tokens)).map_err(|error| {
            // The source sent what does not fit, unless it is our own memory.
            let at = match error {
                TransportError::Arena(_) => Side::Target,
                _ => Side::Source,
            };
            let text = format!("tokens {tokens} from source rank {source}: {error}");
            Cause { at, ..Cause::new(work::cause(&error, Side::Target).kind, at, text) }
        });
        if let Ok(leg) = &result {
            self.shared.moved(Side::Target, key, source, std::slice::from_ref(leg), took);
        }
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
                self.tell_all(&entry, &error);
                return self.end_target(&entry, Err(error));
            }
            Stage::Open(room, kind) => {
                if let Some(outcome) = room.outcome() {
                    if let Err(cause) = outcome
                        && (cause.kind, cause.at) == (CauseKind::Link, Side::Source)
                    {
                        let (kind, cause) = (*kind, cause.clone());
                        self.pass_over(&mut entry, kind, &cause);
                        entry.stage = Stage::Dialling;
                        self.targets.insert(key, entry);
                        return self.open(key);
                    }
                    let result = receipt(key, outcome, *kind, &entry.why);
                    return self.end_target(&entry, result);
                }
                let deadline = room.deadline();
                Self::arm(&mut self.timers, &mut entry.armed, deadline, Timer::Target(key));
            }
            Stage::Dialling | Stage::Linking(..) => {}
        }
        self.targets.insert(key, entry);
    }

    /// Tells the peers of a room that was never opened.
    fn tell_all(&mut self, entry: &TargetEntry, error: &RoomError) {
        let Some(cause) = told(error) else { return };
        for (id, peer) in entry.conns.iter().zip(&entry.asked.peers) {
            self.tell_off(*id, peer, entry.key, entry.serial, &cause);
        }
    }

    /// A room will not be asked for: its peers are told.
    pub(super) fn decline(&mut self, key: RoomKey, serial: u64, peers: &[PeerAddr], cause: &Cause) {
        if self.draining || self.targets.contains_key(&key) || self.ended_targets.end(key).is_some() {
            return;
        }
        let now = self.now();
        self.ended_targets.bury(key, Some(cause.clone()), now);
        for peer in peers {
            let id = self.dial(peer);
            self.tell_off(id, peer, key, serial, cause);
        }
    }

    /// Gives a room up at a peer, as soon as there is a connection.
    fn tell_off(&mut self, id: ConnId, peer: &PeerAddr, key: RoomKey, serial: u64, cause: &Cause) {
        let head = Head {
            key,
            generation: Generation(serial),
            from: self.shared.hello.incarnation,
            to: peer.incarnation,
        };
        let abort = Abort { head, cause: cause.clone() };
        match self.conns.get_mut(&id) {
            Some(Conn { paired: Some((_, outbox)), .. }) => {
                outbox.send(&Message::Abort(abort)).ok();
            }
            Some(conn) if conn.unsaid.len() < self.shared.limits.rooms.waiting => conn.unsaid.push(abort),
            _ => {}
        }
    }

    fn carry_out_target(&mut self, entry: &mut TargetEntry, kind: TransportKind, action: Action) {
        let Stage::Open(room, _) = &entry.stage else { return };
        let asked = room.room().clone();
        let (key, serial, generation) = (entry.key, entry.serial, asked.generation);
        let Some(Started { transport, .. }) = self.shared.transport(&asked.transport) else { return };
        match action {
            Action::Send(message) => {
                let to = message.head().map(|head| head.to);
                let at = asked.sources.iter().position(|s| Some(s.incarnation) == to);
                let Some(conn) = at.and_then(|at| entry.conns.get(at)) else { return };
                if let Err(error) = self.transmit(*conn, &message) {
                    let now = self.now();
                    entry.abort(Cause::new(CauseKind::Transport, Side::Target, error), now);
                }
            }
            Action::Grant => {
                let (table, slot) = (PageTable::clone(&entry.table), entry.asked.slot);
                let grants: Vec<_> = asked
                    .sources
                    .iter()
                    .map(|process| Grant {
                        key,
                        generation,
                        peer: process.incarnation,
                        ranks: asked.targets.clone(),
                        pair: asked.pair.clone(),
                        table: table.clone(),
                        slot,
                        tokens: asked.tokens,
                        digest: asked.digest,
                        landed: self.landing(serial, process.ranks.clone()),
                    })
                    .collect();
                let events = self.shared.events.clone();
                self.shared.tracker.spawn_blocking(move || {
                    let all = grants.into_iter().try_for_each(|grant| transport.grant(grant));
                    let result = all.map_err(|e| {
                        transport.revoke(key, generation);
                        work::cause(&e, Side::Target)
                    });
                    events.send(Event::Granted { key, serial, result }).ok();
                });
            }
            Action::Execute(piece) => {
                let (source, tokens) = (piece.source, piece.tokens);
                let host = asked.sources.iter().position(|s| s.ranks.contains(&source));
                let conn = host.and_then(|at| entry.conns.get(at)).copied();
                let lane = conn.and_then(|conn| Some((conn, self.lane(conn, kind)?)));
                if let Some((conn, lane)) = lane {
                    lane.execute(Task {
                        key,
                        serial,
                        conn,
                        generation,
                        pair: asked.pair,
                        table: entry.table.clone(),
                        slot: entry.asked.slot.filter(|_| tokens.end == asked.tokens.end),
                        source,
                        tokens,
                        rotation: piece.rotation,
                        targets: asked.targets.into(),
                        digest: asked.digest,
                        since: Instant::now(),
                        half: Half::Pull(piece.pages, piece.slot),
                    });
                } else {
                    let gone = Cause::new(CauseKind::Lost, Side::Source, "the connection is gone");
                    let now = self.now();
                    entry.drive(|room| room.executed(source, tokens, Err(gone), now));
                }
            }
            Action::Fence => {
                // What we pull ourselves stops on its lanes; what is pushed stops at the grants.
                let conns = entry.conns.iter().filter_map(|id| self.conns.get(id));
                let lanes = conns.filter_map(|c| c.lanes.get(&kind)).filter(|_| asked.mover == Mover::Target);
                for lane in lanes {
                    entry.fences += 1;
                    lane.fence(key, serial, Some(generation));
                }
                if entry.fences > 0 {
                    return;
                }
                entry.fences = 1;
                let events = self.shared.events.clone();
                self.shared.tracker.spawn_blocking(move || {
                    transport.revoke(key, generation);
                    events.send(Event::Fenced { key, serial }).ok();
                });
            }
            Action::Sever => {
                for id in &entry.conns {
                    if let Some(conn) = self.conns.get_mut(id) {
                        conn.lanes.remove(&kind);
                    }
                }
            }
            Action::Finish => {}
        }
    }

    /// Hears of what lands from a process that speaks for these source ranks, and for no others.
    fn landing(&self, serial: u64, ranks: Vec<RankId>) -> Arc<dyn Fn(Landed) + Send + Sync> {
        let events = self.shared.events.clone();
        Arc::new(move |mut landed: Landed| {
            if !ranks.contains(&landed.source) {
                landed.outcome = Err(TransportError::Refused { key: landed.key, refusal: Refusal::Rank });
            }
            events.send(Event::Landed { serial, landed }).ok();
        })
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

/// The peers as one instance: they say the same of it, and each of its ranks lives in one of them.
fn whole(peers: &[Arc<Peer>]) -> Result<(), String> {
    let Some(first) = peers.first() else { return Err("a room without peers".into()) };
    if let Some(other) =
        peers.iter().find(|p| p.instance != first.instance || p.descriptor != first.descriptor)
    {
        return Err(format!(
            "the processes {} and {} of {} describe different instances",
            first.incarnation, other.incarnation, first.instance
        ));
    }
    let mut ranks: Vec<_> = peers.iter().flat_map(|p| &p.ranks).collect();
    let all = first.pair.src().ranks();
    ranks.sort_unstable();
    if let Some([twice, ..]) = ranks.windows(2).find(|pair| matches!(pair, [a, b] if a == b)) {
        return Err(format!("source rank {twice} lives in two of the processes that were named"));
    }
    if ranks.len() as u64 != u64::from(all) {
        return Err(format!(
            "{} has {} of {all} ranks in the processes that were named",
            first.instance,
            ranks.len()
        ));
    }
    Ok(())
}

/// Why a room was never opened, as its peers are told.
fn told(error: &RoomError) -> Option<Cause> {
    Some(match error {
        RoomError::Ended { cause, .. } => cause.clone(),
        RoomError::Incompatible { mismatch: Mismatch { field, ours, theirs }, .. } => {
            let (field, ours, theirs) = (field.clone(), theirs.clone(), ours.clone());
            Cause::new(CauseKind::Incompatible, Side::Target, Mismatch { field, ours, theirs })
        }
        RoomError::Unreachable { .. } => Cause::new(CauseKind::Lost, Side::Source, error),
        RoomError::Rejected { reason, .. } => Cause::new(CauseKind::Aborted, Side::Target, reason),
        RoomError::ShutDown => return None,
    })
}

fn receipt(
    key: RoomKey,
    outcome: &Outcome<Received>,
    transport: TransportKind,
    why: &str,
) -> Result<Receipt, RoomError> {
    match outcome {
        Ok(received) => Ok(Receipt {
            first: received.first,
            bytes: received.bytes,
            planned_bytes: received.planned,
            copies: received.copies,
            seconds: received.elapsed.as_secs_f64(),
            transport,
            why: why.to_owned(),
        }),
        Err(cause) => Err(RoomError::Ended { key, cause: cause.clone(), side: Side::Target }),
    }
}
