//! Landing slots under a source that is stopped, goes on late, or never does: what it writes then reaches no page, and
//! every room of others is exact.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

mod fabric;

use std::{
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use fabric::Fabric;
use kvferry_arena::{Arena, Memory};
use kvferry_plan::{
    Attempt, Bytes, CacheShape, Descriptor, Dtype, End, Generation, Incarnation, LayoutSpec, PROTOCOL,
    PageTable, Pair, Placement, PoolLayout, RankId, RoomId, RoomKey, Rotation, TokenRange,
};
use kvferry_transport::{
    Grant, Job, Leg, LegReport, Limits, Link, Mem, PeerAddr, Registration, Setup, Transport, TransportError,
    slots::{SlotOptions, Slots},
};

const TARGET: Incarnation = Incarnation { started_ms: 9, nonce: 9 };
const TOKENS: u64 = 700;
const PAGES: u32 = 60;
const PATIENCE: Duration = Duration::from_secs(30);
const GENERATION: Generation = Generation(1);

fn limits() -> Limits {
    Limits { stall: Duration::from_secs(1), ..Limits::default() }
}

fn source(n: u64) -> Incarnation {
    Incarnation { started_ms: 1, nonce: n }
}

struct World {
    fabric: Fabric,
    pair: Arc<Pair>,
    target: Slots,
    pools: Vec<Arc<Arena>>,
    /// Another target, over another transport, to compare with.
    twin: Mem,
    twin_pools: Vec<Arc<Arena>>,
    rooms: u128,
}

/// A source that sends whatever room from the same pages.
struct Source {
    id: Incarnation,
    end: Slots,
    mem: Mem,
}

fn arenas(shape: &CacheShape, place: &Placement, seed: u8) -> Vec<Arc<Arena>> {
    let arena = |rank| {
        let arena = Arena::new("test", PoolLayout::new(shape, place, RankId(rank), PAGES).unwrap()).unwrap();
        let from = arena.layout().regions().first().unwrap().offset;
        let noise: Vec<u8> = (from.0..arena.layout().len().0)
            .map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 ^ seed)
            .collect();
        arena.write(from, &noise).unwrap();
        Arc::new(arena)
    };
    (0..place.ranks()).map(arena).collect()
}

fn register(end: &dyn Transport, arenas: &[Arc<Arena>]) {
    for (rank, arena) in (0..).zip(arenas) {
        end.register(RankId(rank), Registration::host(Arc::clone(arena))).unwrap();
    }
}

impl World {
    fn new(options: SlotOptions) -> Self {
        let shape = CacheShape::mla(3, 96);
        let place = |spec: &str| spec.parse::<LayoutSpec>().unwrap().placement(&shape, Dtype::Bf16).unwrap();
        let (src, dst) = (place("tp=1"), place("tp=2,dcp=2"));
        let setup = |incarnation| Setup { limits: limits(), ..Setup::new(incarnation) };
        let fabric = Fabric::default();
        let (target, twin) = (fabric.start(setup(TARGET), options).unwrap(), Mem::new(setup(TARGET)));
        let (pools, twin_pools) = (arenas(&shape, &dst, 0), arenas(&shape, &dst, 0));
        register(&target, &pools);
        register(&twin, &twin_pools);
        let pair = Arc::new(Pair::new(shape, src, dst).unwrap());
        Self { fabric, pair, target, pools, twin, twin_pools, rooms: 0 }
    }

    fn source(&self, n: u64) -> Source {
        let id = source(n);
        let setup = Setup { limits: limits(), ..Setup::new(id) };
        let end = self.fabric.start(setup.clone(), Fabric::options()).unwrap();
        let mem = Mem::new(setup);
        let arenas = arenas(self.pair.shape(), self.pair.src(), n as u8);
        register(&end, &arenas);
        register(&mem, &arenas);
        Source { id, end, mem }
    }

    fn open(&self, from: &dyn Transport, to: &dyn Transport) -> Result<Arc<dyn Link>, TransportError> {
        self.open_to(from, to, TARGET)
    }

    fn open_to(
        &self,
        from: &dyn Transport,
        to: &dyn Transport,
        incarnation: Incarnation,
    ) -> Result<Arc<dyn Link>, TransportError> {
        let descriptor = Descriptor {
            protocol: PROTOCOL,
            model: String::new(),
            shape: self.pair.shape().clone(),
            placement: self.pair.dst().clone(),
            converts: false,
        };
        let endpoint = to.endpoint();
        from.open(&PeerAddr { endpoint, incarnation, descriptor: Arc::new(descriptor) })
    }

    fn grant(&self, to: &dyn Transport, key: RoomKey, peer: Incarnation) {
        to.grant(Grant {
            key,
            generation: GENERATION,
            peer,
            pair: Arc::clone(&self.pair),
            table: PageTable::identity(PAGES),
            slot: None,
            tokens: TokenRange::new(0, TOKENS),
            ranks: (0..self.pair.dst().ranks()).map(RankId).collect(),
            digest: true,
            landed: Arc::new(drop),
        })
        .unwrap();
    }

    fn start(&self, link: &dyn Link, key: RoomKey) -> mpsc::Receiver<Result<Vec<LegReport>, TransportError>> {
        let (tokens, table) = (TokenRange::new(0, TOKENS), PageTable::identity(PAGES));
        let leg = |rank| {
            let end = |rank| End { rank, table: &table };
            let plan = Arc::new(self.pair.plan(end(RankId(0)), end(rank), tokens).unwrap());
            Leg { target: rank, plan, source_pages: Vec::new(), source_slot: None }
        };
        let legs = (0..self.pair.dst().ranks()).map(RankId).map(leg).collect();
        let job = Job {
            key,
            generation: GENERATION,
            source: RankId(0),
            tokens,
            rotation: Rotation(0),
            digest: true,
            legs,
        };
        let (send, wait) = mpsc::channel();
        link.execute(job, Box::new(move |outcome| drop(send.send(outcome)))).unwrap();
        wait
    }

    fn key(&mut self) -> RoomKey {
        self.rooms += 1;
        RoomKey { room: RoomId(self.rooms), attempt: Attempt(1) }
    }

    fn pools(&self, arenas: &[Arc<Arena>]) -> Vec<Vec<u8>> {
        let bytes = |arena: &Arc<Arena>| {
            let mut bytes = vec![0; arena.layout().len().index()];
            arena.read(Bytes(0), &mut bytes).unwrap();
            bytes
        };
        arenas.iter().map(bytes).collect()
    }

    /// A room of `source` through `link`: byte for byte what another transport makes of it.
    fn exact(&mut self, source: &Source, link: &dyn Link) {
        let key = self.key();
        let twin = self.open(&source.mem, &self.twin).unwrap();
        let report = |to: &dyn Transport, link: &dyn Link| {
            self.grant(to, key, source.id);
            let reports = self.start(link, key).recv_timeout(PATIENCE).unwrap().unwrap();
            to.revoke(key, GENERATION);
            reports.into_iter().map(|leg| (leg.target, leg.parts)).collect::<Vec<_>>()
        };
        assert_eq!(report(&self.target, link), report(&self.twin, &*twin));
        assert!(self.pools(&self.pools) == self.pools(&self.twin_pools), "the pools differ");
    }

    fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let since = Instant::now();
        while !holds(self) {
            assert!(since.elapsed() < PATIENCE, "{what}: {:?}", self.target.stats());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops `source` in the middle of a room, past its deadline, and returns its link.
    fn stopped(&mut self, source: &Source) -> Arc<dyn Link> {
        let link = self.open(&source.end, &self.target).unwrap();
        self.exact(source, &*link);
        self.fabric.hold(source.id);
        let key = self.key();
        self.grant(&self.target, key, source.id);
        let wait = self.start(&*link, key);
        match wait.recv_timeout(PATIENCE).unwrap() {
            Err(TransportError::Stalled { .. } | TransportError::PeerGone { .. }) => {}
            other => panic!("not noticed: {other:?}"),
        }
        self.target.revoke(key, GENERATION);
        link
    }
}

/// The source is stopped past the room's deadline; its slots stay out of use while others are used again and again;
/// what it writes when it goes on reaches no page; then it gets its slots back and goes on itself.
#[test]
fn a_source_that_goes_on_late_writes_to_no_page() {
    let mut world = World::new(Fabric::options());
    let (hung, well) = (world.source(1), world.source(2));
    let link = world.stopped(&hung);
    world.until("fenced", |world| world.target.stats().fenced > 0);
    let fenced = world.target.stats().fenced;
    assert!(world.fabric.moving() > 0);
    drop(link);
    // Its blocks are still read, so nobody may pack into them, and no second link may take more. Slots that it was granted and
    // had no use for yet are fenced off, too: the target cannot know.
    let staged = hung.end.stats().staged;
    assert!((1..=fenced).contains(&staged), "{staged} of {fenced}");
    match world.open(&hung.end, &world.target) {
        Err(TransportError::PeerGone { reason, .. }) => {
            assert!(reason.contains("still on their way"), "{reason}");
        }
        other => panic!("opened: {other:?}"),
    }
    let other = world.open(&well.end, &world.target).unwrap();
    for _ in 0..5 {
        world.exact(&well, &*other);
    }
    assert_eq!(world.target.stats().fenced, fenced, "time freed a slot");

    // In the middle of a room of the other.
    let key = world.key();
    world.grant(&world.target, key, well.id);
    let wait = world.start(&*other, key);
    world.fabric.go_on(hung.id);
    wait.recv_timeout(PATIENCE).unwrap().unwrap();
    world.target.revoke(key, GENERATION);
    assert_eq!(world.fabric.moving(), 0);
    for _ in 0..3 {
        world.exact(&well, &*other);
    }
    world.until("its blocks are free", |_| hung.end.stats().staged == 0);
    let link = world.open(&hung.end, &world.target).unwrap();
    world.exact(&hung, &*link);
    assert_eq!((world.target.stats().fenced, world.target.stats().renewed), (0, 0));
    world.exact(&well, &*other);
}

/// When all slots are fenced off the target goes on with another agent on other memory; links that are well notice
/// nothing, and late bytes find the old memory.
#[test]
fn all_slots_fenced_off() {
    let options = SlotOptions { slots: 2, ..Fabric::options() };
    let kept = u64::from(options.kept);
    let mut world = World::new(options);
    let (hung, well) = (world.source(1), world.source(2));
    let other = world.open(&well.end, &world.target).unwrap();
    world.exact(&well, &*other);
    // More often than old memory may be kept: it is given back when the source that may write it says so.
    for times in 1..=kept + 2 {
        let link = world.stopped(&hung);
        drop(link);
        world.until("all are fenced off", |world| world.target.stats().fenced == 2);
        for round in 0..4 {
            world.exact(&well, &*other);
            if round == 1 {
                world.fabric.go_on(hung.id);
            }
        }
        assert_eq!(world.target.stats().renewed, times);
        world.until("its blocks are free", |_| hung.end.stats().staged == 0);
        let link = world.open(&hung.end, &world.target).unwrap();
        world.exact(&hung, &*link);
        assert_eq!(world.target.stats().fenced, 0);
    }
}

/// Memory for that is bounded: then links are refused with what to do, and nothing is written.
#[test]
fn kept_memory_is_bounded() {
    let options = SlotOptions { slots: 2, kept: 1, ..Fabric::options() };
    let mut world = World::new(options);
    let sources = [world.source(1), world.source(2)];
    let _links: Vec<_> = sources
        .iter()
        .map(|source| {
            let link = world.stopped(source);
            world.until("all are fenced off", |world| world.target.stats().slots == 0);
            link
        })
        .collect();
    let well = world.source(3);
    let link = world.open(&well.end, &world.target).unwrap();
    let key = world.key();
    world.grant(&world.target, key, well.id);
    match world.start(&*link, key).recv_timeout(PATIENCE).unwrap() {
        Err(TransportError::PeerGone { reason, .. }) => {
            assert!(reason.contains("restart this instance"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(world.target.stats().renewed, 1);
}

/// A source that closes with writes under way gives nothing back.
#[test]
fn what_a_closed_source_has_sent_still_comes() {
    let mut world = World::new(Fabric::options());
    let source = world.source(1);
    let link = world.stopped(&source);
    drop(link);
    let stopped = source.end.stats().staged;
    assert!(stopped > 0);
    source.end.close();
    assert_eq!(source.end.stats().staged, 0);
    // What it had sent still comes: to slots that are fenced off.
    let fenced = |world: &World| world.target.stats().fenced >= stopped && world.target.stats().slots == 0;
    world.until("fenced", fenced);
    world.fabric.go_on(source.id);
    let well = world.source(2);
    let link = world.open(&well.end, &world.target).unwrap();
    world.exact(&well, &*link);
}

/// A source whose blocks are all on their way to a target that hangs starts its agent again, for the others.
#[test]
fn all_blocks_on_their_way_to_who_hangs() {
    let mut world = World::new(Fabric::options());
    let id = source(1);
    let setup = Setup { limits: limits(), ..Setup::new(id) };
    let options = SlotOptions { staging: 2, ..Fabric::options() };
    let end = world.fabric.start(setup.clone(), options).unwrap();
    let source = Source { id, end, mem: Mem::new(setup) };
    let arenas = arenas(world.pair.shape(), world.pair.src(), 1);
    register(&source.end, &arenas);
    register(&source.mem, &arenas);
    let link = world.open(&source.end, &world.target).unwrap();
    world.exact(&source, &*link);

    let setup = Setup { limits: limits(), ..Setup::new(Incarnation { nonce: 7, ..TARGET }) };
    let hangs = setup.incarnation;
    let other = world.fabric.start(setup, Fabric::options()).unwrap();
    register(&other, &self::arenas(world.pair.shape(), world.pair.dst(), 0));
    let to_other = world.open_to(&source.end, &other, hangs).unwrap();
    world.fabric.hold(hangs);
    let key = world.key();
    world.grant(&other, key, source.id);
    assert!(world.start(&*to_other, key).recv_timeout(PATIENCE).unwrap().is_err());
    drop(to_other);

    let key = world.key();
    world.grant(&world.target, key, source.id);
    match world.start(&*link, key).recv_timeout(PATIENCE).unwrap() {
        Err(TransportError::PeerGone { reason, .. }) => assert!(reason.contains("started again"), "{reason}"),
        other => panic!("{other:?}"),
    }
    world.target.revoke(key, GENERATION);
    let link = world.open(&source.end, &world.target).unwrap();
    world.exact(&source, &*link);
    world.fabric.go_on(hangs);
    world.exact(&source, &*link);
    assert_eq!((source.end.stats().renewed, source.end.stats().staged), (1, 0));
}

impl World {
    /// A room of `source` in which its engine fails in the middle of a chunk; why it failed.
    fn broken(&mut self, source: &Source, link: &dyn Link) -> String {
        self.fabric.fail(source.id);
        let key = self.key();
        self.grant(&self.target, key, source.id);
        let outcome = self.start(link, key).recv_timeout(PATIENCE).unwrap();
        self.target.revoke(key, GENERATION);
        self.fabric.mend(source.id);
        match outcome {
            Err(TransportError::PeerGone { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }
}

/// An error of the engine in the middle of a chunk fails the room with the engine's reason. What still comes of it reaches no
/// page, and both the source and others go on.
#[test]
fn an_engine_that_fails_in_the_middle_of_a_chunk() {
    let mut world = World::new(Fabric::options());
    let (bad, well) = (world.source(1), world.source(2));
    let other = world.open(&well.end, &world.target).unwrap();
    let link = world.open(&bad.end, &world.target).unwrap();
    world.exact(&bad, &*link);
    let reason = world.broken(&bad, &*link);
    assert!(reason.contains("fabric") && reason.contains("the other end was lost"), "{reason}");
    drop(link);
    world.until("fenced", |world| world.target.stats().fenced > 0);
    let fenced = world.target.stats().fenced;
    assert_eq!(bad.end.stats().staged, 0);
    world.exact(&well, &*other);
    // The other half of what failed, in the middle of a room.
    let key = world.key();
    world.grant(&world.target, key, well.id);
    let wait = world.start(&*other, key);
    world.fabric.go_on(bad.id);
    wait.recv_timeout(PATIENCE).unwrap().unwrap();
    world.target.revoke(key, GENERATION);
    world.exact(&well, &*other);
    let link = world.open(&bad.end, &world.target).unwrap();
    world.exact(&bad, &*link);
    // Nobody knows that it came; what had not failed is free.
    let stats = world.target.stats();
    assert!((1..=fenced).contains(&stats.fenced) && stats.slots == 0, "{stats:?}");
}

/// One whose engine fails again and again does not use up the slots of everybody: when two whole areas had to be given up for
/// it, it gets no more until it is started again.
#[test]
fn an_engine_that_always_fails_harms_itself_alone() {
    let mut world = World::new(Fabric::options());
    let (bad, well) = (world.source(1), world.source(2));
    let other = world.open(&well.end, &world.target).unwrap();
    let mut reasons = Vec::new();
    for _ in 0..20 {
        let link = world.open(&bad.end, &world.target).unwrap();
        reasons.push(world.broken(&bad, &*link));
        drop(link);
        world.exact(&well, &*other);
    }
    assert!(reasons[0].contains("the other end was lost"), "{reasons:?}");
    assert!(reasons.last().unwrap().contains("restart it"), "{reasons:?}");
    assert_eq!(world.target.stats().renewed, 2);
    let again = world.source(3);
    let link = world.open(&again.end, &world.target).unwrap();
    world.exact(&again, &*link);
}

/// A room that is cancelled at any moment leaves a link that goes on: what was asked for, was granted, or is on its way
/// is given back before the next job.
#[test]
fn cancelled_at_any_moment() {
    let mut world = World::new(Fabric::options());
    let source = world.source(1);
    let link = world.open(&source.end, &world.target).unwrap();
    for round in 0..150 {
        let key = world.key();
        world.grant(&world.target, key, source.id);
        let waits: Vec<_> = (0..3).map(|_| world.start(&*link, key)).collect();
        thread::sleep(Duration::from_micros(17 * round));
        link.cancel(key);
        for wait in waits {
            match wait.recv_timeout(PATIENCE).unwrap() {
                Ok(_) | Err(TransportError::Cancelled) => {}
                Err(error) => panic!("round {round}: {error}"),
            }
        }
        world.target.revoke(key, GENERATION);
    }
    world.exact(&source, &*link);
    assert_eq!((world.target.stats().slots, source.end.stats().staged), (0, 0));
}

/// Many links to few slots and blocks: everybody waits, nobody fails.
#[test]
fn few_slots_are_shared() {
    let options = SlotOptions { slots: 1, ..Fabric::options() };
    let mut world = World::new(options);
    let sources: Vec<_> = (1..=4).map(|n| world.source(n)).collect();
    let links: Vec<_> =
        sources.iter().map(|source| world.open(&source.end, &world.target).unwrap()).collect();
    let mut waits = Vec::new();
    for (source, link) in sources.iter().zip(&links) {
        for _ in 0..5 {
            let key = world.key();
            world.grant(&world.target, key, source.id);
            waits.push(world.start(&**link, key));
        }
    }
    for wait in waits {
        wait.recv_timeout(PATIENCE).unwrap().unwrap();
    }
    assert_eq!((world.target.stats().slots, world.target.stats().fenced), (0, 0));
    world.exact(&sources[0], &*links[0]);
}
