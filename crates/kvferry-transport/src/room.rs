//! A granted room: who may write where, the fence, and the landing of legs.

use std::{
    collections::BTreeMap,
    ops::Range,
    os::fd::BorrowedFd,
    sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard},
    time::Instant,
};

use kvferry_arena::{Arena, ArenaError, Memory, Packed, Pieces, RowHasher, Side, Span, Wait, digest_rows};
use kvferry_plan::{
    Bytes, End, PageId, PageTable, Pair, Part, PartDigest, Plan, RankId, Rotation, Row, SlotId, Token,
    TokenRange, Unit, UnitId,
};

use crate::{
    Grant, Inject, Landed, LegReport, Refusal, TransportError,
    inject::{Faults, Spot},
    stats::{Counters, add},
    wire::{LegId, Units},
};

/// Bytes in a row that are worth a place of their own in a call that receives.
const PLACE: u64 = 8 << 10;

/// Any page numbers will do for a peer's pages, as long as the right ranks own them and there are enough for `end` tokens.
pub(crate) fn source_table(pair: &Pair, rotation: Rotation, end: Token) -> PageTable {
    let rows = pair.src().parts.iter().filter(|part| !part.part.is_state());
    let smallest = rows.map(|part| part.page_size).min().unwrap_or(1);
    let pages = end.0.div_ceil(u64::from(smallest.max(1)));
    PageTable::rotated(rotation, u32::try_from(pages).unwrap_or(u32::MAX))
}

/// A granted room.
#[derive(Debug)]
pub(crate) struct Room {
    grant: Grant,
    arenas: BTreeMap<RankId, Arc<Arena>>,
    /// False once fenced. Held for reading while bytes are written.
    live: RwLock<bool>,
    /// Of the source's page table, once a leg has said it. Rooms that several of its processes fill share it.
    rotation: Arc<OnceLock<Rotation>>,
    faults: Option<Faults>,
    counters: Arc<Counters>,
}

impl Room {
    pub(crate) fn new(
        grant: Grant,
        arenas: BTreeMap<RankId, Arc<Arena>>,
        rotation: Arc<OnceLock<Rotation>>,
        inject: Option<Inject>,
        counters: &Arc<Counters>,
    ) -> Self {
        let several = grant.ranks.len() > 1;
        Self {
            grant,
            arenas,
            live: RwLock::new(true),
            rotation,
            faults: inject.map(|inject| Faults::new(inject, several)),
            counters: Arc::clone(counters),
        }
    }

    pub(crate) fn grant(&self) -> &Grant {
        &self.grant
    }

    pub(crate) fn rotation(&self) -> Arc<OnceLock<Rotation>> {
        Arc::clone(&self.rotation)
    }

    /// Waits for whoever is writing and lets nobody write afterwards.
    pub(crate) fn fence(&self) {
        *self.live.write().unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// The right to write, for as long as the guard is held.
    fn writing(&self) -> Result<RwLockReadGuard<'_, bool>, TransportError> {
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner);
        if *live { Ok(live) } else { Err(self.refused(Refusal::Room)) }
    }

    /// Fails once the room is fenced.
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        self.writing().map(drop)
    }

    /// The memory of `target`, if `source` may write `tokens` of it.
    pub(crate) fn arena(
        &self,
        source: RankId,
        target: RankId,
        tokens: TokenRange,
    ) -> Result<&Arc<Arena>, Refusal> {
        if source.0 >= self.grant.pair.src().ranks() {
            return Err(Refusal::Rank);
        }
        let granted = self.grant.tokens;
        if tokens.start > tokens.end || tokens.start < granted.start || tokens.end > granted.end {
            return Err(Refusal::Range);
        }
        self.arenas.get(&target).ok_or(Refusal::Rank)
    }

    /// Where pages are sharded, the source's ranks own each token once only if all of them count from the same page: the
    /// first leg says from which.
    fn agree(&self, rotation: Rotation) -> Result<(), Refusal> {
        self.grant.pair.src().check_rotation(rotation).map_err(|_| Refusal::Rotation)?;
        if *self.rotation.get_or_init(|| rotation) == rotation { Ok(()) } else { Err(Refusal::Rotation) }
    }

    /// Starts to land a leg that is pushed.
    pub(crate) fn leg(self: &Arc<Self>, id: &LegId) -> Result<Landing, Refusal> {
        let LegId { source, target, tokens, rotation, .. } = *id;
        let arena = Arc::clone(self.arena(source, target, tokens)?);
        self.agree(rotation)?;
        let from = source_table(&self.grant.pair, rotation, tokens.end);
        let to = End { rank: target, table: &self.grant.table };
        // The table was checked against the granted tokens, so there is a plan for each part of them.
        // Any slot will do for the peer's, too.
        let slots = self.grant.slot.filter(|_| tokens.end == self.grant.tokens.end).map(|to| (SlotId(0), to));
        let plan = self
            .grant
            .pair
            .plan_last(End { rank: source, table: &from }, to, tokens, slots)
            .map_err(|_| Refusal::Internal)?;
        Ok(Landing {
            room: Arc::clone(self),
            arena,
            plan,
            source,
            target,
            tokens,
            next: (0, 0),
            hasher: None,
            parts: Vec::new(),
            started: Instant::now(),
        })
    }

    /// True while a fault waits to be committed.
    pub(crate) fn faulty(&self) -> bool {
        self.faults.as_ref().is_some_and(Faults::pending)
    }

    /// Calls `write`, which writes `spots`, unless the room is fenced; a fence waits for it. A fault of this room is
    /// committed here.
    pub(crate) fn write(
        &self,
        spots: impl FnOnce() -> Result<Vec<Spot>, ArenaError>,
        write: impl FnOnce() -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        let _writing = self.writing()?;
        match &self.faults {
            Some(faults) if faults.pending() => faults.around(&spots()?, write, &self.counters),
            _ => write(),
        }
    }

    /// Tells the owner of the grant how a leg of a push ended.
    pub(crate) fn report(
        &self,
        source: RankId,
        target: RankId,
        tokens: TokenRange,
        outcome: Result<LegReport, TransportError>,
    ) {
        let (key, generation) = (self.grant.key, self.grant.generation);
        (self.grant.landed)(Landed { key, generation, source, target, tokens, outcome });
    }

    pub(crate) fn refused(&self, refusal: Refusal) -> TransportError {
        TransportError::Refused { key: self.grant.key, refusal }
    }
}

/// A pushed leg on its way into the pool. Units come in plan order, each once.
pub(crate) struct Landing {
    room: Arc<Room>,
    arena: Arc<Arena>,
    plan: Plan,
    source: RankId,
    target: RankId,
    tokens: TokenRange,
    /// The unit and row that must come next.
    next: (u64, u64),
    /// Of a unit that has not come completely.
    hasher: Option<RowHasher>,
    parts: Vec<PartDigest>,
    started: Instant,
}

impl Landing {
    pub(crate) fn room(&self) -> &Arc<Room> {
        &self.room
    }

    /// True when nothing has landed.
    pub(crate) fn fresh(&self) -> bool {
        self.next == (0, 0)
    }

    /// The bytes that `units` must have, if they are what comes next.
    pub(crate) fn expect(&self, units: &Units) -> Result<Bytes, Refusal> {
        let end = units.first.checked_add(units.count).ok_or(Refusal::Sequence)?;
        if (units.first, units.row) != self.next || end > self.plan.unit_count() || units.count == 0 {
            return Err(Refusal::Sequence);
        }
        let mut sum = 0_u64;
        for index in units.first..end {
            let unit = self.plan.unit(index).ok_or(Refusal::Sequence)?;
            let rows = rows_of(units, &unit).ok_or(Refusal::Sequence)?;
            sum = sum.saturating_add((rows.end - rows.start).saturating_mul(unit.slice.len.0));
            if sum > crate::wire::MAX_PAYLOAD {
                return Err(Refusal::Length);
            }
        }
        Ok(Bytes(sum))
    }

    /// Writes the payload of `units`, which has the length that [`Landing::expect`] said.
    pub(crate) fn land(&mut self, units: &Units, payload: Packed<'_>) -> Result<(), TransportError> {
        let room = Arc::clone(&self.room);
        let spots = || self.spots(units);
        let write = || {
            let mut rest = payload;
            self.each(units, |unit, rows| {
                let region = self.arena.region(unit.layer, unit.part)?;
                for pieces in Pieces::of_rows(unit, Side::Target, region, rows) {
                    let short =
                        ArenaError::Length { expected: pieces.bytes(), found: Bytes(rest.len() as u64) };
                    let (chunk, tail) = rest.split_at(pieces.bytes().index()).ok_or(short)?;
                    self.arena.scatter(&pieces, chunk)?;
                    rest = tail;
                }
                Ok(())
            })?;
            Ok(())
        };
        room.write(spots, write)?;
        self.landed(units, payload.len() as u64)
    }

    /// Where the payload of `units` goes, if that is a few long places, so that it need not go through a buffer.
    pub(crate) fn places(&self, units: &Units) -> Option<Vec<Span>> {
        if self.room.faulty() {
            return None;
        }
        let (mut places, mut long) = (Vec::<Span>::new(), true);
        self.each(units, |unit, rows| {
            let region = self.arena.region(unit.layer, unit.part)?;
            for pieces in Pieces::of_rows(unit, Side::Target, region, rows) {
                for offset in pieces.offsets() {
                    match places.last_mut() {
                        // Rows of several source pages lie side by side on one target page.
                        Some(place) if place.offset.0.checked_add(place.len.0) == Some(offset.0) => {
                            place.len.0 += pieces.len.0;
                        }
                        _ => {
                            long &= places.last().is_none_or(|done| done.len.0 >= PLACE);
                            places.push(Span { offset, len: pieces.len });
                        }
                    }
                    if !long {
                        return Ok(());
                    }
                }
            }
            Ok(())
        })
        .ok()?;
        long &= places.last().is_none_or(|done| done.len.0 >= PLACE);
        long.then_some(places)
    }

    /// Receives what has come for `places`, in order, without waiting; a fence waits for this call.
    pub(crate) fn receive(&self, socket: BorrowedFd<'_>, places: &[Span]) -> Result<usize, TransportError> {
        let _writing = self.room.writing()?;
        Ok(self.arena.receive_from(socket, places, Wait::Never)?)
    }

    /// The `len` bytes of `units` lie in the pool.
    pub(crate) fn landed(&mut self, units: &Units, len: u64) -> Result<(), TransportError> {
        add(&self.room.counters.frames, 1);
        add(&self.room.counters.landed, len);
        self.digest(units)?;
        self.next = match units.rows {
            Some(rows) if !self.ends_unit(units, rows) => (units.first, units.row + rows),
            _ => (units.first + units.count, 0),
        };
        Ok(())
    }

    /// What lies in the pool now, if all of the leg has come.
    pub(crate) fn finish(&mut self) -> Result<LegReport, TransportError> {
        if self.next != (self.plan.unit_count(), 0) {
            return Err(self.room.refused(Refusal::Missing));
        }
        self.room.check()?;
        add(&self.room.counters.legs, 1);
        Ok(LegReport {
            target: self.target,
            bytes: self.plan.bytes(),
            copies: self.plan.copies(),
            parts: std::mem::take(&mut self.parts),
            took: self.started.elapsed(),
        })
    }

    /// Tells the owner of the grant.
    pub(crate) fn report(&self, outcome: Result<LegReport, TransportError>) {
        self.room.report(self.source, self.target, self.tokens, outcome);
    }

    fn each(
        &self,
        units: &Units,
        mut f: impl FnMut(&Unit<'_>, Range<u64>) -> Result<(), ArenaError>,
    ) -> Result<(), ArenaError> {
        for unit in (units.first..units.first + units.count).filter_map(|i| self.plan.unit(i)) {
            if let Some(rows) = rows_of(units, &unit) {
                f(&unit, rows)?;
            }
        }
        Ok(())
    }

    fn ends_unit(&self, units: &Units, rows: u64) -> bool {
        self.plan.unit(units.first).is_none_or(|unit| units.row + rows == unit.rows())
    }

    fn spots(&self, units: &Units) -> Result<Vec<Spot>, ArenaError> {
        let mut spots = Vec::new();
        self.each(units, |unit, rows| {
            spots.push(Spot::new(self.source, self.target, &self.arena, unit, rows)?);
            Ok(())
        })?;
        Ok(spots)
    }

    /// Digests what lies in the pool after `units` were written, while it is in the cache.
    fn digest(&mut self, units: &Units) -> Result<(), ArenaError> {
        let mut hasher = self.hasher.take();
        let mut parts = std::mem::take(&mut self.parts);
        self.each(units, |unit, rows| {
            if rows.start == 0 {
                hasher = None;
            }
            let last = rows.end == unit.rows();
            let mut sum = 0;
            if self.room.grant.digest {
                let id = UnitId::new(self.room.grant.key, self.target, unit);
                let mut state = hasher.take().unwrap_or_else(|| RowHasher::new(id, unit.bytes()));
                digest_rows(&*self.arena, Side::Target, unit, rows, &mut state)?;
                if last {
                    sum = state.digest();
                } else {
                    hasher = Some(state);
                }
            }
            if last {
                PartDigest::add(&mut parts, unit.part, sum, unit.bytes());
            }
            Ok(())
        })?;
        (self.hasher, self.parts) = (hasher, parts);
        Ok(())
    }
}

/// The rows of `unit` that a frame carries, if there are such.
fn rows_of(units: &Units, unit: &Unit<'_>) -> Option<Range<u64>> {
    match units.rows {
        None => Some(0..unit.rows()),
        Some(rows) => {
            let end = units.row.checked_add(rows)?;
            (units.count == 1 && rows > 0 && end <= unit.rows()).then_some(units.row..end)
        }
    }
}

/// True when every row that `plan` writes lies on a granted page, or in the granted slot, for a plan that was made by
/// somebody else.
pub(crate) fn writes_only(plan: &Plan, grant: &Grant) -> bool {
    let Grant { pair, table, slot, .. } = grant;
    let mut pages = table.0.clone();
    pages.sort_unstable();
    // A slot's rows are its window, as a page's rows are the page.
    let granted = |part: Part, page: PageId| match part.is_state() {
        true => slot.is_some_and(|slot| slot.0 == page.0),
        false => pages.binary_search(&page).is_ok(),
    };
    plan.groups().iter().all(|group| {
        pair.dst().part(group.part).is_some_and(|layout| {
            plan.group_runs(group).iter().all(|run| {
                let steps = run.dst_step.checked_mul(run.blocks.saturating_sub(1));
                let last = steps.and_then(|steps| {
                    steps.checked_add(run.dst_row.0)?.checked_add(run.block.saturating_sub(1))
                });
                // A run lies on one page, so its ends say it all.
                last.is_some_and(|last| {
                    let (first, last) = (layout.page(run.dst_row), layout.page(Row(last)));
                    first == last && granted(group.part, first)
                })
            })
        })
    })
}
