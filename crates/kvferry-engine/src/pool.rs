//! One rank's KV pool: rows of an arena, addressed by point queries to placement and page table. Independent of the
//! planner on purpose, so that the engine can check what a hand-off did.

use std::{mem::size_of, sync::Arc};

use kvferry_arena::{Arena, Memory};
use kvferry_plan::{
    Bytes, CacheShape, Dtype, LayerId, PageId, PageTable, Part, PartLayout, Placement, PoolLayout, PoolSize,
    RankId, Row, SlotId, Token, TokenMap,
};

use crate::{
    EngineError,
    math::{narrow_bf16, narrow_fp8, widen_bf16, widen_fp8},
};

/// How this rank holds one part.
#[derive(Clone, Copy, Debug)]
struct Held {
    layout: PartLayout,
    /// Token class of this rank.
    class: u32,
    /// Elements of a row: local heads x elements of a head.
    elems: usize,
}

impl Held {
    /// Checks that `elems` are a whole slot of state.
    fn whole(&self, elems: usize) -> Result<(), EngineError> {
        let slot = self.elems * self.layout.page_size as usize;
        if elems == slot {
            Ok(())
        } else {
            Err(EngineError::Pool(format!("{elems} elements for a slot of {slot}")))
        }
    }
}

/// The pool of one rank.
#[derive(Debug)]
pub(crate) struct Pool {
    arena: Arc<Arena>,
    held: Vec<Held>,
    /// Ranks over which logical pages are dealt.
    shard_ranks: u32,
    /// This one's place among them.
    shard_rank: u32,
}

/// The pools of ranks that have the same heads of the same layers to themselves: each has some of the pages (KV
/// sharding), or each has all (context parallelism alone). One of them is this rank's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sharers<'a> {
    own: &'a Pool,
    pools: &'a [Pool],
    /// The first of them, and how far the next one is.
    first: usize,
    step: usize,
    count: usize,
}

/// Rows read from a pool, as `f32`; a scratch to reuse.
#[derive(Debug, Default)]
pub(crate) struct RowBuffer {
    values: Vec<f32>,
    narrow: Narrow,
    stride: usize,
    rows: usize,
}

/// Elements on their way to or from a pool, as it keeps them; a scratch to reuse.
#[derive(Debug, Default)]
pub(crate) struct Narrow {
    halves: Vec<u16>,
    bytes: Vec<u8>,
}

impl Narrow {
    /// Takes the memory for `elems` elements of any type.
    pub(crate) fn reserve(&mut self, elems: usize) {
        self.halves.reserve(elems.saturating_sub(self.halves.len()));
        self.bytes.reserve(elems.saturating_sub(self.bytes.len()));
    }

    /// Memory held, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.halves.capacity() * size_of::<u16>() + self.bytes.capacity()
    }

    fn halves(&mut self, elems: usize) -> &mut [u16] {
        self.halves.resize(elems, 0);
        &mut self.halves
    }

    fn bytes_of(&mut self, elems: usize) -> &mut [u8] {
        self.bytes.resize(elems, 0);
        &mut self.bytes
    }
}

impl RowBuffer {
    /// The rows from element `offset` on, as rows that still lie `stride` apart. The last row is padded, so the
    /// length is a multiple of the stride whatever the offset.
    pub(crate) fn from(&self, offset: usize) -> &[f32] {
        self.values.get(offset..offset + self.rows * self.stride).unwrap_or(&[])
    }

    /// Memory held, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.values.capacity() * size_of::<f32>() + self.narrow.bytes()
    }

    /// Touches all memory that it holds, so that the system gives it now.
    pub(crate) fn touch(&mut self) {
        self.values.resize(self.values.capacity(), 0.0);
    }

    /// Elements from one row to the next.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }
}

impl Pool {
    /// The pool of `rank` of this size.
    pub(crate) fn new(
        shape: &CacheShape,
        placement: &Placement,
        rank: RankId,
        size: PoolSize,
    ) -> Result<Self, EngineError> {
        let layout = PoolLayout::with_slots(shape, placement, rank, size)
            .map_err(|error| EngineError::Layout(error.to_string()))?;
        let held = shape
            .parts
            .iter()
            .filter_map(|part| {
                let heads: usize = placement.shares(part, rank).map(|share| share.len()).sum();
                let elems = heads * part.head_elems as usize;
                let layout = *placement.part(part.part)?;
                Some(Held { layout, class: placement.class(part.part, rank), elems })
            })
            .collect();
        let arena = Arena::new(&format!("kv-rank-{rank}"), layout)?;
        let (shard_ranks, shard_rank) = (placement.shard_ranks(), placement.shard_rank(rank));
        Ok(Self { arena: Arc::new(arena), held, shard_ranks, shard_rank })
    }

    /// This rank's number of a page of the instance, if it holds it.
    pub(crate) fn local_page(&self, page: PageId) -> Option<PageId> {
        (page.0 % self.shard_ranks == self.shard_rank).then(|| PageId(page.0 / self.shard_ranks))
    }

    /// The memory.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn held(&self, part: Part) -> Result<&Held, EngineError> {
        self.held
            .iter()
            .find(|held| held.layout.part == part)
            .ok_or_else(|| EngineError::Pool(format!("the model caches no `{part}`")))
    }

    /// How many of the tokens `0 .. end` this rank holds.
    pub(crate) fn owned(&self, part: Part, end: u64) -> Result<usize, EngineError> {
        let held = self.held(part)?;
        usize::try_from(held.layout.tokens.owned(Token(end), held.class))
            .map_err(|_| EngineError::Pool("more rows than memory".into()))
    }

    /// As [`Pool::owned`], of the rank that holds the most.
    pub(crate) fn most(&self, part: Part, end: u64) -> Result<usize, EngineError> {
        // Tokens are dealt from class 0 on.
        usize::try_from(self.held(part)?.layout.tokens.owned(Token(end), 0))
            .map_err(|_| EngineError::Pool("more rows than memory".into()))
    }

    /// Elements of the longest row or whole state that is stored at once.
    pub(crate) fn largest(&self) -> usize {
        let elems = |held: &Held| match held.layout.part.is_state() {
            true => held.elems * held.layout.page_size as usize,
            false => held.elems,
        };
        self.held.iter().map(elems).max().unwrap_or(0)
    }

    /// Takes the memory that reading `rows` rows needs.
    pub(crate) fn reserve(&self, part: Part, rows: usize, into: &mut RowBuffer) -> Result<(), EngineError> {
        let held = self.held(part)?;
        let page = held.layout.page_size as usize;
        into.values.reserve(((rows + 1) * held.elems).saturating_sub(into.values.len()));
        into.narrow.reserve(rows.min(page) * held.elems);
        Ok(())
    }

    /// Bytes of a buffer for `rows` rows of the part that has the longest, as they are read.
    pub(crate) fn assembly_bytes(&self, rows: u64) -> u64 {
        let of_rows = self.held.iter().filter(|held| !held.layout.part.is_state());
        let elems = of_rows.map(|held| held.elems as u64).max().unwrap_or(0);
        rows.saturating_add(1).saturating_mul(elems).saturating_mul(size_of::<f32>() as u64)
    }

    /// Whether this rank holds `token` of a request with these pages.
    pub(crate) fn owns(&self, part: Part, table: &PageTable, token: u64) -> Result<bool, EngineError> {
        let held = self.held(part)?;
        Ok(held.layout.row(held.class, table, Token(token)).is_some())
    }

    fn offset(&self, (layer, part): (LayerId, Part), row: Row) -> Result<Bytes, EngineError> {
        self.arena
            .layout()
            .region(layer, part)
            .and_then(|region| region.row_offset(row))
            .ok_or_else(|| EngineError::Pool(format!("layer {layer} has no `{part}` row {row} here")))
    }

    /// Stores the row of `token`, which this rank holds.
    pub(crate) fn write(
        &self,
        at: (LayerId, Part),
        table: &PageTable,
        token: u64,
        values: &[f32],
        narrow: &mut Narrow,
    ) -> Result<(), EngineError> {
        let held = self.held(at.1)?;
        let row = held.layout.row(held.class, table, Token(token)).ok_or_else(|| {
            let pages = table.0.len();
            EngineError::Pool(format!("token {token} is another rank's, or past a table of {pages} pages"))
        })?;
        if values.len() != held.elems {
            return Err(EngineError::Pool(format!("{} elements for rows of {}", values.len(), held.elems)));
        }
        self.store(held, self.offset(at, row)?, values, narrow)
    }

    fn store(
        &self,
        held: &Held,
        offset: Bytes,
        values: &[f32],
        narrow: &mut Narrow,
    ) -> Result<(), EngineError> {
        match held.layout.dtype {
            Dtype::F32 => self.arena.write(offset, bytemuck::cast_slice(values)).map_err(EngineError::from),
            Dtype::Bf16 => {
                let narrow = narrow.halves(values.len());
                narrow_bf16(values, narrow);
                self.arena.write(offset, bytemuck::cast_slice(narrow)).map_err(EngineError::from)
            }
            Dtype::Fp8E4m3 => {
                let narrow = narrow.bytes_of(values.len());
                narrow_fp8(values, narrow);
                self.arena.write(offset, narrow).map_err(EngineError::from)
            }
            other => Err(EngineError::Layout(format!("kv={other} is not built yet"))),
        }
    }

    fn fetch(
        &self,
        held: &Held,
        offset: Bytes,
        values: &mut [f32],
        narrow: &mut Narrow,
    ) -> Result<(), EngineError> {
        match held.layout.dtype {
            Dtype::F32 => {
                self.arena.read(offset, bytemuck::cast_slice_mut(values)).map_err(EngineError::from)
            }
            Dtype::Bf16 => {
                let narrow = narrow.halves(values.len());
                self.arena.read(offset, bytemuck::cast_slice_mut(narrow))?;
                widen_bf16(narrow, values);
                Ok(())
            }
            Dtype::Fp8E4m3 => {
                let narrow = narrow.bytes_of(values.len());
                self.arena.read(offset, narrow)?;
                widen_fp8(narrow, values);
                Ok(())
            }
            other => Err(EngineError::Layout(format!("kv={other} is not built yet"))),
        }
    }

    /// Rounds values to what the pool keeps of them.
    pub(crate) fn round(
        &self,
        part: Part,
        values: &mut [f32],
        narrow: &mut Narrow,
    ) -> Result<(), EngineError> {
        match self.held(part)?.layout.dtype {
            Dtype::F32 => Ok(()),
            Dtype::Bf16 => {
                let narrow = narrow.halves(values.len());
                narrow_bf16(values, narrow);
                widen_bf16(narrow, values);
                Ok(())
            }
            Dtype::Fp8E4m3 => {
                let narrow = narrow.bytes_of(values.len());
                narrow_fp8(values, narrow);
                widen_fp8(narrow, values);
                Ok(())
            }
            other => Err(EngineError::Layout(format!("kv={other} is not built yet"))),
        }
    }

    /// Where the rows of a slot begin, and how many elements they have together.
    fn slot(&self, (layer, part): (LayerId, Part), slot: SlotId) -> Result<(&Held, Bytes), EngineError> {
        let held = self.held(part)?;
        let region = self.arena.layout().region(layer, part);
        let offset = region.and_then(|region| region.row_offset(held.layout.slot_row(slot)));
        let missing = || EngineError::Pool(format!("layer {layer} has no `{part}` slot {slot} here"));
        Ok((held, offset.ok_or_else(missing)?))
    }

    /// Stores a request's state, `[window][elements]`.
    pub(crate) fn write_state(
        &self,
        at: (LayerId, Part),
        slot: SlotId,
        values: &[f32],
        narrow: &mut Narrow,
    ) -> Result<(), EngineError> {
        let (held, offset) = self.slot(at, slot)?;
        held.whole(values.len())?;
        self.store(held, offset, values, narrow)
    }

    /// Reads what [`Pool::write_state`] stored, or a hand-off brought.
    pub(crate) fn read_state(
        &self,
        at: (LayerId, Part),
        slot: SlotId,
        values: &mut [f32],
        narrow: &mut Narrow,
    ) -> Result<(), EngineError> {
        let (held, offset) = self.slot(at, slot)?;
        held.whole(values.len())?;
        self.fetch(held, offset, values, narrow)
    }

    /// Copies all state in a slot to another, as it lies.
    pub(crate) fn copy_state(&self, from: SlotId, to: SlotId) -> Result<(), EngineError> {
        let mut bytes = Vec::new();
        for region in self.arena.layout().regions().iter().filter(|region| region.part.is_state()) {
            let at = (region.layer, region.part);
            let ((held, from), (_, to)) = (self.slot(at, from)?, self.slot(at, to)?);
            let rows = held.layout.page_size as usize;
            bytes.resize(rows * held.elems * held.layout.dtype.size().0 as usize, 0);
            self.arena.read(from, &mut bytes)?;
            self.arena.write(to, &bytes)?;
        }
        Ok(())
    }

    /// The pool of page `k` of a request, if that page is here, and the page's first row there.
    fn page_row(&self, held: &Held, table: &PageTable, k: usize) -> Option<Row> {
        let page = self.local_page(*table.0.get(k)?)?;
        Some(Row(u64::from(page.0) * u64::from(held.layout.page_size)))
    }
}

impl<'a> Sharers<'a> {
    /// Those of `rank`, whose pool is one of `pools`, which are in rank order.
    pub(crate) fn of(placement: &Placement, pools: &'a [Pool], rank: RankId) -> Option<Self> {
        let own = pools.get(rank.index())?;
        let at = placement.coords(rank)?;
        let (cp, tp) = (placement.cp as usize, placement.tp as usize);
        let stage = at.stage as usize * cp * tp;
        let (first, step, count) = if cp > 1 {
            (stage + at.tp as usize, tp, cp)
        } else if placement.shard_ranks() > 1 {
            (stage, 1, tp)
        } else {
            (rank.index(), 1, 1)
        };
        Some(Self { own, pools, first, step, count })
    }

    fn all(self) -> impl Iterator<Item = &'a Pool> {
        (0..self.count).filter_map(move |at| self.pools.get(self.first + at * self.step))
    }

    /// Stores the row of `token` wherever it is kept: where pages are dealt in this rank's pool, to which it belongs; else
    /// in all of them.
    pub(crate) fn write(
        self,
        at: (LayerId, Part),
        table: &PageTable,
        token: u64,
        values: &[f32],
        narrow: &mut Narrow,
    ) -> Result<(), EngineError> {
        if self.own.shard_ranks > 1 {
            return self.own.write(at, table, token, values, narrow);
        }
        self.all().try_for_each(|pool| pool.write(at, table, token, values, narrow))
    }

    /// Reads the first `rows` rows that this rank attends to: of its own tokens in order, and where pages are dealt
    /// those of all, each from its owner.
    pub(crate) fn read(
        self,
        at: (LayerId, Part),
        table: &PageTable,
        rows: usize,
        into: &mut RowBuffer,
    ) -> Result<(), EngineError> {
        let held = self.own.held(at.1)?;
        let (elems, page) = (held.elems, held.layout.page_size as usize);
        (into.stride, into.rows) = (elems, rows);
        into.values.clear();
        into.values.resize((rows + 1) * elems, 0.0);
        let all = into.values.get_mut(..rows * elems).unwrap_or_default();
        let dealt = matches!(held.layout.tokens, TokenMap::PageSharded { .. });
        for (k, values) in all.chunks_mut((page * elems).max(1)).enumerate() {
            // A page's rows lie one after the other.
            let lies = |pool: &'a Pool| Some((pool, pool.page_row(held, table, k)?));
            let found = if dealt { self.all().find_map(lies) } else { lies(self.own) };
            let (pool, row) = found.ok_or_else(|| {
                EngineError::Pool(format!("page {k} of a table of {} pages is nowhere", table.0.len()))
            })?;
            pool.fetch(held, pool.offset(at, row)?, values, &mut into.narrow)?;
        }
        Ok(())
    }
}
