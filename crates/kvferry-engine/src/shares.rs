//! Which part of every matrix a rank works on. Query heads stay with the KV head they read; the ranks that hold the
//! same KV heads (replicas, and the ranks of a DCP head group) split its query heads. Heads of linear attention lie
//! where their state does. Feed-forward networks are split in whole units, the vocabulary by rows; experts are dealt
//! to groups of ranks, whose ranks split the units of each. A rank with nothing to do is fine.

use std::ops::Range;

use kvferry_plan::{CacheShape, Part, PartShape, Placement, RankId, TokenMap, shard};

use crate::{checkpoint::ModelConfig, weights::ffn_units};

/// One rank's work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// KV heads that the rank stores.
    pub(crate) kv_heads: Range<usize>,
    /// Query heads whose projections the rank computes.
    pub(crate) heads: Range<usize>,
    /// Query heads that the ranks of its head group attend with, each over its own tokens.
    pub(crate) group_heads: Range<usize>,
    /// Heads of linear attention, whose state the rank holds.
    pub(crate) linear_heads: Range<usize>,
    /// Feed-forward units, where there are no experts.
    pub(crate) units: Range<usize>,
    /// Units of the expert of all tokens.
    pub(crate) shared_units: Range<usize>,
    /// Experts of which the rank computes a part.
    pub(crate) experts: Range<usize>,
    /// That part: units of each of these experts.
    pub(crate) expert_units: Range<usize>,
    /// Vocabulary rows of the output head.
    pub(crate) vocab: Range<usize>,
}

/// Sizes that are shared out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Totals {
    /// Query heads.
    pub(crate) heads: u32,
    /// Feed-forward units, where there are no experts.
    pub(crate) units: u32,
    /// Units of the expert of all tokens.
    pub(crate) shared_units: u32,
    /// Experts.
    pub(crate) experts: u32,
    /// Units of one expert.
    pub(crate) expert_units: u32,
    /// Groups of ranks to which experts are dealt; divides the ranks.
    pub(crate) expert_groups: u32,
    /// Vocabulary.
    pub(crate) vocab: u32,
}

impl Totals {
    /// What a model has, with its experts dealt to `expert_groups`.
    pub(crate) fn of(config: &ModelConfig, expert_groups: u32) -> Self {
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let moe = config.moe.as_ref();
        Self {
            heads: narrow(config.heads),
            units: narrow(ffn_units(config.ffn)),
            shared_units: moe.map_or(0, |moe| narrow(ffn_units(moe.shared_ffn))),
            experts: moe.map_or(0, |moe| narrow(moe.experts)),
            expert_units: moe.map_or(0, |moe| narrow(ffn_units(moe.ffn))),
            expert_groups,
            vocab: narrow(config.vocab),
        }
    }
}

/// The shares of the ranks of a pipeline stage, in rank order; every stage has the same.
pub(crate) fn shares(shape: &CacheShape, placement: &Placement, totals: Totals) -> Vec<Share> {
    // Keys and values have the same heads; a latent comes before any state.
    let Some(part) = shape.parts.first() else { return Vec::new() };
    let ranks = placement.tp;
    let group = dcp(placement);
    let of_expert = (ranks / totals.expert_groups.max(1)).max(1);
    let linear = shape.part(Part::Recurrent);
    (0..ranks)
        .map(|rank| {
            let first = rank / group * group;
            let of_group: Vec<Range<u32>> =
                (first..first + group).map(|r| query_heads(part, placement, totals.heads, r)).collect();
            let start = of_group.iter().map(|r| r.start).min().unwrap_or(0);
            let end = of_group.iter().map(|r| r.end).max().unwrap_or(0);
            Share {
                kv_heads: wide(placement.heads(part, RankId(rank))),
                heads: wide(query_heads(part, placement, totals.heads, rank)),
                group_heads: wide(start..end),
                linear_heads: wide(linear.map_or(0..0, |part| placement.heads(part, RankId(rank)))),
                units: wide(shard(totals.units, ranks, rank)),
                shared_units: wide(shard(totals.shared_units, ranks, rank)),
                experts: wide(shard(totals.experts, totals.expert_groups, rank / of_expert)),
                expert_units: wide(shard(totals.expert_units, of_expert, rank % of_expert)),
                vocab: wide(shard(totals.vocab, ranks, rank)),
            }
        })
        .collect()
}

/// Ranks of a head group.
pub(crate) fn dcp(placement: &Placement) -> u32 {
    match placement.parts.first().map(|part| part.tokens) {
        Some(TokenMap::Interleaved { ranks, .. }) => ranks.max(1),
        _ => 1,
    }
}

fn query_heads(part: &PartShape, placement: &Placement, heads: u32, rank: u32) -> Range<u32> {
    let held = |r| placement.heads(part, RankId(r));
    let mine = held(rank);
    let sharers: Vec<u32> = (0..placement.tp).filter(|r| held(*r) == mine).collect();
    let place = sharers.iter().position(|r| *r == rank).unwrap_or(0);
    let per_kv = heads / part.heads.max(1);
    let first = mine.start * per_kv;
    let count = (mine.end - mine.start) * per_kv;
    let cut = shard(count, sharers.len() as u32, place as u32);
    first + cut.start..first + cut.end
}

fn wide(range: Range<u32>) -> Range<usize> {
    range.start as usize..range.end as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_plan::{Dtype, LayoutSpec};
    use proptest::prelude::*;

    fn build(shape: &CacheShape, heads: u32, spec: &str) -> Vec<Share> {
        let placement = spec.parse::<LayoutSpec>().unwrap().placement(shape, Dtype::F32).unwrap();
        let totals = Totals {
            heads,
            units: 24,
            shared_units: 3,
            experts: 7,
            expert_units: 5,
            expert_groups: spec.split_once(",ep=").map_or(1, |(_, ep)| ep.parse().unwrap()),
            vocab: 100,
        };
        shares(shape, &placement, totals)
    }

    #[test]
    fn experts_go_to_groups_and_their_units_to_the_ranks_of_a_group() {
        let shares = build(&CacheShape::mla(2, 384), 8, "tp=4,ep=2");
        let experts: Vec<_> = shares.iter().map(|s| (s.experts.clone(), s.expert_units.clone())).collect();
        assert_eq!(experts, [(0..3, 0..2), (0..3, 2..5), (3..7, 0..2), (3..7, 2..5)]);
        let alone = build(&CacheShape::mla(2, 384), 8, "tp=4,ep=4");
        assert!(alone.iter().all(|s| s.expert_units == (0..5)));
        assert_eq!(alone.iter().map(|s| s.experts.len()).collect::<Vec<_>>(), [1, 2, 2, 2]);
    }

    #[test]
    fn linear_heads_are_where_their_state_is() {
        let [conv, recurrent] = CacheShape::kda([kvferry_plan::LayerId(0)].into(), 5, 16, 4);
        let latent = PartShape::rows(Part::Latent, [kvferry_plan::LayerId(1)].into(), 1, 80);
        let shares = build(&CacheShape { parts: vec![latent, conv, recurrent] }, 8, "tp=4,dcp=2");
        let heads: Vec<_> = shares.iter().map(|s| s.linear_heads.clone()).collect();
        assert_eq!(heads, [0..1, 1..2, 2..3, 3..5]);
    }

    #[test]
    fn smollm2_over_five_ranks() {
        let shares = build(&CacheShape::gqa(2, 3, 64), 9, "tp=5");
        let heads: Vec<_> = shares.iter().map(|s| s.heads.clone()).collect();
        assert_eq!(heads, [0..1, 1..3, 3..4, 4..6, 6..9]);
        let kv: Vec<_> = shares.iter().map(|s| s.kv_heads.clone()).collect();
        assert_eq!(kv, [0..1, 0..1, 1..2, 1..2, 2..3]);
    }

    #[test]
    fn a_head_group_attends_with_the_heads_of_all_its_ranks() {
        let shares = build(&CacheShape::mla(2, 384), 9, "tp=4,dcp=2");
        let heads: Vec<_> = shares.iter().map(|s| (s.heads.clone(), s.group_heads.clone())).collect();
        assert_eq!(heads, [(0..2, 0..4), (2..4, 0..4), (4..6, 4..9), (6..9, 4..9)]);
    }

    proptest! {
        /// Every item is somebody's work, once; and a rank's query heads read KV heads that it stores.
        #[test]
        fn work_is_dealt_out_completely(
            kv in 1_u32..6, per_kv in 1_u32..5, groups in 1_u32..7, dcp in 1_u32..4, latent: bool,
        ) {
            let shape = if latent { CacheShape::mla(1, 8) } else { CacheShape::gqa(1, kv, 8) };
            let heads = kv * per_kv;
            let shares = build(&shape, heads, &format!("tp={},dcp={dcp}", groups * dcp));
            let stored_per = if latent { heads } else { per_kv } as usize;
            type Pick = fn(&Share) -> Range<usize>;
            let picks: [(Pick, usize); 3] =
                [(|s| s.heads.clone(), heads as usize), (|s| s.units.clone(), 24), (|s| s.vocab.clone(), 100)];
            for (pick, total) in picks {
                let all: Vec<usize> = shares.iter().flat_map(pick).collect();
                prop_assert_eq!(all, (0..total).collect::<Vec<_>>());
            }
            for share in &shares {
                for head in share.group_heads.clone() {
                    prop_assert!(share.kv_heads.contains(&(head / stored_per)));
                }
                prop_assert!(share.heads.is_empty() || share.group_heads.start <= share.heads.start);
                prop_assert!(share.heads.is_empty() || share.heads.end <= share.group_heads.end);
            }
        }
    }
}
