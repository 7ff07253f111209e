//! The right bytes, in the right places, and nothing else.

use std::thread;

use kvferry_plan::{CacheShape, Generation, Rotation, TokenRange};

use super::{
    Start,
    world::{self, Options, World},
};

struct Geometry {
    shape: CacheShape,
    source: &'static str,
    target: &'static str,
}

fn geometries() -> Vec<Geometry> {
    let gqa = || CacheShape::gqa(2, 3, 8);
    let mla = || CacheShape::mla(3, 24);
    let case = |shape, source, target| Geometry { shape, source, target };
    vec![
        case(gqa(), "tp=3", "tp=1"),
        case(gqa(), "tp=2", "tp=3"),
        case(gqa(), "tp=1,page=64", "tp=2,page=24"),
        case(gqa(), "tp=4", "tp=2,dcp=2,interleave=4"),
        case(mla(), "tp=2", "tp=4,dcp=4"),
        case(mla(), "tp=1,page=24", "tp=4,dcp=2,interleave=2,page=16"),
        case(gqa(), "pp=2", "tp=1"),
    ]
}

/// Hands one room of `tokens` over in `chunks` and compares everything. What comes before the first chunk is the target's
/// already.
fn check(start: Start<'_>, geometry: &Geometry, tokens: u64, chunks: &[TokenRange], pool_pages: u32) {
    check_with(start, geometry, tokens, chunks, &Options { pool_pages, ..Options::default() });
}

fn check_with(start: Start<'_>, geometry: &Geometry, tokens: u64, chunks: &[TokenRange], options: &Options) {
    let world = World::new(start, &geometry.shape, geometry.source, geometry.target, options);
    let room = world.granted(1, tokens);
    let before = world.pools();
    let reports = world.hand_off(&room, chunks);
    for (chunk, reports) in chunks.iter().zip(&reports) {
        world.check_reports(&room, *chunk, reports);
    }
    let first = chunks.first().map_or(0, |chunk| chunk.start.0);
    let model = world.model(&room, TokenRange::new(first, tokens), &before);
    let equal = world.pools() == model;
    assert!(equal, "{} -> {}, {tokens} tokens: the pools differ", geometry.source, geometry.target);
}

/// Exact bytes for several pairs of layouts and prompt lengths, one token included, and equal digests on both sides.
pub fn exact(start: Start<'_>) {
    for geometry in geometries() {
        for tokens in [1, 16, 65] {
            check(start, &geometry, tokens, &[TokenRange::new(0, tokens)], 40);
        }
    }
}

/// Every element type to every other, in other layouts on the way, and digests of what it becomes: long rows, short
/// ones, pieces of a prompt, and units that are larger than a frame.
pub fn converted(start: Start<'_>) {
    let gqa = || CacheShape::gqa(2, 3, 8);
    let mla = || CacheShape::mla(3, 600);
    let chunks = |cuts: &[u64]| cuts.windows(2).map(|w| TokenRange::new(w[0], w[1])).collect::<Vec<_>>();
    for (shape, source, target) in [
        (gqa(), "tp=3,kv=f32", "tp=1,kv=bf16"),
        (gqa(), "tp=2,kv=f32", "tp=3,kv=fp8"),
        (gqa(), "tp=4,kv=bf16", "tp=2,dcp=2,interleave=4,kv=fp8"),
        (mla(), "tp=2,kv=bf16", "tp=4,dcp=4,kv=f32"),
        (mla(), "tp=1,page=24,kv=fp8", "tp=4,dcp=2,interleave=2,page=16,kv=f32"),
        (gqa(), "pp=2,kv=fp8", "tp=1,kv=bf16"),
    ] {
        check(start, &Geometry { shape, source, target }, 90, &chunks(&[0, 17, 18, 18, 64, 90]), 40);
    }
    let shape = CacheShape::gqa(1, 2, 2048);
    let large = Geometry { shape, source: "tp=2,page=450,kv=f32", target: "tp=1,page=512,kv=bf16" };
    check(start, &large, 700, &chunks(&[0, 700]), 6);
}

/// A prompt in pieces, one of them a single token and one of them empty.
pub fn chunked(start: Start<'_>) {
    let cuts = [0, 17, 18, 18, 64, 90];
    let chunks: Vec<_> = cuts.windows(2).map(|w| TokenRange::new(w[0], w[1])).collect();
    for geometry in geometries() {
        check(start, &geometry, 90, &chunks, 40);
    }
}

/// Sources that deal their pages to their ranks, from each of them on: to targets of every kind and other pages, one page
/// and part of a page, in pieces of which some ranks own nothing, and with a prefix that the target has.
pub fn sharded(start: Start<'_>) {
    let gqa = || CacheShape::gqa(2, 3, 8);
    let mla = || CacheShape::mla(2, 24);
    let case = |shape, source, target| Geometry { shape, source, target };
    let geometries = [
        case(mla(), "tp=4,shard=on,page=8", "tp=1,page=8"),
        case(mla(), "tp=2,shard=on", "tp=2,page=24"),
        case(mla(), "tp=4,shard=on,page=8", "tp=4,dcp=4,page=8"),
        case(mla(), "tp=3,shard=on,page=7", "tp=4,dcp=2,interleave=4,page=6"),
        // Ranks of the same tokens share the pages that they own.
        case(mla(), "cp=2,tp=2,shard=on,page=8", "tp=2,page=8"),
        case(gqa(), "cp=2,tp=3,shard=on", "tp=2,page=24"),
        case(gqa(), "cp=4,pp=2,shard=on,page=8", "tp=1"),
    ];
    let cut = |cuts: &[u64]| cuts.windows(2).map(|w| TokenRange::new(w[0], w[1])).collect::<Vec<_>>();
    let rooms = [(3, cut(&[0, 3])), (90, cut(&[0, 17, 18, 18, 64, 90])), (64, cut(&[21, 48, 64]))];
    for geometry in geometries {
        let ranks = world::placement(&geometry.shape, geometry.source).shard_ranks();
        for rotation in (0..ranks).map(Rotation) {
            for (tokens, chunks) in &rooms {
                let options = Options { rotation, pool_pages: 120, ..Options::default() };
                check_with(start, &geometry, *tokens, chunks, &options);
            }
        }
    }
}

/// Rows long enough to be received straight into the pool, where those of several source pages adjoin, and a last page
/// that is not full.
pub fn long_runs(start: Start<'_>) {
    let geometry =
        Geometry { shape: CacheShape::mla(2, 576), source: "tp=1,page=64", target: "tp=4,dcp=4,page=64" };
    check(start, &geometry, 601, &[TokenRange::new(0, 600), TokenRange::new(600, 601)], 64);
}

/// Units that are larger than a frame are split by rows.
pub fn large_units(start: Start<'_>) {
    // 4 KiB of each head and row, 450 rows and more a page: 1.8 MB a unit.
    let geometry =
        Geometry { shape: CacheShape::gqa(1, 2, 2048), source: "tp=2,page=450", target: "tp=1,page=512" };
    check(start, &geometry, 700, &[TokenRange::new(0, 700)], 6);
}

/// The same chunk twice leaves the same bytes and the same reports.
pub fn repeated(start: Start<'_>) {
    let world = World::new(start, &CacheShape::gqa(2, 3, 8), "tp=3", "tp=2", &Options::default());
    let tokens = TokenRange::new(0, 40);
    let room = world.granted(1, 40);
    let before = world.pools();
    let reports = world.hand_off(&room, &[tokens, tokens, TokenRange::new(5, 20)]);
    for ((key, first), (_, second)) in reports[0].iter().zip(&reports[1]) {
        assert_eq!(first.0, second.0, "{key:?}");
        assert_eq!(first.1.parts, second.1.parts, "{key:?}");
    }
    assert!(world.pools() == world.model(&room, tokens, &before));
}

/// Rooms at the same time, from several threads; each on its own pages.
pub fn concurrent(start: Start<'_>) {
    let world = World::new(start, &CacheShape::mla(3, 24), "tp=2", "tp=4,dcp=4", &Options::default());
    let tokens = TokenRange::new(0, 120);
    let before = world.pools();
    let rooms: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let world = &world;
                scope.spawn(move || {
                    let mut room = world.granted(number, tokens.end.0);
                    for again in 0..5 {
                        let chunks = [TokenRange::new(0, 50), TokenRange::new(50, 120)];
                        for (chunk, reports) in chunks.iter().zip(world.hand_off(&room, &chunks)) {
                            world.check_reports(&room, *chunk, &reports);
                        }
                        // The next generation of the reservation.
                        world.target.transport.revoke(room.key, room.generation);
                        room.generation = Generation(room.generation.0 + 100 * (again + 1));
                        world.target.transport.grant(world.grant(&room, tokens.end.0)).unwrap();
                    }
                    room
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut model = before;
    for room in &rooms {
        model = world.model(room, tokens, &model);
    }
    assert!(world.pools() == model);
}
