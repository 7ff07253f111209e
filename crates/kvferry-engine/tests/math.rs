//! The kernels through their public interface: against definitions written the long way, against `f64`, and
//! against themselves under every split.

#![allow(clippy::unwrap_used)]

use std::ops::Range;

use kvferry_engine::math::{
    Arith, AttentionSums, KeyPanels, Matrix, Partial, RopeTable, RowParallel, Scores, ValueRows, argmax, exp,
    log_softmax, log_softmax_at, merge_lse, merge_max, query_block, rms_norm, silu_mul, softmax,
};
use proptest::prelude::*;

/// Numbers in [-1, 1) that depend on the seed alone.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let step = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(step).take(count).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn chain(x: &[f32], w: &[f32]) -> f32 {
    x.iter().zip(w).fold(0.0, |sum, (x, w)| x.mul_add(*w, sum))
}

fn grid(x: f64, step_bits: i32) -> i64 {
    (x * 2f64.powi(step_bits)).round_ties_even() as i64
}

fn cut(count: usize, at: usize) -> [Range<usize>; 2] {
    [0..at.min(count), at.min(count)..count]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_column_parallel_output_is_one_chain_under_every_split(
        m in 1usize..20, n in 1usize..150, k in 1usize..90, at in 0usize..150, row in 0usize..20,
    ) {
        let (x, w) = (numbers(m * k, 1), numbers(n * k, 2));
        let matrix = Matrix::new(n, k, &w);
        let mut whole = vec![0.0; m * n];
        matrix.apply(&x, m, 0..n, &mut whole);
        for (i, out) in whole.iter().enumerate() {
            let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
            prop_assert_eq!(out.to_bits(), chain(x, w).to_bits());
        }
        for range in cut(n, at) {
            let mut part = vec![0.0; m * range.len()];
            matrix.apply(&x, m, range.clone(), &mut part);
            for (i, part) in part.chunks_exact(range.len().max(1)).enumerate() {
                prop_assert_eq!(bits(part), bits(&whole[i * n..][range.clone()]));
            }
        }
        let row = row % m;
        let mut alone = vec![0.0; n];
        matrix.apply(&x[row * k..][..k], 1, 0..n, &mut alone);
        prop_assert_eq!(bits(&alone), bits(&whole[row * n..][..n]));
        let mut weights = vec![0.0; k];
        matrix.row(n - 1, &mut weights);
        prop_assert_eq!(weights, &w[(n - 1) * k..]);
    }

    #[test]
    fn a_row_parallel_sum_does_not_depend_on_ranks_or_batch(
        m in 1usize..15, n in 1usize..70, unit_k in 1usize..40, units in 1usize..9, at in 0usize..9,
    ) {
        let k = unit_k * units;
        let (x, w) = (numbers(m * k, 3), numbers(n * k, 4));
        let weights = RowParallel::new(n, unit_k, units, &w);
        let part = |m: usize, x: &[f32], units: Range<usize>| {
            let own: Vec<f32> = x.chunks_exact(k).flat_map(|x| &x[units.start * unit_k..units.end * unit_k]).copied().collect();
            let mut part = Partial::new(Arith::Canonical, m, n);
            weights.partial(&own, m, units, &mut part);
            part
        };
        let mut expected = vec![0.0; m * n];
        for (i, out) in expected.iter_mut().enumerate() {
            let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
            let units = x.chunks_exact(unit_k).zip(w.chunks_exact(unit_k));
            let sum: i64 = units.map(|(x, w)| grid(chain(x, w).into(), 32)).sum();
            *out = (sum as f64 / 2f64.powi(32)) as f32;
        }
        let [a, b] = cut(units, at).map(|units| part(m, &x, units));
        let mut out = vec![0.0; m * n];
        prop_assert!(Partial::finish(&[&b, &a], 0..m, &mut out).is_clear());
        prop_assert_eq!(bits(&out), bits(&expected));

        let mut last = vec![0.0; n];
        prop_assert!(Partial::finish(&[&a, &b], m - 1..m, &mut last).is_clear());
        prop_assert_eq!(bits(&last), bits(&expected[(m - 1) * n..]));
        let alone = part(1, &x[(m - 1) * k..], 0..units);
        prop_assert!(Partial::finish(&[&alone], 0..1, &mut last).is_clear());
        prop_assert_eq!(bits(&last), bits(&expected[(m - 1) * n..]));
    }
}

#[test]
fn both_modes_are_close_to_f64() {
    let (m, n, unit_k, units) = (5, 48, 64, 24);
    let k = unit_k * units;
    let (x, w) = (numbers(m * k, 5), numbers(n * k, 6));
    for arith in [Arith::Canonical, Arith::Fast] {
        let mut column = vec![0.0; m * n];
        Matrix::new(n, k, &w).apply(&x, m, 0..n, &mut column);
        let mut part = Partial::new(arith, m, n);
        RowParallel::new(n, unit_k, units, &w).partial(&x, m, 0..units, &mut part);
        let mut row = vec![0.0; m * n];
        assert!(Partial::finish(&[&part], 0..m, &mut row).is_clear());
        for i in 0..m * n {
            let pairs = x[i / n * k..][..k].iter().zip(&w[i % n * k..][..k]);
            let exact: f64 = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            assert!((f64::from(column[i]) - exact).abs() < 1e-4, "{arith:?} column {i}");
            assert!((f64::from(row[i]) - exact).abs() < 2e-5, "{arith:?} row {i}");
        }
    }
}

#[test]
fn a_row_that_leaves_the_grid_or_holds_nan_is_flagged_and_no_other() {
    // Two units of one input; the second unit's input spoils rows 1 and 2.
    for (bad, arith) in [
        (f32::NAN, Arith::Canonical),
        (f32::NEG_INFINITY, Arith::Canonical),
        (524_288.0, Arith::Canonical),
        (-1e30, Arith::Canonical),
        (f32::NAN, Arith::Fast),
        (f32::INFINITY, Arith::Fast),
    ] {
        let weights = RowParallel::new(17, 1, 2, &[1.0; 34]);
        let [mut good, mut spoilt] = [(); 2].map(|()| Partial::new(arith, 4, 17));
        weights.partial(&[1.0; 4], 4, 0..1, &mut good);
        weights.partial(&[1.0, bad, bad, 524_286.0], 4, 1..2, &mut spoilt);
        let mut out = [0.0; 4 * 17];
        assert_eq!(Partial::finish(&[&good, &spoilt], 0..4, &mut out).rows(), [1, 2], "{bad} {arith:?}");
        assert_eq!(out[3 * 17], 524_287.0);
        assert_eq!(
            Partial::finish(&[&good, &spoilt], 2..4, &mut out[34..]).rows(),
            [0],
            "counted from the range"
        );
        spoilt.reset(4);
        assert!(Partial::finish(&[&good, &spoilt], 0..4, &mut out).is_clear(), "reset forgets");
    }
}

/// One head group's attention in one process.
struct Case {
    d: usize,
    dv: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    visible: Vec<usize>,
}

impl Case {
    /// The last `m` of `tokens` tokens, one query row each.
    fn causal(m: usize, tokens: usize, d: usize, dv: usize) -> Self {
        let q = numbers(m * d, 11).iter().map(|x| x * 0.7).collect();
        let (k, v) = (numbers(tokens * d, 12), numbers(tokens * dv, 13));
        Self { d, dv, q, k, v, visible: (tokens - m + 1..=tokens).collect() }
    }

    fn tokens(&self) -> usize {
        self.v.len() / self.dv
    }

    /// The rows and visible counts of rank `rank` of `ranks` with `interleave`.
    fn rank(&self, rank: usize, ranks: usize, interleave: usize) -> (Vec<f32>, Vec<f32>, Vec<usize>) {
        let own = |token: &usize| token / interleave % ranks == rank;
        let tokens: Vec<usize> = (0..self.tokens()).filter(own).collect();
        let rows = |all: &[f32], width: usize| -> Vec<f32> {
            tokens.iter().flat_map(|t| &all[t * width..][..width]).copied().collect()
        };
        let visible = self.visible.iter().map(|&seen| tokens.iter().filter(|&&t| t < seen).count());
        (rows(&self.k, self.d), rows(&self.v, self.dv), visible.collect())
    }

    fn canonical(&self, ranks: usize, interleave: usize) -> (Vec<f32>, Vec<usize>) {
        let m = self.visible.len();
        let mut max = vec![f32::NEG_INFINITY; m];
        let mut parts = Vec::new();
        for rank in 0..ranks {
            let (k, v, visible) = self.rank(rank, ranks, interleave);
            let mut scores = Scores::new();
            scores.compute(&self.q, &KeyPanels::from_rows(&k, self.d), &visible);
            merge_max(&mut max, scores.max());
            parts.push((scores, ValueRows::from_rows(&v, self.dv, Arith::Canonical)));
        }
        let sum = |(mut scores, values): (Scores, ValueRows)| {
            let mut sums = AttentionSums::new();
            scores.sums(0, &max, &values, &mut sums);
            sums
        };
        let sums: Vec<AttentionSums> = parts.into_iter().map(sum).collect();
        let mut out = vec![0.0; m * self.dv];
        let overflow = AttentionSums::finish(&sums, 0..m, &mut out);
        (out, overflow.rows().to_vec())
    }

    fn fast(&self, ranks: usize) -> (Vec<f32>, Vec<usize>) {
        let m = self.visible.len();
        let mut bad = Vec::new();
        let mut parts = Vec::new();
        for rank in 0..ranks {
            let (k, v, visible) = self.rank(rank, ranks, 1);
            let (mut out, mut lse) = (vec![9.0; m * self.dv], vec![9.0; m]);
            let values = ValueRows::from_rows(&v, self.dv, Arith::Fast);
            let cache = (&KeyPanels::from_rows(&k, self.d), &values);
            let overflow = Scores::new().attend(&self.q, cache, &visible, &mut out, &mut lse);
            bad.extend_from_slice(overflow.rows());
            parts.push((out, lse));
        }
        let parts: Vec<(&[f32], &[f32])> = parts.iter().map(|(o, l)| (&o[..], &l[..])).collect();
        let (mut out, mut lse) = (vec![0.0; m * self.dv], vec![0.0; m]);
        merge_lse(&parts.iter().copied(), self.dv, &mut out, &mut lse);
        (out, bad)
    }

    /// Canonical attention as its definition says, one value at a time.
    fn definition(&self) -> Vec<f32> {
        let sticky = |x: f32| if x == 0.0 { x } else { f32::from_bits(x.to_bits() | 1) };
        let mut out = Vec::new();
        for (row, &seen) in self.visible.iter().enumerate() {
            let q = &self.q[row * self.d..][..self.d];
            let scores: Vec<f32> = self.k.chunks_exact(self.d).take(seen).map(|k| chain(q, k)).collect();
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let p: Vec<f32> = scores.iter().map(|s| sticky(exp(s - max))).collect();
            let l: i64 = p.iter().map(|&p| grid(p.into(), 40)).sum();
            for col in 0..self.dv {
                let terms = p.iter().zip(self.v[col..].iter().step_by(self.dv));
                let o: i64 = terms.map(|(p, v)| grid(f64::from(*p) * f64::from(sticky(*v)), 32)).sum();
                out.push((o as f64 * (256.0 / l as f64)) as f32);
            }
        }
        out
    }

    fn exact(&self) -> Vec<f64> {
        let mut out = Vec::new();
        for (row, &seen) in self.visible.iter().enumerate() {
            let q = &self.q[row * self.d..][..self.d];
            let dot =
                |k: &[f32]| -> f64 { q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
            let weights: Vec<f64> = self.k.chunks_exact(self.d).take(seen).map(|k| dot(k).exp()).collect();
            let total: f64 = weights.iter().sum();
            for col in 0..self.dv {
                let terms = weights.iter().zip(self.v[col..].iter().step_by(self.dv));
                out.push(terms.map(|(p, v)| p * f64::from(*v)).sum::<f64>() / total);
            }
        }
        out
    }
}

/// Lengths beyond 2,000: shorter ones do not meet the ties that a wrong kernel rounds by order.
#[test]
fn canonical_attention_is_its_definition_under_every_split() {
    let coarse = |x: &f32| half::bf16::from_f32(*x).to_f32();
    let mut bf16 = Case::causal(7, 2100, 64, 64);
    bf16.v = bf16.v.iter().map(coarse).collect();
    let mut ties = Case::causal(7, 2100, 64, 64);
    // Few distinct values, all equal scores: half of the products would be ties without sticky bits.
    ties.q.fill(0.0);
    ties.v = ties.v.iter().map(|x| (x * 1000.0).round() * 2f32.powi(-33)).collect();
    let mut large = Case::causal(7, 2100, 64, 64);
    large.v = large.v.iter().map(|x| x * 400_000.0).collect();
    let mut middle = Case::causal(7, 2100, 64, 64);
    middle.q.iter_mut().for_each(|x| *x *= 0.1);
    middle.v = middle.v.iter().map(|x| x * 900.0).collect();
    for (name, case) in [
        ("f32", Case::causal(13, 2100, 64, 64)),
        ("bf16", bf16),
        ("ties", ties),
        ("values for kernel A", large),
        ("values for E on some ranks only", middle),
        ("latent rows", Case::causal(3, 2050, 96, 48)),
        ("odd sizes", Case::causal(5, 2061, 33, 7)),
    ] {
        let expected = case.definition();
        for (ranks, interleave) in [(1, 1), (2, 1), (3, 4), (4, 1), (4, 4), (6, 1)] {
            let (out, bad) = case.canonical(ranks, interleave);
            assert!(bad.is_empty(), "{name}");
            assert!(bits(&out) == bits(&expected), "{name}, {ranks} ranks, interleave {interleave}");
        }
    }
}

#[test]
fn query_blocks_do_not_change_a_row() {
    let whole = Case::causal(40, 300, 64, 64);
    let (expected, _) = whole.canonical(1, 1);
    for size in [1, 7, 16] {
        for first in (0..40).step_by(size) {
            let rows = first..(first + size).min(40);
            let seen = whole.visible[rows.end - 1];
            let block = Case {
                q: whole.q[rows.start * 64..rows.end * 64].to_vec(),
                k: whole.k[..seen * 64].to_vec(),
                v: whole.v[..seen * 64].to_vec(),
                visible: whole.visible[rows.clone()].to_vec(),
                ..whole
            };
            let (out, _) = block.canonical(2, 1);
            assert_eq!(bits(&out), bits(&expected[rows.start * 64..rows.end * 64]));
        }
    }
    for arith in [Arith::Canonical, Arith::Fast] {
        assert!(query_block(1 << 30, arith) >= 12 && query_block(0, arith) * 4096 * 4 <= 8 << 20);
    }
}

#[test]
fn attention_is_close_to_f64_in_both_modes() {
    let case = Case::causal(9, 700, 64, 64);
    let exact = case.exact();
    for (what, (out, bad)) in [
        ("canonical", case.canonical(1, 1)),
        ("canonical, 4 ranks", case.canonical(4, 1)),
        ("fast", case.fast(1)),
        ("fast, 4 ranks", case.fast(4)),
    ] {
        assert!(bad.is_empty(), "{what}");
        for (found, exact) in out.iter().zip(&exact) {
            assert!((f64::from(*found) - exact).abs() < 2e-6, "{what}: {found} {exact}");
        }
    }
}

#[test]
fn ranks_and_rows_that_see_nothing() {
    // Three tokens on six ranks; the first row sees none of them anywhere, the second one.
    let mut case = Case::causal(3, 3, 8, 5);
    case.visible = vec![0, 1, 3];
    for ranks in [1, 2, 6] {
        let ((canonical, bad), (fast, worse)) = (case.canonical(ranks, 1), case.fast(ranks));
        assert!(bad.is_empty() && worse.is_empty());
        for out in [&canonical, &fast] {
            assert_eq!(out[..5], [0.0; 5]);
            assert!(out[5..10].iter().zip(&case.v).all(|(a, b)| (a - b).abs() < 1e-6));
            assert!(out[10..].iter().any(|&x| x != 0.0));
        }
    }
    let none = Case { q: vec![], visible: vec![], ..case };
    assert!(none.canonical(2, 1).0.is_empty() && none.fast(2).0.is_empty());
}

#[test]
fn attention_does_not_hide_what_is_not_finite() {
    let spoil = |change: &dyn Fn(&mut Case)| {
        let mut case = Case::causal(4, 40, 8, 8);
        change(&mut case);
        [case.canonical(1, 1).1, case.canonical(3, 1).1, case.fast(1).1, case.fast(3).1]
    };
    // A query row, a key, a score that overflows downwards: only the rows that see it. (A rank flags in fast mode
    // once per rank.)
    let expect = |found: [Vec<usize>; 4], rows: &[usize], what: &str| {
        for mut found in found {
            found.sort_unstable();
            found.dedup();
            assert_eq!(found, rows, "{what}");
        }
    };
    expect(spoil(&|case| case.q[2 * 8] = f32::NAN), &[2], "query");
    expect(spoil(&|case| case.k[38 * 8 + 3] = f32::NAN), &[2, 3], "key");
    expect(spoil(&|case| case.k[39 * 8 + 3] = f32::INFINITY), &[3], "key");
    let opposite = |case: &mut Case| [case.q[1], case.k[1]] = [-1e30, 1e30];
    expect(spoil(&opposite), &[0], "score");
    for value in [f32::NAN, f32::INFINITY] {
        for rows in spoil(&|case| case.v[17] = value) {
            assert!((0..4).all(|row| rows.contains(&row)), "value {value}");
        }
    }
    let [one, three, ..] = spoil(&|case| case.v[17] = 600_000.0);
    assert_eq!((one, three), (vec![0, 1, 2, 3], vec![0, 1, 2, 3]), "outside the grid");
}

#[test]
fn merging_follows_the_recorded_vectors() {
    let text = include_str!("data/lse_merge.json");
    let file: serde_json::Value = serde_json::from_str(text).unwrap();
    let flat = |value: &serde_json::Value, missing: f32| -> Vec<f32> {
        fn walk(value: &serde_json::Value, missing: f32, out: &mut Vec<f32>) {
            match value {
                serde_json::Value::Array(items) => items.iter().for_each(|item| walk(item, missing, out)),
                value => out.push(value.as_f64().map_or(missing, |x| x as f32)),
            }
        }
        let mut out = Vec::new();
        walk(value, missing, &mut out);
        out
    };
    for case in file["cases"].as_array().unwrap() {
        let size = |key: &str| case[key].as_u64().unwrap() as usize;
        let (n, batch, heads, dim) = (size("n"), size("batch"), size("heads"), size("dim"));
        let rows = batch * heads;
        let (outs, lses) = (flat(&case["outs"], f32::NAN), flat(&case["lses"], f32::NEG_INFINITY));
        let parts: Vec<(&[f32], &[f32])> =
            outs.chunks_exact(rows * dim).zip(lses.chunks_exact(rows)).collect();
        assert_eq!(parts.len(), n);
        let (mut out, mut lse) = (vec![0.0; rows * dim], vec![0.0; rows]);
        merge_lse(&parts.iter().copied(), dim, &mut out, &mut lse);
        let mut seen = 0;
        for result in case["result"].as_array().unwrap() {
            let own = heads / n;
            let first = result["rank"].as_u64().unwrap() as usize * own;
            let (want, want_lse) = (flat(&result["out"], f32::NAN), flat(&result["lse"], f32::NEG_INFINITY));
            for b in 0..batch {
                for h in 0..own {
                    let (row, at) = (b * heads + first + h, b * own + h);
                    let close = |a: f32, b: f32| a == b || (a - b).abs() < 1e-5;
                    assert!(close(lse[row], want_lse[at]), "lse {} {}", lse[row], want_lse[at]);
                    for c in 0..dim {
                        assert!(close(out[row * dim + c], want[at * dim + c]));
                        seen += 1;
                    }
                }
            }
        }
        assert_eq!(seen, rows * dim);
    }
}

#[test]
fn parts_without_weight_are_not_read() {
    let nan = [f32::NAN, f32::NAN];
    let good = [1.0, 2.0];
    let (mut out, mut lse) = ([5.0; 2], [5.0]);
    for weightless in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        merge_lse(&[(&nan[..], &[weightless][..]), (&good, &[-200.0])].into_iter(), 2, &mut out, &mut lse);
        assert_eq!((out, lse), (good, [-200.0]));
        merge_lse(&[(&nan[..], &[weightless][..])].into_iter(), 2, &mut out, &mut lse);
        assert_eq!((out, lse), ([0.0; 2], [f32::NEG_INFINITY]));
    }
}

#[test]
fn exponential_norm_and_activation_against_f64() {
    for i in -8700..8800 {
        let x = i as f32 / 100.0;
        let exact = f64::from(x).exp();
        assert!((f64::from(exp(x)) / exact - 1.0).abs() < 2e-7, "exp {x}");
    }
    assert!(exp(f32::NAN).is_nan());
    assert_eq!((exp(-87.1).to_bits(), exp(f32::NEG_INFINITY).to_bits()), (0, 0));
    assert!(exp(1000.0).is_finite());

    let (x, weight) = (numbers(3 * 577, 21), numbers(577, 22));
    let mut out = vec![0.0; x.len()];
    rms_norm(&x, &weight, 1e-5, &mut out);
    for (x, out) in x.chunks_exact(577).zip(out.chunks_exact(577)) {
        let mean = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / 577.0 + 1e-5;
        for ((x, weight), out) in x.iter().zip(&weight).zip(out) {
            assert!((f64::from(*x) / mean.sqrt() * f64::from(*weight) - f64::from(*out)).abs() < 1e-6);
        }
    }

    let gate: Vec<f32> = numbers(1000, 23).iter().map(|x| x * 100.0).collect();
    let up = numbers(1000, 24);
    let mut out = vec![0.0; 1000];
    silu_mul(&gate, &up, &mut out);
    for ((g, u), out) in gate.iter().zip(&up).zip(&out) {
        let exact = f64::from(*g) / (1.0 + f64::from(-g).exp()) * f64::from(*u);
        assert!((exact - f64::from(*out)).abs() < 1e-5, "silu {g}");
    }
    silu_mul(&[f32::NAN], &[1.0], &mut out[..1]);
    assert!(out[0].is_nan());
}

#[test]
fn rotation_against_f64() {
    let (dim, theta) = (64, 100_000.0);
    let table = RopeTable::new(dim, theta, 8192);
    assert_eq!((table.head_dim(), table.positions()), (64, 8192));
    for position in [0, 1, 17, 2047, 8191] {
        let before = numbers(3 * dim, 31);
        let mut after = before.clone();
        table.rotate(&mut after, position);
        for (before, after) in before.chunks_exact(dim).zip(after.chunks_exact(dim)) {
            for i in 0..dim / 2 {
                let frequency = theta.powf(-2.0 * i as f64 / dim as f64) as f32;
                let (sin, cos) = f64::from(frequency * position as f32).sin_cos();
                let (a, b) = (f64::from(before[i]), f64::from(before[i + dim / 2]));
                assert!((a * cos - b * sin - f64::from(after[i])).abs() < 1e-6);
                assert!((b * cos + a * sin - f64::from(after[i + dim / 2])).abs() < 1e-6);
            }
        }
    }
}

#[test]
fn logits_to_choices() {
    let logits: Vec<f32> = numbers(5000, 41).iter().map(|x| x * 20.0).collect();
    let total = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
    let mut all = vec![0.0; logits.len()];
    assert!(log_softmax(&logits, &mut all));
    for (id, (&x, &log)) in logits.iter().zip(&all).enumerate() {
        assert!((f64::from(x) - total - f64::from(log)).abs() < 4e-6);
        assert_eq!(log_softmax_at(&logits, id).unwrap().to_bits(), log.to_bits());
    }
    let mut p = vec![0.0; logits.len()];
    assert!(softmax(&logits, 0.7, &mut p));
    assert!((p.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    let best = argmax(&logits).unwrap();
    assert!(p.iter().all(|&x| x <= p[best]));

    let mut turned = logits.clone();
    turned.rotate_left(1234);
    let id = (best + 5000 - 1234) % 5000;
    assert_eq!(log_softmax_at(&turned, id), log_softmax_at(&logits, best), "the sum has no order");

    for bad in [f32::NAN, f32::INFINITY] {
        let logits = [0.0, bad];
        assert!(log_softmax_at(&logits, 0).is_none() && !log_softmax(&logits, &mut p[..2]));
        assert!(!softmax(&logits, 1.0, &mut p[..2]));
    }
    assert_eq!((argmax(&[]), argmax(&[f32::NEG_INFINITY, 2.0, 2.0])), (None, Some(1)));
    assert!(log_softmax_at(&[1.0], 1).is_none());
}
