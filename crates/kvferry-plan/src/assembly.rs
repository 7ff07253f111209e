//! What has been announced to a target, part by part and token by token: no byte twice, and in the end none missing.
//!
//! [`crate::Coverage`] asks whether every rank spoke of every chunk; this asks whether what they said adds up, which
//! matters where page ids decide who holds what. Not for bytes: whether the right ones arrived is the digest's question.
//!
//! `kvferry-session` does not need it: its offers are one token range for each source rank and one [`crate::Rotation`]
//! for all, which says everything, because owners in the tables of this engine are cyclic. Who embeds the planner for an
//! engine that deals pages in any order finds the check here; `kvferry bench plan` times it.

use alloc::collections::BTreeMap;

use crate::{Accepted, Cover, CoverageError, Pair, Part, RankId, TokenMap, TokenRange};

/// Ranks that hold the same heads of the same layers; whose tokens must therefore be disjoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Holders {
    part: Part,
    stage: u32,
    first_head: u32,
    /// DCP rank; 0 where positions do not decide.
    class: u32,
}

/// The token runs that all source ranks of a pair announced for one hand-off.
///
/// ```
/// use kvferry_plan::*;
/// let shape = CacheShape::mla(1, 576);
/// let target = Placement::single(&shape, 4, Dtype::Bf16);
/// let mut sharded = target.clone();
/// (sharded.tp, sharded.parts[0].tokens) = (2, TokenMap::PageSharded { ranks: 2 });
/// let pair = Pair::new(shape, sharded, target).unwrap();
/// let (table, tokens) = (PageTable([8, 3, 5, 6].map(PageId).into()), TokenRange::new(0, 16));
/// let cover = |rank| pair.cover(End { rank, table: &table }, tokens).unwrap();
/// let mut assembly = Assembly::new(&pair, tokens);
/// assert_eq!(assembly.accept(&pair, RankId(0), tokens, &cover(RankId(0))), Ok(Accepted::New));
/// assert_eq!(assembly.gap(&pair), Some((Part::Latent, TokenRange::new(4, 12))));
/// assert!(assembly.accept(&pair, RankId(1), tokens, &cover(RankId(0))).is_err(), "these are rank 0's");
/// assert_eq!(assembly.accept(&pair, RankId(1), tokens, &cover(RankId(1))), Ok(Accepted::New));
/// assert_eq!(assembly.gap(&pair), None);
/// ```
#[derive(Clone, Debug)]
pub struct Assembly {
    tokens: TokenRange,
    /// Of each set of holders the disjoint runs: start to end and announcer.
    runs: BTreeMap<Holders, BTreeMap<u64, (u64, RankId)>>,
}

impl Assembly {
    /// Nothing is announced yet of `tokens`.
    #[must_use]
    pub fn new(pair: &Pair, tokens: TokenRange) -> Self {
        let ranks = (0..pair.src().ranks()).map(RankId);
        let parts = ranks.flat_map(|rank| pair.shape().parts.iter().map(move |p| (rank, p.part)));
        let holders = parts.filter_map(|(rank, part)| holders(pair, rank, part));
        Self { tokens, runs: holders.map(|h| (h, BTreeMap::new())).collect() }
    }

    /// Counts what a source rank says that it sends of a chunk.
    ///
    /// # Errors
    /// When a run is malformed, outside the chunk or the hand-off, of a part that the rank does not hold, or overlaps
    /// what has been announced. Nothing changes then.
    pub fn accept(
        &mut self,
        pair: &Pair,
        source: RankId,
        chunk: TokenRange,
        cover: &Cover,
    ) -> Result<Accepted, CoverageError> {
        let source_rank = source;
        if source.0 >= pair.src().ranks() {
            return Err(CoverageError::Rank { source_rank, sources: pair.src().ranks() });
        }
        if chunk.start < self.tokens.start || chunk.end > self.tokens.end {
            return Err(CoverageError::Outside { source_rank, chunk, tokens: self.tokens });
        }
        cover.check(source, chunk)?;
        let mut verdict = Accepted::Repeat;
        for (part, runs) in listed(cover) {
            let known = holders(pair, source, part).and_then(|h| self.runs.get(&h));
            let Some(known) = known else { return Err(CoverageError::Foreign { source_rank, part }) };
            for &run in runs {
                let (start, end) = (run.start.0, run.end.0);
                // Known runs are disjoint: of those that start before this one ends, only the last can reach into it.
                match known.range(..end).next_back() {
                    Some((&s, &(e, other))) if (s, e, other) != (start, end, source) && e > start => {
                        return Err(CoverageError::Taken { source_rank, part, run, other });
                    }
                    Some((&s, &(e, _))) if (s, e) == (start, end) => {}
                    _ => verdict = Accepted::New,
                }
            }
        }
        for (part, runs) in listed(cover) {
            if let Some(known) = holders(pair, source, part).and_then(|h| self.runs.get_mut(&h)) {
                known.extend(runs.iter().map(|run| (run.start.0, (run.end.0, source))));
            }
        }
        Ok(verdict)
    }

    /// The first tokens that nobody has announced, and of which part; `None` when every token of every part has come
    /// once. Under DCP the tokens between those of one rank count as announced with them.
    #[must_use]
    pub fn gap(&self, pair: &Pair) -> Option<(Part, TokenRange)> {
        let parts = &pair.shape().parts;
        let in_order = parts.iter().flat_map(|p| self.runs.iter().filter(move |(h, _)| h.part == p.part));
        in_order.into_iter().find_map(|(holders, runs)| {
            let tokens = pair.src().part(holders.part)?.tokens;
            let owns = |from: u64, to: u64| {
                let owned = |end| tokens.owned(crate::Token(end), holders.class);
                from < to && owned(to) > owned(from)
            };
            let mut at = self.tokens.start.0;
            for (&start, &(end, _)) in runs {
                if owns(at, start) {
                    return Some((holders.part, TokenRange::new(at, start)));
                }
                at = at.max(end);
            }
            let end = self.tokens.end.0;
            owns(at, end).then(|| (holders.part, TokenRange::new(at, end)))
        })
    }
}

/// Every part that a cover lists, with its runs. Those without runs say nothing.
fn listed(cover: &Cover) -> impl Iterator<Item = (Part, &[TokenRange])> {
    let told = cover.0.iter().filter(|c| !c.runs.is_empty());
    told.flat_map(|c| c.parts.iter().map(move |part| (*part, c.runs.as_slice())))
}

/// Whom a rank shares its tokens of a part with; `None` if it holds nothing of the part.
fn holders(pair: &Pair, rank: RankId, part: Part) -> Option<Holders> {
    let src = pair.src();
    let (shape, layout) = (pair.shape().part(part)?, src.part(part)?);
    let held = src.heads(shape, rank);
    if shape.state.is_some() || held.is_empty() || src.layers(shape, rank).is_empty() {
        return None;
    }
    let class = match layout.tokens {
        TokenMap::Interleaved { .. } => src.class(part, rank),
        TokenMap::Dense | TokenMap::PageSharded { .. } => 0,
    };
    Some(Holders { part, stage: src.coords(rank)?.stage, first_head: held.start, class })
}
