//! The rows of a unit as they lie in one arena.

#![forbid(unsafe_code)]

use std::ops::Range;

use kvferry_plan::{Bytes, Region, Row, Run, Strides, Token, Unit};

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
    /// Rows `rows` of `unit` on one side, counted in token order, as few pieces and as long as they lie there. Rows that
    /// `region` does not have lie outside every arena.
    pub fn of_rows<'a>(
        unit: &Unit<'a>,
        side: Side,
        region: &'a Region,
        rows: Range<u64>,
    ) -> impl Iterator<Item = Self> + use<'a> {
        let unit = *unit;
        let mut before = 0_u64;
        unit.runs.iter().flat_map(move |run| {
            let start = rows.start.saturating_sub(before).min(run.rows());
            let end = rows.end.saturating_sub(before).min(run.rows());
            before = before.saturating_add(run.rows());
            let runs = if start < end { clip(run, start..end) } else { [None; 3] };
            runs.into_iter().flatten().filter_map(move |run| Self::of_run(run, &unit, side, region))
        })
    }

    /// The rows of `run` on one side. Addresses are the planner's: a move of the run onto itself joins the pieces
    /// that touch on this side.
    fn of_run(mut run: Run, unit: &Unit<'_>, side: Side, region: &Region) -> Option<Self> {
        let mut slice = unit.slice;
        match side {
            Side::Source => {
                // As they lie there, before any conversion.
                (slice.len, slice.cast) = (slice.src_len(), None);
                (run.dst_row, run.dst_step, slice.dst_offset) = (run.src_row, run.src_step, slice.src_offset);
            }
            Side::Target => {
                slice.cast = None;
                (run.src_row, run.src_step, slice.src_offset) = (run.dst_row, run.dst_step, slice.dst_offset);
            }
        }
        let own = Unit { runs: std::slice::from_ref(&run), slice, ..*unit };
        let m = own.moves(region, region).next()?;
        Some(Self { strides: m.src, len: m.len, rows: m.rows, blocks: m.blocks })
    }

    /// Bytes of all pieces, saturated.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.len.0.saturating_mul(self.rows).saturating_mul(self.blocks))
    }

    /// Offsets of the pieces, in order.
    pub fn offsets(&self) -> impl Iterator<Item = Bytes> + use<> {
        let Self { strides, rows, blocks, .. } = *self;
        (0..blocks).flat_map(move |b| (0..rows).map(move |i| strides.at(b, i)))
    }
}

/// Rows `range`, not empty, of `run`: the rest of a block, whole blocks, and the start of a block.
fn clip(run: &Run, range: Range<u64>) -> [Option<Run>; 3] {
    let part = |from: u64, block: u64, blocks: u64| {
        let (b, i) = (from / run.block, from % run.block);
        let on = |first: u64, step: u64| first.wrapping_add(b.wrapping_mul(step)).wrapping_add(i);
        (block > 0 && blocks > 0).then_some(Run {
            token: Token(on(run.token.0, run.token_step)),
            src_row: Row(on(run.src_row.0, run.src_step)),
            dst_row: Row(on(run.dst_row.0, run.dst_step)),
            block,
            blocks,
            ..*run
        })
    };
    let first_whole = range.start.next_multiple_of(run.block);
    if first_whole >= range.end {
        return [part(range.start, range.end - range.start, 1), None, None];
    }
    let whole = (range.end - first_whole) / run.block;
    let rest = first_whole + whole * run.block;
    [
        part(range.start, first_whole - range.start, 1),
        part(first_whole, run.block, whole),
        part(rest, range.end - rest, 1),
    ]
}
