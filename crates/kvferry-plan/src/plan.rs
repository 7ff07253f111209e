//! The factored copy that one source rank owes one target rank.
//!
//! Not for choosing transports or sizes of frames; a plan says what goes where and nothing about how.

use alloc::vec::Vec;
use core::ops::Range;

use crate::{Bytes, LayerId, Part, Region, Run, Slice, StridedMove, Token};

/// What one source rank owes one target rank for a range of tokens: layers x bytes x token runs. Its size grows
/// with pages, not with tokens or layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub(crate) groups: Vec<Group>,
    pub(crate) runs: Vec<Run>,
    /// Runs of each target page, as index ranges.
    pub(crate) cuts: Vec<Range<usize>>,
}

/// The layers of one part (of state: of one channel group of a part); all of them move the same rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The part.
    pub part: Part,
    /// Of per-request state the channel group; 0 for everything else.
    pub channels: u32,
    /// Layers that both ranks hold, ascending.
    pub layers: Vec<LayerId>,
    /// Bytes of each row.
    pub slice: Slice,
    /// Index range into [`Plan::runs`].
    pub runs: Range<usize>,
    /// Index range into the plan's cuts: one per target page.
    pub(crate) cuts: Range<usize>,
}

impl Group {
    /// Layers x target pages.
    fn units(&self) -> u64 {
        (self.layers.len() as u64).saturating_mul(self.cuts.len() as u64)
    }
}

impl Plan {
    /// The groups, in the order of the cache shape's parts.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The runs that the groups refer to. Parts that move the same rows share theirs.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The runs of a group.
    #[must_use]
    pub fn group_runs(&self, group: &Group) -> &[Run] {
        self.runs.get(group.runs.clone()).unwrap_or_default()
    }

    /// Every unit in the order in which both sides visit them: part, layer, target page.
    pub fn units(&self) -> impl Iterator<Item = Unit<'_>> {
        self.groups.iter().flat_map(move |group| {
            let cuts = self.cuts.get(group.cuts.clone()).unwrap_or_default();
            group.layers.iter().flat_map(move |&layer| {
                cuts.iter().map(move |cut| Unit {
                    layer,
                    part: group.part,
                    channels: group.channels,
                    runs: self.runs.get(cut.clone()).unwrap_or_default(),
                    slice: group.slice,
                })
            })
        })
    }

    /// Number of units.
    #[must_use]
    pub fn unit_count(&self) -> u64 {
        self.groups.iter().map(Group::units).fold(0, u64::saturating_add)
    }

    /// Unit `index` in the order of [`Plan::units`], without walking there.
    #[must_use]
    pub fn unit(&self, mut index: u64) -> Option<Unit<'_>> {
        for group in &self.groups {
            if index < group.units() {
                let (index, pages) = (usize::try_from(index).ok()?, group.cuts.len());
                let cut = self.cuts.get(group.cuts.clone())?.get(index % pages)?;
                return Some(Unit {
                    layer: *group.layers.get(index / pages)?,
                    part: group.part,
                    channels: group.channels,
                    runs: self.runs.get(cut.clone())?,
                    slice: group.slice,
                });
            }
            index -= group.units();
        }
        None
    }

    /// Bytes that the plan moves.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        let group = |g: &Group| {
            rows(self.group_runs(g)).saturating_mul(g.slice.len.0).saturating_mul(g.layers.len() as u64)
        };
        Bytes(self.groups.iter().map(group).fold(0, u64::saturating_add))
    }

    /// Strided copies that the plan needs: runs x layers.
    #[must_use]
    pub fn copies(&self) -> u64 {
        let group = |g: &Group| (g.runs.len() as u64).saturating_mul(g.layers.len() as u64);
        self.groups.iter().map(group).fold(0, u64::saturating_add)
    }

    /// Appends a group for each slice, if there is a layer that moves it.
    pub(crate) fn push(
        &mut self,
        part: Part,
        layers: &[LayerId],
        slices: impl Iterator<Item = (u32, Slice)>,
        runs: Range<usize>,
        cuts: Range<usize>,
    ) {
        if layers.is_empty() {
            return;
        }
        self.groups.extend(slices.map(|(channels, slice)| Group {
            part,
            channels,
            layers: layers.to_vec(),
            slice,
            runs: runs.clone(),
            cuts: cuts.clone(),
        }));
    }

    /// Appends what another plan moves between the same ranks.
    pub(crate) fn append(&mut self, other: Self) {
        let (runs, cuts) = (self.runs.len(), self.cuts.len());
        let later = |range: &Range<usize>, by: usize| range.start + by..range.end + by;
        self.runs.extend(other.runs);
        self.cuts.extend(other.cuts.iter().map(|cut| later(cut, runs)));
        self.groups.extend(other.groups.into_iter().map(|group| Group {
            runs: later(&group.runs, runs),
            cuts: later(&group.cuts, cuts),
            ..group
        }));
    }

    /// True when the pair of ranks has nothing to move for the range.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }
}

/// All that a plan moves for one (layer, part, target page), or of state for one (layer, part, channel group, slot):
/// the unit of digests and of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit<'a> {
    /// The layer.
    pub layer: LayerId,
    /// The part.
    pub part: Part,
    /// Of per-request state the channel group; 0 for everything else.
    pub channels: u32,
    /// Its runs, in token order.
    pub runs: &'a [Run],
    /// Bytes of each row.
    pub slice: Slice,
}

impl Unit<'_> {
    /// First token of the unit; 0 for state, which has none.
    #[must_use]
    pub fn first_token(&self) -> Token {
        self.runs.first().map_or(Token(0), |r| r.token)
    }

    /// Rows of the unit.
    #[must_use]
    pub fn rows(&self) -> u64 {
        rows(self.runs)
    }

    /// Bytes that the unit moves.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.rows().saturating_mul(self.slice.len.0))
    }

    /// The unit as strided byte moves between two regions, in token order, as few and as long as the strides
    /// allow. A run that leaves a region (the tables name pages that the pool does not have) becomes a move whose
    /// offset is `u64::MAX` on that side: every bounds check refuses it, and it can never touch the next region.
    ///
    /// ```
    /// use kvferry_plan::*;
    /// let shape = CacheShape::mla(1, 576);
    /// let place = Placement::single(&shape, 64, Dtype::Bf16);
    /// let pool = PoolLayout::new(&shape, &place, RankId(0), 4).unwrap();
    /// let region = pool.region(LayerId(0), Part::Latent).unwrap();
    /// let pair = Pair::new(shape, place.clone(), place).unwrap();
    /// let from = PageTable([PageId(2)].into());
    /// let to = PageTable([PageId(3)].into());
    /// let (src, dst) = (End { rank: RankId(0), table: &from }, End { rank: RankId(0), table: &to });
    /// let plan = pair.plan(src, dst, TokenRange::new(0, 10)).unwrap();
    /// let moves: Vec<_> = plan.units().next().unwrap().moves(region, region).collect();
    /// // Dense to dense with equal rows: one piece of ten rows.
    /// assert_eq!(moves.len(), 1);
    /// assert_eq!((moves[0].len.0, moves[0].rows, moves[0].blocks), (10 * 1152, 1, 1));
    /// assert_eq!(moves[0].dst.offset.0, region.offset.0 + 3 * 64 * 1152);
    /// ```
    pub fn moves(&self, src: &Region, dst: &Region) -> impl Iterator<Item = StridedMove> + use<'_> {
        let (slice, src, dst) = (self.slice, *src, *dst);
        self.runs.iter().map(move |run| StridedMove::new(run, slice, &src, &dst))
    }
}

fn rows(runs: &[Run]) -> u64 {
    runs.iter().map(Run::rows).fold(0, u64::saturating_add)
}
