//! Two ends with memory, and a naive model of what a hand-off must leave behind.

use std::{
    collections::BTreeMap,
    sync::{Arc, mpsc},
    time::Duration,
};

use kvferry_arena::{Arena, Memory, Side, convert, digest_plan};
use kvferry_plan::{
    Attempt, Bytes, CacheShape, Cast, Descriptor, Dtype, Dtypes, End, Generation, Incarnation, LayoutSpec,
    PROTOCOL, PageId, PageTable, Pair, PartDigest, PartLayout, Placement, Plan, PoolLayout, RankId, RoomId,
    RoomKey, Rotation, Row, Token, TokenMap, TokenRange, UnitId,
};

use super::Start;
use crate::{
    Done, Grant, Inject, Job, Landed, Leg, LegReport, Limits, Link, Mover, PeerAddr, Registration, Setup,
    Transport, TransportError,
};

/// Far longer than anything here takes, on the slowest machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

pub(super) const SOURCE: Incarnation = Incarnation { started_ms: 1, nonce: 11 };
pub(super) const TARGET: Incarnation = Incarnation { started_ms: 2, nonce: 22 };

/// How a world differs from the usual.
#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) inject: Option<Inject>,
    pub(super) limits: Limits,
    pub(super) pool_pages: u32,
    /// Who owns the first page of a source that shards them.
    pub(super) rotation: Rotation,
}

impl Default for Options {
    fn default() -> Self {
        Self { inject: None, limits: Limits::default(), pool_pages: 40, rotation: Rotation(0) }
    }
}

/// One instance's memory and transport.
pub(super) struct Instance {
    pub(super) arenas: Vec<Arc<Arena>>,
    pub(super) transport: Arc<dyn Transport>,
}

/// A source, a target, and a link from the mover to the other.
pub(super) struct World {
    pub(super) pair: Arc<Pair>,
    pub(super) source: Instance,
    pub(super) target: Instance,
    pub(super) link: Arc<dyn Link>,
    pool_pages: u32,
    rotation: Rotation,
}

/// A room on both sides.
pub(super) struct Room {
    pub(super) key: RoomKey,
    pub(super) generation: Generation,
    pub(super) source: PageTable,
    pub(super) target: PageTable,
    pub(super) landed: mpsc::Receiver<Landed>,
    report: mpsc::Sender<Landed>,
}

/// Reports of both sides, by (source rank, target rank).
pub(super) type Reports = BTreeMap<(RankId, RankId), (Vec<PartDigest>, LegReport)>;

pub(super) fn key(room: u128) -> RoomKey {
    RoomKey { room: RoomId(room), attempt: Attempt(1) }
}

pub(super) fn placement(shape: &CacheShape, spec: &str) -> Placement {
    spec.parse::<LayoutSpec>().unwrap().placement(shape, Dtype::Bf16).unwrap()
}

fn instance(start: Start<'_>, shape: &CacheShape, place: &Placement, setup: Setup, pages: u32) -> Instance {
    let seed = setup.incarnation.nonce;
    let transport = start(setup).unwrap();
    let arenas: Vec<_> = (0..place.ranks())
        .map(RankId)
        .map(|rank| {
            let layout = PoolLayout::new(shape, place, rank, pages).unwrap();
            let arena = Arc::new(Arena::new("contract", layout).unwrap());
            fill(&arena, seed ^ (u64::from(rank.0) << 32));
            transport.register(rank, Registration::host(Arc::clone(&arena))).unwrap();
            arena
        })
        .collect();
    Instance { arenas, transport }
}

/// Noise in all rows.
fn fill(arena: &Arena, seed: u64) {
    let from = arena.layout().regions().first().unwrap().offset;
    let len = arena.layout().len().0 - from.0;
    arena.write(from, &noise(&seed.to_le_bytes(), len.try_into().unwrap())).unwrap();
}

/// Bytes that follow from a name.
fn noise(name: &[u8], len: usize) -> Vec<u8> {
    let mut state = twox_hash::XxHash3_64::oneshot(name);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Pages for `tokens` in no order, disjoint for the rooms 0 to 3 of one world; their owners are cyclic.
fn table(place: &Placement, tokens: u64, room: u32, rotation: Rotation) -> PageTable {
    let (part, ranks) = (&place.parts[0], place.shard_ranks());
    let dealt = if ranks > 1 { 1 } else { part.tokens.classes() };
    let pages = tokens.div_ceil(u64::from(part.page_size) * u64::from(dealt)) as u32;
    let turns = pages.div_ceil(ranks);
    let page = |k| ((turns - 1 - k / ranks) * 4 + room) * ranks + (rotation.0 + k) % ranks;
    PageTable((0..pages).map(|k| PageId(page(k))).collect())
}

pub(super) fn snapshot(arena: &Arena) -> Vec<u8> {
    let mut bytes = vec![0; arena.layout().len().index()];
    arena.read(Bytes(0), &mut bytes).unwrap();
    bytes
}

impl World {
    pub(super) fn new(start: Start<'_>, shape: &CacheShape, src: &str, dst: &str, options: &Options) -> Self {
        let (src, dst) = (placement(shape, src), placement(shape, dst));
        let pair = Arc::new(Pair::with(shape.clone(), src.clone(), dst.clone(), Dtypes::Converted).unwrap());
        let limits = options.limits.clone();
        let setup = |incarnation| Setup { limits: limits.clone(), ..Setup::new(incarnation) };
        let source = instance(start, shape, &src, setup(SOURCE), options.pool_pages);
        let target = instance(
            start,
            shape,
            &dst,
            Setup { inject: options.inject, ..setup(TARGET) },
            options.pool_pages,
        );
        let link = {
            let describe = |placement| Descriptor {
                protocol: PROTOCOL,
                model: "m".into(),
                shape: shape.clone(),
                placement,
                converts: true,
            };
            let (from, to, incarnation, place) = match source.transport.mover() {
                Mover::Source => (&source, &target, TARGET, dst),
                Mover::Target => (&target, &source, SOURCE, src),
            };
            let endpoint = to.transport.endpoint();
            let descriptor = Arc::new(describe(place));
            from.transport.open(&PeerAddr { endpoint, incarnation, descriptor }).unwrap()
        };
        Self { pair, source, target, link, pool_pages: options.pool_pages, rotation: options.rotation }
    }

    pub(super) fn mover(&self) -> Mover {
        self.source.transport.mover()
    }

    /// The end that executes.
    pub(super) fn executor(&self) -> &Instance {
        match self.mover() {
            Mover::Source => &self.source,
            Mover::Target => &self.target,
        }
    }

    /// The end that does not.
    pub(super) fn other(&self) -> &Instance {
        match self.mover() {
            Mover::Source => &self.target,
            Mover::Target => &self.source,
        }
    }

    /// Room `number` (0 to 3) with pages for `tokens` that the source has computed, not granted yet.
    pub(super) fn room(&self, number: u32, tokens: u64) -> Room {
        let (report, landed) = mpsc::channel();
        let room = Room {
            key: key(u128::from(number) + 100),
            generation: Generation(u64::from(number) + 7),
            source: table(self.pair.src(), tokens, number, self.rotation),
            target: table(self.pair.dst(), tokens, number, Rotation(0)),
            landed,
            report,
        };
        self.prefill(&room, TokenRange::new(0, tokens));
        room
    }

    /// A grant of the room for all ranks.
    pub(super) fn grant(&self, room: &Room, tokens: u64) -> Grant {
        let report = room.report.clone();
        Grant {
            key: room.key,
            generation: room.generation,
            peer: SOURCE,
            pair: Arc::clone(&self.pair),
            table: room.target.clone(),
            slot: None,
            tokens: TokenRange::new(0, tokens),
            ranks: (0..self.pair.dst().ranks()).map(RankId).collect(),
            digest: true,
            landed: Arc::new(move |landed| {
                let _ = report.send(landed);
            }),
        }
    }

    pub(super) fn granted(&self, number: u32, tokens: u64) -> Room {
        let room = self.room(number, tokens);
        self.target.transport.grant(self.grant(&room, tokens)).unwrap();
        room
    }

    fn plan(&self, room: &Room, source: RankId, target: RankId, tokens: TokenRange) -> Plan {
        let (src, dst) =
            (End { rank: source, table: &room.source }, End { rank: target, table: &room.target });
        self.pair.plan(src, dst, tokens).unwrap()
    }

    /// The job of one source rank, to all target ranks.
    pub(super) fn job(&self, room: &Room, source: RankId, tokens: TokenRange) -> Job {
        let identity = PageTable::identity(self.pool_pages);
        let leg = |target| {
            let (table, source_pages) = match self.mover() {
                // Where the target keeps the room is not known here.
                Mover::Source => (&identity, Vec::new()),
                Mover::Target => (&room.target, self.source_pages(room, source)),
            };
            let (src, dst) = (End { rank: source, table: &room.source }, End { rank: target, table });
            Leg {
                target,
                plan: Arc::new(self.pair.plan(src, dst, tokens).unwrap()),
                source_pages,
                source_slot: None,
            }
        };
        Job {
            key: room.key,
            generation: room.generation,
            source,
            tokens,
            rotation: self.rotation,
            digest: true,
            legs: (0..self.pair.dst().ranks()).map(RankId).map(leg).collect(),
        }
    }

    fn source_pages(&self, room: &Room, source: RankId) -> Vec<(PageId, Generation)> {
        let (arena, src) = (&self.source.arenas[source.index()], self.pair.src());
        let own = room.source.0.iter().filter(|page| src.owner(**page) == src.shard_rank(source));
        own.map(|page| src.local_page(*page)).map(|page| (page, arena.generation(page).unwrap())).collect()
    }

    /// Executes jobs and waits for them, in order.
    pub(super) fn execute(&self, jobs: Vec<Job>) -> Vec<Result<Vec<LegReport>, TransportError>> {
        let waits: Vec<_> = jobs.into_iter().map(|job| self.start(job)).collect();
        waits.into_iter().map(|wait| wait.recv_timeout(PATIENCE).expect("a job was never done")).collect()
    }

    pub(super) fn start(&self, job: Job) -> mpsc::Receiver<Result<Vec<LegReport>, TransportError>> {
        let (done, wait) = done();
        self.link.execute(job, done).unwrap();
        wait
    }

    /// Hands `chunks` of a granted room over from all source ranks, and returns what both sides report.
    pub(super) fn hand_off(&self, room: &Room, chunks: &[TokenRange]) -> Vec<Reports> {
        let sources = || (0..self.pair.src().ranks()).map(RankId);
        let targets = || (0..self.pair.dst().ranks()).map(RankId);
        let jobs: Vec<_> = chunks
            .iter()
            .flat_map(|&chunk| sources().map(move |source| self.job(room, source, chunk)))
            .collect();
        let mut outcomes = self.execute(jobs).into_iter();
        let mut all = Vec::new();
        for &chunk in chunks {
            let mut reports = Reports::new();
            for source in sources() {
                let legs = outcomes.next().unwrap().unwrap();
                assert_eq!(
                    legs.iter().map(|leg| leg.target).collect::<Vec<_>>(),
                    targets().collect::<Vec<_>>()
                );
                for leg in legs {
                    let target = leg.target;
                    let pair = match self.mover() {
                        Mover::Source => (leg.parts, self.landed(room, source, target, chunk)),
                        Mover::Target => {
                            let plan = self.plan(room, source, target, chunk);
                            let memory = &*self.source.arenas[source.index()];
                            (digest_plan(memory, Side::Source, &plan, room.key, target).unwrap(), leg)
                        }
                    };
                    reports.insert((source, target), pair);
                }
            }
            all.push(reports);
        }
        assert!(room.landed.try_recv().is_err(), "a leg was reported more than once");
        all
    }

    fn landed(&self, room: &Room, source: RankId, target: RankId, tokens: TokenRange) -> LegReport {
        let landed = room.landed.recv_timeout(PATIENCE).expect("a leg was never reported");
        let found = (landed.key, landed.generation, landed.source, landed.target, landed.tokens);
        assert_eq!(found, (room.key, room.generation, source, target, tokens));
        landed.outcome.unwrap()
    }

    /// Checks reports against each other, against the planner's figures and against a digest made row by row.
    pub(super) fn check_reports(&self, room: &Room, chunk: TokenRange, reports: &Reports) {
        for target in (0..self.pair.dst().ranks()).map(RankId) {
            let bytes: u64 =
                reports.iter().filter(|((_, t), _)| *t == target).map(|(_, (_, leg))| leg.bytes.0).sum();
            assert_eq!(Bytes(bytes), self.pair.target_bytes(target, chunk), "bytes of target rank {target}");
        }
        for ((source, target), (sent, leg)) in reports {
            let plan = self.plan(room, *source, *target, chunk);
            assert_eq!(leg.copies, plan.copies());
            assert_eq!(*sent, leg.parts, "digests of {source} -> {target}");
            assert_eq!(*sent, self.naive_digest(room.key, *source, *target, &plan));
        }
    }

    fn naive_digest(&self, key: RoomKey, source: RankId, target: RankId, plan: &Plan) -> Vec<PartDigest> {
        let arena = &self.source.arenas[source.index()];
        let mut parts = Vec::new();
        for unit in plan.units() {
            let region = arena.layout().region(unit.layer, unit.part).unwrap();
            let mut hasher = UnitId::new(key, target, &unit).hasher();
            let mut row_bytes = vec![0; unit.slice.src_len().index()];
            for (_, row, _) in unit.runs.iter().flat_map(kvferry_plan::Run::expand) {
                let at = Bytes(region.row_offset(row).unwrap().0 + unit.slice.src_offset.0);
                arena.read(at, &mut row_bytes).unwrap();
                hasher.update(&cast(&row_bytes, unit.slice.cast));
            }
            PartDigest::add(&mut parts, unit.part, hasher.digest(), unit.bytes());
        }
        parts
    }

    pub(super) fn pools(&self) -> Vec<Vec<u8>> {
        self.target.arenas.iter().map(|arena| snapshot(arena)).collect()
    }

    /// What the target's pools must hold when `tokens` of the room have come: found coordinate by coordinate,
    /// without the planner. Everything else is as in `before`.
    pub(super) fn model(&self, room: &Room, tokens: TokenRange, before: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut pools = before.to_vec();
        for (rank, pool) in pools.iter_mut().enumerate() {
            let arena = &self.target.arenas[rank];
            self.each(self.pair.dst(), rank, arena, &room.target, room.key, tokens, |at, bytes| {
                pool[at.index()..at.index() + bytes.len()].copy_from_slice(bytes);
            });
        }
        pools
    }

    /// What a prefill leaves behind: every source rank holds its coordinates of the room.
    fn prefill(&self, room: &Room, tokens: TokenRange) {
        for (rank, arena) in self.source.arenas.iter().enumerate() {
            self.each(self.pair.src(), rank, arena, &room.source, room.key, tokens, |at, bytes| {
                arena.write(at, bytes).unwrap();
            });
        }
    }

    /// Visits every coordinate that a rank holds, with its place and its bytes.
    #[allow(clippy::too_many_arguments)]
    fn each(
        &self,
        side: &Placement,
        rank: usize,
        arena: &Arena,
        table: &PageTable,
        key: RoomKey,
        tokens: TokenRange,
        mut visit: impl FnMut(Bytes, &[u8]),
    ) {
        let rank = RankId(u32::try_from(rank).unwrap());
        for part in &self.pair.shape().parts {
            let layout = side.part(part.part).unwrap();
            let len = u64::from(part.head_elems) * layout.dtype.size().0;
            let computed = self.pair.src().part(part.part).unwrap().dtype;
            let computed_len = part.head_elems as usize * computed.size().index();
            let heads = side.heads(part, rank);
            for layer in side.layers(part, rank) {
                let region = arena.layout().region(layer, part.part).unwrap();
                for token in (tokens.start.0..tokens.end.0).map(Token) {
                    let class = side.class(part.part, rank);
                    // None where it is another rank's.
                    let Some(row) = naive_row(layout, class, table, token) else { continue };
                    let row = region.row_offset(row).unwrap();
                    for head in heads.clone() {
                        let at = Bytes(row.0 + u64::from(head - heads.start) * len);
                        let name = format!("{key} {layer} {} {head} {token}", part.part);
                        let content = noise(name.as_bytes(), computed_len);
                        visit(at, &cast(&content, Cast::between(computed, layout.dtype)));
                    }
                }
            }
        }
    }
}

/// Where a rank of this class keeps a token of a request with these pages, if it does.
fn naive_row(layout: &PartLayout, class: u32, table: &PageTable, token: Token) -> Option<Row> {
    let local = layout.tokens.local(token, class)?;
    let TokenMap::PageSharded { ranks } = layout.tokens else {
        return Some(table.row(local, layout.page_size).unwrap());
    };
    let size = u64::from(layout.page_size);
    let page = table.0[(token.0 / size) as usize].0;
    (page % ranks == class).then(|| Row(u64::from(page / ranks) * size + token.0 % size))
}

/// What the target must find of some of the source's elements.
fn cast(bytes: &[u8], cast: Option<Cast>) -> Vec<u8> {
    let Some(cast) = cast else { return bytes.to_vec() };
    let mut out = vec![0; cast.target_len(Bytes(bytes.len() as u64)).index()];
    convert(cast, bytes, &mut out);
    out
}

/// A callback and what it is called with.
pub(super) fn done() -> (Done, mpsc::Receiver<Result<Vec<LegReport>, TransportError>>) {
    let (send, receive) = mpsc::channel();
    let done = move |outcome| {
        let _ = send.send(outcome);
    };
    (Box::new(done), receive)
}
