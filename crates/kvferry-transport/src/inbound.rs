//! The target's half of a push: what one source process sends, leg after leg.

use std::{io::ErrorKind, sync::Arc};

use kvferry_arena::{ArenaError, Packed, Span};
use kvferry_plan::Incarnation;

use crate::{
    Refusal, TransportError,
    local::Local,
    room::Landing,
    socket::{Lost, Socket},
    stats::add,
    wire::{LegId, Units},
};

/// Legs of one job; more than any layout has.
const LEGS: usize = 4096;

/// The legs that come over one connection: those of one job at a time, in any order among themselves.
pub(crate) struct Inbound {
    local: Arc<Local>,
    from: Incarnation,
    /// The one that was spoken of last is the last.
    legs: Vec<(LegId, Result<Landing, Refusal>)>,
}

impl Inbound {
    pub(crate) fn new(local: Arc<Local>, from: Incarnation) -> Self {
        Self { local, from, legs: Vec::new() }
    }

    /// Whether `units` with `len` bytes are to be landed; if not, their payload is to be dropped.
    pub(crate) fn accepts(&mut self, id: &LegId, units: &Units, len: u32) -> bool {
        let first = (units.first, units.row) == (0, 0);
        let refusal = match self.begin(id, first) {
            Err(refusal) => Err(refusal),
            Ok(landing) => match landing.expect(units) {
                Ok(expected) if expected.0 == u64::from(len) => return true,
                Ok(_) => Ok(Refusal::Length),
                Err(refusal) => Ok(refusal),
            },
        };
        if let Ok(new) = refusal {
            self.fail(new);
        }
        self.dropped(len as usize);
        false
    }

    /// Lands what was accepted.
    pub(crate) fn land(&mut self, units: &Units, payload: Packed<'_>) {
        if let Some((_, Ok(landing))) = self.legs.last_mut()
            && let Err(error) = landing.land(units, payload)
        {
            self.failed(error);
        }
    }

    /// Receives the payload of what was accepted straight into the pool, where that is possible, and returns the bytes
    /// that are still to come: all of them when it is not, the rest when the room was fenced meanwhile.
    pub(crate) fn land_from(&mut self, socket: &Socket, units: &Units, len: usize) -> Result<Left, Lost> {
        let Some((_, Ok(landing))) = self.legs.last_mut() else { return Ok(Left::Dropped(len)) };
        let Some(mut places) = landing.places(units) else { return Ok(Left::ToLand) };
        let mut left = len;
        let error = loop {
            if places.is_empty() {
                match landing.landed(units, len as u64) {
                    Ok(()) => return Ok(Left::Dropped(0)),
                    Err(error) => break error,
                }
            }
            match landing.receive(socket.fd(), &places) {
                Ok(0) => return Err(Lost::Cut),
                Ok(n) => {
                    left = left.saturating_sub(n);
                    shorten(&mut places, n as u64);
                }
                Err(TransportError::Arena(ArenaError::Socket(error))) => match error.kind() {
                    ErrorKind::WouldBlock => socket.readable()?,
                    ErrorKind::Interrupted => {}
                    _ => return Err(Lost::Io(error)),
                },
                Err(error) => break error,
            }
        };
        self.failed(error);
        self.dropped(left);
        Ok(Left::Dropped(left))
    }

    /// Ends a leg: `None` when all of it lies in the pool.
    pub(crate) fn end(&mut self, id: &LegId) -> Option<Refusal> {
        let outcome = self.begin(id, false).map(Landing::finish);
        let refusal = match outcome {
            Err(refusal) => Some(refusal),
            Ok(Err(error)) => Some(self.failed(error)),
            Ok(Ok(report)) => {
                if let Some((_, Ok(landing))) = self.legs.last() {
                    landing.report(Ok(report));
                }
                None
            }
        };
        self.legs.pop();
        refusal
    }

    /// The connection is gone; a leg that has not ended never will.
    pub(crate) fn lost(&mut self, error: impl Fn() -> TransportError) {
        for (_, leg) in self.legs.drain(..) {
            if let Ok(landing) = leg {
                landing.report(Err(error()));
            }
        }
    }

    /// The leg `id`, from now on the last: a current one, unless it begins anew. A leg of another job ends all that did
    /// not end: their job was cancelled.
    fn begin(&mut self, id: &LegId, first: bool) -> Result<&mut Landing, Refusal> {
        let other = |(leg, _): &(LegId, _)| LegId { target: id.target, ..*leg } != *id;
        if self.legs.first().is_some_and(other) || self.legs.len() >= LEGS {
            self.legs.clear();
        }
        let found = self.legs.iter().position(|(leg, _)| leg == id).map(|at| self.legs.swap_remove(at));
        let current = found.filter(|(_, state)| !first || matches!(state, Ok(landing) if landing.fresh()));
        let leg = current.unwrap_or_else(|| {
            let leg = self.start(id);
            if let Err(refusal) = &leg {
                self.local.counters.refuse(*refusal);
            }
            (*id, leg)
        });
        self.legs.push(leg);
        match self.legs.last_mut() {
            Some((_, Ok(landing))) => Ok(landing),
            Some((_, Err(refusal))) => Err(*refusal),
            None => Err(Refusal::Internal),
        }
    }

    fn start(&self, id: &LegId) -> Result<Landing, Refusal> {
        let room = self.local.room(id.key, id.generation, self.from)?;
        room.leg(id).inspect_err(|refusal| {
            room.report(id.source, id.target, id.tokens, Err(room.refused(*refusal)));
        })
    }

    fn dropped(&self, bytes: usize) {
        add(&self.local.counters.dropped, bytes as u64);
    }

    /// Refuses the rest of the leg.
    fn fail(&mut self, refusal: Refusal) {
        if let Some((_, Ok(landing))) = self.legs.last() {
            self.failed(landing.room().refused(refusal));
        }
    }

    /// As [`Inbound::fail`], for an error that was found here.
    fn failed(&mut self, error: TransportError) -> Refusal {
        let refusal = match &error {
            TransportError::Refused { refusal, .. } => *refusal,
            _ => Refusal::Internal,
        };
        self.local.counters.refuse(refusal);
        if let Some((_, state)) = self.legs.last_mut() {
            if let Ok(landing) = state {
                landing.report(Err(error));
            }
            *state = Err(refusal);
        }
        refusal
    }
}

/// Takes away the first `filled` bytes of `places`.
fn shorten(places: &mut Vec<Span>, mut filled: u64) {
    places.retain_mut(|place| {
        let here = filled.min(place.len.0);
        filled -= here;
        (place.offset.0, place.len.0) = (place.offset.0 + here, place.len.0 - here);
        place.len.0 > 0
    });
}

/// What is to be done with the payload that has not been received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// It is to be received into a buffer and landed from there.
    ToLand,
    /// So many bytes are to be received and forgotten.
    Dropped(usize),
}

#[cfg(test)]
mod tests {
    use kvferry_arena::{Arena, Memory};
    use kvferry_plan::{
        Attempt, Bytes, CacheShape, Dtype, Generation, LayerId, PageId, PageTable, Pair, Part, Placement,
        PoolLayout, RankId, RoomId, RoomKey, Rotation, TokenRange,
    };
    use proptest::prelude::*;

    use super::*;
    use crate::{Grant, Registration, Setup};

    const PEER: Incarnation = Incarnation { started_ms: 2, nonce: 2 };
    /// Of 8 pages of 16 rows of 8 bytes.
    const GRANTED: [PageId; 2] = [PageId(5), PageId(2)];
    const TOKENS: u64 = 29;

    fn local() -> (Arc<Local>, Arc<Arena>) {
        let shape = CacheShape::mla(2, 4);
        let place = Placement::single(&shape, 16, Dtype::Bf16);
        let layout = PoolLayout::new(&shape, &place, RankId(0), 8).unwrap();
        let arena = Arc::new(Arena::new("test", layout).unwrap());
        let local = Local::new(Setup::new(Incarnation { started_ms: 1, nonce: 1 }));
        local.register(RankId(0), Registration::host(Arc::clone(&arena))).unwrap();
        let grant = Grant {
            key: key(1),
            generation: Generation(1),
            peer: PEER,
            pair: Arc::new(Pair::new(shape, place.clone(), place).unwrap()),
            table: PageTable(GRANTED.into()),
            slot: None,
            tokens: TokenRange::new(0, TOKENS),
            ranks: vec![RankId(0)],
            digest: true,
            landed: Arc::new(drop),
        };
        local.grant(grant).unwrap();
        (Arc::new(local), arena)
    }

    fn key(room: u128) -> RoomKey {
        RoomKey { room: RoomId(room), attempt: Attempt(1) }
    }

    fn small() -> impl Strategy<Value = u64> {
        prop_oneof![10 => 0_u64..5, 2 => 0_u64..40, 1 => any::<u64>()]
    }

    fn legs() -> impl Strategy<Value = LegId> {
        let token = || prop_oneof![3 => Just(0), 3 => Just(TOKENS), 2 => 0..TOKENS, 1 => any::<u64>()];
        let odd = |usual: u32| prop_oneof![15 => Just(usual), 1 => any::<u32>()];
        (odd(1), odd(1), odd(0), odd(0), odd(0), token(), token()).prop_map(
            |(room, generation, source, target, rotation, a, b)| LegId {
                key: key(u128::from(room)),
                generation: Generation(u64::from(generation)),
                source: RankId(source),
                target: RankId(target),
                tokens: TokenRange::new(a, b),
                rotation: Rotation(rotation),
            },
        )
    }

    /// A leg to go on with, and units or its end; `None` for the units that are due, with their length.
    type Frame = (Option<LegId>, Option<Option<(Units, u32)>>);

    fn frames() -> impl Strategy<Value = Frame> {
        let units = (small(), small(), small(), prop::option::weighted(0.3, small()))
            .prop_map(|(first, count, row, rows)| Units { first, count, row, rows });
        let rows = prop_oneof![6 => 0_u32..40, 1 => any::<u32>()].prop_map(|rows| rows.saturating_mul(8));
        let odd = prop::option::weighted(0.3, (units, rows));
        (prop::option::weighted(0.1, legs()), prop::option::weighted(0.8, odd))
    }

    /// The leg of the first room that the tests begin with.
    fn first_leg() -> LegId {
        LegId {
            key: key(1),
            generation: Generation(1),
            source: RankId(0),
            target: RankId(0),
            tokens: TokenRange::new(0, TOKENS),
            rotation: Rotation(0),
        }
    }

    /// A frame that was on its way when the room was revoked is not written, and its leg is refused.
    #[test]
    fn nothing_lands_behind_the_fence() {
        let (local, arena) = local();
        let mut inbound = Inbound::new(Arc::clone(&local), PEER);
        let leg = first_leg();
        let unit = |first| Units { first, count: 1, row: 0, rows: None };
        assert!(inbound.accepts(&leg, &unit(0), 128));
        inbound.land(&unit(0), [1; 128][..].into());
        let pool = || {
            let mut bytes = vec![0; arena.layout().len().index()];
            arena.read(Bytes(0), &mut bytes).unwrap();
            bytes
        };
        let fenced = pool();
        assert!(inbound.accepts(&leg, &unit(1), 104));
        local.revoke(leg.key, leg.generation);
        inbound.land(&unit(1), [1; 104][..].into());
        assert!(!inbound.accepts(&leg, &unit(2), 128));
        assert_eq!(inbound.end(&leg), Some(Refusal::Room));
        assert!(pool() == fenced);
        assert_eq!(local.stats().landed, Bytes(128));
        assert_eq!(local.stats().legs, 0);
    }

    /// A leg that was begun and never ended holds its room in memory; that is no grant.
    #[test]
    fn a_revoked_room_with_an_open_leg_is_not_granted() {
        let (local, _) = local();
        let mut inbound = Inbound::new(Arc::clone(&local), PEER);
        let leg = first_leg();
        assert!(inbound.accepts(&leg, &Units { first: 0, count: 1, row: 0, rows: None }, 128));
        assert_eq!(local.stats().grants, 1);
        local.revoke(leg.key, leg.generation);
        assert_eq!(local.stats().grants, 0);
    }

    /// A source in several processes has one page table: what the first leg of one of them says of it holds for all, in
    /// every grant of that generation.
    #[test]
    fn the_processes_of_a_source_agree_on_a_rotation() {
        let shape = CacheShape::mla(1, 4);
        let whole = Placement::single(&shape, 16, Dtype::Bf16);
        let mut sharded = whole.clone();
        (sharded.tp, sharded.parts[0].tokens) = (2, kvferry_plan::TokenMap::PageSharded { ranks: 2 });
        let local = Arc::new(Local::new(Setup::new(Incarnation { started_ms: 1, nonce: 1 })));
        let layout = PoolLayout::new(&shape, &whole, RankId(0), 8).unwrap();
        let arena = Arc::new(Arena::new("test", layout).unwrap());
        local.register(RankId(0), Registration::host(arena)).unwrap();
        let pair = Arc::new(Pair::new(shape, sharded, whole).unwrap());
        let processes = [2, 3].map(|nonce| Incarnation { started_ms: 2, nonce });
        let grant = |generation| {
            for peer in processes {
                let grant = Grant {
                    key: key(1),
                    generation: Generation(generation),
                    peer,
                    pair: Arc::clone(&pair),
                    table: PageTable(GRANTED.into()),
                    slot: None,
                    tokens: TokenRange::new(0, TOKENS),
                    ranks: vec![RankId(0)],
                    digest: true,
                    landed: Arc::new(drop),
                };
                local.grant(grant).unwrap();
            }
        };
        let mut inbound = processes.map(|peer| Inbound::new(Arc::clone(&local), peer));
        let mut begins = |process: usize, generation, rotation| {
            let leg = LegId {
                source: RankId(process as u32),
                generation: Generation(generation),
                rotation: Rotation(rotation),
                ..first_leg()
            };
            // With rotation 1 rank 0 owns the second page and rank 1 the first.
            let rows = if process as u32 == rotation { 16 } else { TOKENS as u32 - 16 };
            let units = Units { first: 0, count: 1, row: 0, rows: None };
            match inbound[process].accepts(&leg, &units, rows * 8) {
                true => None,
                false => inbound[process].end(&leg),
            }
        };
        grant(1);
        assert_eq!(begins(0, 1, 1), None);
        assert_eq!(begins(1, 1, 0), Some(Refusal::Rotation));
        assert_eq!(begins(1, 1, 1), None);
        local.revoke(key(1), Generation(1));
        grant(2);
        assert_eq!(begins(1, 2, 0), None);
        assert_eq!(begins(0, 2, 1), Some(Refusal::Rotation));
    }

    proptest! {
        /// Whatever a peer sends, in whatever order: nothing outside the granted rows changes, and what landed is
        /// what was counted.
        #[test]
        fn nothing_lands_elsewhere(frames in prop::collection::vec(frames(), 1..60)) {
            let (local, arena) = local();
            let mut inbound = Inbound::new(Arc::clone(&local), PEER);
            let mut leg =
                first_leg();
            let (mut landed, mut due) = (0, 0);
            for (next, frame) in frames {
                leg = next.unwrap_or(leg);
                let Some(units) = frame else {
                    inbound.end(&leg);
                    due = 0;
                    continue;
                };
                // Two pages a layer, of which the second is not full.
                let usual = || (Units { first: due, count: 1, row: 0, rows: None }, [128, 104][due as usize % 2]);
                let (units, len) = units.unwrap_or_else(usual);
                if inbound.accepts(&leg, &units, len) {
                    inbound.land(&units, vec![0xff; len as usize][..].into());
                    landed += u64::from(len);
                    due += 1;
                }
            }
            prop_assert_eq!(local.stats().landed, Bytes(landed));
            for layer in [LayerId(0), LayerId(1)] {
                let region = arena.layout().region(layer, Part::Latent).unwrap();
                let mut rows = vec![0; (region.rows * region.row_bytes.0) as usize];
                arena.read(region.offset, &mut rows).unwrap();
                for (i, row) in rows.chunks(region.row_bytes.index()).enumerate() {
                    let (page, offset) = (PageId((i / 16) as u32), i % 16);
                    let granted = page == GRANTED[0] || (page == GRANTED[1] && offset < TOKENS as usize - 16);
                    prop_assert!(granted || row.iter().all(|byte| *byte == 0), "row {} of page {}", offset, page);
                }
            }
            prop_assert!((0..8).all(|page| arena.generation(PageId(page)).unwrap() == Generation(0)));
        }
    }
}
