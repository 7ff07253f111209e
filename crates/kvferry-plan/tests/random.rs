//! Random large geometries against the naive copier.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod naive;

use kvferry_plan::*;
use naive::{Case, table};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// Failing cases are kept beside this file and tried first.
fn config(cases: u32) -> ProptestConfig {
    let keep = FileFailurePersistence::WithSource("regressions");
    ProptestConfig { cases, failure_persistence: Some(Box::new(keep)), ..ProptestConfig::default() }
}

fn token_map(tp: u32, cp: u32, latent: bool) -> BoxedStrategy<TokenMap> {
    let divisors: Vec<u32> = (2..=tp).filter(|d| tp.is_multiple_of(*d)).collect();
    let mut maps = vec![Just(TokenMap::Dense).boxed()];
    if !divisors.is_empty() {
        let interleave = prop_oneof![3 => Just(1_u32), 2 => 2..9_u32, 1 => 16..100_u32];
        let dcp = (prop::sample::select(divisors), interleave);
        maps.push(dcp.prop_map(|(ranks, interleave)| TokenMap::Interleaved { ranks, interleave }).boxed());
    }
    if cp > 1 || (latent && tp > 1) {
        maps.push(Just(TokenMap::PageSharded { ranks: if cp > 1 { cp } else { tp } }).boxed());
    }
    prop::strategy::Union::new(maps).boxed()
}

/// State whose groups need not be divisible by anything, or that is not split at all.
fn state_parts(layers: u32) -> impl Strategy<Value = Vec<PartShape>> {
    let ids = move || (0..layers).map(LayerId).collect::<Vec<_>>();
    let conv = (1..4_u32, prop::collection::vec(1..6_u32, 1..4), 1..4_u32)
        .prop_map(move |(window, groups, elems)| PartShape::state(Part::Conv, ids(), window, groups, elems));
    let recurrent = (1..9_u32, any::<bool>()).prop_map(move |(heads, split)| {
        let mut part = PartShape::state(Part::Recurrent, ids(), 1, [heads].into(), 4);
        if !split {
            part.state = Some(StateShape { window: 1, groups: Vec::new() });
        }
        part
    });
    (conv, recurrent).prop_map(|(conv, recurrent)| vec![conv, recurrent])
}

/// Draft rows beside the model's own, in its last layer.
fn draft_part(shape: &CacheShape) -> PartShape {
    let mut part = shape.parts[0].clone();
    part.part = if part.part == Part::Latent { Part::DraftLatent } else { Part::DraftKey };
    part.layers.drain(..part.layers.len() - 1);
    part
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(vec![Dtype::F32, Dtype::Bf16, Dtype::Fp8E4m3])
}

/// A placement whose parts may differ in token map and page size, as draft rows do, and in element type.
fn placement(shape: CacheShape, cps: std::ops::Range<u32>) -> impl Strategy<Value = Placement> {
    let layers = shape.parts[0].layers.len();
    let latent = shape.part(Part::Latent).is_some();
    (1..9_u32, cps, prop::collection::vec(0..3_usize, layers)).prop_flat_map(move |(tp, cp, stage_of)| {
        let mut stages = vec![Vec::new(); 3];
        stage_of.iter().enumerate().for_each(|(layer, stage)| stages[*stage].push(LayerId(layer as u32)));
        let parts: Vec<_> = (shape.parts.iter())
            .map(|p| {
                let part = p.part;
                if let Some(state) = &p.state {
                    let (tokens, page_size) = (TokenMap::Dense, state.window);
                    return dtype()
                        .prop_map(move |dtype| PartLayout { part, tokens, page_size, dtype })
                        .boxed();
                }
                (token_map(tp, cp, latent), 1..70_u32, dtype())
                    .prop_map(move |(tokens, page_size, dtype)| PartLayout { part, tokens, page_size, dtype })
                    .boxed()
            })
            .collect();
        parts.prop_map(move |parts| Placement { stages: stages.clone(), cp, tp, parts, host_pages: None })
    })
}

fn case(longest: u64) -> impl Strategy<Value = Case> {
    let shapes = prop_oneof![
        (1..4_u32, 1..7_u32).prop_map(|(layers, heads)| CacheShape::gqa(layers, heads, 2)),
        (1..4_u32).prop_map(|layers| CacheShape::mla(layers, 3)),
    ];
    let shapes = shapes.prop_flat_map(|shape| {
        let state = state_parts(shape.parts[0].layers.len() as u32);
        let extras = (any::<bool>(), prop::option::of(state));
        (Just(shape), extras).prop_map(|(mut shape, (draft, state))| {
            if draft {
                shape.parts.push(draft_part(&shape));
            }
            shape.parts.extend(state.into_iter().flatten());
            shape
        })
    });
    shapes.prop_flat_map(move |shape| {
        let sides = (placement(shape.clone(), 1..4), placement(shape.clone(), 1..2));
        let cuts = prop::collection::btree_set(0..longest, 2..5);
        (Just(shape), sides, cuts, any::<u64>()).prop_map(|(shape, (src, dst), cuts, seed)| {
            let cuts: Vec<u64> = cuts.into_iter().collect();
            let end = *cuts.last().unwrap();
            let (src_table, dst_table) = (table(&src, end, seed), table(&dst, end, !seed));
            let chunks = cuts.windows(2).map(|w| TokenRange::new(w[0], w[1])).collect();
            Case { shape, src, dst, src_table, dst_table, chunks }
        })
    })
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn small_cases_byte_by_byte(case in case(60), rotation in 0_u32..8) {
        case.check_rows();
        case.check_bytes();
        case.check_covers();
        case.check_rotation(Rotation(rotation));
    }

    #[test]
    fn large_cases_row_by_row(case in case(3_000), rotation in 0_u32..8) {
        case.check_rows();
        case.check_covers();
        case.check_rotation(Rotation(rotation));
    }
}
