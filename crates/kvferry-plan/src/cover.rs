//! What a source rank sends of a chunk, in coordinates: what its offer lists, and what a receiver plans from.

use alloc::{vec, vec::Vec};
use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{CoverageError, Part, RankId, TokenRange};

/// The token runs that one source rank sends, for the parts that it holds. [`crate::Pair::cover`] makes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(transparent)]
#[serde(transparent)]
pub struct Cover(#[n(0)] pub Vec<Covered>);

/// Parts of which the same tokens are sent.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
pub struct Covered {
    /// The parts.
    #[n(0)]
    pub parts: Vec<Part>,
    /// Their tokens: ascending, disjoint, none empty, as long as they go. A DCP rank holds those of its class.
    #[n(1)]
    pub runs: Vec<TokenRange>,
}

impl Covered {
    /// Joins pages that follow one another.
    pub(crate) fn new(part: Part, pages: impl Iterator<Item = TokenRange>) -> Self {
        let mut runs: Vec<TokenRange> = Vec::new();
        for page in pages.filter(|page| !page.is_empty()) {
            match runs.last_mut().filter(|open| open.end == page.start) {
                Some(open) => open.end = page.end,
                None => runs.push(page),
            }
        }
        Self { parts: vec![part], runs }
    }
}

impl Cover {
    /// The token runs of `part`.
    #[must_use]
    pub fn of(&self, part: Part) -> &[TokenRange] {
        self.0.iter().find(|c| c.parts.contains(&part)).map_or(&[], |c| &c.runs)
    }

    /// Checks what `source` says that it sends of `chunk`: runs that ascend, hold tokens and stay in the chunk, and
    /// each part once.
    ///
    /// # Errors
    /// Names the run; the peer's fault.
    pub fn check(&self, source: RankId, chunk: TokenRange) -> Result<(), CoverageError> {
        let source_rank = source;
        let mut seen = Vec::new();
        for covered in &self.0 {
            for &part in &covered.parts {
                if seen.contains(&part) || part.is_state() {
                    return Err(CoverageError::Part { source_rank, part });
                }
                seen.push(part);
            }
            let mut before: Option<TokenRange> = None;
            for &run in &covered.runs {
                if run.is_empty() {
                    return Err(CoverageError::Empty { source_rank, chunk: run });
                }
                if run.start < chunk.start || run.end > chunk.end {
                    return Err(CoverageError::Outside { source_rank, chunk: run, tokens: chunk });
                }
                if let Some(earlier) = before.filter(|earlier| earlier.end > run.start) {
                    return Err(CoverageError::Overlap { source_rank, chunk: run, earlier });
                }
                before = Some(run);
            }
        }
        Ok(())
    }
}
