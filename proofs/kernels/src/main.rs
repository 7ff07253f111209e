//! Speed of the kernels at the shapes of a small model, on one thread, next to the `gemm` crate.
//!
//! `cargo run --release --manifest-path proofs/kernels/Cargo.toml`
#![allow(clippy::print_stdout, reason = "a benchmark prints")]

mod delta;

use std::time::Instant;

use kvferry_engine::math::{
    Arith, AttentionSums, KeyPanels, Matrix, Partial, RowParallel, Scores, ValueRows, instruction_set,
};

/// Numbers in [-1, 1).
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed | 1;
    let step = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(step).take(count).collect()
}

/// Median seconds of a call.
fn time(mut run: impl FnMut()) -> f64 {
    run();
    let start = Instant::now();
    let mut seconds = Vec::new();
    while seconds.len() < 5 || start.elapsed().as_secs_f64() < 0.1 {
        let start = Instant::now();
        run();
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn columns(n: usize, k: usize) {
    let w = numbers(n * k, 1);
    let matrix = Matrix::new(n, k, &w);
    for m in [1, 4, 16, 64, 256] {
        let x = numbers(m * k, 2);
        let mut out = vec![0.0f32; m * n];
        let gflop = 2e-9 * (m * n * k) as f64;
        let own = gflop / time(|| matrix.apply(&x, m, 0..n, &mut out));
        let [row, step] = [n, k].map(|x| x as isize);
        let none = gemm::Parallelism::None;
        // SAFETY: the pointers cover [m][n], [m][k] and [n][k], as the strides say.
        #[allow(unsafe_code, reason = "the crate's interface takes pointers")]
        let crate_ = gflop
            / time(|| unsafe {
                let (out, x, w) = (out.as_mut_ptr(), x.as_ptr(), w.as_ptr());
                gemm::gemm(
                    m, n, k, out, 1, row, false, x, 1, step, w, step, 1, 0.0, 1.0, false, false, false, none,
                );
            });
        println!(
            "{n:5} x {k:4}, {m:3} rows: {own:6.1} GFLOP/s, gemm crate {crate_:6.1}, {:.2}x",
            own / crate_
        );
    }
}

fn rows(n: usize, unit_k: usize, units: usize) {
    let k = unit_k * units;
    let weights = RowParallel::new(n, unit_k, units, &numbers(n * k, 1));
    for m in [1, 16, 256] {
        let x = numbers(m * k, 2);
        let gflop = 2e-9 * (m * n * k) as f64;
        let [canonical, fast] = [Arith::Canonical, Arith::Fast].map(|arith| {
            let mut part = Partial::new(arith, m, n);
            let seconds = time(|| {
                part.reset(m);
                weights.partial(&x, m, 0..units, &mut part);
            });
            gflop / seconds
        });
        println!("{n} x {units} x {unit_k}, {m:3} rows: canonical {canonical:6.1} GFLOP/s, fast {fast:6.1}");
    }
}

fn attention(m: usize, tokens: usize) {
    let d = 64;
    let (q, k, v) = (numbers(m * d, 1), numbers(tokens * d, 2), numbers(tokens * d, 3));
    // Beyond kernel E's bound, so that kernel A runs.
    let large: Vec<f32> = v.iter().map(|x| x * 10_000.0).collect();
    let keys = KeyPanels::from_rows(&k, d);
    let visible = vec![tokens; m];
    let mut scores = Scores::new();
    let (mut out, mut lse) = (vec![0.0; m * d], vec![0.0; m]);
    let mut sums = AttentionSums::new();

    let first = time(|| {
        scores.clear();
        scores.compute(&q, &keys, &visible);
    });
    let max = scores.max().to_vec();
    let mut canonical = |v: &[f32]| {
        let values = ValueRows::from_rows(v, d, Arith::Canonical);
        let both = time(|| {
            scores.clear();
            scores.compute(&q, &keys, &visible);
            sums.clear();
            scores.sums(0, &max, &values, &mut sums);
        });
        both - first
    };
    let (e, a) = (canonical(&v), canonical(&large));
    let values = ValueRows::from_rows(&v, d, Arith::Fast);
    let fast = time(|| {
        assert!(scores.attend(&q, (&keys, &values), &visible, &mut out, &mut lse).is_clear());
    });
    println!(
        "attention {m:3} rows, {tokens} tokens: fast {:.1} us; canonical with E {:.2}x, with A {:.2}x",
        fast * 1e6,
        (first + e) / fast,
        (first + a) / fast,
    );
}

fn main() {
    println!("{}", instruction_set());
    for (n, k) in [(576, 576), (1536, 576), (576, 1536)] {
        columns(n, k);
    }
    rows(576, 64, 24);
    for (m, tokens) in [(3, 256), (3, 2048), (192, 256), (192, 2048), (192, 8192)] {
        attention(m, tokens);
    }
    delta::compare::<32>();
    delta::compare::<64>();
    delta::compare::<128>();
}
