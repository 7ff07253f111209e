//! Kimi delta attention in chunked form, beside the engine's recurrence: is it worth having on a processor?
//!
//! With `g_t` the product of the decays of a chunk's tokens up to `t`, per key channel, and `S` the state before the
//! chunk: `u_t = beta_t (v_t - (g_t k_t)ᵀ S - sum_{s<t} A_ts u_s)` where `A_ts = k_tᵀ (d_ts k_s)`; the output is `(g_t q_t)ᵀ S +
//! sum_{s<=t} B_ts u_s` where `B_ts = q_tᵀ (d_ts k_s)`; the next state is `g_C S + sum_s (d_Cs k_s) u_sᵀ`. `d_ts`, the decays
//! between two tokens, are running products here: no factor is above 1, so that nothing overflows however strong a decay
//! is, and no logarithm is needed.
//!
//! A head of `d` costs 3 d² + 2 C d operations per token in chunks of C, the recurrence 4 d². A larger chunk saves loads of the
//! state and costs arithmetic; 8 was the best of 4, 8 and 16 here.

use std::hint::black_box;

use kvferry_engine::math::{DeltaTokens, delta, set_length};

use crate::{numbers, time};

/// Tokens of a chunk.
const C: usize = 8;
/// Value channels that are in registers together, and rows that are.
const N: usize = 32;
const R: usize = 4;

type Block = [f32; N];

/// A head's tokens, `[tokens][D]` each.
struct Tokens<const D: usize> {
    decay: Vec<[f32; D]>,
    q: Vec<[f32; D]>,
    k: Vec<[f32; D]>,
    v: Vec<[f32; D]>,
    beta: Vec<f32>,
}

impl<const D: usize> Tokens<D> {
    /// Decays between `left` and 1, keys and queries of length 1.
    fn new(count: usize, left: f32) -> Self {
        let rows = |seed| numbers(count * D, seed).as_chunks::<D>().0.to_vec();
        let unit = |seed| {
            let mut rows: Vec<[f32; D]> = rows(seed);
            rows.iter_mut().for_each(|row| set_length(row, 1.0));
            rows
        };
        let mut decay = rows(1);
        let scale = |x: &mut f32| *x = left.powf(*x * 0.5 + 0.5);
        decay.iter_mut().flatten().for_each(scale);
        let beta = numbers(count, 5).iter().map(|x| x * 0.5 + 0.5).collect();
        Self { decay, q: unit(2), k: unit(3), v: rows(4), beta }
    }

    fn from(&self, first: usize, count: usize) -> DeltaTokens<'_> {
        DeltaTokens {
            count,
            heads: 1,
            dim: D,
            decay: self.decay[first..].as_flattened(),
            q: self.q[first..].as_flattened(),
            k: self.k[first..].as_flattened(),
            v: self.v[first..].as_flattened(),
            beta: &self.beta[first..],
        }
    }
}

/// The sum of 16 lanes.
#[inline(always)]
fn sum(l: [f32; 16]) -> f32 {
    let h: [f32; 8] = std::array::from_fn(|i| l[i] + l[i + 8]);
    let g: [f32; 4] = std::array::from_fn(|i| h[i] + h[i + 4]);
    (g[0] + g[2]) + (g[1] + g[3])
}

/// Lets an earlier key decay once more; its products with the key and the query of now.
#[inline(always)]
fn products<const D: usize>(
    earlier: &mut [f32; D],
    decay: &[f32; D],
    k: &[f32; D],
    q: &[f32; D],
) -> [f32; 2] {
    let (mut with_k, mut with_q) = ([0.0f32; 16], [0.0f32; 16]);
    let now = decay.as_chunks::<16>().0.iter().zip(k.as_chunks::<16>().0).zip(q.as_chunks::<16>().0);
    for (earlier, ((decay, k), q)) in earlier.as_chunks_mut::<16>().0.iter_mut().zip(now) {
        for j in 0..16 {
            let x = earlier[j] * decay[j];
            earlier[j] = x;
            with_k[j] = k[j].mul_add(x, with_k[j]);
            with_q[j] = q[j].mul_add(x, with_q[j]);
        }
    }
    [sum(with_k), sum(with_q)]
}

/// `out[rows] = x[rows][D] · block[D]`.
#[inline(always)]
fn read<const D: usize>(x: &[[f32; D]; 2 * C], block: &[Block; D], out: &mut [Block; 2 * C]) {
    for (x, out) in x.as_chunks::<R>().0.iter().zip(out.as_chunks_mut::<R>().0) {
        let mut sums = [[0.0f32; N]; R];
        for c in 0..D {
            for r in 0..R {
                for j in 0..N {
                    sums[r][j] = x[r][c].mul_add(block[c][j], sums[r][j]);
                }
            }
        }
        *out = sums;
    }
}

/// One chunk; `blocks` are the state's `[D / N][D][N]`.
#[inline(always)]
fn chunk<const D: usize>(blocks: &mut [[Block; D]], tokens: &Tokens<D>, first: usize, out: &mut [[f32; D]]) {
    // Keys, then queries, as they read the state from before the chunk; keys as they will be in the state after it.
    let mut reading = [[0.0f32; D]; 2 * C];
    let mut taken = [[0.0f32; D]; C];
    let (mut a, mut b) = ([[0.0f32; C]; C], [[0.0f32; C]; C]);
    let mut left = [1.0f32; D];
    for t in 0..C {
        let [decay, q, k] = [&tokens.decay, &tokens.q, &tokens.k].map(|rows| rows[first + t]);
        for c in 0..D {
            left[c] *= decay[c];
            reading[t][c] = k[c] * left[c];
            reading[C + t][c] = q[c] * left[c];
        }
        for s in 0..t {
            [a[t][s], b[t][s]] = products(&mut taken[s], &decay, &k, &q);
        }
        taken[t] = k;
        [_, b[t][t]] = products(&mut taken[t], &[1.0; D], &k, &q);
    }
    for (number, block) in blocks.iter_mut().enumerate() {
        let at = number * N;
        let mut reads = [[0.0f32; N]; 2 * C];
        read(&reading, block, &mut reads);
        let mut news = [[0.0f32; N]; C];
        for t in 0..C {
            let v = &tokens.v[first + t][at..at + N];
            let mut new: Block = std::array::from_fn(|j| v[j] - reads[t][j]);
            for s in 0..t {
                for j in 0..N {
                    new[j] = (-a[t][s]).mul_add(news[s][j], new[j]);
                }
            }
            news[t] = new.map(|x| x * tokens.beta[first + t]);
            let mut sum = reads[C + t];
            for s in 0..=t {
                for j in 0..N {
                    sum[j] = b[t][s].mul_add(news[s][j], sum[j]);
                }
            }
            out[first + t][at..at + N].copy_from_slice(&sum);
        }
        for c in 0..D {
            let mut row = block[c];
            row.iter_mut().for_each(|x| *x *= left[c]);
            for t in 0..C {
                for j in 0..N {
                    row[j] = taken[t][c].mul_add(news[t][j], row[j]);
                }
            }
            block[c] = row;
        }
    }
}

#[inline(always)]
fn chunks<const D: usize>(blocks: &mut [[Block; D]], tokens: &Tokens<D>, out: &mut [[f32; D]]) {
    for first in (0..tokens.beta.len()).step_by(C) {
        chunk(blocks, tokens, first, out);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512dq,avx512vl,avx512bw")]
fn chunks_avx512<const D: usize>(blocks: &mut [[Block; D]], tokens: &Tokens<D>, out: &mut [[f32; D]]) {
    chunks(blocks, tokens, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn chunks_avx2<const D: usize>(blocks: &mut [[Block; D]], tokens: &Tokens<D>, out: &mut [[f32; D]]) {
    chunks(blocks, tokens, out);
}

/// With the instructions that the engine's kernels would have here.
fn chunked<const D: usize>(blocks: &mut [[Block; D]], tokens: &Tokens<D>, out: &mut [[f32; D]]) {
    #[cfg(target_arch = "x86_64")]
    match kvferry_engine::math::instruction_set() {
        // SAFETY: the engine has detected these features.
        #[allow(unsafe_code, reason = "instructions that were detected")]
        "avx512" => return unsafe { chunks_avx512(blocks, tokens, out) },
        // SAFETY: as above.
        #[allow(unsafe_code, reason = "instructions that were detected")]
        "avx2" => return unsafe { chunks_avx2(blocks, tokens, out) },
        _ => {}
    }
    chunks(blocks, tokens, out);
}

/// Largest difference as part of the largest value.
fn error(a: &[f32], b: &[f32]) -> f32 {
    let largest = |values: &mut dyn Iterator<Item = f32>| values.fold(0.0, f32::max);
    largest(&mut a.iter().zip(b).map(|(a, b)| (a - b).abs())) / largest(&mut a.iter().map(|a| a.abs()))
}

pub(crate) fn compare<const D: usize>() {
    let mut worst = 0.0f32;
    // From decays that leave nearly all to some that leave nearly nothing.
    for left in [1.0 - 1e-7, 0.9, 0.01, 1e-8] {
        let tokens = Tokens::<D>::new(200, left);
        let (mut state, mut out) = (vec![0.0; D * D], vec![0.0; 200 * D]);
        delta(&mut state, &tokens.from(0, 200), &mut out);
        let (mut blocks, mut other) = (vec![[[0.0; N]; D]; D / N], vec![[0.0; D]; 200]);
        chunked(&mut blocks, &tokens, &mut other);
        let rows = (0..D).flat_map(|c| blocks.iter().flat_map(move |block| block[c]));
        worst = worst.max(error(&out, other.as_flattened())).max(error(&state, &rows.collect::<Vec<_>>()));
    }
    assert!(worst < 1e-5, "heads of {D}: chunks differ from the recurrence by {worst:.0e}");
    let count = 512;
    let tokens = Tokens::<D>::new(count, 0.5);
    let (mut state, mut out) = (vec![0.0; D * D], vec![0.0; count * D]);
    let (mut blocks, mut other) = (vec![[[0.0; N]; D]; D / N], vec![[0.0; D]; count]);
    let one = time(|| {
        for t in 0..count {
            delta(&mut state, &tokens.from(t, 1), &mut out[t * D..]);
        }
    });
    let run = time(|| delta(&mut state, &tokens.from(0, count), &mut out));
    let chunk = time(|| chunked(&mut blocks, &tokens, &mut other));
    black_box((&state, &out, &blocks, &other));
    let ns = |seconds: f64| seconds / count as f64 * 1e9;
    println!(
        "delta, heads of {D:3}: run {:6.0} ns per token, token by token {:.2}x, chunks of {C} {:.2}x; error {worst:.0e}",
        ns(run),
        one / run,
        chunk / run
    );
}
