//! Random nonsense, and legal numbers at their edges, get an answer and soon: never a panic, an overflow or a wait.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::time::{Duration, Instant};

use kvferry_plan::*;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// Failing cases are kept beside this file and tried first.
fn config(cases: u32) -> ProptestConfig {
    let keep = FileFailurePersistence::WithSource("regressions");
    ProptestConfig { cases, failure_persistence: Some(Box::new(keep)), ..ProptestConfig::default() }
}

/// Numbers at which arithmetic breaks, among others.
fn number(max: u64) -> BoxedStrategy<u64> {
    prop_oneof![
        0..8_u64,
        Just(max),
        Just(max / 2 + 1),
        (0..=63_u32).prop_map(move |bits| (1_u64 << bits).min(max)),
        0..=max,
    ]
    .boxed()
}

fn small(max: u32) -> BoxedStrategy<u32> {
    number(u64::from(max)).prop_map(|n| n as u32).boxed()
}

/// Legal placements with the most extreme sizes there are.
fn extreme_placement(shape: &CacheShape) -> BoxedStrategy<Placement> {
    let shape = shape.clone();
    let latent = shape.part(Part::Latent).is_some();
    let page = prop_oneof![1..70_u32, number(1 << 20).prop_map(|n| n.max(1) as u32)];
    let sizes = (number(4096), 0..4_u32, number(1 << 20), page, 0..3_u32);
    let placement = sizes.prop_map(move |(ranks, kind, interleave, page, groups)| {
        let (ranks, interleave) = (ranks.clamp(1, 4096) as u32, interleave.max(1) as u32);
        let mut placement = Placement::single(&shape, page, Dtype::Bf16);
        let tokens = match kind {
            0 => TokenMap::Dense,
            1 if latent => TokenMap::PageSharded { ranks },
            _ => TokenMap::Interleaved { ranks, interleave },
        };
        let groups = if kind == 1 { 1 } else { groups.clamp(1, 4096 / ranks) };
        placement.tp = ranks * groups;
        placement.parts.iter_mut().filter(|p| !p.part.is_state()).for_each(|part| part.tokens = tokens);
        placement
    });
    placement.boxed()
}

fn wild_map() -> impl Strategy<Value = TokenMap> {
    prop_oneof![
        Just(TokenMap::Dense),
        (small(u32::MAX), small(u32::MAX))
            .prop_map(|(ranks, interleave)| TokenMap::Interleaved { ranks, interleave }),
        small(u32::MAX).prop_map(|ranks| TokenMap::PageSharded { ranks }),
    ]
}

fn wild_placement(shape: &CacheShape) -> BoxedStrategy<Placement> {
    let names: Vec<Part> = shape.parts.iter().map(|p| p.part).collect();
    let stages = prop::collection::vec(prop::collection::vec(small(u32::MAX).prop_map(LayerId), 0..3), 0..3);
    let dtype = prop::sample::select(vec![Dtype::F32, Dtype::Bf16, Dtype::Fp8E4m3]);
    let wild = (stages, small(u32::MAX), small(u32::MAX), wild_map(), small(u32::MAX), dtype);
    let placement = wild.prop_map(move |(stages, tp, cp, tokens, page_size, dtype)| {
        let layout = |part: &Part| PartLayout { part: *part, tokens, page_size, dtype };
        Placement { stages, cp, tp, parts: names.iter().map(layout).collect(), host_pages: None }
    });
    placement.boxed()
}

fn wild_shape() -> impl Strategy<Value = CacheShape> {
    let part = prop::sample::select(Part::ALL.to_vec());
    let layers = prop::collection::vec(small(u32::MAX).prop_map(LayerId), 0..4);
    let state = (small(u32::MAX), prop::collection::vec(small(u32::MAX), 0..4))
        .prop_map(|(window, groups)| StateShape { window, groups });
    let parts = (part, layers, small(u32::MAX), small(u32::MAX), prop::option::of(state)).prop_map(
        |(part, layers, heads, head_elems, state)| PartShape { part, layers, heads, head_elems, state },
    );
    let hybrid = (1..3_u32, 1..9_u32, 1..200_u32).prop_map(|(window, heads, elems)| {
        let mut shape = CacheShape::mla(3, 576);
        let layers: Vec<_> = (0..3).map(LayerId).collect();
        shape.parts.extend(CacheShape::kda(layers, heads, elems, window + 1));
        shape
    });
    prop_oneof![
        3 => Just(CacheShape::mla(3, 576)),
        3 => (1..9_u32).prop_map(|heads| CacheShape::gqa(3, heads, 128)),
        2 => hybrid,
        1 => Just(CacheShape::gqa(1, 1 << 20, 1 << 8)),
        1 => prop::collection::vec(parts, 0..4).prop_map(|parts| CacheShape { parts }),
    ]
}

fn sides() -> impl Strategy<Value = (CacheShape, Placement, Placement)> {
    wild_shape().prop_flat_map(|shape| {
        let side = || prop_oneof![9 => extreme_placement(&shape), 1 => wild_placement(&shape)];
        let (src, dst) = (side(), side());
        (Just(shape), src, dst)
    })
}

/// Ranges that tables reach, ranges that they do not, and ranges that are none.
fn wild_tokens() -> impl Strategy<Value = TokenRange> {
    prop_oneof![
        3 => (0..1000_u64, 1..5000_u64).prop_map(|(start, len)| TokenRange::new(start, start + len)),
        3 => (number(1 << 34), number(1 << 34)).prop_map(|(a, b)| TokenRange::new(a.min(b), a.max(b))),
        1 => (number(u64::MAX), number(u64::MAX)).prop_map(|(a, b)| TokenRange::new(a, b)),
    ]
}

fn wild_table() -> impl Strategy<Value = PageTable> {
    let pages = prop::collection::vec(small(u32::MAX).prop_map(PageId), 0..40);
    prop_oneof![1 => pages, 3 => (0..5_000_u32).prop_map(|n| PageTable::identity(n).0)].prop_map(PageTable)
}

/// Asks everything there is to ask about a pair of sides.
fn interrogate(
    shape: &CacheShape,
    sides: [&Placement; 2],
    tables: [&PageTable; 2],
    tokens: TokenRange,
    numbers: (u64, u64),
) {
    let (n, m) = numbers;
    let rank = |n: u64, side: &Placement| RankId((n % u64::from(side.ranks().max(1))) as u32);
    for side in sides {
        let _ = side.check(shape);
        let _ = (side.coords(RankId(n as u32)), side.ranks());
        for part in &shape.parts {
            for rank in [rank(n, side), RankId(m as u32)] {
                let _ = (
                    side.shares(part, rank).count(),
                    side.heads(part, rank),
                    side.layers(part, rank),
                    side.row_bytes(part, rank),
                );
                let replica = side.replica(part, rank);
                assert!(replica.index < replica.count, "{replica:?} {side:?}");
            }
            if let Some(layout) = side.part(part.part) {
                let class = side.class(part.part, rank(n, side));
                for number in [n, m] {
                    let map = layout.tokens;
                    let _ = (map.local(Token(number), class), map.token(number, class));
                    assert!(map.owned(Token(number), class) <= number);
                }
            }
        }
        for table in tables {
            let _ = (table.check(n as u32), table.row(n, m as u32));
            let _ = side.rotation(table).map(|rotation| assert_eq!(side.check_rotation(rotation), Ok(())));
        }
        for rotation in [n, m].map(|n| Rotation(n as u32)) {
            let entries = side.entries(rank(n, side), tokens, rotation);
            let last = entries.iter().take(9).last();
            assert!(last.is_none_or(|k| k < entries.end()) && entries.is_empty() == last.is_none());
            let _ = (side.logical_page(RankId(m as u32), PageId(n as u32)), entries.before(&entries));
        }
    }
    let Ok(pair) = Pair::with(shape.clone(), sides[0].clone(), sides[1].clone(), Dtypes::Converted) else {
        return;
    };
    let pools: Vec<_> = sides.map(|side| PoolLayout::new(shape, side, rank(n, side), 1 << 10)).into();
    for (src, dst) in [(rank(n, sides[0]), rank(n, sides[1])), (rank(m, sides[0]), RankId(m as u32))] {
        let (src, dst) = (End { rank: src, table: tables[0] }, End { rank: dst, table: tables[1] });
        let _ = (pair.target_bytes(dst.rank, tokens), pair.granted_bytes(dst, tokens));
        let slot = |rank| Slot { rank, slot: SlotId(n as u32) };
        let state = pair.state(slot(src.rank), slot(dst.rank)).unwrap_or_default();
        assert_eq!(state.bytes().0, state.units().map(|u| u.bytes().0).fold(0, u64::saturating_add));
        let wild =
            Cover(vec![Covered { parts: Part::ALL.to_vec(), runs: vec![tokens, TokenRange::new(n, m)] }]);
        let mut assembly = Assembly::new(&pair, tokens);
        for cover in [pair.cover(src, tokens).unwrap_or_default(), wild] {
            let _ = pair.landing(src.rank, &cover, dst, tokens);
            let _ = (assembly.accept(&pair, src.rank, tokens, &cover), assembly.gap(&pair));
        }
        let Ok(plan) = pair.plan(src, dst, tokens) else { continue };
        if let [Ok(from), Ok(to)] = &pools[..] {
            assert!(plan.flat(from, to).take(100).all(|f| f.len.0 > 0));
        }
        let sum = plan.units().map(|u| u.bytes().0).fold(0, u64::saturating_add);
        assert_eq!(plan.bytes().0, sum);
        for unit in plan.units().take(100) {
            assert!(unit.runs.iter().flat_map(Run::expand).take(1000).count() > 0);
            let [Ok(from), Ok(to)] = &pools[..] else { continue };
            let region = |pool: &PoolLayout| pool.region(unit.layer, unit.part).copied();
            let (Some(from), Some(to)) = (region(from), region(to)) else { continue };
            for m in unit.moves(&from, &to) {
                // Inside its region, or nowhere.
                for (side, len, region) in [(m.src, m.src_len(), from), (m.dst, m.len, to)] {
                    let last = side.at(m.blocks - 1, m.rows - 1).0.saturating_add(len.0);
                    let end = region.offset.0 + region.rows * region.row_bytes.0;
                    let inside = side.offset >= region.offset && last <= end;
                    assert!(inside || side.offset.0 == u64::MAX, "{m:?} {region:?}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(config(5_000))]

    #[test]
    fn nonsense_gets_an_answer_and_soon(
        (shape, src, dst) in sides(),
        tables in (wild_table(), wild_table()),
        tokens in wild_tokens(),
        numbers in (prop_oneof![0..64_u64, number(u64::MAX)], number(u64::MAX)),
    ) {
        let begin = Instant::now();
        interrogate(&shape, [&src, &dst], [&tables.0, &tables.1], tokens, numbers);
        // Milliseconds in truth; a second allows for a busy machine.
        prop_assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    }
}

/// Sizes at the very edge, all legal: the answer is a plan or a refusal, never a wait.
#[test]
fn the_largest_legal_numbers() {
    let shape = CacheShape::mla(61, 576);
    let dcp = |ranks, interleave, page_size| {
        let mut placement = Placement::single(&shape, page_size, Dtype::Bf16);
        placement.tp = ranks;
        placement.parts[0].tokens = TokenMap::Interleaved { ranks, interleave };
        placement
    };
    let table = PageTable::identity(3);
    for (src, dst) in [
        (dcp(4096, 1 << 20, 1 << 20), dcp(4095, 1 << 20, 1 << 20)),
        (dcp(4096, 1, 1 << 20), dcp(4095, 1, 1 << 20)),
        (dcp(4096, 3, 1), dcp(4095, 7, 1 << 20)),
        (dcp(1, 1, 1 << 20), dcp(4096, 1 << 20, 1)),
    ] {
        let pair = Pair::new(shape.clone(), src, dst).unwrap();
        let end = End { rank: RankId(0), table: &table };
        assert!(pair.plan(end, end, TokenRange::new(0, 1)).unwrap().bytes().0 > 0);
        let refusal = pair.plan(end, end, TokenRange::new(0, u64::MAX)).unwrap_err();
        assert_eq!((refusal.axis, refusal.blame()), (Axis::PageTable, Blame::Caller), "{refusal}");
        // At the very end either this rank has no token, or the table does not reach it.
        match pair.plan(end, end, TokenRange::new(u64::MAX - 1, u64::MAX)) {
            Ok(plan) => assert!(plan.is_empty()),
            Err(refusal) => assert_eq!(refusal.axis, Axis::PageTable),
        }
    }
}

/// Two interleaves that meet token by token over more than a million blocks are refused by name, not walked.
#[test]
fn a_plan_that_would_be_absurdly_large_is_refused() {
    let shape = CacheShape::mla(1, 4);
    let dcp = |ranks, interleave| {
        let mut placement = Placement::single(&shape, 1 << 20, Dtype::Bf16);
        placement.tp = ranks;
        placement.parts[0].tokens = TokenMap::Interleaved { ranks, interleave };
        placement
    };
    let pair = Pair::new(shape.clone(), dcp(2, 1), dcp(3, 2)).unwrap();
    let table = PageTable::identity(16);
    let end = End { rank: RankId(0), table: &table };
    let refusal = pair.plan(end, end, TokenRange::new(0, 30 << 20)).unwrap_err();
    assert_eq!(refusal.axis, Axis::Size);
    assert!(refusal.to_string().contains("smaller chunks"), "{refusal}");
    assert!(pair.plan(end, end, TokenRange::new(29 << 20, 29 << 20 | 4096)).is_ok());
}
