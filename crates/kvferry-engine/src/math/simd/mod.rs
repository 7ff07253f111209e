//! The hot loops, once for every instruction set, behind one table of function pointers.
//!
//! `scalar` is the definition; the others must give the same bits, and the tests here compare them. Elementwise
//! functions and reductions are the scalar body compiled again with more instructions allowed (the compiler may
//! vectorise, never reorder floating-point operations); the loops that dominate are written with intrinsics.

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector intrinsics")]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector intrinsics")]
mod avx512;
mod recurrent;
pub(super) mod scalar;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use super::delta::DeltaTokens;

/// Values in the largest tile: 12 rows of 2 panels, or 6 rows of 4.
pub(super) const TILE: usize = 12 * 2 * 16;

/// Rows of weights that one call of a weighing kernel takes at most.
pub(super) const WEIGH_ROWS: usize = 6;

/// Value rows are padded to a multiple of this.
pub(super) const WEIGH_LANES: usize = 16;

/// The kernels of one instruction set. Each checks the lengths it is given.
#[derive(Debug)]
pub(super) struct Kernels {
    /// For messages.
    pub(super) name: &'static str,
    /// Most rows of a product tile.
    pub(super) rows: usize,
    /// Most panels of a product tile with that many rows: a power of two.
    pub(super) panels: fn(rows: usize) -> usize,
    pub(super) chain: Chain,
    /// Clamps, rounds to the 2^-32 grid and adds; the result is the largest magnitude seen before.
    pub(super) fold: fn(values: &[f32], sums: &mut [i64]) -> u32,
    /// (largest value, largest magnitude).
    pub(super) peak: fn(values: &[f32]) -> (f32, u32),
    /// Sets the lowest mantissa bit of all that is not zero; the result is the largest magnitude.
    pub(super) stick: fn(values: &mut [f32]) -> u32,
    /// Scores to `exp(score - max)` with the sticky bit; the result is their sum on the 2^-40 grid.
    pub(super) exp_grid: fn(scores: &mut [f32], max: f32) -> i64,
    /// Scores to `exp(score - max)`; the result is their sum.
    pub(super) exp_sum: fn(scores: &mut [f32], max: f32) -> f32,
    /// Kernel A: adds `p · v` rounded to grid steps; right for any |v| below the limit.
    pub(super) weigh_wide: Weigh<f64, i64>,
    /// Kernel E: `acc` starts at the magic number and must stay in its binade.
    pub(super) weigh_binade: Weigh<f64, f64>,
    /// Plain f32.
    pub(super) weigh: Weigh<f32, f32>,
    /// One row of the norm.
    pub(super) rms_norm: fn(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]),
    /// Gated activation.
    pub(super) silu_mul: fn(gate: &[f32], up: &[f32], out: &mut [f32]),
    /// Convolution over a window of rows, then SiLU.
    pub(super) convolve: fn(window: &[f32], taps: &[f32], out: &mut [f32]),
    /// A vector of a given length.
    pub(super) set_length: fn(x: &mut [f32], eps: f32, length: f32),
    /// What is left of a state.
    pub(super) decay: fn(x: &[f32], bias: &[f32], rate: f32, out: &mut [f32]),
    /// A head's recurrence over consecutive tokens.
    pub(super) delta: for<'a> fn(state: &mut [f32], tokens: &DeltaTokens<'a>, out: &mut [f32]),
    /// Times the sigmoid of a gate.
    pub(super) gate: fn(x: &mut [f32], gate: &[f32]),
    /// 16 rows of `k` values, `stride` apart, to one panel `[k][16]`.
    pub(super) transpose: fn(rows: &[f32], k: usize, stride: usize, panel: &mut [f32]),
}

/// `tile[mr][np * 16]`: the fused chains of `x[k][mr]` with `np` panels `[k][16]` that lie `stride` apart.
pub(super) type Chain = fn(mr: usize, np: usize, x: &[f32], w: &[f32], stride: usize, tile: &mut [f32]);

/// `acc[r][dv] += p[t][r] · v[t][dv]` over all t, in order; `dv` is a multiple of [`WEIGH_LANES`].
pub(super) type Weigh<P, A> = fn(r: usize, p: &[P], v: &[f32], dv: usize, acc: &mut [A]);

impl Kernels {
    /// The best set this processor has.
    pub(super) fn best() -> &'static Self {
        static BEST: OnceLock<&'static Kernels> = OnceLock::new();
        BEST.get_or_init(|| Self::available()[0])
    }

    /// All sets this processor has, best first; the last is the scalar one.
    pub(super) fn available() -> Vec<&'static Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(avx512::detect());
            sets.extend(avx2::detect());
        }
        sets.push(&scalar::KERNELS);
        sets
    }
}
