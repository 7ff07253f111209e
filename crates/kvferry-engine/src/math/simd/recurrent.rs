//! Scalar twins of linear attention.

use super::super::delta::DeltaTokens;
use super::scalar::exp;

/// `1 / (1 + e⁻ˣ)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[inline(always)]
pub(crate) fn convolve(window: &[f32], taps: &[f32], out: &mut [f32]) {
    let n = out.len().max(1);
    out.fill(0.0);
    for (row, taps) in window.chunks_exact(n).zip(taps.chunks_exact(n)) {
        for ((out, x), tap) in out.iter_mut().zip(row).zip(taps) {
            *out = x.mul_add(*tap, *out);
        }
    }
    for out in out {
        *out = *out / (1.0 + exp(-*out));
    }
}

/// Eight lanes (index mod 8) and a fixed tree, as in the norm.
#[inline(always)]
pub(crate) fn set_length(x: &mut [f32], eps: f32, length: f32) {
    let mut s = [0.0f32; 8];
    for chunk in x.chunks(8) {
        for (lane, x) in s.iter_mut().zip(chunk) {
            *lane = x.mul_add(*x, *lane);
        }
    }
    let sum = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    let factor = 1.0 / (sum + eps).sqrt() * length;
    for x in x {
        *x *= factor;
    }
}

/// `ln(1 + t)` for t in [0, 1], as `2 artanh(t / (2 + t))`: eight terms leave less than 2e-9 of it.
#[inline(always)]
fn ln_1p(t: f32) -> f32 {
    let s = t / (2.0 + t);
    let square = s * s;
    let mut series = 1.0 / 15.0;
    for odd in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0f32] {
        series = square.mul_add(series, 1.0 / odd);
    }
    2.0 * s * series
}

#[inline(always)]
pub(crate) fn decay(x: &[f32], bias: &[f32], rate: f32, out: &mut [f32]) {
    for ((out, x), bias) in out.iter_mut().zip(x).zip(bias) {
        let x = x + bias;
        // ln(1 + eˣ) without a large power. In this order a NaN passes through.
        let positive = if x < 0.0 { 0.0 } else { x };
        let softplus = positive + ln_1p(exp(-x.abs()));
        *out = exp(-rate * softplus);
    }
}

/// Value channels that are taken together through a run of tokens; each is a chain of its own over the key channels.
const BLOCK: usize = 32;
/// The largest head whose block is copied together: 16 KiB, which stays in the first-level cache from token to token.
const MOST: usize = 128;
/// From this many tokens on the copy pays.
const RUN: usize = 4;

#[inline(always)]
pub(crate) fn delta(state: &mut [f32], tokens: &DeltaTokens<'_>, out: &mut [f32]) {
    let d = tokens.dim;
    let mut done = 0;
    if tokens.count >= RUN && d <= MOST {
        let mut block = [[0.0f32; BLOCK]; MOST];
        let block = &mut block[..d];
        while done + BLOCK <= d {
            for (row, state) in block.iter_mut().zip(state.chunks_exact(d)) {
                row.copy_from_slice(&state[done..done + BLOCK]);
            }
            run(block, tokens, done, out);
            for (row, state) in block.iter().zip(state.chunks_exact_mut(d)) {
                state[done..done + BLOCK].copy_from_slice(row);
            }
            done += BLOCK;
        }
    }
    for token in 0..tokens.count {
        let mut at = done;
        while at + LANES <= d {
            columns::<LANES>(state, tokens, token, at, out);
            at += LANES;
        }
        while at < d {
            columns::<1>(state, tokens, token, at, out);
            at += 1;
        }
    }
}

/// All tokens, in the value channels from `at` on, whose state is `block[d]`. One pass over the state takes a token in,
/// reads it for that token's query, and lets it decay and reads it for the next token's key.
#[inline(always)]
fn run(block: &mut [[f32; BLOCK]], tokens: &DeltaTokens<'_>, at: usize, out: &mut [f32]) {
    let DeltaTokens { count, heads, dim: d, decay, q, k, v, beta } = *tokens;
    let mut taken = [0.0f32; BLOCK];
    for ((row, decay), k) in block.iter_mut().zip(&decay[..d]).zip(&k[..d]) {
        for j in 0..BLOCK {
            row[j] *= decay;
            taken[j] = k.mul_add(row[j], taken[j]);
        }
    }
    for token in 0..count {
        let here = token * tokens.stride();
        let v = &v[here + at..][..BLOCK];
        let mut news = [0.0f32; BLOCK];
        for j in 0..BLOCK {
            news[j] = beta[token * heads] * (v[j] - taken[j]);
        }
        let (q_here, k_here) = (&q[here..here + d], &k[here..here + d]);
        let mut read = [0.0f32; BLOCK];
        taken = [0.0; BLOCK];
        let next = here + tokens.stride();
        if token + 1 < count {
            let (decay, k_next) = (&decay[next..next + d], &k[next..next + d]);
            let keys = k_here.iter().zip(k_next);
            for (((row, q), (k, k_next)), decay) in block.iter_mut().zip(q_here).zip(keys).zip(decay) {
                for j in 0..BLOCK {
                    let s = k.mul_add(news[j], row[j]);
                    read[j] = q.mul_add(s, read[j]);
                    let s = s * decay;
                    taken[j] = k_next.mul_add(s, taken[j]);
                    row[j] = s;
                }
            }
        } else {
            for ((row, q), k) in block.iter_mut().zip(q_here).zip(k_here) {
                for j in 0..BLOCK {
                    row[j] = k.mul_add(news[j], row[j]);
                    read[j] = q.mul_add(row[j], read[j]);
                }
            }
        }
        out[here + at..][..BLOCK].copy_from_slice(&read);
    }
}

/// Value channels that one token takes together.
const LANES: usize = 16;

#[inline(always)]
fn columns<const N: usize>(
    state: &mut [f32],
    tokens: &DeltaTokens<'_>,
    token: usize,
    at: usize,
    out: &mut [f32],
) {
    let (d, here) = (tokens.dim, token * tokens.stride());
    let [decay, q, k] = [tokens.decay, tokens.q, tokens.k].map(|rows| &rows[here..here + d]);
    let beta = tokens.beta[token * tokens.heads];
    // What the key reads now; then what is to be taken in.
    let mut taken = [0.0f32; N];
    for ((row, decay), k) in state.chunks_exact_mut(d).zip(decay).zip(k) {
        for (s, taken) in row[at..at + N].iter_mut().zip(&mut taken) {
            *s *= decay;
            *taken = k.mul_add(*s, *taken);
        }
    }
    for (taken, v) in taken.iter_mut().zip(&tokens.v[here + at..][..N]) {
        *taken = beta * (v - *taken);
    }
    let mut read = [0.0f32; N];
    for ((row, q), k) in state.chunks_exact_mut(d).zip(q).zip(k) {
        for ((s, taken), read) in row[at..at + N].iter_mut().zip(&taken).zip(&mut read) {
            *s = k.mul_add(*taken, *s);
            *read = q.mul_add(*s, *read);
        }
    }
    out[here + at..][..N].copy_from_slice(&read);
}

#[inline(always)]
pub(crate) fn gate(x: &mut [f32], by: &[f32]) {
    for (x, by) in x.iter_mut().zip(by) {
        *x *= sigmoid(*by);
    }
}
