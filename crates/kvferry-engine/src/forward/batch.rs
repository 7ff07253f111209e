//! What one step computes: tokens of several requests, row after row.

use std::ops::Range;

use kvferry_plan::{PageTable, SlotId, TokenRange};

use crate::math::query_block;

/// Consecutive tokens of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    /// Vocabulary ids.
    pub(crate) tokens: &'a [u32],
    /// Position of the first.
    pub(crate) start: u64,
    /// The request's pages, which hold the cache of everything before.
    pub(crate) table: &'a PageTable,
    /// The request's state slot, in a model that has such state: after everything before.
    pub(crate) slot: Option<SlotId>,
    /// Whether the logits after the last token are wanted.
    pub(crate) logits: bool,
}

/// What came of a piece.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// Positions that went through the model.
    pub(crate) computed: TokenRange,
    /// Logits after the last token, if wanted.
    pub(crate) logits: Option<Vec<f32>>,
    /// False when a value of one of its rows left the range of the arithmetic: nothing here is to be used.
    pub(crate) in_range: bool,
}

/// Rows of a piece that attend together to one KV head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) piece: usize,
    /// Batch rows.
    pub(super) rows: Range<usize>,
    /// KV head, counted from the rank's first.
    pub(super) kv: usize,
}

/// The rows of a step.
#[derive(Debug)]
pub(super) struct Batch<'a> {
    pub(super) pieces: &'a [Piece<'a>],
    /// Batch rows of each piece.
    pub(super) spans: Vec<Range<usize>>,
    /// Position of each row.
    pub(super) positions: Vec<u64>,
    /// Rows whose logits are wanted, ascending.
    pub(super) wanted: Vec<usize>,
}

impl<'a> Batch<'a> {
    pub(super) fn new(pieces: &'a [Piece<'a>]) -> Self {
        let mut batch = Self { pieces, spans: Vec::new(), positions: Vec::new(), wanted: Vec::new() };
        for piece in pieces {
            let first = batch.positions.len();
            batch.positions.extend(piece.start..piece.start + piece.tokens.len() as u64);
            let end = batch.positions.len();
            batch.spans.push(first..end);
            if piece.logits && end > first {
                batch.wanted.push(end - 1);
            }
        }
        batch
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> usize {
        self.positions.len()
    }

    /// Tokens that the cache holds for `piece` after this step.
    pub(super) fn context(&self, piece: usize) -> u64 {
        self.pieces.get(piece).map_or(0, |piece| piece.start + piece.tokens.len() as u64)
    }

    /// The blocks of rows that attend, in groups after each of which the ranks of a head group meet. All ranks
    /// of a head group must get the same answer, so it depends on nothing that differs between them.
    pub(super) fn meetings(&self, kv_heads: usize, heads_per_kv: usize, dcp: usize) -> Vec<Vec<Block>> {
        /// Scores that are kept until the ranks have met.
        const SCORES: usize = 512 << 10;
        let mut meetings: Vec<Vec<Block>> = Vec::new();
        let mut held = usize::MAX;
        for (piece, span) in self.spans.iter().enumerate() {
            let tokens = usize::try_from(self.context(piece)).unwrap_or(usize::MAX).div_ceil(dcp.max(1));
            let step = (query_block(tokens) / heads_per_kv.max(1)).max(1);
            for first in span.clone().step_by(step) {
                let rows = first..span.end.min(first + step);
                for kv in 0..kv_heads {
                    let scores = rows.len().saturating_mul(heads_per_kv).saturating_mul(tokens);
                    // Alone, a rank waits for nobody: it finishes each block while its scores are in the cache.
                    held = held.saturating_add(scores);
                    if dcp <= 1 || held > SCORES {
                        meetings.push(Vec::new());
                        held = scores;
                    }
                    if let Some(meeting) = meetings.last_mut() {
                        meeting.push(Block { piece, rows: rows.clone(), kv });
                    }
                }
            }
        }
        meetings
    }
}
