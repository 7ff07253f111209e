//! What pools of a size let in and take, as numbers to be told. Not for asking whether a request fits
//! ([`Capacity::fit`]).

use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

use crate::{AdmissionPath, Bytes, Capacity, Hold, Part, PoolLayout, RankId};

/// What one instance holds, lets in and takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footprint {
    /// Tokens that the pool holds, over all requests.
    pub pool_tokens: u64,
    /// Tokens of a page; under DCP of a virtual one.
    pub page_tokens: u64,
    /// Pages, the same on every rank; with KV sharding logical pages, of all ranks together.
    pub pages: u32,
    /// Ranks over which logical pages are dealt; 1 without KV sharding.
    pub shard_ranks: u32,
    /// Longest prompt that is let in.
    pub longest_prompt: LongestPrompt,
    /// What the pool takes on each rank.
    pub ranks: Vec<RankFootprint>,
}

/// The longest prompt that is let in, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LongestPrompt {
    /// Where only the prompt is held.
    Prefill {
        /// On [`AdmissionPath::Normal`].
        normal: u64,
        /// On [`AdmissionPath::IgnoreEos`].
        ignore_eos: u64,
    },
    /// Where its answer is held too.
    Decode {
        /// With at least one token of the answer.
        answered: u64,
    },
}

/// What the pool takes on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFootprint {
    /// The rank.
    pub rank: RankId,
    /// Pages that it has.
    pub pages: u32,
    /// State slots that it has.
    pub slots: u32,
    /// Rows of each part that it holds.
    pub parts: Vec<PartBytes>,
    /// Generation words of pages and slots.
    pub generation_bytes: Bytes,
    /// The whole arena: all of these, each region rounded up to a page of the operating system.
    pub total_bytes: Bytes,
}

/// Bytes of a part's rows, over all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartBytes {
    /// The part.
    pub part: Part,
    /// Its bytes.
    pub bytes: Bytes,
}

impl LongestPrompt {
    /// At an instance that holds prompts for others to continue.
    #[must_use]
    pub fn prefill(capacity: &Capacity) -> Self {
        let longest = |path| capacity.longest(Hold::Prompt(path));
        Self::Prefill {
            normal: longest(AdmissionPath::Normal),
            ignore_eos: longest(AdmissionPath::IgnoreEos),
        }
    }

    /// At an instance that holds answers.
    #[must_use]
    pub fn decode(capacity: &Capacity) -> Self {
        Self::Decode { answered: capacity.longest(Hold::Continue) }
    }

    /// On a path.
    #[must_use]
    pub fn on(self, path: AdmissionPath) -> u64 {
        match (self, path) {
            (Self::Prefill { normal, .. }, AdmissionPath::Normal) => normal,
            (Self::Prefill { ignore_eos, .. }, AdmissionPath::IgnoreEos) => ignore_eos,
            (Self::Decode { answered }, _) => answered,
        }
    }
}

impl Footprint {
    /// Of an instance with these pools, by rank.
    ///
    /// ```
    /// use kvferry_plan::*;
    /// let shape = CacheShape::mla(2, 96);
    /// let sharded = "tp=4,shard=on,page=16".parse::<LayoutSpec>()?.placement(&shape, Dtype::Bf16)?;
    /// let size = PoolSize { pages: sharded.pool_pages(1000).unwrap(), slots: 0 };
    /// let pools = (0..4).map(|r| PoolLayout::with_slots(&shape, &sharded, RankId(r), size));
    /// let pools = pools.collect::<Result<Vec<_>, _>>()?;
    /// let parts = sharded.parts.clone();
    /// let capacity =
    ///     Capacity { max_model_len: 4096, made_for: 4096, pages: size.pages, parts, prefix_cache: true };
    /// let footprint = Footprint::new(&capacity, LongestPrompt::prefill(&capacity), &pools);
    /// // 64 logical pages of 16 tokens, 16 on each rank; a page on each of 4 ranks and 2 tokens are kept back.
    /// assert_eq!((footprint.pool_tokens, footprint.ranks[0].pages), (1024, 16));
    /// assert_eq!(footprint.longest_prompt.on(AdmissionPath::Normal), 1024 - 64 - 2);
    /// assert_eq!(footprint.ranks[3].parts[0].bytes, Bytes(16 * 16 * 96 * 2 * 2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn new<'a>(
        capacity: &Capacity,
        longest_prompt: LongestPrompt,
        pools: impl IntoIterator<Item = &'a PoolLayout>,
    ) -> Self {
        Self {
            pool_tokens: capacity.pool_tokens(),
            page_tokens: capacity.page_tokens(),
            pages: capacity.pages,
            shard_ranks: capacity.shard_ranks(),
            longest_prompt,
            ranks: (0..).zip(pools).map(|(rank, pool)| RankFootprint::new(RankId(rank), pool)).collect(),
        }
    }
}

impl RankFootprint {
    fn new(rank: RankId, pool: &PoolLayout) -> Self {
        let mut parts: Vec<PartBytes> = Vec::new();
        for region in pool.regions() {
            let bytes = region.rows * region.row_bytes.0;
            match parts.iter_mut().find(|held| held.part == region.part) {
                Some(held) => held.bytes.0 += bytes,
                None => parts.push(PartBytes { part: region.part, bytes: Bytes(bytes) }),
            }
        }
        parts.sort_unstable_by_key(|held| held.part);
        Self {
            rank,
            pages: pool.pages(),
            slots: pool.slots(),
            parts,
            generation_bytes: pool.generation_bytes(),
            total_bytes: pool.len(),
        }
    }
}
