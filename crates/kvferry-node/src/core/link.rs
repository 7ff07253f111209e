//! Which transport a room uses, and what happens when no link comes about over it.
//!
//! Where a pair has several, the mover opens its link before the room is bound to one: until then nothing has moved, and
//! the room goes on with the next. Each is tried once a room. One that failed is left out for
//! [`crate::Limits::relink`], so that not every room waits for it again; it is tried before that only where all others
//! have failed too. Where a pair has one only, the first chunk finds as early that there is no link.

use std::sync::Arc;

use kvferry_plan::RoomKey;
use kvferry_session::{Cause, CauseKind, Mover, Open, Peer, Side};

use super::{
    Core, Started,
    target::{Stage, TargetEntry},
};
use crate::{Moment, TransportKind, connection::ConnId};

/// A transport for a room.
pub(super) struct Chosen {
    pub(super) started: Started,
    pub(super) why: String,
    /// There are others, should no link come about.
    pub(super) others: bool,
}

impl Core {
    /// The transport that is asked for, or the best of those that all peers have and that were not tried; `None` when
    /// there is none that could be tried.
    pub(super) fn choose(&self, entry: &TargetEntry, peers: &[Arc<Peer>]) -> Result<Option<Chosen>, String> {
        let all = |name: &str| peers.iter().all(|p| p.transports.iter().any(|(c, _)| c.transport == name));
        let common = peers.first().into_iter().flat_map(|p| &p.transports);
        let common = common.filter(|(choice, _)| all(choice.transport));
        let found: Vec<(Started, &str)> = common
            .filter_map(|(choice, _)| Some((self.shared.transport(choice.transport)?, choice.why.as_str())))
            .collect();
        if let Some(wanted) = entry.asked.transport {
            let of_both = found.iter().find(|(started, _)| started.kind == wanted);
            let Some((started, _)) = of_both else {
                let names: Vec<_> = found.iter().map(|(started, _)| started.transport.name()).collect();
                let names = names.join(", ");
                return Err(format!("the transport `{wanted}` is not one of both; {names} are"));
            };
            let (started, why) = (started.clone(), "it was asked for".into());
            return Ok(entry.tried.is_empty().then_some(Chosen { started, why, others: false }));
        }
        // A source in several processes has then given the room up in all of them.
        if peers.len() > 1 && entry.tried.iter().any(|(_, cause)| cause.at == Side::Source) {
            return Ok(None);
        }
        let tried = |kind| entry.tried.iter().any(|(other, _)| *other == kind);
        let mut left = found.iter().filter(|(started, _)| !tried(started.kind));
        let fresh = left.clone().find(|(started, _)| !self.left_out(entry, started.kind));
        let Some((started, why)) = fresh.or_else(|| left.clone().next()) else { return Ok(None) };
        let without: Vec<_> = found
            .iter()
            .map(|(started, _)| started.kind)
            .filter(|kind| *kind != started.kind && (tried(*kind) || self.left_out(entry, *kind)))
            .map(|kind| kind.to_string())
            .collect();
        let why = match without.as_slice() {
            [] => (*why).to_owned(),
            names => format!("no link came about over {}", names.join(" and ")),
        };
        let others = left.any(|(other, _)| other.kind != started.kind);
        Ok(Some(Chosen { started: started.clone(), why, others }))
    }

    /// Whether no link came about over a transport a moment ago, to any of the room's peers.
    fn left_out(&self, entry: &TargetEntry, kind: TransportKind) -> bool {
        let now = self.now();
        let conns = entry.conns.iter().filter_map(|id| self.conns.get(id));
        conns.filter_map(|conn| conn.unlinked.get(&kind)).any(|until| now < *until)
    }

    /// Opens the links of a room that we pull, to all of its peers.
    pub(super) fn link(&mut self, entry: &TargetEntry, started: Started) -> Stage {
        for id in &entry.conns {
            // A connection that is gone ends the room.
            if let Some(lane) = self.lane(*id, started.kind) {
                lane.link(Side::Target, entry.key, entry.serial);
            }
        }
        Stage::Linking(started, entry.conns.len())
    }

    /// One link of a room that we pull is open, or cannot be opened.
    pub(super) fn linked(
        &mut self,
        (key, serial): (RoomKey, u64),
        kind: TransportKind,
        result: Result<(), String>,
    ) {
        let Some(mut entry) = self.targets.remove(&key) else { return };
        let mut open = None;
        if let Stage::Linking(started, left) = &mut entry.stage
            && (entry.serial, started.kind) == (serial, kind)
        {
            match result {
                Ok(()) => {
                    *left = left.saturating_sub(1);
                    open = (*left == 0).then(|| started.clone());
                }
                Err(error) => {
                    let cause = Cause::new(CauseKind::Link, Side::Target, format_args!("{kind}: {error}"));
                    self.pass_over(&mut entry, kind, &cause);
                    entry.stage = Stage::Dialling;
                }
            }
        }
        let again = matches!(entry.stage, Stage::Dialling);
        self.targets.insert(key, entry);
        match open {
            Some(started) => self.linked_all(key, &started),
            None if again => self.open(key),
            None => {}
        }
    }

    /// A room goes on without a transport.
    pub(super) fn pass_over(&mut self, entry: &mut TargetEntry, kind: TransportKind, cause: &Cause) {
        for id in &entry.conns {
            self.unlinked(entry.key, *id, kind, cause);
        }
        entry.tried.push((kind, cause.clone()));
    }

    /// A target opens a room.
    pub(super) fn opened(&mut self, id: ConnId, open: Open) {
        let Some(kind) = self.to_link(id, &open) else { return self.bind(id, open) };
        let over = (open.head.key, id);
        if self.linking.contains_key(&over) {
            return;
        }
        let links = self.linking.keys().filter(|(_, conn)| *conn == id).count();
        if links >= self.shared.limits.rooms.waiting {
            let text = format!("{links} opens wait for their links already");
            return self.close_waiting(id, &open, Cause::new(CauseKind::Unavailable, Side::Source, text));
        }
        if let Some(lane) = self.lane(id, kind) {
            lane.link(Side::Source, open.head.key, 0);
            self.linking.insert(over, open);
        }
    }

    /// The transport of an open for which we have to have a link first.
    fn to_link(&self, id: ConnId, open: &Open) -> Option<TransportKind> {
        let (peer, _) = self.conns.get(&id)?.paired.as_ref()?;
        let started = self.shared.transport(&open.transport)?;
        let common = peer.transports.iter().any(|(choice, _)| choice.transport == open.transport);
        let several = peer.transports.len() > 1;
        let key = open.head.key;
        let known =
            self.sources.get(&key).is_some_and(|e| e.read_by(id)) || self.ended_sources.end(key).is_some();
        (common && several && !known && started.mover() == Mover::Source).then_some(started.kind)
    }

    /// The link for an open is there, or cannot be opened: then the target is told, which may open the room over another
    /// transport.
    pub(super) fn reader_linked(
        &mut self,
        over: (RoomKey, ConnId),
        kind: TransportKind,
        result: Result<(), String>,
    ) {
        if self.linking.get(&over).is_none_or(|open| open.transport != kind.to_string()) {
            return;
        }
        let Some(open) = self.linking.remove(&over) else { return };
        let (key, id) = over;
        match result {
            Ok(()) => self.bind(id, open),
            Err(error) => {
                let cause = Cause::new(CauseKind::Link, Side::Source, format_args!("{kind}: {error}"));
                self.unlinked(key, id, kind, &cause);
                self.close_waiting(id, &open, cause);
            }
        }
    }

    /// No link came about over a transport.
    fn unlinked(&mut self, key: RoomKey, id: ConnId, kind: TransportKind, cause: &Cause) {
        let until = self.now() + self.shared.limits.relink;
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.unlinked.insert(kind, until);
        let Some((peer, _)) = &conn.paired else { return };
        let (instance, side) = (peer.instance.clone(), peer.side);
        tracing::warn!(peer = %instance, %side, transport = %kind, %cause, "no link came about");
        self.shared.saw(side, key, Moment::Unlinked { peer: instance, transport: kind });
    }
}
