//! Where a row lies in a rank's arena: the only place that knows byte offsets.

use alloc::{format, vec::Vec};

use crate::{Bytes, CacheShape, LayerId, PageId, Part, Placement, PlacementError, RankId, Row, SlotId};

/// Regions start on a page of the operating system.
const ALIGN: u64 = 4096;

/// The rows of one layer and part: `[pages, page_size, row bytes]`, or `[slots, window, row bytes]` of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// The layer.
    pub layer: LayerId,
    /// The part.
    pub part: Part,
    /// Offset of row 0 in the arena.
    pub offset: Bytes,
    /// Bytes of one row.
    pub row_bytes: Bytes,
    /// Number of rows: `pages * page_size`, or `slots * window`.
    pub rows: u64,
}

impl Region {
    /// Offset of `row` in the arena, or `None` past the last row.
    #[must_use]
    pub fn row_offset(&self, row: Row) -> Option<Bytes> {
        let at = row.0.checked_mul(self.row_bytes.0).and_then(|at| at.checked_add(self.offset.0));
        at.filter(|_| row.0 < self.rows).map(Bytes)
    }
}

/// What a pool has room for, on every rank alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSize {
    /// Pages, of the placement's page size in rows each. With KV sharding logical pages, of all ranks together.
    pub pages: u32,
    /// Slots, each for the state of one request; 0 in shapes without state.
    pub slots: u32,
}

/// The layout of one rank's arena: one generation word per page that the rank has and then per slot, then one region per (layer, part).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolLayout {
    pages: u32,
    slots: u32,
    regions: Vec<Region>,
    len: Bytes,
}

impl PoolLayout {
    /// The pool of `rank` with `pages` pages and no slots: for models without per-request state.
    ///
    /// # Errors
    /// When the placement does not describe the shape, has no such rank, or the sizes overflow.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, LayerId, Part, Placement, PoolLayout, RankId, Row, SlotId};
    /// let shape = CacheShape::mla(2, 576);
    /// let place = Placement::single(&shape, 16, Dtype::Bf16);
    /// let pool = PoolLayout::new(&shape, &place, RankId(0), 8).unwrap();
    /// let region = pool.region(LayerId(1), Part::Latent).unwrap();
    /// assert_eq!(region.row_bytes.0, 1152);
    /// assert_eq!(region.row_offset(Row(1)).unwrap().0, region.offset.0 + 1152);
    /// assert_eq!(region.row_offset(Row(8 * 16)), None);
    /// ```
    pub fn new(
        shape: &CacheShape,
        placement: &Placement,
        rank: RankId,
        pages: u32,
    ) -> Result<Self, PlacementError> {
        Self::with_slots(shape, placement, rank, PoolSize { pages, slots: 0 })
    }

    /// The pool of `rank` of this size, with slots for the state of requests. With KV sharding it has its share of the
    /// pages, rounded up.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, LayoutSpec, PoolLayout, PoolSize, RankId};
    /// let shape = CacheShape::mla(2, 96);
    /// let sharded = "tp=4,shard=on,page=16".parse::<LayoutSpec>()?.placement(&shape, Dtype::Bf16)?;
    /// let pool = PoolLayout::with_slots(&shape, &sharded, RankId(3), PoolSize { pages: 12, slots: 0 })?;
    /// assert_eq!((pool.pages(), pool.regions()[0].rows), (3, 3 * 16));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`PoolLayout::new`].
    pub fn with_slots(
        shape: &CacheShape,
        placement: &Placement,
        rank: RankId,
        PoolSize { pages, slots }: PoolSize,
    ) -> Result<Self, PlacementError> {
        placement.check(shape)?;
        if rank.0 >= placement.ranks() {
            return Err(PlacementError(format!("rank {rank} of a layout with {} ranks", placement.ranks())));
        }
        let pages = pages.div_ceil(placement.shard_ranks());
        let too_large = || PlacementError("the pool is larger than an address space".into());
        let align = |n: u64| n.checked_next_multiple_of(ALIGN).ok_or_else(too_large);
        let mut at = align((u64::from(pages) + u64::from(slots)) * 8)?;
        let mut regions = Vec::new();
        for part in &shape.parts {
            let Some(layout) = placement.part(part.part) else { continue };
            let row_bytes = placement.row_bytes(part, rank);
            if row_bytes.0 == 0 {
                continue;
            }
            let units = if part.state.is_some() { slots } else { pages };
            let rows = u64::from(units) * u64::from(layout.page_size);
            let bytes = rows.checked_mul(row_bytes.0).ok_or_else(too_large)?;
            for layer in placement.layers(part, rank) {
                regions.push(Region { layer, part: part.part, offset: Bytes(at), row_bytes, rows });
                at = align(at.checked_add(bytes).ok_or_else(too_large)?)?;
            }
        }
        regions.sort_unstable_by_key(|r| (r.layer, r.part));
        Ok(Self { pages, slots, regions, len: Bytes(at) })
    }

    /// Pages of this rank's pool.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// State slots of the pool.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of the generation words.
    #[must_use]
    pub fn generation_bytes(&self) -> Bytes {
        Bytes((u64::from(self.pages) + u64::from(self.slots)) * 8)
    }

    /// Bytes of the arena.
    #[must_use]
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// True when the arena holds not even a generation word.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len.0 == 0
    }

    /// Offset of the generation word (u64, native endian) of `page`.
    #[must_use]
    pub fn generation_offset(&self, page: PageId) -> Option<Bytes> {
        (page.0 < self.pages).then(|| Bytes(u64::from(page.0) * 8))
    }

    /// Offset of the generation word (u64, native endian) of `slot`.
    #[must_use]
    pub fn slot_generation_offset(&self, slot: SlotId) -> Option<Bytes> {
        (slot.0 < self.slots).then(|| Bytes((u64::from(self.pages) + u64::from(slot.0)) * 8))
    }

    /// The region of a layer and part, if this rank holds it.
    #[must_use]
    pub fn region(&self, layer: LayerId, part: Part) -> Option<&Region> {
        self.regions
            .binary_search_by_key(&(layer, part), |r| (r.layer, r.part))
            .ok()
            .and_then(|i| self.regions.get(i))
    }

    /// All regions, by layer and part.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }
}
