//! Rows of units on their way out of a memory: packed, digested, or both, by one read of each byte.

#![forbid(unsafe_code)]

use std::ops::Range;

use kvferry_plan::{Bytes, Unit};

use crate::{ArenaError, Memory, PackedMut, Pieces, RowHasher, Side, simd};

/// Rows of a unit that are read.
#[derive(Debug)]
pub struct UnitRead<'a> {
    /// The unit.
    pub unit: Unit<'a>,
    /// Which of its rows, counted in token order; what is beyond the unit is left out.
    pub rows: Range<u64>,
    /// Where they are packed, in token order: exactly as many bytes as they have. Nowhere when absent.
    pub into: Option<PackedMut<'a>>,
    /// What digests them.
    pub hasher: Option<&'a mut RowHasher>,
}

/// Reads rows of several units from one side of their plans, as the target has them (the source's bytes are converted
/// where a plan says so), a row of each in turn: units that take turns with the rows
/// of the same pages read these pages once, from their first byte to their last.
///
/// # Errors
/// [`ArenaError::NoRegion`] and [`ArenaError::OutOfBounds`] when a unit is not of this memory,
/// [`ArenaError::Length`] when a buffer does not have the length of its rows.
pub fn read_units(
    memory: &(impl Memory + ?Sized),
    side: Side,
    units: Vec<UnitRead<'_>>,
) -> Result<(), ArenaError> {
    let mut lanes = Vec::with_capacity(units.len());
    for UnitRead { unit, rows, into, hasher } in units {
        let region = memory.region(unit.layer, unit.part)?;
        let due = rows.end.min(unit.rows()).saturating_sub(rows.start).saturating_mul(unit.slice.len.0);
        let found = into.as_ref().map_or(due, |into| into.len() as u64);
        if found != due {
            return Err(ArenaError::Length { expected: Bytes(due), found: Bytes(found) });
        }
        let cast = if side == Side::Source { unit.slice.cast } else { None };
        lanes.push((Pieces::of_rows(&unit, side, region, rows), cast, into, hasher));
    }
    loop {
        let mut turn = Vec::with_capacity(lanes.len());
        for (pieces, cast, rest, hasher) in &mut lanes {
            let Some(pieces) = pieces.next() else { continue };
            let into = match rest.take().map(|rest| rest.split_at(simd::packed(&pieces, *cast).index())) {
                Some(Some((here, later))) => {
                    *rest = Some(later);
                    Some(here)
                }
                _ => None,
            };
            turn.push(simd::Read { pieces, cast: *cast, into, hasher: hasher.as_deref_mut() });
        }
        if turn.is_empty() {
            return Ok(());
        }
        simd::read(memory.mapping(), &mut turn)?;
    }
}
