//! Two placements that fit, and the plans between their ranks.

use alloc::{format, vec::Vec};
use core::ops::Range;

use crate::coverage::prove;
use crate::holding::{Holding, owned_rows};
use crate::runs::Relation;
use crate::unsupported::unsupported;
use crate::{
    Axis, Bytes, CacheShape, Cast, Cover, Covered, Dtype, Dtypes, LayerId, PageTable, Part, PartShape,
    Placement, Plan, RankId, Replica, Run, Slice, SlotId, TokenRange, Unsupported,
};

/// One end of a plan: a rank and the pages that the request owns there.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// The rank.
    pub rank: RankId,
    /// Its pages. An end whose rows are not wanted (a receiver does not know the sender's pages) passes
    /// [`PageTable::identity`]. Where tokens are [`crate::TokenMap::PageSharded`] the page ids say who holds what: a
    /// receiver passes [`PageTable::rotated`], or asks [`Pair::landing`] where owners are not cyclic.
    pub table: &'a PageTable,
}

/// One end of a state plan: a rank and the slot that the request owns there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The rank.
    pub rank: RankId,
    /// Its slot.
    pub slot: SlotId,
}

/// Two placements that have been found to fit: what a pair of peers keeps after pairing.
#[derive(Clone, Debug)]
pub struct Pair {
    shape: CacheShape,
    src: Placement,
    dst: Placement,
}

impl Pair {
    /// Checks both placements against the shape and against each other, once, and proves that the source holds
    /// every coordinate that the target wants. What is moved is moved as it is: element types must be equal.
    ///
    /// # Errors
    /// Names the axis on which they do not fit.
    pub fn new(shape: CacheShape, src: Placement, dst: Placement) -> Result<Self, Unsupported> {
        Self::with(shape, src, dst, Dtypes::Equal)
    }

    /// As [`Pair::new`], but with [`Dtypes::Converted`] the element types of the two sides may differ. Everything that
    /// a plan counts in bytes is then bytes of the target: what crosses and what is digested.
    ///
    /// # Errors
    /// As [`Pair::new`].
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, Dtypes, End, PageTable, Pair, Placement, RankId, TokenRange};
    /// let shape = CacheShape::mla(1, 576);
    /// let [wide, narrow] = [Dtype::F32, Dtype::Fp8E4m3].map(|dtype| Placement::single(&shape, 64, dtype));
    /// assert!(Pair::new(shape.clone(), wide.clone(), narrow.clone()).is_err());
    /// let pair = Pair::with(shape, wide, narrow, Dtypes::Converted).unwrap();
    /// let table = PageTable::identity(1);
    /// let end = End { rank: RankId(0), table: &table };
    /// let plan = pair.plan(end, end, TokenRange::new(0, 10)).unwrap();
    /// assert_eq!((plan.bytes().0, plan.groups()[0].slice.src_len().0), (10 * 576, 4 * 576));
    /// ```
    pub fn with(
        shape: CacheShape,
        src: Placement,
        dst: Placement,
        dtypes: Dtypes,
    ) -> Result<Self, Unsupported> {
        for (side, placement) in [("source", &src), ("target", &dst)] {
            if let Err(e) = placement.check(&shape) {
                return unsupported(Axis::Placement, format!("{side}: {e}"));
            }
            prove(side, &shape, placement)?;
            if let Some(pages) = placement.host_pages {
                return unsupported(
                    Axis::HostTier,
                    format!(
                        "the {side} keeps {pages} pages in host memory; start it without a host-tier cache"
                    ),
                );
            }
        }
        if dst.cp > 1 {
            return unsupported(
                Axis::ContextParallel,
                format!("the target has cp {}; 1 is supported", dst.cp),
            );
        }
        for part in &shape.parts {
            let (Some(s), Some(d)) = (src.part(part.part), dst.part(part.part)) else { continue };
            if dtypes == Dtypes::Equal && s.dtype != d.dtype {
                return unsupported(
                    Axis::Dtype,
                    format!(
                        "part `{}` is {} at the source and {} at the target; give both the same element type, or have the \
                         source convert with `--convert-kv`",
                        part.part, s.dtype, d.dtype
                    ),
                );
            }
        }
        Ok(Self { shape, src, dst })
    }

    /// What both sides cache.
    #[must_use]
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// The source's placement.
    #[must_use]
    pub fn src(&self) -> &Placement {
        &self.src
    }

    /// The target's placement.
    #[must_use]
    pub fn dst(&self) -> &Placement {
        &self.dst
    }

    /// Bytes that target rank `rank` holds of `tokens`, over all parts and layers: what must have arrived, from
    /// all sources together, when a hand-off of these tokens is complete. Where the target's tokens are
    /// [`crate::TokenMap::PageSharded`] the page ids decide, and only [`Pair::granted_bytes`] knows.
    #[must_use]
    pub fn target_bytes(&self, rank: RankId, tokens: TokenRange) -> Bytes {
        let mut sum = 0_u64;
        for part in self.shape.parts.iter().filter(|part| part.state.is_none()) {
            let Some(layout) = self.dst.part(part.part) else { continue };
            let class = self.dst.class(part.part, rank);
            let end = layout.tokens.owned(tokens.end, class);
            let rows = end.saturating_sub(layout.tokens.owned(tokens.start, class));
            sum = sum.saturating_add(self.bytes_of(part, rank, rows));
        }
        Bytes(sum)
    }

    /// Bytes of one request's state on target rank `rank`: what must have arrived besides [`Pair::target_bytes`].
    #[must_use]
    pub fn state_bytes(&self, rank: RankId) -> Bytes {
        let part = |part: &PartShape| {
            part.state.as_ref().map_or(0, |state| self.bytes_of(part, rank, u64::from(state.window)))
        };
        Bytes(self.shape.parts.iter().map(part).fold(0, u64::saturating_add))
    }

    /// [`Pair::target_bytes`] for the pages in a table, whatever decides who holds them.
    ///
    /// # Errors
    /// When the rank does not exist or the table is too short for the range.
    pub fn granted_bytes(&self, dst: End<'_>, tokens: TokenRange) -> Result<Bytes, Unsupported> {
        check_rank("target", &self.dst, dst.rank)?;
        let mut sum = 0_u64;
        for part in self.shape.parts.iter().filter(|part| part.state.is_none()) {
            let Some(holding) = Holding::of(&self.dst, part.part, dst.rank) else { continue };
            let rows = owned_rows("target", holding, dst.table, tokens)?;
            sum = sum.saturating_add(self.bytes_of(part, dst.rank, rows));
        }
        Ok(Bytes(sum))
    }

    /// What source rank `src.rank` owes target rank `dst.rank` for `tokens` (not the request's state, which
    /// [`Pair::state`] has). When several source ranks hold the
    /// same bytes, each owes every n-th of its pages.
    ///
    /// The rows, their order and their grouping depend on the page ids of an end only by adding to the row
    /// numbers (except where page ids say who holds what), so that both peers see the same units in the same order.
    ///
    /// # Errors
    /// [`Unsupported`] when a rank does not exist, a page table is too short for the range, or two interleaves
    /// have so little in common that the plan would be absurdly large. Never panics.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, End, PageTable, Pair, Placement, RankId, TokenMap, TokenRange};
    /// // Dense latent rows to DCP4: rank 1 takes tokens 1, 5, 9, ... as one strided run per page.
    /// let shape = CacheShape::mla(61, 576);
    /// let dense = Placement::single(&shape, 64, Dtype::Bf16);
    /// let mut dcp4 = dense.clone();
    /// dcp4.tp = 4;
    /// dcp4.parts[0].tokens = TokenMap::Interleaved { ranks: 4, interleave: 1 };
    /// let pair = Pair::new(shape, dense, dcp4).unwrap();
    /// let table = PageTable::identity(4);
    /// let plan = pair
    ///     .plan(
    ///         End { rank: RankId(0), table: &table },
    ///         End { rank: RankId(1), table: &table },
    ///         TokenRange::new(0, 256),
    ///     )
    ///     .unwrap();
    /// assert_eq!(plan.runs().len(), 4);
    /// assert_eq!((plan.runs()[0].src_step, plan.runs()[0].dst_step), (4, 1));
    /// assert_eq!(plan.bytes().0, 64 * 1152 * 61);
    /// ```
    pub fn plan(&self, src: End<'_>, dst: End<'_>, tokens: TokenRange) -> Result<Plan, Unsupported> {
        self.build(src.rank, dst, tokens, |relation, _, plan| {
            relation.emit(src.table, dst.table, tokens, plan)
        })
    }

    /// The tokens of each part that source rank `src.rank` sends of `tokens`, to whatever target: the pages that it
    /// holds, less those whose turn is another rank's that holds the same. Under DCP the runs reach over the tokens of
    /// other ranks, because which of the tokens in a run are its own follows from the placement.
    ///
    /// # Errors
    /// As [`Pair::plan`].
    ///
    /// ```
    /// use kvferry_plan::*;
    /// let shape = CacheShape::mla(1, 576);
    /// let target = Placement::single(&shape, 4, Dtype::Bf16);
    /// let mut sharded = target.clone();
    /// (sharded.tp, sharded.parts[0].tokens) = (2, TokenMap::PageSharded { ranks: 2 });
    /// let pair = Pair::new(shape, sharded, target).unwrap();
    /// // Logical pages 8, 3, 5 and 6: rank 0 holds the first and the last.
    /// let table = PageTable([8, 3, 5, 6].map(PageId).into());
    /// let cover = pair.cover(End { rank: RankId(0), table: &table }, TokenRange::new(1, 16)).unwrap();
    /// assert_eq!(cover.of(Part::Latent), [TokenRange::new(1, 4), TokenRange::new(12, 16)]);
    /// ```
    pub fn cover(&self, src: End<'_>, tokens: TokenRange) -> Result<Cover, Unsupported> {
        check_rank("source", &self.src, src.rank)?;
        let mut cover = Cover::default();
        let mut known: Vec<(Holding, Replica)> = Vec::new();
        for part in self.shape.parts.iter().filter(|part| part.state.is_none()) {
            let Some(holding) = Holding::of(&self.src, part.part, src.rank) else { continue };
            if self.src.layers(part, src.rank).is_empty() {
                continue;
            }
            let dealt = (holding, self.src.replica(part, src.rank));
            match known.iter().position(|other| *other == dealt).and_then(|i| cover.0.get_mut(i)) {
                Some(same) => same.parts.push(part.part),
                None => {
                    let pages = holding.pages("source", src.table, tokens, dealt.1)?;
                    cover.0.push(Covered::new(part.part, pages.map(|p| TokenRange::new(p.start, p.end))));
                    known.push(dealt);
                }
            }
        }
        Ok(cover)
    }

    /// What [`Pair::plan`] says at the source, as the target sees it: the same units with the same bytes at the same
    /// target rows, from the source's [`Pair::cover`] instead of its pages. Source rows are its local indices.
    ///
    /// # Errors
    /// As [`Pair::plan`], and when the cover is not made of ascending runs within `tokens`.
    pub fn landing(
        &self,
        source: RankId,
        cover: &Cover,
        dst: End<'_>,
        tokens: TokenRange,
    ) -> Result<Plan, Unsupported> {
        if let Err(e) = cover.check(source, tokens) {
            return unsupported(Axis::Coverage, format!("{e}"));
        }
        self.build(source, dst, tokens, |relation, part, plan| {
            relation.land(cover.of(part), dst.table, tokens, plan)
        })
    }

    /// What source rank `src.rank` owes target rank `dst.rank` of a request's state. When several source ranks hold
    /// the same state, each owes every n-th layer.
    ///
    /// # Errors
    /// When a rank does not exist. Whether a slot does is the pools' question.
    ///
    /// ```
    /// use kvferry_plan::*;
    /// let shape = CacheShape { parts: CacheShape::kda([LayerId(0)].into(), 8, 16, 4).into() };
    /// let whole = Placement::single(&shape, 16, Dtype::Bf16);
    /// let mut tp2 = whole.clone();
    /// tp2.tp = 2;
    /// let pair = Pair::new(shape, whole, tp2).unwrap();
    /// let plan = pair.state(Slot { rank: RankId(0), slot: SlotId(5) }, Slot { rank: RankId(1), slot: SlotId(2) });
    /// // The second halves of q, k and v, three rows each; and half of the recurrent heads.
    /// let conv: Vec<_> = plan.unwrap().units().map(|u| (u.slice.src_offset.0, u.slice.dst_offset.0, u.rows())).collect();
    /// assert_eq!(conv, [(128, 0, 3), (384, 128, 3), (640, 256, 3), (2048, 0, 1)]);
    /// ```
    pub fn state(&self, src: Slot, dst: Slot) -> Result<Plan, Unsupported> {
        check_rank("source", &self.src, src.rank)?;
        check_rank("target", &self.dst, dst.rank)?;
        let mut plan = Plan::default();
        for part in &self.shape.parts {
            let Some(state) = &part.state else { continue };
            let deal = self.src.replica(part, src.rank);
            let mine = |i: usize| i as u64 % u64::from(deal.count) == u64::from(deal.index);
            let turn = |layer: &LayerId| part.layers.binary_search(layer).is_ok_and(mine);
            let mut layers = self.layers(part, src.rank, dst.rank);
            layers.retain(turn);
            let before = plan.groups.len();
            let (run, cut) = (plan.runs.len(), plan.cuts.len());
            plan.push(part.part, &layers, self.slices(part, src.rank, dst.rank), run..run + 1, cut..cut + 1);
            if plan.groups.len() > before {
                plan.runs.push(Run::slot(src.slot, dst.slot, state.window));
                plan.cuts.push(run..run + 1);
            }
        }
        Ok(plan)
    }

    /// [`Pair::plan`] for the chunk that ends a prompt: with it goes the request's state, from slot to slot. Who does not
    /// know the peer's slot passes any. Without slots, or for a model without state, it is the plan alone.
    ///
    /// # Errors
    /// As [`Pair::plan`].
    ///
    /// ```
    /// use kvferry_plan::*;
    /// let mut shape = CacheShape::mla(1, 576);
    /// shape.parts.extend(CacheShape::kda([LayerId(1)].into(), 8, 16, 4));
    /// let place = Placement::single(&shape, 16, Dtype::Bf16);
    /// let pair = Pair::new(shape, place.clone(), place).unwrap();
    /// let table = PageTable([PageId(2)].into());
    /// let end = End { rank: RankId(0), table: &table };
    /// let last = pair.plan_last(end, end, TokenRange::new(0, 10), Some((SlotId(1), SlotId(4)))).unwrap();
    /// let due = pair.target_bytes(RankId(0), TokenRange::new(0, 10)).0 + pair.state_bytes(RankId(0)).0;
    /// assert_eq!(last.bytes().0, due);
    /// ```
    pub fn plan_last(
        &self,
        src: End<'_>,
        dst: End<'_>,
        tokens: TokenRange,
        slots: Option<(SlotId, SlotId)>,
    ) -> Result<Plan, Unsupported> {
        let mut plan = self.plan(src, dst, tokens)?;
        if let Some((from, to)) = slots {
            plan.append(self.state(Slot { rank: src.rank, slot: from }, Slot { rank: dst.rank, slot: to })?);
        }
        Ok(plan)
    }

    /// The plan whose runs for parts with one relation are what `emit` appends.
    fn build(
        &self,
        src: RankId,
        dst: End<'_>,
        tokens: TokenRange,
        emit: impl Fn(&Relation, Part, &mut Plan) -> Result<(), Unsupported>,
    ) -> Result<Plan, Unsupported> {
        check_rank("source", &self.src, src)?;
        check_rank("target", &self.dst, dst.rank)?;
        let mut plan = Plan::default();
        // Parts that move the same rows, as keys and values do, share their runs.
        let mut shared: Vec<(Relation, Range<usize>, Range<usize>)> = Vec::new();
        if tokens.is_empty() {
            return Ok(plan);
        }
        for part in self.shape.parts.iter().filter(|part| part.state.is_none()) {
            let layers = self.layers(part, src, dst.rank);
            let slices: Vec<_> = self.slices(part, src, dst.rank).collect();
            let (Some(from), Some(to)) =
                (Holding::of(&self.src, part.part, src), Holding::of(&self.dst, part.part, dst.rank))
            else {
                continue;
            };
            if layers.is_empty() || slices.is_empty() {
                continue;
            }
            let relation = Relation { src: from, dst: to, deal: self.src.replica(part, src) };
            let (runs, cuts) = match shared.iter().find(|(known, ..)| *known == relation) {
                Some((_, runs, cuts)) => (runs.clone(), cuts.clone()),
                None => {
                    let (run, cut) = (plan.runs.len(), plan.cuts.len());
                    emit(&relation, part.part, &mut plan)?;
                    let (runs, cuts) = (run..plan.runs.len(), cut..plan.cuts.len());
                    shared.push((relation, runs.clone(), cuts.clone()));
                    (runs, cuts)
                }
            };
            if !runs.is_empty() {
                plan.push(part.part, &layers, slices.into_iter(), runs, cuts);
            }
        }
        Ok(plan)
    }

    /// Layers that both ranks hold, ascending.
    fn layers(&self, part: &PartShape, src: RankId, dst: RankId) -> Vec<LayerId> {
        let held = self.dst.layers(part, dst);
        let mut layers = self.src.layers(part, src);
        layers.retain(|layer| held.binary_search(layer).is_ok());
        layers
    }

    /// Bytes of a row that both ranks hold, for each group of heads of which they hold some in common.
    fn slices<'a>(
        &'a self,
        part: &'a PartShape,
        src: RankId,
        dst: RankId,
    ) -> impl Iterator<Item = (u32, Slice)> + 'a {
        let head = |dtype: Dtype| u64::from(part.head_elems).saturating_mul(dtype.size().0);
        let dtypes = self.dtypes(part.part);
        let cast = dtypes.and_then(|(from, to)| Cast::between(from, to));
        let (src_head, dst_head) = dtypes.map_or((0, 0), |(from, to)| (head(from), head(to)));
        // Where the groups begin in a row of each rank.
        let (mut src_at, mut dst_at) = (0, 0);
        let shares = self.src.shares(part, src).zip(self.dst.shares(part, dst));
        (0..).zip(shares).filter_map(move |(group, (s, d))| {
            let (src_group, dst_group) = (src_at, dst_at);
            src_at += s.len() as u64 * src_head;
            dst_at += d.len() as u64 * dst_head;
            let heads = s.start.max(d.start)..s.end.min(d.end);
            let slice = |heads: Range<u32>| Slice {
                src_offset: Bytes(src_group + u64::from(heads.start - s.start) * src_head),
                dst_offset: Bytes(dst_group + u64::from(heads.start - d.start) * dst_head),
                len: Bytes(heads.len() as u64 * dst_head),
                cast,
            };
            (!heads.is_empty()).then(|| (group, slice(heads)))
        })
    }

    /// Element types of a part at the source and at the target.
    fn dtypes(&self, part: Part) -> Option<(Dtype, Dtype)> {
        Some((self.src.part(part)?.dtype, self.dst.part(part)?.dtype))
    }

    /// What the source makes of the rows of each part that the target has in another element type.
    pub fn casts(&self) -> impl Iterator<Item = (Part, Cast)> + '_ {
        self.shape.parts.iter().filter_map(|part| {
            let (from, to) = self.dtypes(part.part)?;
            Some((part.part, Cast::between(from, to)?))
        })
    }

    /// Bytes of `rows` rows of a part in all the layers of a target rank.
    fn bytes_of(&self, part: &PartShape, rank: RankId, rows: u64) -> u64 {
        let layers = self.dst.layers(part, rank).len() as u64;
        rows.saturating_mul(self.dst.row_bytes(part, rank).0).saturating_mul(layers)
    }
}

fn check_rank(side: &str, placement: &Placement, rank: RankId) -> Result<(), Unsupported> {
    if rank.0 < placement.ranks() {
        return Ok(());
    }
    unsupported(Axis::Rank, format!("{side} rank {rank} of an instance with {} ranks", placement.ranks()))
}
