//! The rows of a unit as they lie in one arena.

#![forbid(unsafe_code)]

use std::ops::Range;

use kvferry_plan::{Bytes, Region, Row, Run, Slice, Strides, Unit};

use crate::ArenaError;

/// Which end of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Where bytes come from.
    Source,
    /// Where bytes go.
    Target,
}

/// `blocks` x `rows` pieces of `len` bytes at strided places of one arena, in token order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Where they lie.
    pub strides: Strides,
    /// Bytes of each.
    pub len: Bytes,
    /// Pieces of a block.
    pub rows: u64,
    /// Blocks.
    pub blocks: u64,
}

impl Pieces {
    /// The rows of `run` on one side, `slice` bytes of each, checked to lie in `region`.
    ///
    /// # Errors
    /// [`ArenaError::OutOfRegion`].
    pub fn of_run(run: &Run, slice: Slice, side: Side, region: &Region) -> Result<Self, ArenaError> {
        let (first, step, start) = match side {
            Side::Source => (run.src_row, run.src_step, slice.src_offset),
            Side::Target => (run.dst_row, run.dst_step, slice.dst_offset),
        };
        let last = run
            .blocks
            .saturating_sub(1)
            .saturating_mul(step)
            .saturating_add(run.block.saturating_sub(1))
            .saturating_add(first.0);
        let end = start.0.saturating_add(slice.len.0);
        if last >= region.rows || end > region.row_bytes.0 {
            return Err(ArenaError::OutOfRegion {
                row: Row(last),
                end: Bytes(end),
                row_bytes: region.row_bytes,
                rows: region.rows,
            });
        }
        // Nothing below overflows: the last row lies inside the region, whose size is a number of bytes.
        let strides = Strides {
            offset: Bytes(region.offset.0 + first.0 * region.row_bytes.0 + start.0),
            row: region.row_bytes,
            block: Bytes(step.saturating_mul(region.row_bytes.0)),
        };
        Ok(Self { strides, len: slice.len, rows: run.block, blocks: run.blocks })
    }

    /// All rows of `unit` on one side, as few and as long as they lie.
    ///
    /// # Errors
    /// [`ArenaError::OutOfRegion`], per run.
    pub fn of_unit<'a>(
        unit: &Unit<'a>,
        side: Side,
        region: &'a Region,
    ) -> impl Iterator<Item = Result<Self, ArenaError>> + use<'a> {
        let slice = unit.slice;
        unit.runs.iter().map(move |run| Ok(Self::of_run(run, slice, side, region)?.merged()))
    }

    /// Rows `rows` of `unit` on one side, counted in token order: for a unit that is larger than a frame.
    ///
    /// # Errors
    /// [`ArenaError::OutOfRegion`], per run.
    pub fn of_rows<'a>(
        unit: &Unit<'a>,
        side: Side,
        region: &'a Region,
        rows: Range<u64>,
    ) -> impl Iterator<Item = Result<Self, ArenaError>> + use<'a> {
        let slice = unit.slice;
        let mut before = 0_u64;
        unit.runs.iter().flat_map(move |run| {
            let start = rows.start.saturating_sub(before).min(run.rows());
            let end = rows.end.saturating_sub(before).min(run.rows());
            before = before.saturating_add(run.rows());
            let parts = match Self::of_run(run, slice, side, region) {
                _ if start >= end => [None, None, None],
                Ok(pieces) => pieces.clip(start..end).map(|p| p.map(|p| Ok(p.merged()))),
                Err(error) => [Some(Err(error)), None, None],
            };
            parts.into_iter().flatten()
        })
    }

    /// Pieces `range`, not empty, as the rest of a block, whole blocks and the start of a block.
    fn clip(self, range: Range<u64>) -> [Option<Self>; 3] {
        let part = |from: u64, rows: u64, blocks: u64| {
            let offset = self.strides.at(from / self.rows, from % self.rows);
            (rows > 0 && blocks > 0).then_some(Self {
                strides: Strides { offset, ..self.strides },
                rows,
                blocks,
                ..self
            })
        };
        let first_whole = range.start.next_multiple_of(self.rows);
        if first_whole >= range.end {
            return [part(range.start, range.end - range.start, 1), None, None];
        }
        let whole = (range.end - first_whole) / self.rows;
        let rest = first_whole + whole * self.rows;
        [
            part(range.start, first_whole - range.start, 1),
            part(first_whole, self.rows, whole),
            part(rest, range.end - rest, 1),
        ]
    }

    /// Joins pieces that touch.
    #[must_use]
    pub fn merged(mut self) -> Self {
        if self.rows > 1 && self.strides.row == self.len {
            self.len = Bytes(self.len.0 * self.rows);
            self.rows = 1;
        }
        if self.rows == 1 && self.blocks > 1 {
            self.strides.row = self.strides.block;
            (self.rows, self.blocks) = (self.blocks, 1);
            if self.strides.row == self.len {
                self.len = Bytes(self.len.0 * self.rows);
                self.rows = 1;
            }
        }
        self
    }

    /// Bytes of all pieces, saturated.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.len.0.saturating_mul(self.rows).saturating_mul(self.blocks))
    }

    /// Offset of piece `i` of block `b`.
    ///
    /// # Errors
    /// [`ArenaError::OutOfBounds`] when it cannot be counted in 64 bits.
    pub fn at(&self, b: u64, i: u64) -> Result<Bytes, ArenaError> {
        offset(&self.strides, b, i, self.len)
    }
}

/// Offset of piece `i` of block `b`, checked against overflow.
pub(crate) fn offset(strides: &Strides, b: u64, i: u64, len: Bytes) -> Result<Bytes, ArenaError> {
    b.checked_mul(strides.block.0)
        .and_then(|n| n.checked_add(i.checked_mul(strides.row.0)?))
        .and_then(|n| n.checked_add(strides.offset.0))
        .map(Bytes)
        .ok_or(ArenaError::OutOfBounds { offset: strides.offset, len, arena: Bytes(u64::MAX) })
}
