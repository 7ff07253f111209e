//! From a piece of work to legs, and from reports to legs of a manifest.

use std::{collections::BTreeSet, sync::Arc};

use kvferry_arena::{Arena, digest_plans};
use kvferry_plan::{
    Blame, End, PageId, PageTable, PartDigest, Plan, RankId, SlotId, TokenRange, Unsupported,
};
use kvferry_session::{Cause, CauseKind, PageRef, Side, SlotRef, page_span};
use kvferry_transport::{Leg, LegReport, TransportError};

use crate::lane::Task;

/// The pages of our own rank that `tokens` touch, with their generations.
pub(crate) fn page_refs(
    pages: &PageTable,
    span: std::ops::Range<u64>,
    arena: &Arena,
) -> Result<Vec<PageRef>, String> {
    use kvferry_arena::Memory;
    span.map(|entry| {
        let page = usize::try_from(entry).ok().and_then(|e| pages.0.get(e)).copied();
        let page =
            page.ok_or_else(|| format!("a page table of {} pages, entry {entry} needed", pages.0.len()))?;
        let generation = arena.generation(page).map_err(|e| e.to_string())?;
        Ok(PageRef { page, generation })
    })
    .collect()
}

/// A request's state slot on each of our ranks, with its generations.
pub(crate) fn slot_refs(slot: SlotId, arenas: &[Arc<Arena>]) -> Result<Vec<SlotRef>, String> {
    use kvferry_arena::Memory;
    arenas
        .iter()
        .map(|arena| {
            let generation = arena.slot_generation(slot).map_err(|e| e.to_string())?;
            Ok(SlotRef { slot, generation })
        })
        .collect()
}

/// The legs of a push: the source's own rows, and any rows at the target, which alone knows its pages.
pub(crate) fn push_legs(task: &Task) -> Result<Vec<Leg>, Unsupported> {
    let leg = |(target, plan)| Leg { target, plan, source_pages: Vec::new(), source_slot: None };
    plans(task).map(|planned| planned.map(leg)).collect()
}

/// The plans of the source rank to each of the target ranks that it owes something, on identity pages and any slot
/// there.
fn plans(task: &Task) -> impl Iterator<Item = Result<(RankId, Arc<Plan>), Unsupported>> {
    let Task { pair, table, source, tokens, .. } = task;
    let slots = task.slot.map(|slot| (slot, SlotId(0)));
    task.targets.iter().copied().filter_map(move |target| {
        let pages = page_span(pair.dst(), target, *tokens).end;
        let identity = PageTable::identity(u32::try_from(pages).unwrap_or(u32::MAX));
        let (src, dst) = (End { rank: *source, table }, End { rank: target, table: &identity });
        let plan = pair.plan_last(src, dst, *tokens, slots);
        plan.map(|plan| (!plan.is_empty()).then(|| (target, Arc::new(plan)))).transpose()
    })
}

/// The legs of a pull: the pages and the slot that the source offered, and our own.
pub(crate) fn pull_legs(
    task: &Task,
    offered: &[PageRef],
    slot: Option<SlotRef>,
) -> Result<Vec<Leg>, Unsupported> {
    let Task { pair, table, .. } = task;
    let (source, tokens) = (task.source, task.tokens);
    let slots = slot.zip(task.slot).map(|(theirs, ours)| (theirs.slot, ours));
    // Entries before the offered ones are not read.
    let before = usize::try_from(page_span(pair.src(), source, tokens).start).unwrap_or(usize::MAX);
    let entries = std::iter::repeat_n(PageId(0), before).chain(offered.iter().map(|p| p.page));
    let theirs = PageTable(entries.collect());
    let mut legs = Vec::new();
    for &target in task.targets.iter() {
        let (src, dst) = (End { rank: source, table: &theirs }, End { rank: target, table });
        let plan = pair.plan_last(src, dst, tokens, slots)?;
        if plan.is_empty() {
            continue;
        }
        let read: BTreeSet<u64> = plan
            .groups()
            .iter()
            .filter(|group| !group.part.is_state())
            .filter_map(|group| Some((group, pair.src().part(group.part)?.page_size)))
            .flat_map(|(group, size)| {
                plan.group_runs(group).iter().map(move |r| r.src_row.0 / u64::from(size.max(1)))
            })
            .collect();
        let source_pages = offered
            .iter()
            .filter(|p| read.contains(&u64::from(p.page.0)))
            .map(|p| (p.page, p.generation))
            .collect();
        let source_slot = slot.map(|slot| (slot.slot, slot.generation));
        legs.push(Leg { target, plan: Arc::new(plan), source_pages, source_slot });
    }
    Ok(legs)
}

/// The source's half of a pull: what each of the task's target ranks must find, from the source's own memory.
pub(crate) fn digest_legs(task: &Task, arena: &Arena) -> Result<Vec<kvferry_session::Leg>, TransportError> {
    let (key, tokens) = (task.key, task.tokens);
    let planned = plans(task).collect::<Result<Vec<_>, _>>()?;
    let parts = if task.digest {
        let plans: Vec<_> = planned.iter().map(|(target, plan)| (*target, &**plan)).collect();
        digest_plans(arena, kvferry_arena::Side::Source, &plans, key)?
    } else {
        let counted = |(_, plan): &(RankId, Arc<Plan>)| {
            let mut parts = Vec::new();
            plan.units().for_each(|unit| PartDigest::add(&mut parts, unit.part, 0, unit.bytes()));
            parts
        };
        planned.iter().map(counted).collect()
    };
    let leg = |((target, _), parts): (&(RankId, _), _)| kvferry_session::Leg {
        target: *target,
        tokens,
        parts,
        copies: 0,
    };
    Ok(planned.iter().zip(parts).map(leg).collect())
}

/// A report as a leg of a manifest.
pub(crate) fn reported(report: LegReport, tokens: TokenRange) -> kvferry_session::Leg {
    kvferry_session::Leg { target: report.target, tokens, parts: report.parts, copies: report.copies }
}

/// A transport's error as the cause of a room's end, seen from `side`.
pub(crate) fn cause(error: &TransportError, side: Side) -> Cause {
    let at = if error.blame() == Blame::PeerMisbehaved { side.other() } else { side };
    let kind = match error {
        TransportError::PeerGone { .. } | TransportError::Restarted { .. } => CauseKind::Lost,
        TransportError::Stalled { .. } => CauseKind::Stalled,
        TransportError::Busy { .. } => CauseKind::Unavailable,
        _ => CauseKind::Transport,
    };
    Cause::new(kind, at, error)
}
