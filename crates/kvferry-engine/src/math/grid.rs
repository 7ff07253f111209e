//! The integer grids on which canonical sums are taken, and the flag for values that do not fit on them.

/// Units (heads, FFN blocks) and `p * v` are summed in steps of 2^-32.
pub(super) const STEP_BITS: i32 = 32;

/// Softmax weights are summed in steps of 2^-40.
pub(super) const WEIGHT_BITS: i32 = 40;

/// Largest magnitude of a single term on the 2^-32 grid; a larger one is clamped and flagged.
pub(super) const LIMIT: f32 = 524_287.0;

/// [`magnitude`] of an infinity; NaN lies above it.
pub(super) const INFINITE: u32 = 0x7f80_0000;

/// 1.5 * 2^20: an `f64` near it has steps of 2^-32, so adding it rounds to the grid (ties to even) and leaves the
/// rounded number in the low bits.
pub(super) const MAGIC: f64 = 1_572_864.0;

/// 1.5 * 2^12: the same for steps of 2^-40.
pub(super) const WEIGHT_MAGIC: f64 = 6144.0;

/// `x` with |x| <= [`LIMIT`] as a number of 2^-32 steps, ties to even.
#[inline(always)]
pub(super) fn to_grid(x: f32) -> i64 {
    ((f64::from(x) + MAGIC).to_bits() as i64).wrapping_sub(MAGIC.to_bits() as i64)
}

/// `p` in [0, 2) as a number of 2^-40 steps, ties to even.
#[inline(always)]
pub(super) fn weight_to_grid(p: f32) -> i64 {
    ((f64::from(p) + WEIGHT_MAGIC).to_bits() as i64).wrapping_sub(WEIGHT_MAGIC.to_bits() as i64)
}

/// Clamp to ±[`LIMIT`]; NaN becomes the upper limit (the flag, not the value, reports it).
#[inline(always)]
pub(super) fn clamp(x: f32) -> f32 {
    let x = if x < LIMIT { x } else { LIMIT };
    if x > -LIMIT { x } else { -LIMIT }
}

/// Magnitude as an ordered integer: larger for larger |x|, largest for infinities and NaN.
#[inline(always)]
pub(super) fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

/// A sum on the 2^-32 grid back to `f32`.
#[inline(always)]
pub(super) fn from_grid(sum: i64) -> f32 {
    (sum as f64 * STEP) as f32
}

const STEP: f64 = 1.0 / (1u64 << STEP_BITS) as f64;

/// Rows of a result that hold a NaN, an infinity or a value outside the grid. Whoever owns such a row must fail:
/// its numbers are not to be used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "a flagged row holds garbage: its request must fail"]
pub struct Overflow {
    rows: Vec<usize>,
}

impl Overflow {
    /// True if every row is good.
    pub fn is_clear(&self) -> bool {
        self.rows.is_empty()
    }

    /// The bad rows, ascending, counted from the first row of the result's output.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    pub(super) fn of(rows: impl IntoIterator<Item = usize>) -> Self {
        Self { rows: rows.into_iter().collect() }
    }
}
