//! From a piece of work to legs, and from reports to legs of a manifest.

use std::{collections::BTreeSet, sync::Arc};

use kvferry_arena::{Arena, digest_plans};
use kvferry_plan::{
    Blame, End, Entries, PageId, PageTable, PartDigest, Placement, Plan, RankId, Rotation, SlotId,
    TokenRange, Unsupported,
};
use kvferry_session::{Cause, CauseKind, PageRef, Side, SlotRef};
use kvferry_transport::{Leg, LegReport, TransportError};

use crate::lane::Task;

/// Where the entries of a request's table that a rank of ours owns lie in its pool, with their generations.
pub(crate) fn page_refs(
    pages: &PageTable,
    entries: Entries,
    placement: &Placement,
    arena: &Arena,
) -> Result<Vec<PageRef>, String> {
    use kvferry_arena::Memory;
    let page_ref = |entry| {
        let page = usize::try_from(entry).ok().and_then(|e| pages.0.get(e)).copied();
        let page =
            page.ok_or_else(|| format!("a page table of {} pages, entry {entry} needed", pages.0.len()))?;
        let page = placement.local_page(page);
        let generation = arena.generation(page).map_err(|e| e.to_string())?;
        Ok(PageRef { page, generation })
    };
    entries.iter().map(page_ref).collect()
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
        let pages = pair.dst().entries(target, *tokens, Rotation(0)).end();
        let identity = PageTable::identity(u32::try_from(pages).unwrap_or(u32::MAX));
        let (src, dst) = (End { rank: *source, table }, End { rank: target, table: &identity });
        let plan = pair.plan_last(src, dst, *tokens, slots);
        plan.map(|plan| (!plan.is_empty()).then(|| (target, Arc::new(plan)))).transpose()
    })
}

/// The source's page table as a target knows it: the offered pages, of the rank's own pool, at the entries that they are
/// for, and between them others that the right ranks own, which are not read.
fn table_of(task: &Task, offered: &[PageRef]) -> PageTable {
    let src = task.pair.src();
    let entries = src.entries(task.source, task.tokens, task.rotation);
    let mut table = PageTable::rotated(task.rotation, u32::try_from(entries.end()).unwrap_or(u32::MAX));
    for (entry, PageRef { page, .. }) in entries.iter().zip(offered) {
        let place = usize::try_from(entry).ok().and_then(|at| table.0.get_mut(at));
        if let Some((place, page)) = place.zip(src.logical_page(task.source, *page)) {
            *place = page;
        }
    }
    table
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
    let theirs = table_of(task, offered);
    let mut legs = Vec::new();
    for &target in task.targets.iter() {
        let (src, dst) = (End { rank: source, table: &theirs }, End { rank: target, table });
        let plan = pair.plan_last(src, dst, tokens, slots)?;
        if plan.is_empty() {
            continue;
        }
        // Rows are those of the rank's own pool, and so are the pages that were offered.
        let read: BTreeSet<PageId> = plan
            .groups()
            .iter()
            .filter(|group| !group.part.is_state())
            .filter_map(|group| Some((group, pair.src().part(group.part)?)))
            .flat_map(|(group, layout)| plan.group_runs(group).iter().map(|r| layout.page(r.src_row)))
            .collect();
        let source_pages =
            offered.iter().filter(|p| read.contains(&p.page)).map(|p| (p.page, p.generation)).collect();
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
