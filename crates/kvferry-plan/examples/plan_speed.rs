//! How long one rank's plan takes: `cargo run --release -p kvferry-plan --example plan_speed`.
//!
//! Medians of many calls on one thread, for scattered pages. The size of a plan grows with pages; so should its time.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::time::Instant;

use kvferry_plan::*;

/// Page ids in no order, without repeats: an odd multiplier permutes a power of two.
fn scattered(pages: u32) -> PageTable {
    let space = (pages * 8).next_power_of_two();
    PageTable((0..pages).map(|i| PageId(i.wrapping_mul(0x9E37_79B1) % space)).collect())
}

/// Microseconds of the middle one of 201 calls.
fn median_us(mut call: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..201)
        .map(|_| {
            let begin = Instant::now();
            call();
            begin.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[100]
}

fn side(shape: &CacheShape, tp: u32, tokens: TokenMap, page: u32) -> Placement {
    let mut placement = Placement::single(shape, page, Dtype::Bf16);
    placement.tp = tp;
    placement.parts.iter_mut().for_each(|part| part.tokens = tokens);
    placement
}

fn main() {
    let (mla, gqa) = (CacheShape::mla(61, 576), CacheShape::gqa(30, 8, 128));
    let dcp = |ranks, interleave| TokenMap::Interleaved { ranks, interleave };
    let dense = |shape: &CacheShape, tp, page| side(shape, tp, TokenMap::Dense, page);
    let cases = [
        ("mla tp1 -> dcp4", &mla, dense(&mla, 1, 64), side(&mla, 4, dcp(4, 1), 64)),
        ("mla tp4 -> dcp4 (4 replicas)", &mla, dense(&mla, 4, 64), side(&mla, 4, dcp(4, 1), 64)),
        ("mla dcp2 -> dcp4", &mla, side(&mla, 2, dcp(2, 1), 64), side(&mla, 4, dcp(4, 1), 64)),
        ("mla dcp2 -> dcp3 interleave 16", &mla, side(&mla, 2, dcp(2, 1), 64), side(&mla, 3, dcp(3, 16), 64)),
        (
            "mla shard4 -> tp1",
            &mla,
            side(&mla, 4, TokenMap::PageSharded { ranks: 4 }, 64),
            dense(&mla, 1, 64),
        ),
        ("gqa tp4 -> tp2, page 64 -> 24", &gqa, dense(&gqa, 4, 64), dense(&gqa, 2, 24)),
        ("mla tp4096 -> dcp4", &mla, dense(&mla, 4096, 64), side(&mla, 4, dcp(4, 1), 64)),
    ];
    println!("{:32} {:>10} {:>8} {:>10} {:>10}", "layouts", "tokens", "runs", "plan us", "pair us");
    for (name, shape, src, dst) in cases {
        for tokens in [8_192, 32_768, 131_072] {
            let pair = Pair::new(shape.clone(), src.clone(), dst.clone()).unwrap();
            let table = |p: &Placement| scattered((tokens as u32).div_ceil(p.parts[0].page_size));
            let (from, to) = (table(&src), table(&dst));
            let ends = (End { rank: RankId(0), table: &from }, End { rank: RankId(0), table: &to });
            let plan = || pair.plan(ends.0, ends.1, TokenRange::new(0, tokens)).unwrap();
            let runs = plan().runs().len();
            let plan_us = median_us(|| drop(std::hint::black_box(plan())));
            let pair_us = median_us(|| drop(Pair::new(shape.clone(), src.clone(), dst.clone())));
            println!("{name:32} {tokens:>10} {runs:>8} {plan_us:>10.1} {pair_us:>10.1}");
        }
    }
}
