//! Every plan of every small geometry against the naive copier.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod naive;

use kvferry_plan::*;
use naive::{Case, table};

fn layout(part: Part, tokens: TokenMap, page_size: u32) -> PartLayout {
    PartLayout { part, tokens, page_size, dtype: Dtype::Fp8E4m3 }
}

fn stages(split: &[&[u32]]) -> Vec<Vec<LayerId>> {
    split.iter().map(|stage| stage.iter().copied().map(LayerId).collect()).collect()
}

/// Placements of `shape` with every combination of the given values. `cp` above 1 and sharding are a source's.
fn placements(
    shape: &CacheShape,
    splits: &[&[&[u32]]],
    cps: &[u32],
    tp_dcp: &[(u32, u32)],
    interleaves: &[u32],
    pages: &[u32],
    shard: bool,
) -> Vec<Placement> {
    let mut all = Vec::new();
    for (split, cp, &(tp, dcp), page) in product(splits, cps, tp_dcp, pages) {
        let mut maps = match dcp {
            1 => vec![TokenMap::Dense],
            ranks => interleaves.iter().map(|i| TokenMap::Interleaved { ranks, interleave: *i }).collect(),
        };
        let ranks = if cp > 1 { cp } else { tp };
        if shard && dcp == 1 && ranks > 1 && (cp > 1 || shape.part(Part::Latent).is_some()) {
            maps.push(TokenMap::PageSharded { ranks });
        }
        all.extend(maps.into_iter().map(|map| {
            Placement {
                stages: stages(split),
                cp,
                tp,
                parts: (shape.parts.iter())
                    .map(|p| match &p.state {
                        Some(state) => layout(p.part, TokenMap::Dense, state.window),
                        None => layout(p.part, map, page),
                    })
                    .collect(),
                host_pages: None,
            }
        }));
    }
    all
}

type Axes<'a> = (&'a [&'a [u32]], u32, &'a (u32, u32), u32);

fn product<'a>(
    splits: &'a [&'a [&'a [u32]]],
    cps: &'a [u32],
    tp_dcp: &'a [(u32, u32)],
    pages: &'a [u32],
) -> impl Iterator<Item = Axes<'a>> {
    splits.iter().flat_map(move |split| {
        cps.iter().flat_map(move |cp| {
            tp_dcp.iter().flat_map(move |td| pages.iter().map(move |page| (*split, *cp, td, *page)))
        })
    })
}

/// The hand-offs between two placements: everything at once, and a range inside pages in two chunks.
fn cases(shape: &CacheShape, src: &Placement, dst: &Placement, tokens: u64) -> [Case; 2] {
    let case = |chunks: &[(u64, u64)]| {
        let end = chunks.last().unwrap().1;
        Case {
            shape: shape.clone(),
            src: src.clone(),
            dst: dst.clone(),
            src_table: table(src, end, 7),
            dst_table: table(dst, end, 11),
            chunks: chunks.iter().map(|(a, b)| TokenRange::new(*a, *b)).collect(),
        }
    };
    [case(&[(0, tokens)]), case(&[(3, 8), (8, tokens + 1)])]
}

/// All axes at once: TP m to n with replicated and unevenly split heads, uneven pipeline splits, CP, DCP of any
/// two sizes and interleaves, sharded sources, page sizes that divide or not.
#[test]
fn all_axes_at_once() {
    const LAYERS: [&[&[u32]]; 2] = [&[&[0, 1, 2]], &[&[1], &[0, 2]]];
    const TP_DCP: [(u32, u32); 6] = [(1, 1), (2, 1), (3, 1), (2, 2), (3, 3), (4, 2)];
    let mut checked = 0;
    for shape in [CacheShape::gqa(3, 2, 2), CacheShape::mla(3, 2)] {
        let sources = placements(&shape, &LAYERS, &[1, 2], &TP_DCP, &[1, 2], &[2, 3], true);
        let targets = placements(&shape, &LAYERS, &[1], &TP_DCP, &[1, 2], &[2, 3], false);
        for (i, src) in sources.iter().enumerate() {
            for (j, dst) in targets.iter().enumerate() {
                for (k, case) in cases(&shape, src, dst, 13).iter().enumerate() {
                    // Rows always; bytes, which cost more, on a spread of a third.
                    case.check_rows();
                    if (i + j + k) % 3 == 0 {
                        case.check_bytes();
                    }
                    if (i + j + k) % 3 == 1 {
                        case.check_covers();
                        case.check_rotation(Rotation((i + j) as u32));
                    }
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 5_000, "{checked}");
}

/// Head splits: any two TP sizes over any head count, and groups of DCP ranks, byte by byte.
#[test]
fn head_splits() {
    for heads in 1..=5 {
        let shape = CacheShape::gqa(1, heads, 2);
        let all = |tps: &[(u32, u32)]| placements(&shape, &[&[&[0]]], &[1], tps, &[1], &[2], false);
        let tps = [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (4, 2), (6, 3), (6, 2)];
        for (src, dst) in all(&tps).iter().flat_map(|src| all(&tps).into_iter().map(move |dst| (src, dst))) {
            for case in cases(&shape, src, &dst, 9) {
                case.check_rows();
                case.check_bytes();
            }
        }
    }
}

/// Every element type to every other, over heads that are cut, rows that touch and rows that do not.
#[test]
fn every_conversion() {
    let types = [Dtype::F32, Dtype::Bf16, Dtype::Fp8E4m3];
    for shape in [CacheShape::gqa(1, 3, 2), CacheShape::mla(1, 3)] {
        let tps = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)];
        let all = placements(&shape, &[&[&[0]]], &[1], &tps, &[1, 2], &[2, 3], false);
        for (src, dst) in all.iter().flat_map(|src| all.iter().map(move |dst| (src, dst))) {
            for (from, to) in types.into_iter().flat_map(|from| types.map(|to| (from, to))) {
                let typed = |place: &Placement, dtype| {
                    let mut place = place.clone();
                    place.parts.iter_mut().for_each(|part| part.dtype = dtype);
                    place
                };
                cases(&shape, &typed(src, from), &typed(dst, to), 7).iter().for_each(Case::check_bytes);
            }
        }
    }
}

/// The token axis alone, exhaustively: every pair of maps and page sizes, every range.
#[test]
fn every_range_of_every_pair_of_token_maps() {
    const TOKENS: u64 = 12;
    let shape = CacheShape::mla(1, 1);
    let dcp = [(1, 1), (2, 2), (3, 3), (4, 4)];
    let sources = placements(&shape, &[&[&[0]]], &[1, 2], &dcp, &[1, 2, 3], &[1, 2, 3, 4], true);
    let targets = placements(&shape, &[&[&[0]]], &[1], &dcp, &[1, 2, 3], &[1, 2, 3, 4], true);
    for (src, dst) in sources.iter().flat_map(|src| targets.iter().map(move |dst| (src, dst))) {
        // Each start once and each end once; every (start, end) where the maps differ most.
        for (start, end) in (0..TOKENS).flat_map(|a| (a + 1..=TOKENS).map(move |b| (a, b))) {
            let case = Case {
                shape: shape.clone(),
                src: src.clone(),
                dst: dst.clone(),
                src_table: table(src, end, start),
                dst_table: table(dst, end, end),
                chunks: vec![TokenRange::new(start, end)],
            };
            case.check_rows();
            if (start + end) % 4 == 0 {
                case.check_covers();
            }
        }
    }
}

/// Per-request state: any two TP sizes over channel groups that nothing divides, whole state, two pipeline splits, CP.
#[test]
fn state_splits() {
    const LAYERS: [&[&[u32]]; 2] = [&[&[0, 1, 2]], &[&[1], &[0, 2]]];
    for groups in [vec![1], vec![3, 3, 3], vec![4, 2], vec![2, 5, 1], vec![]] {
        let layers: Vec<LayerId> = (0..3).map(LayerId).collect();
        let mut state = PartShape::state(Part::Conv, layers.clone(), 2, groups.clone(), 2);
        state.heads = state.heads.max(3 * u32::from(groups.is_empty()));
        let mut shape = CacheShape::mla(3, 2);
        shape.parts.push(state);
        let all = |cps: &[u32]| {
            let tps = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (5, 1), (8, 1)];
            placements(&shape, &LAYERS, cps, &tps, &[1], &[2], false)
        };
        let targets = all(&[1]);
        for (src, dst) in all(&[1, 2]).iter().flat_map(|src| targets.iter().map(move |dst| (src, dst))) {
            cases(&shape, src, dst, 5)[0].check_bytes();
        }
    }
}
