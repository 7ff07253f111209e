//! Copies, gathers, scatters and digests against a copier that goes byte by byte.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use kvferry_arena::{Arena, ArenaView, Memory, Pieces, Side, Stores, copy_in_turns, digest_plan};
use kvferry_plan::{
    Attempt, Bytes, CacheShape, Dtype, End, LayoutSpec, PageId, PageTable, Pair, PartDigest, Plan,
    PoolLayout, RankId, RoomId, RoomKey, StridedMove, Strides, TokenRange, Unit, UnitId,
};
use proptest::prelude::*;

/// A pool of odd size for moves that no plan would make.
fn arena() -> Arena {
    let shape = CacheShape::gqa(1, 3, 5);
    let place = "page=7".parse::<LayoutSpec>().unwrap().placement(&shape, Dtype::Fp8E4m3).unwrap();
    let arena = Arena::new("test", PoolLayout::new(&shape, &place, RankId(0), 40).unwrap()).unwrap();
    fill(&arena, 1);
    arena
}

fn fill(arena: &Arena, seed: u64) {
    let mut state = seed;
    let bytes: Vec<u8> = (0..arena.layout().len().0)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect();
    arena.write(Bytes(0), &bytes).unwrap();
}

fn bytes(memory: &impl Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.layout().len().index()];
    memory.read(Bytes(0), &mut bytes).unwrap();
    bytes
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0_u64..3000, 1 => Just(u64::MAX), 1 => any::<u64>()]
}

fn strides() -> impl Strategy<Value = Strides> {
    (number(), number(), number()).prop_map(|(offset, row, block)| Strides {
        offset: Bytes(offset),
        row: Bytes(row),
        block: Bytes(block),
    })
}

fn moves() -> impl Strategy<Value = StridedMove> {
    let small = |max: u64| prop_oneof![9 => 0..max, 1 => any::<u64>()];
    (strides(), strides(), small(300), small(5), small(4)).prop_map(|(src, dst, len, rows, blocks)| {
        StridedMove { src, dst, len: Bytes(len), rows, blocks, cast: None }
    })
}

/// Moves that lie inside.
fn inside() -> impl Strategy<Value = StridedMove> {
    let strides = || {
        (0_u64..100, 0_u64..100, 0_u64..100).prop_map(|(offset, row, block)| Strides {
            offset: Bytes(offset),
            row: Bytes(row),
            block: Bytes(block),
        })
    };
    // Pieces that do not lie on each other in the target: else the last one would win, whichever that is.
    let apart = |mut m: StridedMove| {
        m.dst.row.0 += m.len.0;
        m.dst.block.0 += m.dst.row.0 * m.rows;
        m
    };
    (strides(), strides(), 0_u64..150, 0_u64..4, 0_u64..4)
        .prop_map(|(src, dst, len, rows, blocks)| StridedMove {
            src,
            dst,
            len: Bytes(len),
            rows,
            blocks,
            cast: None,
        })
        .prop_map(apart)
        .prop_filter("inside", |m| m.bytes().0 < 1200)
}

/// Byte by byte; `None` when a byte lies outside.
fn naive(m: &StridedMove, source: &[u8], target: &[u8]) -> Option<Vec<u8>> {
    let mut out = target.to_vec();
    if m.len.0 == 0 || m.rows == 0 || m.blocks == 0 {
        return Some(out);
    }
    // Far more pieces than fit have a last piece that does not fit, unless strides are 0; nobody copies these.
    if m.rows.checked_mul(m.blocks)? > 4096 || m.len.0 > source.len() as u64 {
        return None;
    }
    for b in 0..m.blocks {
        for i in 0..m.rows {
            let at = |s: &Strides| {
                b.checked_mul(s.block.0)?.checked_add(i.checked_mul(s.row.0)?)?.checked_add(s.offset.0)
            };
            for byte in 0..m.len.0 {
                let (from, to) = (at(&m.src)?.checked_add(byte)?, at(&m.dst)?.checked_add(byte)?);
                let from = *source.get(usize::try_from(from).ok()?)?;
                *out.get_mut(usize::try_from(to).ok()?)? = from;
            }
        }
    }
    Some(out)
}

proptest! {
    /// Both kernels do what byte by byte does, or refuse and touch nothing.
    #[test]
    fn strided_moves(m in moves()) {
        let far = m.rows.saturating_mul(m.blocks) > 4096;
        // Countless pieces on one spot are legal and take for ever.
        prop_assume!(!far || (m.src.row.0 > 0 && m.src.block.0 > 0) || m.len.0 == 0);
        let (source, cached, streamed) = (arena(), arena(), arena());
        fill(&source, 2);
        let view = ArenaView::map(source.fd(), source.layout().clone()).unwrap();
        let before = bytes(&cached);
        let expected = naive(&m, &bytes(&source), &before);
        let plain = cached.copy_from(&source, &m, Stores::Cached);
        let stream = streamed.copy_from(&view, &m, Stores::Streaming);
        prop_assert_eq!(plain.is_ok(), expected.is_some());
        prop_assert_eq!(stream.is_ok(), expected.is_some());
        let expected = expected.unwrap_or(before);
        prop_assert!(bytes(&cached) == expected);
        prop_assert!(bytes(&streamed) == expected);
    }

    /// Moves that take turns write what they write one after the other, or nothing when one of them is out of bounds.
    #[test]
    fn moves_in_turns(moves in prop::collection::vec(inside(), 0..5), stray in prop::option::of((inside(), any::<bool>()))) {
        let (source, target) = (arena(), arena());
        fill(&source, 2);
        let before = bytes(&target);
        let stray = stray.map(|(mut m, source)| {
            let side = if source { &mut m.src } else { &mut m.dst };
            side.offset = target.layout().len();
            (m.len, m.rows, m.blocks) = (Bytes(m.len.0.max(1)), m.rows.max(1), m.blocks.max(1));
            m
        });
        for stores in [Stores::Cached, Stores::Streaming] {
            target.write(Bytes(0), &before).unwrap();
            let targets: Vec<Arena> = moves.iter().map(|_| arena()).collect();
            let all = targets.iter().zip(&moves).chain(stray.iter().map(|m| (&target, m)));
            prop_assert_eq!(copy_in_turns(&source, all, stores).is_ok(), stray.is_none());
            for (target, m) in targets.iter().zip(&moves) {
                let expected = if stray.is_none() { naive(m, &bytes(&source), &before) } else { None };
                prop_assert!(bytes(target) == expected.unwrap_or_else(|| before.clone()));
            }
            prop_assert!(bytes(&target) == before);
        }
    }

    /// Gather and scatter check their bounds.
    #[test]
    fn pieces_out_of_bounds(strides in strides(), len in 0_u64..300, rows in 0_u64..5, blocks in 0_u64..4) {
        let arena = arena();
        let before = bytes(&arena);
        let pieces = Pieces { strides, len: Bytes(len), rows, blocks };
        let m = StridedMove { src: strides, dst: Strides { offset: Bytes(0), row: Bytes(len), block: Bytes(len * rows) }, len: Bytes(len), rows, blocks, cast: None };
        let mut packed = vec![0; pieces.bytes().index()];
        let inside = naive(&m, &before, &before);
        let gathered = arena.gather(&pieces, &mut packed);
        prop_assert_eq!(gathered.is_ok(), inside.is_some());
        if let Some(inside) = inside {
            prop_assert!(packed[..] == inside[..packed.len()]);
            // Back where it came from.
            arena.scatter(&pieces, packed[..].into()).unwrap();
            prop_assert!(bytes(&arena) == before);
        } else {
            prop_assert!(arena.scatter(&pieces, packed[..].into()).is_err());
        }
        prop_assert!(arena.gather(&pieces, &mut vec![0; packed.len() + 1]).is_err());
        prop_assert!(arena.scatter(&pieces, vec![0; packed.len() + 1][..].into()).is_err());
    }

    /// Units of real plans: whole, in parts, packed and unpacked, and their digests.
    #[test]
    fn units_of_plans(
        layouts in prop::sample::select(vec![
            ("tp=3,page=16", "tp=1,page=16"),
            ("tp=1,page=16", "tp=2,page=24"),
            ("tp=2,page=8", "tp=4,dcp=4,page=8"),
            ("tp=1,page=64", "tp=4,dcp=2,interleave=3,page=16"),
        ]),
        tokens in 1_u64..130,
        start in 0_u64..130,
        cut in 0_u64..64,
    ) {
        let shape = CacheShape::gqa(2, 3, 6);
        let place = |spec: &str| spec.parse::<LayoutSpec>().unwrap().placement(&shape, Dtype::Bf16).unwrap();
        let (src, dst) = (place(layouts.0), place(layouts.1));
        let pair = Pair::new(shape.clone(), src.clone(), dst.clone()).unwrap();
        let table = PageTable((0..20).rev().map(|p| PageId(p * 2)).collect());
        let range = TokenRange::new(start.min(tokens), tokens);
        let arena = |place| {
            let arena = Arena::new("test", PoolLayout::new(&shape, place, RankId(0), 40).unwrap()).unwrap();
            fill(&arena, 3);
            arena
        };
        let (source, target) = (arena(&src), arena(&dst));
        let end = End { rank: RankId(0), table: &table };
        let plan = pair.plan(end, end, range).unwrap();
        let key = RoomKey { room: RoomId(1), attempt: Attempt(1) };
        prop_assert_eq!(plan.unit_count(), plan.units().count() as u64);
        prop_assert_eq!(plan.unit(plan.unit_count()), None);
        for (i, unit) in (0..).zip(plan.units()) {
            prop_assert_eq!(plan.unit(i), Some(unit));
            let from = source.region(unit.layer, unit.part).unwrap();
            let expected = rows(&source, &unit, Side::Source);
            prop_assert_eq!(gather(&source, Pieces::of_rows(&unit, Side::Source, from, 0..u64::MAX)), expected.concat());
            let cut = cut.min(unit.rows());
            let (first, rest) = expected.split_at(cut.try_into().unwrap());
            prop_assert_eq!(gather(&source, Pieces::of_rows(&unit, Side::Source, from, 0..cut)), first.concat());
            prop_assert_eq!(
                gather(&source, Pieces::of_rows(&unit, Side::Source, from, cut..unit.rows())),
                rest.concat()
            );
            let to = target.region(unit.layer, unit.part).unwrap();
            let packed = expected.concat();
            let mut left = &packed[..];
            for pieces in Pieces::of_rows(&unit, Side::Target, to, 0..cut)
                .chain(Pieces::of_rows(&unit, Side::Target, to, cut..unit.rows()))
            {
                let (now, later) = left.split_at(pieces.bytes().index());
                target.scatter(&pieces, now.into()).unwrap();
                left = later;
            }
            prop_assert!(left.is_empty());
            prop_assert_eq!(rows(&target, &unit, Side::Target), expected);
        }
        let digests = digest_plan(&source, Side::Source, &plan, key, RankId(0)).unwrap();
        prop_assert_eq!(&digests, &naive_digests(&source, &plan, key));
        prop_assert_eq!(&digests, &digest_plan(&target, Side::Target, &plan, key, RankId(0)).unwrap());
    }
}

fn gather(arena: &Arena, pieces: impl Iterator<Item = Pieces>) -> Vec<u8> {
    let mut packed = Vec::new();
    for pieces in pieces {
        let from = packed.len();
        packed.resize(from + pieces.bytes().index(), 0);
        arena.gather(&pieces, &mut packed[from..]).unwrap();
    }
    packed
}

/// The rows of a unit, one by one.
fn rows(arena: &Arena, unit: &Unit<'_>, side: Side) -> Vec<Vec<u8>> {
    let region = arena.region(unit.layer, unit.part).unwrap();
    unit.runs
        .iter()
        .flat_map(kvferry_plan::Run::expand)
        .map(|(_, src, dst)| {
            let (row, offset) = match side {
                Side::Source => (src, unit.slice.src_offset),
                Side::Target => (dst, unit.slice.dst_offset),
            };
            let mut bytes = vec![0; unit.slice.len.index()];
            arena.read(Bytes(region.row_offset(row).unwrap().0 + offset.0), &mut bytes).unwrap();
            bytes
        })
        .collect()
}

fn naive_digests(arena: &Arena, plan: &Plan, key: RoomKey) -> Vec<PartDigest> {
    let mut parts = Vec::new();
    for unit in plan.units() {
        let mut hasher = UnitId::new(key, RankId(0), &unit).hasher();
        hasher.update(&rows(arena, &unit, Side::Source).concat());
        PartDigest::add(&mut parts, unit.part, hasher.digest(), unit.bytes());
    }
    parts
}
