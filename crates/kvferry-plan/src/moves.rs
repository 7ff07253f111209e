//! From rows to bytes: a run between two regions as one strided move.

use crate::{Bytes, Cast, Region, Row, Run};

/// The bytes of a row that go over: the heads that both ranks hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Offset in the source row.
    pub src_offset: Bytes,
    /// Offset in the target row.
    pub dst_offset: Bytes,
    /// Length in the target row, which is what crosses.
    pub len: Bytes,
    /// What the source makes of its bytes on the way, where the two sides have different element types.
    pub cast: Option<Cast>,
}

impl Slice {
    /// Length in the source row.
    #[must_use]
    pub fn src_len(&self) -> Bytes {
        src_len(self.len, self.cast)
    }
}

/// Bytes at the source of `len` bytes at the target.
pub(crate) fn src_len(len: Bytes, cast: Option<Cast>) -> Bytes {
    cast.map_or(len, |cast| cast.source_len(len))
}

/// Where the rows of a [`StridedMove`] lie in one arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// Offset of the first byte.
    pub offset: Bytes,
    /// From row to row inside a block.
    pub row: Bytes,
    /// From block to block.
    pub block: Bytes,
}

impl Strides {
    /// An offset that lies in no arena.
    const NOWHERE: Bytes = Bytes(u64::MAX);

    /// Offset of row `i` of block `b`; what 64 bits cannot count is an offset that no arena has.
    #[must_use]
    pub fn at(&self, b: u64, i: u64) -> Bytes {
        let blocks = self.block.0.saturating_mul(b);
        Bytes(self.offset.0.saturating_add(blocks).saturating_add(self.row.0.saturating_mul(i)))
    }

    /// The strides of a run's rows in `region`. Rows or bytes that the region does not have lie nowhere, rather
    /// than in the region behind it.
    fn in_region(region: &Region, row: Row, step: u64, slice_offset: Bytes, len: Bytes, run: &Run) -> Self {
        let last = step
            .checked_mul(run.blocks.saturating_sub(1))
            .and_then(|steps| steps.checked_add(row.0)?.checked_add(run.block.saturating_sub(1)));
        let inside = slice_offset.0.checked_add(len.0).is_some_and(|end| end <= region.row_bytes.0)
            && last.is_some_and(|last| last < region.rows);
        let offset = region
            .row_offset(row)
            .filter(|_| inside)
            .and_then(|at| at.0.checked_add(slice_offset.0))
            .map_or(Self::NOWHERE, Bytes);
        Self { offset, row: region.row_bytes, block: Bytes(step.saturating_mul(region.row_bytes.0)) }
    }
}

/// `blocks` x `rows` pieces of `len` bytes, strided on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedMove {
    /// Where they come from.
    pub src: Strides,
    /// Where they go.
    pub dst: Strides,
    /// Bytes of each piece at the target.
    pub len: Bytes,
    /// Pieces of a block.
    pub rows: u64,
    /// Blocks.
    pub blocks: u64,
    /// What becomes of the source's bytes, if they do not stay as they are.
    pub cast: Option<Cast>,
}

impl StridedMove {
    /// The bytes of `run` that lie in `slice`, between two regions.
    pub(crate) fn new(run: &Run, slice: Slice, src: &Region, dst: &Region) -> Self {
        Self {
            src: Strides::in_region(src, run.src_row, run.src_step, slice.src_offset, slice.src_len(), run),
            dst: Strides::in_region(dst, run.dst_row, run.dst_step, slice.dst_offset, slice.len, run),
            len: slice.len,
            rows: run.block,
            blocks: run.blocks,
            cast: slice.cast,
        }
        .merged()
    }

    /// Bytes of each piece at the source.
    #[must_use]
    pub fn src_len(&self) -> Bytes {
        src_len(self.len, self.cast)
    }

    /// Bytes written in all.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.len.0.saturating_mul(self.rows).saturating_mul(self.blocks))
    }

    /// The same bytes in the same order, in as few and as long pieces as the strides allow.
    fn merged(mut self) -> Self {
        let continues = |s: &Strides, rows: u64| s.row.0.checked_mul(rows) == Some(s.block.0);
        if self.blocks > 1 && continues(&self.src, self.rows) && continues(&self.dst, self.rows) {
            (self.rows, self.blocks) = (self.rows.saturating_mul(self.blocks), 1);
        }
        if self.rows > 1 && self.src.row == self.src_len() && self.dst.row == self.len {
            (self.len, self.rows) = (Bytes(self.len.0.saturating_mul(self.rows)), 1);
        }
        if self.rows == 1 && self.blocks > 1 {
            // One piece per block: the blocks are the rows.
            (self.src.row, self.dst.row) = (self.src.block, self.dst.block);
            (self.rows, self.blocks) = (self.blocks, 1);
        }
        self
    }
}
