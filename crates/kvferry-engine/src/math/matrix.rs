//! Column-parallel products: each rank computes some of the outputs.

use std::ops::Range;

use super::panels::Panels;
use super::simd::Kernels;

/// The weights `w[n][k]` of a column-parallel product `x[m][k] · wᵀ`.
///
/// Each output is one fused chain over `k`, so its bits depend neither on `m` nor on the range of outputs asked
/// for. That costs nothing (outputs side by side fill the vector registers), so both modes use it.
///
/// ```
/// use kvferry_engine::math::Matrix;
/// let w = Matrix::new(3, 2, &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
/// let mut out = [0.0; 2];
/// w.apply(&[2.0, 5.0], 1, 1..3, &mut out);
/// assert_eq!(out, [5.0, 7.0]);
/// ```
#[derive(Debug)]
pub struct Matrix {
    panels: Panels,
}

impl Matrix {
    /// Packs `w[n][k]`. Panics if the length is not `n * k`.
    pub fn new(n: usize, k: usize, w: &[f32]) -> Self {
        Self { panels: Panels::new(n, k, w) }
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.panels.n()
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.panels.k()
    }

    /// Writes weight row `row` to `out[k]`: an embedding whose table is tied to the output head.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        self.panels.row(row, out);
    }

    /// `out[m][rows.len()] = x[m][k] · w[rows]ᵀ`. The range need not be aligned to anything.
    pub fn apply(&self, x: &[f32], m: usize, rows: Range<usize>, out: &mut [f32]) {
        let width = rows.len();
        assert_eq!(out.len(), m * width, "out is [m][rows]");
        let start = rows.start;
        let whole = (self.k(), 0..1);
        self.panels.product(Kernels::best(), x, m, rows, whole, |row, col, values| {
            out[row * width + col - start..][..values.len()].copy_from_slice(values);
        });
    }
}
