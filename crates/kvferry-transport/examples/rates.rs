//! Rates of a hand-off from dense latent rows to DCP4, next to ceilings measured in the same run.
//!
//! `cargo run --release -p kvferry-transport --example rates`
//!
//! Both ends share this process and its memory bandwidth. Ratios mean something, absolute numbers only here.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used, reason = "a program for people")]

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use kvferry_arena::{Arena, Memory, Stores};
use kvferry_plan::{
    Attempt, Bytes, CacheShape, Descriptor, Dtype, End, Generation, Incarnation, LayoutSpec, PROTOCOL,
    PageId, PageTable, Pair, Placement, PoolLayout, RankId, RoomId, RoomKey, StridedMove, Strides,
    TokenRange,
};
use kvferry_transport::{Grant, Job, Leg, Mover, PeerAddr, Registration, Setup, Transport, TransportKind};
use rustix::net::sockopt::set_tcp_congestion;

const LAYERS: u32 = 8;
const PAGE: u64 = 64;
const TOKENS: u64 = 4 << 10;
const ROUNDS: usize = 25;
const SOURCE: Incarnation = Incarnation { started_ms: 1, nonce: 1 };
const TARGET: Incarnation = Incarnation { started_ms: 2, nonce: 2 };

fn main() {
    let shape = CacheShape::mla(LAYERS, 576);
    let place = |spec: &str| spec.parse::<LayoutSpec>().unwrap().placement(&shape, Dtype::Bf16).unwrap();
    let (src, dst) = (place("tp=1,page=64"), place("tp=4,dcp=4,page=64"));
    let source = arenas(&shape, &src, TOKENS / PAGE);
    let target = arenas(&shape, &dst, TOKENS / PAGE / 4);
    let pair = Arc::new(Pair::new(shape.clone(), src.clone(), dst.clone()).unwrap());

    let copy = best(|| memcpy(&source[0], &arenas(&shape, &src, TOKENS / PAGE)[0]));
    let loopback = best(raw_loopback);
    println!("copy of one arena to another     {copy:6.2} GB/s");
    println!("loopback, cubic, one stream      {loopback:6.2} GB/s");
    for (kind, ceiling) in [(TransportKind::Shm, copy), (TransportKind::Tcp, loopback)] {
        for digest in [false, true] {
            let world = World::new(kind, &pair, &source, &target);
            let mut room = 0;
            let rate = best(|| {
                room += 1;
                world.hand_off(room, digest)
            });
            let what = if digest { "with digests" } else { "without digests" };
            println!("{kind}, {what:<16}            {rate:6.2} GB/s  {:.2} of its ceiling", rate / ceiling);
        }
    }
}

/// Best of some rounds, in GB/s of the room's payload.
fn best(mut round: impl FnMut() -> Duration) -> f64 {
    let bytes = (TOKENS * 1152 * u64::from(LAYERS)) as f64;
    (0..ROUNDS).map(|_| bytes / round().as_secs_f64() / 1e9).fold(0.0, f64::max)
}

fn arenas(shape: &CacheShape, place: &Placement, pages: u64) -> Vec<Arc<Arena>> {
    (0..place.ranks())
        .map(|rank| PoolLayout::new(shape, place, RankId(rank), pages as u32).unwrap())
        .map(|layout| Arc::new(Arena::new("rates", layout).unwrap()))
        .collect()
}

fn memcpy(source: &Arena, target: &Arena) -> Duration {
    let len = Bytes(TOKENS * 1152 * u64::from(LAYERS));
    let at = source.layout().regions()[0].offset;
    let strides = Strides { offset: at, row: len, block: len };
    let started = Instant::now();
    target
        .copy_from(
            source,
            &StridedMove { src: strides, dst: strides, len, rows: 1, blocks: 1 },
            Stores::Cached,
        )
        .unwrap();
    started.elapsed()
}

fn raw_loopback() -> Duration {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let _ = set_tcp_congestion(&stream, "cubic");
    let (mut sink, _) = listener.accept().unwrap();
    let started = Instant::now();
    thread::scope(|scope| {
        scope.spawn(move || {
            let stage = vec![1_u8; 512 << 10];
            let mut left = (TOKENS * 1152 * u64::from(LAYERS)) as usize;
            while left > 0 {
                let n = left.min(stage.len());
                stream.write_all(&stage[..n]).unwrap();
                left -= n;
            }
        });
        let mut buffer = vec![0; 512 << 10];
        while sink.read(&mut buffer).unwrap() > 0 {}
    });
    started.elapsed()
}

struct World {
    pair: Arc<Pair>,
    source: Arc<dyn Transport>,
    target: Arc<dyn Transport>,
    link: Arc<dyn kvferry_transport::Link>,
    from: PageTable,
    to: PageTable,
}

impl World {
    fn new(kind: TransportKind, pair: &Arc<Pair>, sources: &[Arc<Arena>], targets: &[Arc<Arena>]) -> Self {
        let end = |incarnation, arenas: &[Arc<Arena>]| {
            let end = kind.start(Setup::new(incarnation)).unwrap();
            for (rank, arena) in arenas.iter().enumerate() {
                end.register(RankId(rank as u32), Registration::host(Arc::clone(arena))).unwrap();
            }
            end
        };
        let (source, target) = (end(SOURCE, sources), end(TARGET, targets));
        let (from, to, incarnation, placement) = match source.mover() {
            Mover::Source => (&source, &target, TARGET, pair.dst()),
            Mover::Target => (&target, &source, SOURCE, pair.src()),
        };
        let descriptor = Descriptor {
            protocol: PROTOCOL,
            model: String::new(),
            shape: pair.shape().clone(),
            placement: placement.clone(),
        };
        let peer = PeerAddr { endpoint: to.endpoint(), incarnation, descriptor: Arc::new(descriptor) };
        let link = from.open(&peer).unwrap();
        // Pages in no order, as in a pool that has been used for a while.
        let shuffled = |pages: u64| PageTable((0..pages).map(|i| PageId((i * 37 % pages) as u32)).collect());
        let (from, to) = (shuffled(TOKENS / PAGE), shuffled(TOKENS / PAGE / 4));
        Self { pair: Arc::clone(pair), source, target, link, from, to }
    }

    fn hand_off(&self, room: u128, digest: bool) -> Duration {
        let key = RoomKey { room: RoomId(room), attempt: Attempt(1) };
        let tokens = TokenRange::new(0, TOKENS);
        let ranks: Vec<_> = (0..4).map(RankId).collect();
        let grant = Grant {
            key,
            generation: Generation(1),
            peer: SOURCE,
            pair: Arc::clone(&self.pair),
            table: self.to.clone(),
            tokens,
            ranks: ranks.clone(),
            digest,
            landed: Arc::new(drop),
        };
        self.target.grant(grant).unwrap();
        let src = End { rank: RankId(0), table: &self.from };
        let leg = |target| {
            let plan = self.pair.plan(src, End { rank: target, table: &self.to }, tokens).unwrap();
            let source_pages = self.from.0.iter().map(|page| (*page, Generation(0))).collect();
            Leg { target, plan: Arc::new(plan), source_pages }
        };
        let legs = ranks.into_iter().map(leg).collect();
        let job = Job { key, generation: Generation(1), source: RankId(0), tokens, digest, legs };
        let (send, done) = mpsc::channel();
        let started = Instant::now();
        self.link.execute(job, Box::new(move |outcome| send.send(outcome).expect("nobody waits"))).unwrap();
        done.recv().unwrap().unwrap();
        let took = started.elapsed();
        assert!(self.source.stats().refused.is_empty());
        self.target.revoke(key, Generation(1));
        took
    }
}
