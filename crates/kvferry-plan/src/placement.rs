//! Who holds a coordinate: a product of independent maps for layers, heads and tokens.

use alloc::{format, string::String, vec::Vec};
use core::ops::Range;
use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::split::same_heads;
use crate::{
    Blame, Bytes, CacheShape, Dtype, LayerId, PageId, PageTable, Part, PartShape, RankId, Row, SlotId, Token,
    TokenMap, shard, shard_replicated,
};

/// Ranks of one instance; more are typing errors or hostile, not machines.
const MAX_RANKS: u32 = 4096;
/// Rows of a page, and tokens dealt at a time.
const MAX_PAGE: u32 = 1 << 20;

/// How one part is laid out on every rank of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
pub struct PartLayout {
    /// The part.
    #[n(0)]
    pub part: Part,
    /// Who holds which token.
    #[n(1)]
    pub tokens: TokenMap,
    /// Rows of one page of one rank's pool; of per-request state the rows of one slot, its window.
    #[n(2)]
    pub page_size: u32,
    /// Element type in the pool.
    #[n(3)]
    pub dtype: Dtype,
}

impl PartLayout {
    /// The page that a pool row lies on.
    #[must_use]
    pub fn page(&self, row: Row) -> PageId {
        PageId(u32::try_from(row.0 / u64::from(self.page_size.max(1))).unwrap_or(u32::MAX))
    }

    /// The pool row of `token` on the ranks of a token class (see [`Placement::class`]), of a request with these pages.
    /// `None` when another class holds it, or past the table. A point query: plans come to the same rows another way.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, LayoutSpec, PageId, PageTable, Row, Token};
    /// let sharded = "tp=2,shard=on,page=4".parse::<LayoutSpec>()?.placement(&CacheShape::mla(1, 96), Dtype::Bf16)?;
    /// // Token 6 lies on logical page 9, the fifth page of rank 1.
    /// let table = PageTable([PageId(4), PageId(9)].into());
    /// assert_eq!(sharded.parts[0].row(1, &table, Token(6)), Some(Row(4 * 4 + 2)));
    /// assert_eq!(sharded.parts[0].row(0, &table, Token(6)), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn row(&self, class: u32, table: &PageTable, token: Token) -> Option<Row> {
        let local = self.tokens.local(token, class)?;
        let TokenMap::PageSharded { ranks } = self.tokens else { return table.row(local, self.page_size) };
        let size = u64::from(self.page_size);
        let page = table.0.get(usize::try_from(local.checked_div(size)?).ok()?)?;
        let own = page.0.checked_rem(ranks)? == class;
        own.then(|| Row(u64::from(page.0 / ranks).saturating_mul(size).saturating_add(local % size)))
    }

    /// The first pool row of a state slot; the others of its window follow.
    #[must_use]
    pub fn slot_row(&self, slot: SlotId) -> Row {
        Row(u64::from(slot.0).saturating_mul(u64::from(self.page_size)))
    }
}

/// A rank's place in the product of axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankCoords {
    /// Pipeline stage.
    pub stage: u32,
    /// Prefill context-parallel rank.
    pub cp: u32,
    /// Attention tensor-parallel rank.
    pub tp: u32,
}

/// A rank among those that hold the same bytes of a part: number `index` of `count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    /// 0-based, in rank order.
    pub index: u32,
    /// How many ranks hold these bytes; 1 when nobody else does.
    pub count: u32,
}

/// One side's layout: which rank holds which coordinates, and in what geometry.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
pub struct Placement {
    /// Global layer ids of each pipeline stage, ascending.
    #[n(0)]
    pub stages: Vec<Vec<LayerId>>,
    /// Prefill context-parallel size.
    #[n(1)]
    pub cp: u32,
    /// Attention tensor-parallel size.
    #[n(2)]
    pub tp: u32,
    /// Geometry per part, in the order of the [`CacheShape`].
    #[n(3)]
    pub parts: Vec<PartLayout>,
    /// Pages that a rank may keep in host memory besides its pool, of a side with a host-tier cache. Nobody has built
    /// hand-offs for one: it is there so that a side that has one can say so, and is refused by name.
    #[n(4)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_pages: Option<u32>,
}

/// Why a placement (or the shape that it is to hold) makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PlacementError(pub(crate) String);

impl PlacementError {
    /// Whoever wrote the placement: the caller.
    #[must_use]
    pub fn blame(&self) -> Blame {
        Blame::Caller
    }
}

impl Placement {
    /// One rank that holds everything: what a monolithic run uses.
    #[must_use]
    pub fn single(shape: &CacheShape, page_size: u32, dtype: Dtype) -> Self {
        let mut layers: Vec<LayerId> = shape.parts.iter().flat_map(|p| p.layers.iter().copied()).collect();
        layers.sort_unstable();
        layers.dedup();
        let parts = shape
            .parts
            .iter()
            .map(|p| PartLayout {
                part: p.part,
                tokens: TokenMap::Dense,
                page_size: p.state.as_ref().map_or(page_size, |state| state.window),
                dtype,
            })
            .collect();
        Self { stages: [layers].into(), cp: 1, tp: 1, parts, host_pages: None }
    }

    /// Number of ranks: stages x cp x tp (0 when that overflows, which [`Placement::check`] refuses).
    #[must_use]
    pub fn ranks(&self) -> u32 {
        u32::try_from(self.stages.len())
            .ok()
            .and_then(|stages| stages.checked_mul(self.cp))
            .and_then(|n| n.checked_mul(self.tp))
            .unwrap_or(0)
    }

    /// The rank's place in the product of axes, or `None` past the last rank.
    #[must_use]
    pub fn coords(&self, rank: RankId) -> Option<RankCoords> {
        if rank.0 >= self.ranks() {
            return None;
        }
        let (outer, tp) = (rank.0 / self.tp, rank.0 % self.tp);
        Some(RankCoords { stage: outer / self.cp, cp: outer % self.cp, tp })
    }

    /// The geometry of `part`.
    #[must_use]
    pub fn part(&self, part: Part) -> Option<&PartLayout> {
        self.parts.iter().find(|p| p.part == part)
    }

    /// The layers of `part` that `rank` holds, ascending.
    #[must_use]
    pub fn layers(&self, shape: &PartShape, rank: RankId) -> Vec<LayerId> {
        let Some(stage) = self.coords(rank).and_then(|c| self.stages.get(c.stage as usize)) else {
            return Vec::new();
        };
        shape.layers.iter().copied().filter(|layer| stage.binary_search(layer).is_ok()).collect()
    }

    /// The heads of `part` that `rank` holds. With DCP, consecutive ranks of one head group hold the same heads.
    /// Of state with several channel groups these are the first group's; [`Placement::shares`] has all.
    #[must_use]
    pub fn heads(&self, shape: &PartShape, rank: RankId) -> Range<u32> {
        self.shares(shape, rank).next().unwrap_or(0..0)
    }

    /// The heads of each group of `part` that `rank` holds, in the order in which they lie in its rows. There is one
    /// group, except for per-request state. State heads are dealt like work: with more ranks than heads some hold none.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, LayerId, Placement, RankId};
    /// let shape = CacheShape { parts: CacheShape::kda([LayerId(0)].into(), 8, 16, 4).into() };
    /// let mut tp2 = Placement::single(&shape, 16, Dtype::Bf16);
    /// tp2.tp = 2;
    /// // The second halves of q, k and v.
    /// assert!(tp2.shares(&shape.parts[0], RankId(1)).eq([4..8, 12..16, 20..24]));
    /// ```
    pub fn shares<'a>(
        &self,
        shape: &'a PartShape,
        rank: RankId,
    ) -> impl Iterator<Item = Range<u32>> + use<'a> {
        let held = self.coords(rank).zip(self.part(shape.part)).map(|(at, layout)| {
            let dealt = layout.tokens.dealt_in_tp();
            (self.tp / dealt, at.tp / dealt)
        });
        shape.groups().map(move |group| {
            let heads = group.end - group.start;
            let own = match (&shape.state, held) {
                (_, None) => 0..0,
                (None, Some((n, r))) => shard_replicated(heads, n, r),
                (Some(state), Some(_)) if state.groups.is_empty() => 0..heads,
                (Some(_), Some((n, r))) => shard(heads, n, r),
            };
            group.start + own.start..group.start + own.end
        })
    }

    /// The token class of `rank` for `part`: its DCP rank, its shard rank, or 0.
    #[must_use]
    pub fn class(&self, part: Part, rank: RankId) -> u32 {
        let (Some(at), Some(layout)) = (self.coords(rank), self.part(part)) else { return 0 };
        match layout.tokens {
            TokenMap::Dense => 0,
            TokenMap::Interleaved { ranks, .. } => at.tp % ranks.max(1),
            TokenMap::PageSharded { .. } if self.cp > 1 => at.cp,
            TokenMap::PageSharded { ranks } => at.tp % ranks.max(1),
        }
    }

    /// Ranks over which logical pages are dealt (KV sharding): of all rows, or of none. 1 where pages are the same on
    /// every rank.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, LayoutSpec, PageId};
    /// let sharded = "tp=4,shard=on,page=16".parse::<LayoutSpec>()?.placement(&CacheShape::mla(2, 96), Dtype::Bf16)?;
    /// assert_eq!(sharded.shard_ranks(), 4);
    /// // Logical page 9 is the third page of shard rank 1.
    /// assert_eq!((sharded.owner(PageId(9)), sharded.local_page(PageId(9))), (1, PageId(2)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn shard_ranks(&self) -> u32 {
        shard_ranks(&self.parts)
    }

    /// The shard rank that holds a logical page; 0 without KV sharding.
    ///
    /// Source: `page % ranks`.
    #[must_use]
    pub fn owner(&self, page: PageId) -> u32 {
        page.0 % self.shard_ranks()
    }

    /// The number of a logical page in its owner's pool; without KV sharding its own.
    ///
    /// Source: `page / ranks`.
    #[must_use]
    pub fn local_page(&self, page: PageId) -> PageId {
        PageId(page.0 / self.shard_ranks())
    }

    /// Bytes of one row of `part` on `rank`: its heads x elements x element size.
    #[must_use]
    pub fn row_bytes(&self, shape: &PartShape, rank: RankId) -> Bytes {
        let Some(layout) = self.part(shape.part) else { return Bytes(0) };
        let heads: u64 = self.shares(shape, rank).map(|share| share.len() as u64).sum();
        Bytes(heads.saturating_mul(u64::from(shape.head_elems)).saturating_mul(layout.dtype.size().0))
    }

    /// `rank` among the ranks of its stage that hold the same heads and tokens of `part`.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, Part, Placement, RankId};
    /// let shape = CacheShape::mla(1, 576);
    /// let mut mla_tp2 = Placement::single(&shape, 16, Dtype::Bf16);
    /// mla_tp2.tp = 2;
    /// let replica = mla_tp2.replica(&shape.parts[0], RankId(1));
    /// assert_eq!((replica.index, replica.count), (1, 2));
    /// ```
    #[must_use]
    pub fn replica(&self, shape: &PartShape, rank: RankId) -> Replica {
        let (Some(at), Some(layout)) = (self.coords(rank), self.part(shape.part)) else {
            return Replica { index: 0, count: 1 };
        };
        if let Some(state) = &shape.state {
            let (index, count) = if state.groups.is_empty() { (at.tp, self.tp) } else { (0, 1) };
            return Replica { index: at.cp * count + index, count: self.cp * count };
        }
        let dealt = layout.tokens.dealt_in_tp();
        let group = at.tp / dealt;
        let groups = same_heads(shape.heads, self.tp / dealt, group);
        let (index, count) = (group - groups.start, groups.end - groups.start);
        match layout.tokens {
            TokenMap::Dense | TokenMap::Interleaved { .. } => {
                Replica { index: at.cp * count + index, count: self.cp * count }
            }
            // Pages are dealt over CP, or else over TP: then nobody shares a rank's pages.
            TokenMap::PageSharded { .. } if self.cp > 1 => Replica { index, count },
            TokenMap::PageSharded { .. } => Replica { index: 0, count: 1 },
        }
    }

    /// Checks that the placement describes `shape` completely and with sane numbers, so that every later
    /// question about it has an answer.
    ///
    /// # Errors
    /// Names the number that is wrong and what would be right.
    pub fn check(&self, shape: &CacheShape) -> Result<(), PlacementError> {
        shape.check()?;
        if self.tp == 0 || self.cp == 0 || self.stages.is_empty() {
            return fail("tp, cp and the number of pipeline stages must be at least 1".into());
        }
        if !(1..=MAX_RANKS).contains(&self.ranks()) {
            return fail(format!(
                "{} stages x cp {} x tp {} is more than the {MAX_RANKS} ranks supported",
                self.stages.len(),
                self.cp,
                self.tp
            ));
        }
        for (i, layout) in self.parts.iter().enumerate() {
            if self.parts.iter().take(i).any(|other| other.part == layout.part) {
                return fail(format!("the layout describes the part `{}` twice", layout.part));
            }
        }
        for part in &shape.parts {
            match self.part(part.part) {
                Some(layout) => self.check_part(part, layout)?,
                None => return fail(format!("the layout says nothing about the part `{}`", part.part)),
            }
        }
        self.check_stages(shape)
    }

    fn check_part(&self, shape: &PartShape, layout: &PartLayout) -> Result<(), PlacementError> {
        if let Some(state) = &shape.state
            && (layout.tokens, layout.page_size) != (TokenMap::Dense, state.window)
        {
            return fail(format!(
                "part `{}` is per-request state: its tokens are dense and its page size is its window, {}",
                shape.part, state.window
            ));
        }
        if !(1..=MAX_PAGE).contains(&layout.page_size) {
            return fail(format!("page size {} is not in 1..={MAX_PAGE}", layout.page_size));
        }
        match layout.tokens {
            TokenMap::Dense => {}
            TokenMap::Interleaved { ranks, interleave } => {
                if ranks == 0 || !(1..=MAX_PAGE).contains(&interleave) {
                    return fail(format!(
                        "dcp {ranks} with interleave {interleave}: dcp must be at least 1 and interleave in \
                         1..={MAX_PAGE}"
                    ));
                }
                if !self.tp.is_multiple_of(ranks) {
                    return fail(format!("dcp {ranks} does not divide tp {}", self.tp));
                }
            }
            TokenMap::PageSharded { ranks } => {
                let (axis, group) = if self.cp > 1 { ("cp", self.cp) } else { ("tp", self.tp) };
                if ranks != group {
                    return fail(format!(
                        "{ranks} shard ranks, but pages are dealt over the {group} {axis} ranks"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Every layer of every part is in exactly one stage.
    fn check_stages(&self, shape: &CacheShape) -> Result<(), PlacementError> {
        for (i, stage) in self.stages.iter().enumerate() {
            if !stage.is_sorted_by(|a, b| a < b) {
                return fail(format!("the layers of stage {i} are not ascending"));
            }
        }
        let mut held: Vec<LayerId> = self.stages.concat();
        held.sort_unstable();
        if let Some(twice) = held.windows(2).find(|w| w.first() == w.last()).and_then(|w| w.first()) {
            return fail(format!("layer {twice} is in two pipeline stages; give it to one"));
        }
        for part in &shape.parts {
            if let Some(layer) = part.layers.iter().find(|l| held.binary_search(l).is_err()) {
                return fail(format!("layer {layer} is in no pipeline stage; give it to one"));
            }
        }
        Ok(())
    }
}

/// As [`Placement::shard_ranks`].
pub(crate) fn shard_ranks(parts: &[PartLayout]) -> u32 {
    let mut rows = parts.iter().filter(|part| !part.part.is_state()).map(|part| match part.tokens {
        TokenMap::PageSharded { ranks } => ranks.max(1),
        TokenMap::Dense | TokenMap::Interleaved { .. } => 1,
    });
    let first = rows.next().unwrap_or(1);
    if rows.all(|ranks| ranks == first) { first } else { 1 }
}

fn fail(text: String) -> Result<(), PlacementError> {
    Err(PlacementError(text))
}
