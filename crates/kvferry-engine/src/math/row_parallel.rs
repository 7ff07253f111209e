//! Row-parallel products: each rank holds some of the inputs, the ranks' partial results are added.

use std::borrow::Borrow;
use std::mem::size_of;
use std::ops::Range;

use super::Arith;
use super::elementwise::add_assign;
use super::grid::{self, Overflow};
use super::panels::Panels;
use super::simd::Kernels;

/// The weights `w[n][units * unit_k]` of a product whose inputs are split over ranks by whole units: a query head
/// for the output projection, a block of FFN columns for the down projection.
///
/// ```
/// use kvferry_engine::math::{Arith, Partial, RowParallel};
/// let w = RowParallel::new(1, 2, 3, &[1.0; 6]);
/// let (mut a, mut b) = (Partial::new(Arith::Canonical, 1, 1), Partial::new(Arith::Canonical, 1, 1));
/// w.partial(&[1.0, 2.0], 1, 0..1, &mut a);
/// w.partial(&[3.0, 4.0, 5.0, 6.0], 1, 1..3, &mut b);
/// let mut out = [0.0];
/// assert!(Partial::finish(&[&a, &b], 0..1, &mut out).is_clear());
/// assert_eq!(out, [21.0]);
/// ```
#[derive(Debug)]
pub struct RowParallel {
    panels: Panels,
    unit_k: usize,
    units: usize,
}

impl RowParallel {
    /// Packs `w[n][units * unit_k]`. Panics if the length differs.
    pub fn new(n: usize, unit_k: usize, units: usize, w: &[f32]) -> Self {
        Self { panels: Panels::new(n, units * unit_k, w), unit_k, units }
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.panels.n()
    }

    /// Inputs in a unit.
    pub fn unit_k(&self) -> usize {
        self.unit_k
    }

    /// Units of the whole product.
    pub fn units(&self) -> usize {
        self.units
    }

    /// Adds to `into[m][n]` the part of the product that comes from `units`; `x[m][units.len() * unit_k]` holds
    /// only their inputs. Canonical: each unit's fused chain, clamped and rounded to the 2^-32 grid, is added as
    /// an integer. Fast: the chains are added in `f32`.
    pub fn partial(&self, x: &[f32], m: usize, units: Range<usize>, into: &mut Partial) {
        assert_eq!(into.m, m, "partial result is [m][n]");
        self.add(x, m, units, |row| row, into);
    }

    /// As [`Self::partial`] for `x[rows.len()][..]`, of which row `i` counts towards row `rows[i]` of the result:
    /// tokens that went through an expert.
    pub fn partial_of(&self, x: &[f32], rows: &[usize], units: Range<usize>, into: &mut Partial) {
        assert!(rows.iter().all(|row| *row < into.m), "rows are of the partial result");
        self.add(x, rows.len(), units, |row| rows[row], into);
    }

    fn add(&self, x: &[f32], m: usize, units: Range<usize>, to: impl Fn(usize) -> usize, into: &mut Partial) {
        let n = self.n();
        assert_eq!(into.n, n, "partial result is [m][n]");
        let kernels = Kernels::best();
        let units = (self.unit_k, units);
        match &mut into.sums {
            Sums::Grid { sums, peaks } => {
                self.panels.product(kernels, x, m, 0..n, units, |row, col, values| {
                    let row = to(row);
                    let sums = &mut sums[row * n + col..][..values.len()];
                    peaks[row] = peaks[row].max((kernels.fold)(values, sums));
                });
            }
            Sums::Float(sums) => {
                self.panels.product(kernels, x, m, 0..n, units, |row, col, values| {
                    add_assign(&mut sums[to(row) * n + col..][..values.len()], values);
                });
            }
        }
    }
}

/// One rank's part `[m][n]` of a row-parallel product.
#[derive(Clone, Debug)]
pub struct Partial {
    m: usize,
    n: usize,
    sums: Sums,
}

#[derive(Clone, Debug)]
enum Sums {
    /// Steps of 2^-32, and per row the largest magnitude that any unit's result had before clamping.
    Grid {
        sums: Vec<i64>,
        peaks: Vec<u32>,
    },
    Float(Vec<f32>),
}

impl Default for Partial {
    /// Nothing, of no shape.
    fn default() -> Self {
        Self::new(Arith::Canonical, 0, 0)
    }
}

impl Partial {
    /// Zeros.
    pub fn new(arith: Arith, m: usize, n: usize) -> Self {
        let sums = match arith {
            Arith::Canonical => Sums::Grid { sums: vec![0; m * n], peaks: vec![0; m] },
            Arith::Fast => Sums::Float(vec![0.0; m * n]),
        };
        Self { m, n, sums }
    }

    /// Zeros for `m` rows again, reusing the memory.
    pub fn reset(&mut self, m: usize) {
        self.m = m;
        match &mut self.sums {
            Sums::Grid { sums, peaks } => {
                sums.clear();
                sums.resize(m * self.n, 0);
                peaks.clear();
                peaks.resize(m, 0);
            }
            Sums::Float(sums) => {
                sums.clear();
                sums.resize(m * self.n, 0.0);
            }
        }
    }

    /// Memory held, in bytes.
    pub fn bytes(&self) -> usize {
        match &self.sums {
            Sums::Grid { sums, peaks } => {
                sums.capacity() * size_of::<i64>() + peaks.capacity() * size_of::<u32>()
            }
            Sums::Float(sums) => sums.capacity() * size_of::<f32>(),
        }
    }

    /// The whole result `out[rows.len()][n]` for `rows`, from the parts of all ranks, which are only read: ranks
    /// may share them. Canonical results do not depend on the order of `parts`, fast ones do in the last bits.
    /// Rows where a unit left the grid, or (fast) with a value that is not finite, are flagged.
    pub fn finish<P: Borrow<Self>>(parts: &[P], rows: Range<usize>, out: &mut [f32]) -> Overflow {
        /// Sums that are taken together, where they need no memory of their own.
        const TOGETHER: usize = 256;
        let Some(first) = parts.first().map(Borrow::borrow) else {
            out.fill(0.0);
            return Overflow::default();
        };
        let each = || parts.iter().map(Borrow::borrow);
        let n = first.n;
        assert!(each().all(|p| p.n == n && p.m >= rows.end), "parts are [m][n]");
        assert_eq!(out.len(), rows.len() * n, "out is [rows][n]");
        let mut bad = Vec::new();
        for (at, (row, out)) in rows.zip(out.chunks_exact_mut(n.max(1))).enumerate() {
            let lost = match first.sums {
                Sums::Grid { .. } => {
                    for (chunk, out) in out.chunks_mut(TOGETHER).enumerate() {
                        let mut sums = [0_i64; TOGETHER];
                        let sums = &mut sums[..out.len()];
                        for part in each() {
                            if let Sums::Grid { sums: terms, .. } = &part.sums {
                                let terms = &terms[row * n + chunk * TOGETHER..][..sums.len()];
                                for (sum, &term) in sums.iter_mut().zip(terms) {
                                    *sum = sum.wrapping_add(term);
                                }
                            }
                        }
                        for (out, &sum) in out.iter_mut().zip(&*sums) {
                            *out = grid::from_grid(sum);
                        }
                    }
                    each().any(|part| match &part.sums {
                        Sums::Grid { peaks, .. } => peaks[row] > grid::LIMIT.to_bits(),
                        Sums::Float(_) => false,
                    })
                }
                Sums::Float(_) => {
                    out.fill(0.0);
                    for part in each() {
                        if let Sums::Float(terms) = &part.sums {
                            add_assign(out, &terms[row * n..(row + 1) * n]);
                        }
                    }
                    out.iter().any(|x| !x.is_finite())
                }
            };
            if lost {
                bad.push(at);
            }
        }
        Overflow::of(bad)
    }
}
