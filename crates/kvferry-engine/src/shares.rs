//! Which part of every matrix a rank works on. Query heads stay with the KV head they read; the ranks that hold the
//! same KV heads (replicas, and the ranks of a DCP head group) split its query heads. The feed-forward network is
//! split in whole units, the vocabulary by rows. A rank with nothing to do is fine.

use std::ops::Range;

use kvferry_plan::{CacheShape, PartShape, Placement, RankId, TokenMap, shard};

/// One rank's work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// KV heads that the rank stores.
    pub(crate) kv_heads: Range<usize>,
    /// Query heads whose projections the rank computes.
    pub(crate) heads: Range<usize>,
    /// Query heads that the ranks of its head group attend with, each over its own tokens.
    pub(crate) group_heads: Range<usize>,
    /// Feed-forward units.
    pub(crate) units: Range<usize>,
    /// Vocabulary rows of the output head.
    pub(crate) vocab: Range<usize>,
}

/// Sizes that are shared out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Totals {
    /// Query heads.
    pub(crate) heads: u32,
    /// Feed-forward units.
    pub(crate) units: u32,
    /// Vocabulary.
    pub(crate) vocab: u32,
}

/// The shares of all ranks, in rank order.
pub(crate) fn shares(shape: &CacheShape, placement: &Placement, totals: Totals) -> Vec<Share> {
    // Keys and values (or the latent alone) have the same heads.
    let Some(part) = shape.parts.first() else { return Vec::new() };
    let ranks = placement.tp;
    let group = dcp(placement);
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
                units: wide(shard(totals.units, ranks, rank)),
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
        shares(shape, &placement, Totals { heads, units: 24, vocab: 100 })
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
