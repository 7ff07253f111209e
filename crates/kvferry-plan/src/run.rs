//! Runs of rows: what a plan is made of.

use crate::{Row, SlotId, Token};

/// Rows to copy, in token order: `blocks` blocks of `block` consecutive tokens. Block `b`, row `i` is token
/// `token + b * token_step + i`, source row `src_row + b * src_step + i` and target row
/// `dst_row + b * dst_step + i`. A run never leaves one source page and one target page; the steps of a single
/// block are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First token.
    pub token: Token,
    /// Tokens from block to block.
    pub token_step: u64,
    /// First source row.
    pub src_row: Row,
    /// Source rows from block to block.
    pub src_step: u64,
    /// First target row.
    pub dst_row: Row,
    /// Target rows from block to block.
    pub dst_step: u64,
    /// Consecutive rows of a block.
    pub block: u64,
    /// Number of blocks.
    pub blocks: u64,
}

impl Run {
    /// The rows of a state slot. State has no tokens; its rows are numbered instead.
    pub(crate) fn slot(src: SlotId, dst: SlotId, window: u32) -> Self {
        let window = u64::from(window);
        Self {
            token: Token(0),
            token_step: 0,
            src_row: Row(u64::from(src.0) * window),
            src_step: 0,
            dst_row: Row(u64::from(dst.0) * window),
            dst_step: 0,
            block: window,
            blocks: 1,
        }
    }

    /// Rows of the run.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.block.saturating_mul(self.blocks)
    }

    /// The (token, source row, target row) triples of the run, in token order. Numbers past 64 bits, which no
    /// plan has, come out as the largest number.
    ///
    /// ```
    /// use kvferry_plan::{Row, Run, Token};
    /// // Tokens 1, 5 and 9 of a dense page go side by side.
    /// let run = Run {
    ///     token: Token(1), token_step: 4, src_row: Row(65), src_step: 4, dst_row: Row(32), dst_step: 1,
    ///     block: 1, blocks: 3,
    /// };
    /// let rows: Vec<_> = run.expand().map(|(t, s, d)| (t.0, s.0, d.0)).collect();
    /// assert_eq!(rows, [(1, 65, 32), (5, 69, 33), (9, 73, 34)]);
    /// ```
    pub fn expand(&self) -> impl Iterator<Item = (Token, Row, Row)> + use<> {
        let run = *self;
        let at = |first: u64, step: u64, b: u64, i: u64| {
            first.saturating_add(step.saturating_mul(b)).saturating_add(i)
        };
        (0..run.blocks).flat_map(move |b| {
            (0..run.block).map(move |i| {
                (
                    Token(at(run.token.0, run.token_step, b, i)),
                    Row(at(run.src_row.0, run.src_step, b, i)),
                    Row(at(run.dst_row.0, run.dst_step, b, i)),
                )
            })
        })
    }
}
