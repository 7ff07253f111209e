//! NIXL as a peer would use it: a descriptor for each row, or for each page, straight into memory of the other side. For
//! comparison: nothing checks what is written, and it never serves.

use std::{
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use kvferry_arena::{Arena, Buffer, Memory};
use kvferry_plan::{Blame, Bytes, Region, TokenRange};
use kvferry_transport::{
    DeviceId, MemoryKind,
    slots::{BlockEngine, BlockSpan, EngineError, EnginePeer, Progress},
};
use kvferry_transport_nixl::NixlEngine;

use super::world::Case;
use crate::failure::Failure;

/// Rows of one page, in one descriptor.
const PAGE: usize = 64;
/// Descriptors of rows that are still tried: UCX takes some kilobytes for each that is under way.
const MOST: usize = 300_000;
/// Between two looks at writes.
const LOOK: Duration = Duration::from_micros(20);

/// What has a descriptor of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Each {
    /// Each piece of the plan: the relayout itself.
    Row,
    /// Each source page, elsewhere as it is: no relayout.
    Page,
    /// All rows of a layer, as they are: no relayout.
    Region,
}

/// From where to where.
type Pairs = Vec<(BlockSpan, BlockSpan)>;

/// Two agents in this process, with the memory of a case.
#[derive(Debug)]
pub(super) struct Naive<'a> {
    case: &'a Case,
    agents: Mutex<(NixlEngine, NixlEngine, EnginePeer)>,
    targets: Vec<Arc<Buffer>>,
    /// A request each.
    rows: Vec<Pairs>,
    pages: Vec<Pairs>,
    regions: Vec<Pairs>,
}

impl<'a> Naive<'a> {
    pub(super) fn new(case: &'a Case) -> Result<Self, Failure> {
        let (mut source, mut target) = (NixlEngine::new()?, NixlEngine::new()?);
        let of = |engine: &mut NixlEngine, arena: &Arc<Arena>| -> Result<_, Failure> {
            let buffer = Arc::new(Buffer::new("kvferry-bench", arena.layout().len())?);
            let span = engine.register(Arc::clone(&buffer), MemoryKind::Host, DeviceId(0))?;
            Ok((buffer, span))
        };
        let mut from = Vec::new();
        for arena in &case.sources {
            let (buffer, span) = of(&mut source, arena)?;
            let mut bytes = vec![0; arena.layout().len().index()];
            arena.read(Bytes(0), &mut bytes)?;
            buffer.write(Bytes(0), &bytes)?;
            from.push(span);
        }
        let (mut to, mut flat, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for arena in &case.targets {
            let (buffer, span) = of(&mut target, arena)?;
            targets.push(buffer);
            to.push(span);
        }
        for arena in &case.sources {
            flat.push(of(&mut target, arena)?.1);
        }
        let peer = source.connect(&target.metadata()?)?;
        let rows = rows(case, &from, &to)?;
        let (pages, regions) = whole(case, &from, &flat)?;
        Ok(Self { case, agents: Mutex::new((source, target, peer)), targets, rows, pages, regions })
    }

    /// True when a descriptor for each row is not too many.
    pub(super) fn has_rows(&self) -> bool {
        self.rows.iter().map(Vec::len).sum::<usize>() <= MOST
    }

    /// Moves everything once, a request for each layer and rank, all at once.
    pub(super) fn run(&self, each: Each) -> Result<Duration, Failure> {
        let requests = match each {
            Each::Row => &self.rows,
            Each::Page => &self.pages,
            Each::Region => &self.regions,
        };
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        let (source, _, peer) = &mut *agents;
        let started = Instant::now();
        let mut writes = Vec::with_capacity(requests.len());
        for pairs in requests {
            writes.push(source.write_each(*peer, pairs)?);
        }
        let mut outcome = Ok(());
        while !writes.is_empty() {
            writes.retain(|write| match source.poll(*write) {
                Ok(Progress::Moving) => true,
                Ok(Progress::Settled) => false,
                Err(error) => {
                    outcome = Err(error);
                    false
                }
            });
            thread::sleep(LOOK);
        }
        let took = started.elapsed();
        Ok(outcome.map(|()| took)?)
    }

    /// What the rows made is what a hand-off made, byte for byte.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let (mut theirs, mut ours) = (Vec::new(), Vec::new());
        for (_, there) in self.rows.iter().flatten() {
            let pools = self.case.targets.iter().zip(&self.targets);
            let (arena, buffer) = pools
                .filter(|(_, buffer)| buffer.address() <= there.address)
                .max_by_key(|(_, buffer)| buffer.address())
                .ok_or_else(outside)?;
            let at = Bytes(there.address - buffer.address());
            theirs.resize(there.len.index(), 0);
            ours.resize(there.len.index(), 0);
            buffer.read(at, &mut theirs)?;
            arena.read(at, &mut ours)?;
            if ours != theirs {
                let what = "a descriptor for each row made something else of the pool than a hand-off";
                return Err(Failure::new(Blame::Us, format_args!("{}: {what}", self.case.name)));
            }
        }
        Ok(())
    }
}

fn outside() -> Failure {
    Failure::new(Blame::Us, "a descriptor is outside of its pool")
}

fn pair(
    from: &BlockSpan,
    at: Bytes,
    to: &BlockSpan,
    there: Bytes,
    len: Bytes,
) -> Result<(BlockSpan, BlockSpan), Failure> {
    from.part(at, len).zip(to.part(there, len)).ok_or_else(outside)
}

/// The plan's pieces, a request for each layer and part of each pair of ranks.
fn rows(case: &Case, from: &[BlockSpan], to: &[BlockSpan]) -> Result<Vec<Pairs>, Failure> {
    let mut requests = Vec::new();
    for (source, (ours, local)) in case.source_ranks().into_iter().zip(case.sources.iter().zip(from)) {
        for (target, (theirs, remote)) in case.target_ranks().into_iter().zip(case.targets.iter().zip(to)) {
            let plan = case.plan(source, target, TokenRange::new(0, case.tokens))?;
            let mut last = None;
            for unit in plan.units() {
                if last.replace((unit.layer, unit.part)) != Some((unit.layer, unit.part)) {
                    requests.push(Pairs::new());
                }
                let Some(request) = requests.last_mut() else { continue };
                let (src, dst) = (ours.region(unit.layer, unit.part)?, theirs.region(unit.layer, unit.part)?);
                for m in unit.moves(src, dst) {
                    for (b, i) in (0..m.blocks).flat_map(|b| (0..m.rows).map(move |i| (b, i))) {
                        request.push(pair(local, m.src.at(b, i), remote, m.dst.at(b, i), m.len)?);
                    }
                }
            }
        }
    }
    Ok(requests)
}

/// Source pages to other places, and regions, as they are: as many bytes as a hand-off moves, since ranks may hold the same.
fn whole(case: &Case, from: &[BlockSpan], to: &[BlockSpan]) -> Result<(Vec<Pairs>, Vec<Pairs>), Failure> {
    let (mut by_page, mut by_region, mut left) = (Vec::new(), Vec::new(), case.bytes.0);
    for (arena, (local, remote)) in case.sources.iter().zip(from.iter().zip(to)) {
        for Region { offset, row_bytes, rows, .. } in arena.layout().regions() {
            let rows = (*rows).min(left / row_bytes.0.max(1));
            if rows == 0 {
                continue;
            }
            left -= rows * row_bytes.0;
            let at = |row: u64| Bytes(offset.0 + row * row_bytes.0);
            let pages = (0..rows).step_by(PAGE).map(|row| {
                let count = (rows - row).min(PAGE as u64);
                pair(local, at(row), remote, at(rows - row - count), Bytes(count * row_bytes.0))
            });
            by_page.push(pages.collect::<Result<Pairs, _>>()?);
            by_region.push(vec![pair(local, *offset, remote, *offset, Bytes(row_bytes.0 * rows))?]);
        }
    }
    Ok((by_page, by_region))
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        kvferry_transport::TransportError::from(error).into()
    }
}
