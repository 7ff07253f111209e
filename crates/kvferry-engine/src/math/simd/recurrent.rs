//! Scalar twins of linear attention.

use super::super::delta::DeltaToken;
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

#[inline(always)]
pub(crate) fn delta(state: &mut [f32], token: &DeltaToken<'_>, out: &mut [f32]) {
    let d = out.len();
    let mut at = 0;
    while at + LANES <= d {
        columns::<LANES>(state, token, at, out);
        at += LANES;
    }
    while at < d {
        columns::<1>(state, token, at, out);
        at += 1;
    }
}

/// Value channels that are taken together; each is a chain of its own over the key channels.
const LANES: usize = 16;

#[inline(always)]
fn columns<const N: usize>(state: &mut [f32], token: &DeltaToken<'_>, at: usize, out: &mut [f32]) {
    let DeltaToken { decay, q, k, v, beta } = *token;
    let d = out.len();
    // What the key reads now; then what is to be taken in.
    let mut taken = [0.0f32; N];
    for ((row, decay), k) in state.chunks_exact_mut(d).zip(decay).zip(k) {
        for (s, taken) in row[at..at + N].iter_mut().zip(&mut taken) {
            *s *= decay;
            *taken = k.mul_add(*s, *taken);
        }
    }
    for (taken, v) in taken.iter_mut().zip(&v[at..at + N]) {
        *taken = beta * (v - *taken);
    }
    let mut read = [0.0f32; N];
    for ((row, q), k) in state.chunks_exact_mut(d).zip(q).zip(k) {
        for ((s, taken), read) in row[at..at + N].iter_mut().zip(&taken).zip(&mut read) {
            *s = k.mul_add(*taken, *s);
            *read = q.mul_add(*s, *read);
        }
    }
    out[at..at + N].copy_from_slice(&read);
}

#[inline(always)]
pub(crate) fn gate(x: &mut [f32], by: &[f32]) {
    for (x, by) in x.iter_mut().zip(by) {
        *x *= sigmoid(*by);
    }
}
