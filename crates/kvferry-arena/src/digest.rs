//! Digests over rows as they lie in an arena; the source takes them over its own memory, the target over its pool.

#![forbid(unsafe_code)]

use kvferry_plan::{PartDigest, Plan, RankId, RoomKey, Unit, UnitId};

use crate::{ArenaError, Memory, Pieces, Side};

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
    let region = memory.region(unit.layer, unit.part)?;
    let mut hasher = id.hasher();
    for pieces in Pieces::of_unit(unit, side, region) {
        memory.hash(&pieces, &mut hasher)?;
    }
    Ok(hasher.digest())
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
        for ((target, plan), parts) in plans.iter().zip(&mut parts) {
            let Some(unit) = plan.unit(index) else { continue };
            let digest = digest_unit(memory, side, &unit, UnitId::new(key, *target, &unit))?;
            PartDigest::add(parts, unit.part, digest, unit.bytes());
        }
    }
    Ok(parts)
}
