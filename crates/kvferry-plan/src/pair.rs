//! Two placements that fit, and the plans between their ranks.

use alloc::{format, vec::Vec};
use core::ops::Range;

use crate::coverage::prove;
use crate::holding::{Holding, owned_rows};
use crate::runs::Relation;
use crate::unsupported::unsupported;
use crate::{
    Axis, Bytes, CacheShape, Group, LayerId, PageTable, PartShape, Placement, Plan, RankId, Slice,
    TokenRange, Unsupported,
};

/// One end of a plan: a rank and the pages that the request owns there.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// The rank.
    pub rank: RankId,
    /// Its pages. An end whose rows are not wanted (a receiver does not know the sender's pages) passes
    /// [`PageTable::identity`]; not where tokens are [`crate::TokenMap::PageSharded`], because then the page ids
    /// say who holds what.
    pub table: &'a PageTable,
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
    /// every coordinate that the target wants.
    ///
    /// # Errors
    /// Names the axis on which they do not fit.
    pub fn new(shape: CacheShape, src: Placement, dst: Placement) -> Result<Self, Unsupported> {
        for (side, placement) in [("source", &src), ("target", &dst)] {
            if let Err(e) = placement.check(&shape) {
                return unsupported(Axis::Placement, format!("{side}: {e}"));
            }
            prove(side, &shape, placement)?;
        }
        if dst.cp > 1 {
            return unsupported(
                Axis::ContextParallel,
                format!("the target has cp {}; 1 is supported", dst.cp),
            );
        }
        for part in &shape.parts {
            let (Some(s), Some(d)) = (src.part(part.part), dst.part(part.part)) else { continue };
            if s.dtype != d.dtype {
                return unsupported(
                    Axis::Dtype,
                    format!(
                        "part `{}` is {} at the source and {} at the target",
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
        for part in &self.shape.parts {
            let Some(layout) = self.dst.part(part.part) else { continue };
            let class = self.dst.class(part.part, rank);
            let end = layout.tokens.owned(tokens.end, class);
            let rows = end.saturating_sub(layout.tokens.owned(tokens.start, class));
            sum = sum.saturating_add(self.bytes_of(part, rank, rows));
        }
        Bytes(sum)
    }

    /// [`Pair::target_bytes`] for the pages in a table, whatever decides who holds them.
    ///
    /// # Errors
    /// When the rank does not exist or the table is too short for the range.
    pub fn granted_bytes(&self, dst: End<'_>, tokens: TokenRange) -> Result<Bytes, Unsupported> {
        check_rank("target", &self.dst, dst.rank)?;
        let mut sum = 0_u64;
        for part in &self.shape.parts {
            let Some(holding) = Holding::of(&self.dst, part.part, dst.rank) else { continue };
            let rows = owned_rows("target", holding, dst.table, tokens)?;
            sum = sum.saturating_add(self.bytes_of(part, dst.rank, rows));
        }
        Ok(Bytes(sum))
    }

    /// What source rank `src.rank` owes target rank `dst.rank` for `tokens`. When several source ranks hold the
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
        check_rank("source", &self.src, src.rank)?;
        check_rank("target", &self.dst, dst.rank)?;
        let mut plan = Plan::default();
        // Parts that move the same rows, as keys and values do, share their runs.
        let mut shared: Vec<(Relation, Range<usize>, Range<usize>)> = Vec::new();
        if tokens.is_empty() {
            return Ok(plan);
        }
        for part in &self.shape.parts {
            let Some((layers, slice)) = self.overlap(part, src.rank, dst.rank) else { continue };
            let (Some(from), Some(to)) =
                (Holding::of(&self.src, part.part, src.rank), Holding::of(&self.dst, part.part, dst.rank))
            else {
                continue;
            };
            let relation = Relation { src: from, dst: to, deal: self.src.replica(part, src.rank) };
            let (runs, cuts) = match shared.iter().find(|(known, ..)| *known == relation) {
                Some((_, runs, cuts)) => (runs.clone(), cuts.clone()),
                None => {
                    let (run, cut) = (plan.runs.len(), plan.cuts.len());
                    relation.emit(src.table, dst.table, tokens, &mut plan.runs, &mut plan.cuts)?;
                    let (runs, cuts) = (run..plan.runs.len(), cut..plan.cuts.len());
                    shared.push((relation, runs.clone(), cuts.clone()));
                    (runs, cuts)
                }
            };
            if !runs.is_empty() {
                plan.groups.push(Group { part: part.part, layers, slice, runs, cuts });
            }
        }
        Ok(plan)
    }

    /// Layers and bytes of a row that both ranks hold.
    fn overlap(&self, part: &PartShape, src: RankId, dst: RankId) -> Option<(Vec<LayerId>, Slice)> {
        let (s, d) = (self.src.heads(part, src), self.dst.heads(part, dst));
        let heads = s.start.max(d.start)..s.end.min(d.end);
        if heads.is_empty() {
            return None;
        }
        let held = self.dst.layers(part, dst);
        let mut layers = self.src.layers(part, src);
        layers.retain(|layer| held.binary_search(layer).is_ok());
        let head = u64::from(part.head_elems) * self.src.part(part.part)?.dtype.size().0;
        let slice = Slice {
            src_offset: Bytes(u64::from(heads.start - s.start) * head),
            dst_offset: Bytes(u64::from(heads.start - d.start) * head),
            len: Bytes(heads.len() as u64 * head),
        };
        (!layers.is_empty()).then_some((layers, slice))
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
