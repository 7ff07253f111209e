//! An engine as a peer would use it: a descriptor for each row, or for each page of packed rows, straight into memory of the
//! other side. For comparison: nothing checks what is written, and it never serves.

use std::{
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use kvferry_arena::{Arena, Buffer, Memory, Side, Span, UnitRead, read_units};
use kvferry_plan::{Blame, Bytes, Plan, RankId};
use kvferry_transport::{
    DeviceId, MemoryKind,
    slots::{BlockEngine, BlockSpan, EngineError, EnginePeer, Progress, WriteId},
};

use super::{
    peer::{self, Descriptor, Entries},
    world::Case,
};
use crate::failure::Failure;

/// Descriptors of all requests of a run that are still tried.
const MOST: usize = 300_000;
/// Descriptors that are under way at a time: engines take some kilobytes for each.
const UNDER_WAY: usize = 32_000;
/// Between two looks at writes.
const LOOK: Duration = Duration::from_micros(20);

/// An engine that takes requests of many descriptors.
pub(super) trait DescriptorEngine: BlockEngine {
    /// As [`BlockEngine::write`], of all spans of a request. It is polled and released as one write.
    fn write_each(&mut self, peer: EnginePeer, request: &[Descriptor]) -> Result<WriteId, EngineError>;
}

/// What has a descriptor of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Each {
    /// Each row of the relayout.
    Row,
    /// What each target page gets of it, after the rows have been packed, request by request.
    Page,
    /// The bytes of a layer, in one piece: no relayout, nothing packed. What the engine itself can do.
    Layer,
}

impl Each {
    /// As documents name it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Row => "row",
            Self::Page => "page",
            Self::Layer => "layer",
        }
    }
}

/// What is handed to the engine at once.
#[derive(Debug)]
struct Request {
    /// Of a relayout: whose memory is written.
    target: usize,
    descriptors: Vec<Descriptor>,
    /// What is packed before, from whose memory, and where to.
    pack: Option<(Arc<Plan>, RankId, Span)>,
}

/// Two ends of an engine in this process.
#[derive(Debug)]
struct Ends {
    source: Box<dyn DescriptorEngine>,
    /// Kept because it takes part in what the source does.
    _target: Box<dyn DescriptorEngine>,
    peer: EnginePeer,
}

/// Both ends, with the memory of a case.
#[derive(Debug)]
pub(super) struct Naive<'a> {
    case: &'a Case,
    ends: Mutex<Ends>,
    packed: Arc<Buffer>,
    /// Scratch pools, with where they lie for the engine.
    targets: Vec<(Arc<Buffer>, BlockSpan)>,
    rows: Vec<Request>,
    pages: Vec<Request>,
    layers: Vec<Request>,
}

impl<'a> Naive<'a> {
    /// Starts two engines, and describes everything.
    pub(super) fn new(
        case: &'a Case,
        start: fn() -> Result<Box<dyn DescriptorEngine>, EngineError>,
    ) -> Result<Self, Failure> {
        let (mut source, mut target) = (start()?, start()?);
        let mut from = Vec::new();
        for arena in &case.sources {
            let (buffer, span) = registered(&mut *source, arena.layout().len())?;
            let mut bytes = vec![0; arena.layout().len().index()];
            arena.read(Bytes(0), &mut bytes)?;
            buffer.write(Bytes(0), &bytes)?;
            from.push(span);
        }
        let mut targets = Vec::new();
        for arena in &case.targets {
            targets.push(registered(&mut *target, arena.layout().len())?);
        }
        let (packed, block) = registered(&mut *source, case.bytes)?;
        let (_, flat) = registered(&mut *target, case.bytes)?;
        let peer = source.connect(&target.metadata()?)?;
        let mut naive = Self {
            case,
            ends: Mutex::new(Ends { source, _target: target, peer }),
            packed,
            targets,
            rows: Vec::new(),
            pages: Vec::new(),
            layers: layers(case, block, flat)?,
        };
        naive.describe(&from, block)?;
        Ok(naive)
    }

    /// Requests of a peer: one for each chunk and pair of ranks that have something to move.
    fn describe(&mut self, from: &[BlockSpan], block: BlockSpan) -> Result<(), Failure> {
        let (case, mut used) = (self.case, 0);
        for (source, tokens) in case.parts() {
            let s = source.0 as usize;
            let ours = case.sources.get(s).zip(from.get(s)).ok_or_else(outside)?;
            let ours = Entries { regions: ours.0.layout().regions(), span: *ours.1 };
            for (target, (arena, (_, span))) in case.targets.iter().zip(&self.targets).enumerate() {
                let plan = Arc::new(case.plan(source, RankId(target as u32), tokens)?);
                if plan.is_empty() {
                    continue;
                }
                let theirs = Entries { regions: arena.layout().regions(), span: *span };
                let descriptors = peer::rows(&case.pair, &plan, ours, theirs).ok_or_else(outside)?;
                self.rows.push(Request { target, descriptors, pack: None });
                let place = Span { offset: Bytes(used), len: plan.bytes() };
                used += plan.bytes().0;
                let block = block.part(place.offset, place.len).ok_or_else(outside)?;
                let descriptors = peer::packed(&plan, ours.regions, block, theirs).ok_or_else(outside)?;
                self.pages.push(Request { target, descriptors, pack: Some((plan, source, place)) });
            }
        }
        Ok(())
    }

    fn requests(&self, each: Each) -> &[Request] {
        match each {
            Each::Row => &self.rows,
            Each::Page => &self.pages,
            Each::Layer => &self.layers,
        }
    }

    /// How many descriptors a run has, unless these are too many.
    pub(super) fn descriptors(&self, each: Each) -> Option<u64> {
        let all: usize = self.requests(each).iter().map(|request| request.descriptors.len()).sum();
        (all <= MOST).then_some(all as u64)
    }

    /// Moves everything once, and waits until nothing is on its way.
    pub(super) fn run(&self, each: Each) -> Result<Duration, Failure> {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        let Ends { source, peer, .. } = &mut *ends;
        let mut flights = Flights::default();
        let started = Instant::now();
        let mut outcome = self.requests(each).iter().try_for_each(|request| {
            self.pack(request)?;
            let len = request.descriptors.len();
            flights.wait(&mut **source, UNDER_WAY.saturating_sub(len))?;
            flights.0.push((source.write_each(*peer, &request.descriptors)?, len));
            Ok(())
        });
        let settled = flights.wait(&mut **source, 0);
        outcome = outcome.and(settled.map_err(Failure::from));
        outcome.map(|()| started.elapsed())
    }

    fn pack(&self, request: &Request) -> Result<(), Failure> {
        let Some((plan, source, place)) = &request.pack else { return Ok(()) };
        let arena = self.case.sources.get(source.0 as usize).ok_or_else(outside)?;
        let mut rest = self.packed.packed_mut(*place)?;
        for unit in plan.units() {
            let (here, later) = rest.split_at(unit.bytes().index()).ok_or_else(outside)?;
            rest = later;
            let read = UnitRead { unit, rows: 0..unit.rows(), into: Some(here), hasher: None };
            read_units(&**arena, Side::Source, vec![read])?;
        }
        Ok(())
    }

    /// Both modes make what a hand-off has made of the pools of the case, byte for byte.
    pub(super) fn check(&self) -> Result<(), Failure> {
        for each in [Each::Page, Each::Row].into_iter().filter(|each| self.descriptors(*each).is_some()) {
            for (buffer, _) in &self.targets {
                buffer.write(Bytes(0), &vec![0; buffer.len().index()])?;
            }
            self.run(each)?;
            self.compare(each)?;
        }
        Ok(())
    }

    fn compare(&self, each: Each) -> Result<(), Failure> {
        let (mut theirs, mut ours) = (Vec::new(), Vec::new());
        for Request { target, descriptors, .. } in self.requests(each) {
            let (scratch, span) = self.targets.get(*target).ok_or_else(outside)?;
            let arena: &Arc<Arena> = self.case.targets.get(*target).ok_or_else(outside)?;
            for (_, to) in descriptors {
                let at = Bytes(to.address - span.address);
                theirs.resize(to.len.index(), 0);
                ours.resize(to.len.index(), 0);
                scratch.read(at, &mut theirs)?;
                arena.read(at, &mut ours)?;
                if ours != theirs {
                    let what = "made something else of the pool than a hand-off";
                    let who =
                        format_args!("{}: a descriptor for each {} {what}", self.case.name, each.name());
                    return Err(Failure::new(Blame::Us, who));
                }
            }
        }
        Ok(())
    }
}

/// Writes under way, with their descriptors.
#[derive(Default)]
struct Flights(Vec<(WriteId, usize)>);

impl Flights {
    /// Waits until at most `left` descriptors are under way.
    fn wait(&mut self, engine: &mut dyn DescriptorEngine, left: usize) -> Result<(), EngineError> {
        let mut outcome = Ok(());
        while self.0.iter().map(|(_, len)| len).sum::<usize>() > left {
            let before = self.0.len();
            self.0.retain(|(write, _)| {
                let ended = match engine.poll(*write) {
                    Ok(Progress::Moving) => return true,
                    Ok(Progress::Settled) => Ok(()),
                    Err(error) => Err(error),
                };
                engine.release(*write);
                outcome = std::mem::replace(&mut outcome, Ok(())).and(ended);
                false
            });
            if self.0.len() == before {
                thread::sleep(LOOK);
            }
        }
        outcome
    }
}

fn registered(engine: &mut dyn DescriptorEngine, len: Bytes) -> Result<(Arc<Buffer>, BlockSpan), Failure> {
    let buffer = Arc::new(Buffer::new("kvferry-bench", len)?);
    let span = engine.register(Arc::clone(&buffer), MemoryKind::Host, DeviceId(0))?;
    Ok((buffer, span))
}

/// As many bytes as are moved, in as many pieces as there are layers.
fn layers(case: &Case, from: BlockSpan, to: BlockSpan) -> Result<Vec<Request>, Failure> {
    let count = case.pair.shape().parts.iter().map(|part| part.layers.len()).sum::<usize>().max(1) as u64;
    let each = case.bytes.0.div_ceil(count);
    let starts = (0..count).map(|i| i * each).take_while(|at| *at < case.bytes.0);
    starts
        .map(|at| {
            let len = Bytes(each.min(case.bytes.0 - at));
            let both = from.part(Bytes(at), len).zip(to.part(Bytes(at), len));
            Ok(Request { target: 0, descriptors: vec![both.ok_or_else(outside)?], pack: None })
        })
        .collect()
}

fn outside() -> Failure {
    Failure::new(Blame::Us, "a descriptor is outside of its pool")
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        kvferry_transport::TransportError::from(error).into()
    }
}
