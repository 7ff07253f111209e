//! Digests over rows as they lie in an arena; the source takes them over its own memory, the target over its pool.

#![forbid(unsafe_code)]

use std::ops::Range;

use kvferry_plan::{PartDigest, Plan, RankId, RoomKey, Unit, UnitId};

use crate::{ArenaError, Memory, RowHasher, Side, UnitRead, read_units};

/// The digest of one unit, tokens in order, then heads.
///
/// # Errors
/// [`ArenaError::NoRegion`] and [`ArenaError::OutOfBounds`] when the unit is not of this memory.
pub fn digest_unit(
    memory: &(impl Memory + ?Sized),
    side: Side,
    unit: &Unit<'_>,
    id: UnitId,
) -> Result<u64, ArenaError> {
    let mut hasher = RowHasher::new(id, unit.bytes());
    digest_rows(memory, side, unit, 0..unit.rows(), &mut hasher)?;
    Ok(hasher.digest())
}

/// Feeds rows `rows` of a unit, counted in token order, to `hasher`.
///
/// # Errors
/// As [`digest_unit`].
pub fn digest_rows(
    memory: &(impl Memory + ?Sized),
    side: Side,
    unit: &Unit<'_>,
    rows: Range<u64>,
    hasher: &mut RowHasher,
) -> Result<(), ArenaError> {
    read_units(memory, side, vec![UnitRead { unit: *unit, rows, into: None, hasher: Some(hasher) }])
}

/// What a manifest says of a plan between a source rank and `target`, from the memory of one side.
///
/// # Errors
/// As [`digest_unit`].
pub fn digest_plan(
    memory: &(impl Memory + ?Sized),
    side: Side,
    plan: &Plan,
    key: RoomKey,
    target: RankId,
) -> Result<Vec<PartDigest>, ArenaError> {
    digest_plans(memory, side, &[(target, plan)], key).map(|mut all| all.pop().unwrap_or_default())
}

/// As [`digest_plan`] for several targets in one sweep: plans that read the same pages come to them at the same time.
///
/// # Errors
/// As [`digest_unit`].
pub fn digest_plans(
    memory: &(impl Memory + ?Sized),
    side: Side,
    plans: &[(RankId, &Plan)],
    key: RoomKey,
) -> Result<Vec<Vec<PartDigest>>, ArenaError> {
    let mut parts = vec![Vec::new(); plans.len()];
    let most = plans.iter().map(|(_, plan)| plan.unit_count()).max().unwrap_or(0);
    for index in 0..most {
        let mut units = Vec::with_capacity(plans.len());
        for (target, plan) in plans {
            let unit = plan.unit(index);
            units.push(
                unit.map(|unit| (unit, RowHasher::new(UnitId::new(key, *target, &unit), unit.bytes()))),
            );
        }
        let reads = units.iter_mut().flatten().map(|(unit, hasher)| UnitRead {
            unit: *unit,
            rows: 0..unit.rows(),
            into: None,
            hasher: Some(hasher),
        });
        read_units(memory, side, reads.collect())?;
        for (unit, parts) in units.iter().zip(&mut parts) {
            let Some((unit, hasher)) = unit else { continue };
            PartDigest::add(parts, unit.part, hasher.digest(), unit.bytes());
        }
    }
    Ok(parts)
}
