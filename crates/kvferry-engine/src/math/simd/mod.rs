//! The hot loops, once for every instruction set, behind one table of function pointers.
//!
//! `body` is the scalar twin and the definition; the others must give the same bits (tests compare them).

pub(super) mod body;
mod body_table;

pub(super) use body_table::SCALAR;

/// Values in the largest tile: 12 rows of 2 panels, or 4 rows of 4, or 1 of 8.
pub(super) const TILE: usize = 12 * 2 * 16;

/// Rows of probabilities that one call of a weighing kernel takes at most.
pub(super) const WEIGH_ROWS: usize = 6;

/// Value rows are padded to a multiple of this.
pub(super) const WEIGH_LANES: usize = 16;

/// The kernels of one instruction set. Lengths are the caller's promise and checked by each kernel.
#[derive(Debug)]
pub(super) struct Kernels {
    /// For test messages and the benchmark.
    #[cfg_attr(not(test), expect(dead_code))]
    pub(super) name: &'static str,
    /// Most rows of a product tile.
    pub(super) rows: usize,
    /// Panels of a product tile with that many rows.
    pub(super) panels: fn(rows: usize) -> usize,
    /// `tile[mr][np * 16]`: the fused chains of `x[k][mr]` with `np` panels `[k][16]` that lie `stride` apart.
    pub(super) chain: fn(mr: usize, np: usize, x: &[f32], w: &[f32], stride: usize, tile: &mut [f32]),
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
    /// Kernel A: `acc[r][dv] += round(p[t][r] * v[t][dv])` in grid steps; any |v| below the limit.
    pub(super) weigh_wide: fn(r: usize, p: &[f32], v: &[f32], dv: usize, acc: &mut [i64]),
    /// Kernel E: `acc` starts at the magic number and must stay in its binade.
    pub(super) weigh_binade: fn(r: usize, p: &[f32], v: &[f32], dv: usize, acc: &mut [f64]),
    /// Plain f32: `acc[r][dv] = fma(p, v, acc)`.
    pub(super) weigh: fn(r: usize, p: &[f32], v: &[f32], dv: usize, acc: &mut [f32]),
    /// One row of the norm.
    pub(super) rms_norm: fn(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]),
    /// Gated activation.
    pub(super) silu_mul: fn(gate: &[f32], up: &[f32], out: &mut [f32]),
}

impl Kernels {
    /// The best set this processor has.
    pub(super) fn best() -> &'static Self {
        &SCALAR
    }
}
