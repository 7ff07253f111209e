//! Coverage: proven once for two placements, then watched while chunks arrive.
//!
//! Not for bytes: whether the right bytes arrived is the digest's question.

use alloc::{collections::BTreeMap, format, vec::Vec};
use core::ops::{Bound, Range};

use crate::unsupported::unsupported;
use crate::{Axis, Blame, CacheShape, Part, PartShape, Placement, RankId, TokenRange, Unsupported};

/// Proves that the ranks of a checked placement hold every (layer, part, head, token) of `shape`. Then two
/// placements of one shape cover the same space.
///
/// Layers are each in exactly one stage (checked), and all stages deal heads and tokens alike, so that it is
/// enough to look at one stage: for every token class, the heads of the ranks of that class must reach from the
/// first head to the last without a gap.
pub(crate) fn prove(side: &str, shape: &CacheShape, placement: &Placement) -> Result<(), Unsupported> {
    shape.parts.iter().try_for_each(|part| prove_part(side, part, placement))
}

fn prove_part(side: &str, part: &PartShape, placement: &Placement) -> Result<(), Unsupported> {
    part.groups().enumerate().try_for_each(|(i, group)| prove_group(side, part, placement, i, group))
}

fn prove_group(
    side: &str,
    part: &PartShape,
    placement: &Placement,
    group: usize,
    heads: Range<u32>,
) -> Result<(), Unsupported> {
    let classes = placement.part(part.part).map_or(0, |layout| layout.tokens.classes());
    let per_stage = placement.cp.saturating_mul(placement.tp);
    let mut held: Vec<(u32, u32, u32)> = (0..per_stage)
        .map(RankId)
        .map(|rank| (placement.class(part.part, rank), placement.shares(part, rank).nth(group)))
        .filter_map(|(class, share)| share.map(|heads| (class, heads.start, heads.end)))
        .collect();
    held.sort_unstable();
    let mut held = held.into_iter().peekable();
    for class in 0..classes {
        let mut reached = heads.start;
        while let Some((_, start, end)) = held.next_if(|(c, ..)| *c == class) {
            if start <= reached {
                reached = reached.max(end);
            }
        }
        if reached < heads.end {
            return unsupported(
                Axis::Coverage,
                format!(
                    "{side}: no rank holds head {reached} of part `{}` for token class {class} of {classes}",
                    part.part
                ),
            );
        }
    }
    Ok(())
}

/// The chunks that source ranks have announced for one hand-off: each rank must cover the token range, once.
///
/// Chunks may come in any order, of any rank, and twice.
///
/// ```
/// use kvferry_plan::{Accepted, Coverage, RankId, TokenRange};
/// let mut coverage = Coverage::new(2, TokenRange::new(0, 100));
/// assert_eq!(coverage.accept(RankId(0), TokenRange::new(64, 100)), Ok(Accepted::New));
/// assert_eq!(coverage.accept(RankId(0), TokenRange::new(0, 64)), Ok(Accepted::New));
/// assert_eq!(coverage.accept(RankId(0), TokenRange::new(0, 64)), Ok(Accepted::Repeat));
/// assert!(coverage.accept(RankId(1), TokenRange::new(64, 101)).is_err());
/// assert!(coverage.covers(RankId(0)) && !coverage.complete());
/// assert!(coverage.has(RankId(0), TokenRange::new(0, 64)) && !coverage.has(RankId(0), TokenRange::new(0, 32)));
/// assert_eq!(coverage.gap(RankId(1)), Some(TokenRange::new(0, 100)));
/// ```
#[derive(Clone, Debug)]
pub struct Coverage {
    sources: u32,
    tokens: TokenRange,
    heard: BTreeMap<RankId, Chunks>,
}

/// What one source rank announced: disjoint chunks, start to end, and their tokens in all.
#[derive(Clone, Debug, Default)]
struct Chunks {
    ends: BTreeMap<u64, u64>,
    tokens: u64,
}

/// What became of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// It is counted.
    New,
    /// The same chunk of the same rank was counted before; nothing changed.
    Repeat,
}

/// Why a chunk was not accepted; the peer's fault. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoverageError {
    /// The chunk holds no token.
    #[error("source rank {source_rank} announced the empty chunk {chunk}; a chunk holds at least one token")]
    Empty {
        /// The rank.
        source_rank: RankId,
        /// Its chunk.
        chunk: TokenRange,
    },
    /// The chunk leaves the tokens of the hand-off.
    #[error("source rank {source_rank} announced tokens {chunk}, but the hand-off is of tokens {tokens}")]
    Outside {
        /// The rank.
        source_rank: RankId,
        /// Its chunk.
        chunk: TokenRange,
        /// The tokens of the hand-off.
        tokens: TokenRange,
    },
    /// The chunk overlaps an earlier one of the same rank.
    #[error(
        "source rank {source_rank} announced tokens {chunk} after tokens {earlier}; chunks may not overlap"
    )]
    Overlap {
        /// The rank.
        source_rank: RankId,
        /// Its chunk.
        chunk: TokenRange,
        /// The chunk that it announced before.
        earlier: TokenRange,
    },
    /// A part comes twice, or has no tokens that could be covered.
    #[error("source rank {source_rank} listed tokens of part `{part}`, which comes twice or has no tokens")]
    Part {
        /// The rank.
        source_rank: RankId,
        /// The part.
        part: Part,
    },
    /// Another rank that holds the same has already announced some of these tokens.
    #[error(
        "source rank {source_rank} announced tokens {run} of part `{part}`, of which rank {other} announced some"
    )]
    Taken {
        /// The rank.
        source_rank: RankId,
        /// The part.
        part: Part,
        /// What it announced.
        run: TokenRange,
        /// Who was first.
        other: RankId,
    },
    /// The rank announced tokens of a part of which it holds nothing.
    #[error("source rank {source_rank} announced tokens of part `{part}`, of which it holds nothing")]
    Foreign {
        /// The rank.
        source_rank: RankId,
        /// The part.
        part: Part,
    },
    /// The instance has no such rank.
    #[error("source rank {source_rank} of an instance with {sources} ranks announced a chunk")]
    Rank {
        /// The rank.
        source_rank: RankId,
        /// Ranks of the instance.
        sources: u32,
    },
}

impl CoverageError {
    /// A source that announces such a chunk breaks the protocol.
    #[must_use]
    pub fn blame(&self) -> Blame {
        Blame::PeerMisbehaved
    }
}

impl Coverage {
    /// Nothing is covered yet: `sources` source ranks are to announce `tokens`, each for itself.
    #[must_use]
    pub fn new(sources: u32, tokens: TokenRange) -> Self {
        Self { sources, tokens, heard: BTreeMap::new() }
    }

    /// Counts a chunk of a source rank.
    ///
    /// # Errors
    /// When the rank does not exist, or the chunk is empty, leaves the range or overlaps another of this rank.
    pub fn accept(&mut self, source: RankId, chunk: TokenRange) -> Result<Accepted, CoverageError> {
        let source_rank = source;
        if source.0 >= self.sources {
            return Err(CoverageError::Rank { source_rank, sources: self.sources });
        }
        if chunk.is_empty() {
            return Err(CoverageError::Empty { source_rank, chunk });
        }
        if chunk.start < self.tokens.start || chunk.end > self.tokens.end {
            return Err(CoverageError::Outside { source_rank, chunk, tokens: self.tokens });
        }
        let chunks = self.heard.entry(source).or_default();
        if chunks.ends.get(&chunk.start.0) == Some(&chunk.end.0) {
            return Ok(Accepted::Repeat);
        }
        // Chunks are disjoint: of those that start before this one ends, only the last can reach into it.
        if let Some((&start, &end)) = chunks.ends.range(..chunk.end.0).next_back()
            && end > chunk.start.0
        {
            return Err(CoverageError::Overlap { source_rank, chunk, earlier: TokenRange::new(start, end) });
        }
        chunks.ends.insert(chunk.start.0, chunk.end.0);
        chunks.tokens = chunks.tokens.saturating_add(chunk.len());
        Ok(Accepted::New)
    }

    /// True when the rank announced this very chunk.
    #[must_use]
    pub fn has(&self, source: RankId, chunk: TokenRange) -> bool {
        self.heard.get(&source).and_then(|chunks| chunks.ends.get(&chunk.start.0)) == Some(&chunk.end.0)
    }

    /// True when the rank announced every token.
    #[must_use]
    pub fn covers(&self, source: RankId) -> bool {
        let heard = self.heard.get(&source).map_or(0, |chunks| chunks.tokens);
        source.0 < self.sources && heard == self.tokens.len()
    }

    /// True when every rank announced every token.
    #[must_use]
    pub fn complete(&self) -> bool {
        let whole = self.heard.values().filter(|chunks| chunks.tokens == self.tokens.len()).count() as u64;
        self.tokens.is_empty() || whole == u64::from(self.sources)
    }

    /// The first tokens that the rank has not announced, if any: what a timeout should name.
    #[must_use]
    pub fn gap(&self, source: RankId) -> Option<TokenRange> {
        let none = BTreeMap::new();
        let ends = self.heard.get(&source).map_or(&none, |chunks| &chunks.ends);
        let mut start = self.tokens.start.0;
        while let Some(end) = ends.get(&start) {
            start = *end;
        }
        let after = (Bound::Excluded(start), Bound::Unbounded);
        let end = ends.range(after).next().map_or(self.tokens.end.0, |(next, _)| *next);
        (start < end).then(|| TokenRange::new(start, end))
    }
}
