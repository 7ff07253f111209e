//! What is handed over: two layouts, their pools, and both ends of a transport.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use kvferry_arena::{Arena, Memory, Side, digest_plans};
use kvferry_node::TransportKind;
use kvferry_plan::{
    Attempt, Blame, Bytes, CacheShape, Descriptor, Dtype, End, Generation, Incarnation, LayoutSpec, PROTOCOL,
    PageId, PageTable, Pair, Part, PartDigest, Placement, Plan, PoolLayout, PoolSize, RankId, RoomId,
    RoomKey, SlotId, TokenRange,
};
use kvferry_transport::{Done, Grant, Job, Leg, Link, Mover, PeerAddr, Registration, Setup, Transport};

use crate::failure::Failure;

const SOURCE: Incarnation = Incarnation { started_ms: 1, nonce: 1 };
const TARGET: Incarnation = Incarnation { started_ms: 2, nonce: 2 };
const GENERATION: Generation = Generation(1);
/// Generation of source pages and slots, which no other request ever has.
const UNUSED: Generation = Generation(0);

/// A hand-off and the memory for it.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) what: String,
    pub(super) pair: Arc<Pair>,
    pub(super) tokens: u64,
    /// Tokens of a job, as of a prefill chunk.
    pub(super) chunk: u64,
    pub(super) bytes: Bytes,
    pub(super) sources: Vec<Arc<Arena>>,
    pub(super) targets: Vec<Arc<Arena>>,
    pub(super) from: PageTable,
    pub(super) to: PageTable,
    /// Where the state of the request lies, at the source and at the target.
    slots: Option<(SlotId, SlotId)>,
}

impl Case {
    /// Allocates and fills the pools of both sides.
    pub(super) fn new(
        name: &'static str,
        what: &str,
        shape: &CacheShape,
        layouts: [&str; 2],
        (tokens, chunk): (u64, u64),
    ) -> Result<Self, Failure> {
        let internal = |e: String| Failure::new(Blame::Us, e);
        let place = |spec: &str| {
            let spec: LayoutSpec =
                spec.parse().map_err(|e: kvferry_plan::SpecError| internal(e.to_string()))?;
            spec.placement(shape, Dtype::Bf16).map_err(|e| internal(e.to_string()))
        };
        let (src, dst) = (place(layouts[0])?, place(layouts[1])?);
        let (from, to) = (table(&src, tokens), table(&dst, tokens));
        let slots = shape.has_state().then_some((SlotId(1), SlotId(0)));
        let arenas = |side: &Placement, pages: &PageTable| {
            (0..side.ranks())
                .map(|rank| {
                    let pages = u32::try_from(pages.0.len()).unwrap_or(u32::MAX);
                    let size = PoolSize { pages, slots: if shape.has_state() { 2 } else { 0 } };
                    let layout = PoolLayout::with_slots(shape, side, RankId(rank), size)
                        .map_err(|e| internal(e.to_string()))?;
                    Ok(Arc::new(Arena::new("kvferry-bench", layout)?))
                })
                .collect::<Result<Vec<_>, Failure>>()
        };
        let (sources, targets) = (arenas(&src, &from)?, arenas(&dst, &to)?);
        for (rank, arena) in sources.iter().enumerate() {
            fill(arena, rank as u64 + 1)?;
        }
        let pair = Arc::new(Pair::new(shape.clone(), src, dst)?);
        let what = format!("{what}, {} to {}", layouts[0], layouts[1]);
        let bytes = Bytes(0);
        let mut case = Self { name, what, pair, tokens, chunk, bytes, sources, targets, from, to, slots };
        for source in case.source_ranks() {
            for target in case.target_ranks() {
                case.bytes.0 += case.plan(source, target, TokenRange::new(0, tokens))?.bytes().0;
            }
        }
        Ok(case)
    }

    pub(super) fn source_ranks(&self) -> Vec<RankId> {
        (0..self.pair.src().ranks()).map(RankId).collect()
    }

    pub(super) fn target_ranks(&self) -> Vec<RankId> {
        (0..self.pair.dst().ranks()).map(RankId).collect()
    }

    /// What one rank owes another for a chunk; with the last goes the state.
    pub(super) fn plan(&self, source: RankId, target: RankId, tokens: TokenRange) -> Result<Plan, Failure> {
        let (src, dst) = (End { rank: source, table: &self.from }, End { rank: target, table: &self.to });
        Ok(self.pair.plan_last(src, dst, tokens, self.slots_with(tokens))?)
    }

    fn slots_with(&self, tokens: TokenRange) -> Option<(SlotId, SlotId)> {
        self.slots.filter(|_| tokens.end.0 == self.tokens)
    }

    /// The jobs of a room, in the order of prefill.
    pub(super) fn parts(&self) -> impl Iterator<Item = (RankId, TokenRange)> + use<> {
        let (tokens, chunk, ranks) = (self.tokens, self.chunk, self.pair.src().ranks());
        (0..tokens.div_ceil(chunk)).flat_map(move |i| {
            let range = TokenRange::new(i * chunk, ((i + 1) * chunk).min(tokens));
            (0..ranks).map(move |rank| (RankId(rank), range))
        })
    }
}

/// Pages in no order, as in a pool that has been used for a while.
fn table(side: &Placement, tokens: u64) -> PageTable {
    let of = |part: &kvferry_plan::PartLayout| {
        let owned = part.tokens.owned(kvferry_plan::Token(tokens), side.class(part.part, RankId(0)));
        owned.div_ceil(u64::from(part.page_size))
    };
    let pages = side.parts.iter().filter(|part| !part.part.is_state()).map(of).max().unwrap_or(0);
    let step = (37..).find(|step| (2..*step).all(|d| step % d > 0) && pages % step > 0).unwrap_or(1);
    PageTable((0..pages).map(|i| PageId((i * step % pages) as u32)).collect())
}

/// Where the rows of a pool begin. Regions are listed by layer, not by place.
pub(super) fn content(arena: &Arena) -> u64 {
    arena.layout().regions().iter().map(|region| region.offset.0).min().unwrap_or(0)
}

fn fill(arena: &Arena, seed: u64) -> Result<(), Failure> {
    let mut state = seed;
    let mut block = [0_u8; 4096];
    let (mut at, end) = (content(arena), arena.layout().len().0);
    while at < end {
        for word in block.as_chunks_mut::<8>().0 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *word = (state ^ (state >> 33)).to_le_bytes();
        }
        let part = block.len().min((end - at) as usize);
        arena.write(Bytes(at), &block[..part])?;
        at += part as u64;
    }
    Ok(())
}

/// What both sides say of each (source rank, target rank, part): sum and bytes.
type Sums = BTreeMap<(RankId, RankId, Part), (u64, u64)>;

fn add(sums: &mut Sums, source: RankId, target: RankId, parts: &[PartDigest]) {
    for part in parts {
        let entry = sums.entry((source, target, part.part)).or_default();
        *entry = (entry.0.wrapping_add(part.sum), entry.1 + part.bytes.0);
    }
}

/// Both ends of a transport over the pools of a case, with a link between them.
pub(super) struct World<'a> {
    case: &'a Case,
    source: Arc<dyn Transport>,
    target: Arc<dyn Transport>,
    link: Arc<dyn Link>,
    rooms: AtomicU64,
    /// Blocks of the last hand-off.
    blocks: AtomicU64,
}

impl<'a> World<'a> {
    pub(super) fn new(kind: TransportKind, case: &'a Case) -> Result<Self, Failure> {
        let end = |incarnation, arenas: &[Arc<Arena>]| {
            let end = kind.start(Setup::new(incarnation))?;
            for (rank, arena) in (0..).map(RankId).zip(arenas) {
                end.register(rank, Registration::host(Arc::clone(arena)))?;
            }
            Ok::<_, Failure>(end)
        };
        let (source, target) = (end(SOURCE, &case.sources)?, end(TARGET, &case.targets)?);
        let (from, to, incarnation, placement) = match source.mover() {
            Mover::Source => (&source, &target, TARGET, case.pair.dst()),
            Mover::Target => (&target, &source, SOURCE, case.pair.src()),
        };
        let descriptor = Descriptor {
            protocol: PROTOCOL,
            model: String::new(),
            shape: case.pair.shape().clone(),
            placement: placement.clone(),
            converts: false,
        };
        let peer = PeerAddr { endpoint: to.endpoint(), incarnation, descriptor: Arc::new(descriptor) };
        let link = from.open(&peer)?;
        Ok(Self { case, source, target, link, rooms: AtomicU64::new(1), blocks: AtomicU64::new(0) })
    }

    /// Hands everything over once, in chunks that are queued at once, and checks that both sides say the same. Time
    /// from the first plan to the last byte and digest of both sides.
    pub(super) fn hand_off(&self, digest: bool) -> Result<Duration, Failure> {
        let room = self.rooms.fetch_add(1, Ordering::Relaxed);
        let key = RoomKey { room: RoomId(room.into()), attempt: Attempt(1) };
        let (landed, landings) = mpsc::channel();
        self.target.grant(Grant {
            key,
            generation: GENERATION,
            peer: SOURCE,
            pair: Arc::clone(&self.case.pair),
            table: self.case.to.clone(),
            slot: self.case.slots.map(|(_, to)| to),
            tokens: TokenRange::new(0, self.case.tokens),
            ranks: self.case.target_ranks(),
            digest,
            landed: Arc::new(move |leg| drop(landed.send(leg))),
        })?;
        let before = self.source.stats().blocks;
        let took = self.run(key, digest, &landings);
        self.blocks.store(self.source.stats().blocks - before, Ordering::Relaxed);
        self.target.revoke(key, GENERATION);
        took
    }

    /// What the last hand-off had an engine move: 0 over transports without one.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    fn run(
        &self,
        key: RoomKey,
        digest: bool,
        landings: &mpsc::Receiver<kvferry_transport::Landed>,
    ) -> Result<Duration, Failure> {
        let push = self.source.mover() == Mover::Source;
        let case = self.case;
        let started = Instant::now();
        let (mut theirs, mut ours, mut legs) = (Sums::new(), Sums::new(), 0);
        thread::scope(|scope| {
            // The source of a pull digests its own memory while the target reads it.
            let digests = (digest && !push).then(|| scope.spawn(move || digests(case, key)));
            let (send, done) = mpsc::channel();
            for (source, tokens) in case.parts() {
                let job = self.job(key, source, tokens, digest)?;
                legs += job.legs.len();
                let send = send.clone();
                let reported: Done = Box::new(move |outcome| drop(send.send((source, outcome))));
                self.link.execute(job, reported)?;
            }
            drop(send);
            for (source, outcome) in done {
                for report in outcome? {
                    add(&mut theirs, source, report.target, &report.parts);
                }
            }
            if push {
                for leg in landings.iter().take(legs) {
                    add(&mut ours, leg.source, leg.target, &leg.outcome?.parts);
                }
            }
            if let Some(digests) = digests {
                let lost = |_| Failure::new(Blame::Us, "the thread that digests the source has died");
                ours = digests.join().map_err(lost)??;
            }
            Ok::<_, Failure>(())
        })?;
        let took = started.elapsed();
        let bytes: u64 = theirs.values().map(|(_, bytes)| bytes).sum();
        if bytes != case.bytes.0 || ((push || digest) && ours != theirs) {
            let what = "the two sides do not say the same of what was moved";
            return Err(Failure::new(Blame::Us, format_args!("{}: {what}", case.name)));
        }
        Ok(took)
    }

    fn job(&self, key: RoomKey, source: RankId, tokens: TokenRange, digest: bool) -> Result<Job, Failure> {
        let case = self.case;
        let rotation = case.pair.src().rotation(&case.from)?;
        let mut legs = Vec::new();
        for target in case.target_ranks() {
            let plan = case.plan(source, target, tokens)?;
            if !plan.is_empty() {
                let source_pages = case.from.0.iter().map(|page| (*page, UNUSED)).collect();
                let source_slot = case.slots_with(tokens).map(|(from, _)| (from, UNUSED));
                legs.push(Leg { target, plan: Arc::new(plan), source_pages, source_slot });
            }
        }
        Ok(Job { key, generation: GENERATION, source, tokens, rotation, digest, legs })
    }
}

/// The source's half of a pull.
fn digests(case: &Case, key: RoomKey) -> Result<Sums, Failure> {
    let mut sums = Sums::new();
    for (source, tokens) in case.parts() {
        let arena = &case.sources[source.0 as usize];
        let plan = |target| Ok((target, case.plan(source, target, tokens)?));
        let plans = case.target_ranks().into_iter().map(plan).collect::<Result<Vec<_>, Failure>>()?;
        let plans: Vec<_> = plans.iter().map(|(target, plan)| (*target, plan)).collect();
        let parts = digest_plans(&**arena, Side::Source, &plans, key)?;
        for ((target, _), parts) in plans.iter().zip(&parts) {
            add(&mut sums, source, *target, parts);
        }
    }
    Ok(sums)
}
