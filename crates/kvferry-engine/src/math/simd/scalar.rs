//! Scalar twins: plain Rust with explicit fused operations.

use super::super::grid::{self, MAGIC};
use super::Kernels;
pub(crate) use super::recurrent::sigmoid;
pub(super) use super::recurrent::{convolve, decay, delta, gate, set_length};

pub(super) static KERNELS: Kernels = Kernels {
    name: "scalar",
    rows: 4,
    panels: |_| 1,
    chain,
    fold,
    peak,
    stick,
    exp_grid,
    exp_sum,
    weigh_wide,
    weigh_binade,
    weigh,
    rms_norm,
    silu_mul,
    convolve,
    set_length,
    decay,
    delta,
    gate,
    transpose,
};

/// Below it the weight is +0.
const EXP_CUT: f32 = -87.0;
/// Above it the result would leave the normal numbers.
const EXP_TOP: f32 = 88.0;

/// Degree-5 polynomial on [-ln 2 / 2, ln 2 / 2] (the coefficients of the Cephes library), scaled by exponent bits.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // 1.5 * 2^23: adding it rounds to an integer, ties to even, which then is in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 as an exact short number and a rest.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // In this order a NaN passes through.
    let top = if EXP_TOP < x { EXP_TOP } else { x };
    let shifted = top.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = (-n).mul_add(LN_2_HIGH, top);
    let r = (-n).mul_add(LN_2_LOW, r);
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let y = p.mul_add(r * r, r) + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    let y = y * f32::from_bits(exponent.wrapping_shl(23));
    if x < EXP_CUT { 0.0 } else { y }
}

/// Sets the lowest mantissa bit unless zero. Products of two such numbers cannot lie halfway between grid steps
/// (within the bounds of kernel E), so that rounding does not depend on what was summed before.
#[inline(always)]
pub(crate) fn stick_one(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if x == 0.0 { bits } else { bits | 1 })
}

fn chain(mr: usize, np: usize, x: &[f32], w: &[f32], stride: usize, tile: &mut [f32]) {
    for i in 0..mr {
        for p in 0..np {
            let mut acc = [0.0f32; 16];
            for (x, w) in x.chunks_exact(mr).zip(w[p * stride..].chunks_exact(16)) {
                for (acc, w) in acc.iter_mut().zip(w) {
                    *acc = x[i].mul_add(*w, *acc);
                }
            }
            tile[(i * np + p) * 16..][..16].copy_from_slice(&acc);
        }
    }
}

#[inline(always)]
pub(super) fn fold(values: &[f32], sums: &mut [i64]) -> u32 {
    let mut peak = 0;
    for (sum, &value) in sums.iter_mut().zip(values) {
        peak = peak.max(grid::magnitude(value));
        *sum = sum.wrapping_add(grid::to_grid(grid::clamp(value)));
    }
    peak
}

#[inline(always)]
pub(super) fn peak(values: &[f32]) -> (f32, u32) {
    let mut max = [f32::NEG_INFINITY; 16];
    let mut peak = 0;
    let (chunks, rest) = values.as_chunks::<16>();
    for chunk in chunks {
        for (max, &value) in max.iter_mut().zip(chunk) {
            peak = peak.max(grid::magnitude(value));
            *max = if value > *max { value } else { *max };
        }
    }
    for (max, &value) in max.iter_mut().zip(rest) {
        peak = peak.max(grid::magnitude(value));
        *max = if value > *max { value } else { *max };
    }
    (max.into_iter().fold(f32::NEG_INFINITY, f32::max), peak)
}

#[inline(always)]
pub(super) fn stick(values: &mut [f32]) -> u32 {
    let mut peak = 0;
    for value in values {
        peak = peak.max(grid::magnitude(*value));
        *value = stick_one(*value);
    }
    peak
}

#[inline(always)]
pub(super) fn exp_grid(scores: &mut [f32], max: f32) -> i64 {
    let mut sum = 0i64;
    for score in scores {
        let p = stick_one(exp(*score - max));
        *score = p;
        sum = sum.wrapping_add(grid::weight_to_grid(p));
    }
    sum
}

#[inline(always)]
pub(super) fn exp_sum(scores: &mut [f32], max: f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (chunks, rest) = scores.as_chunks_mut::<16>();
    for chunk in chunks {
        for (lane, score) in lanes.iter_mut().zip(chunk) {
            *score = exp(*score - max);
            *lane += *score;
        }
    }
    for (lane, score) in lanes.iter_mut().zip(rest) {
        *score = exp(*score - max);
        *lane += *score;
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

fn weigh_wide(r: usize, p: &[f64], v: &[f32], dv: usize, acc: &mut [i64]) {
    each(r, p, v, dv, acc, |p, v, acc| {
        let term = p.mul_add(f64::from(v), MAGIC).to_bits() as i64;
        acc.wrapping_add(term.wrapping_sub(MAGIC.to_bits() as i64))
    });
}

fn weigh_binade(r: usize, p: &[f64], v: &[f32], dv: usize, acc: &mut [f64]) {
    each(r, p, v, dv, acc, |p, v, acc| p.mul_add(f64::from(v), acc));
}

fn weigh(r: usize, p: &[f32], v: &[f32], dv: usize, acc: &mut [f32]) {
    each(r, p, v, dv, acc, f32::mul_add);
}

#[inline(always)]
fn each<P: Copy, A: Copy>(
    r: usize,
    p: &[P],
    v: &[f32],
    dv: usize,
    acc: &mut [A],
    step: impl Fn(P, f32, A) -> A,
) {
    for (p, v) in p.chunks_exact(r).zip(v.chunks_exact(dv)) {
        for (&p, acc) in p.iter().zip(acc.chunks_exact_mut(dv)) {
            for (acc, &v) in acc.iter_mut().zip(v) {
                *acc = step(p, v, *acc);
            }
        }
    }
}

/// Eight lanes (index mod 8) and a fixed tree; division and square root are correctly rounded everywhere.
#[inline(always)]
pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mut s = [0.0f32; 8];
    let (chunks, rest) = x.as_chunks::<8>();
    for chunk in chunks {
        for (lane, x) in s.iter_mut().zip(chunk) {
            *lane = x.mul_add(*x, *lane);
        }
    }
    for (lane, x) in s.iter_mut().zip(rest) {
        *lane = x.mul_add(*x, *lane);
    }
    let sum = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    let factor = 1.0 / (sum / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * factor * weight;
    }
}

#[inline(always)]
pub(super) fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

fn transpose(rows: &[f32], k: usize, stride: usize, panel: &mut [f32]) {
    for lane in 0..16 {
        for (slot, &value) in panel[lane..].iter_mut().step_by(16).zip(&rows[lane * stride..][..k]) {
            *slot = value;
        }
    }
}
