//! What every back end has at its own end: registered memory, granted rooms, open links, counters.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use kvferry_arena::{Arena, Memory};
use kvferry_plan::{Generation, Incarnation, RankId, RoomKey};

use crate::{
    Grant, Link, Refusal, Registration, Setup, TransportError, TransportStats, room::Room, stats::Counters,
};

/// Locks, also after a panic of another holder: everything behind these locks is valid between two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One process's end.
#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) setup: Setup,
    pub(crate) counters: Arc<Counters>,
    ranks: Mutex<BTreeMap<RankId, Arc<Arena>>>,
    /// By room and the process that may write it: a source instance may live in several.
    rooms: Mutex<BTreeMap<(RoomKey, Incarnation), Arc<Room>>>,
    links: Mutex<Option<Vec<Weak<dyn Link>>>>,
}

impl Local {
    pub(crate) fn new(setup: Setup) -> Self {
        Self {
            setup,
            counters: Arc::default(),
            ranks: Mutex::default(),
            rooms: Mutex::default(),
            links: Mutex::new(Some(Vec::new())),
        }
    }

    pub(crate) fn register(&self, rank: RankId, memory: Registration) -> Result<(), TransportError> {
        let mut ranks = lock(&self.ranks);
        if ranks.contains_key(&rank) {
            return Err(TransportError::Registered { rank });
        }
        ranks.insert(rank, memory.arena);
        Ok(())
    }

    pub(crate) fn arena(&self, rank: RankId) -> Result<Arc<Arena>, TransportError> {
        lock(&self.ranks).get(&rank).cloned().ok_or(TransportError::UnknownRank { rank, place: "here" })
    }

    pub(crate) fn arenas(&self) -> Vec<(RankId, Arc<Arena>)> {
        lock(&self.ranks).iter().map(|(rank, arena)| (*rank, Arc::clone(arena))).collect()
    }

    pub(crate) fn grant(&self, grant: Grant) -> Result<(), TransportError> {
        self.open()?;
        let key = grant.key;
        let invalid = |reason: String| Err(TransportError::Invalid { key, reason });
        let mut arenas = BTreeMap::new();
        for &rank in &grant.ranks {
            let arena = self.arena(rank)?;
            grant.table.check(arena.layout().pages())?;
            if rank.0 >= grant.pair.dst().ranks() {
                return invalid(format!("the layout has no rank {rank}"));
            }
            match grant.slot {
                None if grant.pair.shape().has_state() => return invalid("its state has no slot".into()),
                Some(slot) if slot.0 >= arena.layout().slots() => {
                    return invalid(format!("state slot {slot} of a pool with {}", arena.layout().slots()));
                }
                _ => {}
            }
            for part in grant.pair.dst().parts.iter().filter(|part| !part.part.is_state()) {
                let class = grant.pair.dst().class(part.part, rank);
                let rows = part.tokens.owned(grant.tokens.end, class);
                if rows > 0 && grant.table.row(rows - 1, part.page_size).is_none() {
                    let pages = grant.table.0.len();
                    return invalid(format!("{pages} pages do not hold the tokens {}", grant.tokens));
                }
            }
            if arenas.insert(rank, arena).is_some() {
                return invalid(format!("rank {rank} is named twice"));
            }
        }
        let mut rooms = lock(&self.rooms);
        if rooms.len() >= self.setup.limits.grants {
            return Err(TransportError::Busy { queued: rooms.len() });
        }
        let at = (key, grant.peer);
        if rooms.contains_key(&at) {
            return invalid("the room is granted already; revoke it first".into());
        }
        let same = rooms.range((key, Incarnation::default())..).take_while(|((of, _), _)| *of == key);
        let mut same = same.filter(|(_, room)| room.grant().generation == grant.generation);
        let rotation = same.next().map(|(_, room)| room.rotation()).unwrap_or_default();
        rooms.insert(at, Arc::new(Room::new(grant, arenas, rotation, self.setup.inject, &self.counters)));
        Ok(())
    }

    pub(crate) fn revoke(&self, key: RoomKey, generation: Generation) {
        let mut revoked = Vec::new();
        lock(&self.rooms).retain(|(of, _), room| {
            let hit = *of == key && room.grant().generation == generation;
            if hit {
                revoked.push(Arc::clone(room));
            }
            !hit
        });
        // Outside the lock: other rooms go on while this one waits for its last frame.
        for room in revoked {
            room.fence();
        }
    }

    /// The granted room that a frame from `peer` is addressed to.
    pub(crate) fn room(
        &self,
        key: RoomKey,
        generation: Generation,
        peer: Incarnation,
    ) -> Result<Arc<Room>, Refusal> {
        let rooms = lock(&self.rooms);
        let Some(room) = rooms.get(&(key, peer)) else {
            let mut others = rooms.keys().map(|(other, _)| other).filter(|other| other.room == key.room);
            let same = others.clone().any(|other| *other == key);
            return Err(match others.next() {
                Some(_) if same => Refusal::Peer,
                Some(_) => Refusal::Attempt,
                None => Refusal::Room,
            });
        };
        if room.grant().generation != generation {
            return Err(Refusal::Generation);
        }
        Ok(Arc::clone(room))
    }

    /// Remembers a link, so that closing this end closes it.
    pub(crate) fn add_link(&self, link: &Arc<dyn Link>) -> Result<(), TransportError> {
        let mut links = lock(&self.links);
        let links = links.as_mut().ok_or(TransportError::Closed)?;
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(link));
        Ok(())
    }

    pub(crate) fn open(&self) -> Result<(), TransportError> {
        if lock(&self.links).is_some() { Ok(()) } else { Err(TransportError::Closed) }
    }

    pub(crate) fn stats(&self) -> TransportStats {
        // Not a count of rooms in memory: a leg that never ended holds its room until the link has another job.
        TransportStats { grants: lock(&self.rooms).len() as u64, ..self.counters.snapshot() }
    }

    /// Closes links and fences all rooms; nothing is granted or opened afterwards.
    pub(crate) fn close(&self) {
        let links = lock(&self.links).take();
        for link in links.into_iter().flatten().filter_map(|link| link.upgrade()) {
            link.close();
        }
        let rooms = std::mem::take(&mut *lock(&self.rooms));
        for room in rooms.into_values() {
            room.fence();
        }
    }
}
