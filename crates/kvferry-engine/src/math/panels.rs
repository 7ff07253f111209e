//! The packed right-hand side of every product, and the loop over tiles.

use std::cell::RefCell;
use std::mem::size_of;
use std::ops::Range;

use super::simd::{Kernels, TILE};

/// Outputs per panel.
pub(super) const LANES: usize = 16;

/// `n` vectors of length `k`, packed as `[ceil(n / 16)][k][16]`, padded with zeros.
#[derive(Clone, Debug, Default)]
pub(super) struct Panels {
    n: usize,
    k: usize,
    data: Vec<f32>,
}

impl Panels {
    /// Packs `rows[n][k]`.
    pub(super) fn new(n: usize, k: usize, rows: &[f32]) -> Self {
        assert_eq!(rows.len(), n * k, "rows are [n][k]");
        let mut panels = Self::default();
        panels.fill(n, k, rows, k);
        panels
    }

    /// Packs the first `k` values of each of `n` rows that lie `stride` apart, reusing the memory.
    pub(super) fn fill(&mut self, n: usize, k: usize, rows: &[f32], stride: usize) {
        assert!(n == 0 || (k <= stride && rows.len() >= (n - 1) * stride + k), "rows are [n][stride]");
        (self.n, self.k) = (n, k);
        self.data.resize(n.div_ceil(LANES) * k * LANES, 0.0);
        let transpose = Kernels::best().transpose;
        for (panel, first) in self.data.chunks_exact_mut((k * LANES).max(1)).zip((0..n).step_by(LANES)) {
            let count = LANES.min(n - first);
            if count == LANES {
                transpose(&rows[first * stride..], k, stride, panel);
                continue;
            }
            panel.fill(0.0);
            for lane in 0..count {
                let row = &rows[(first + lane) * stride..][..k];
                for (slot, &value) in panel[lane..].iter_mut().step_by(LANES).zip(row) {
                    *slot = value;
                }
            }
        }
    }

    /// Takes the memory that `n` vectors of length `k` need.
    pub(super) fn reserve(&mut self, n: usize, k: usize) {
        self.data.reserve((n.div_ceil(LANES) * k * LANES).saturating_sub(self.data.len()));
    }

    /// Memory held, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.data.capacity() * size_of::<f32>()
    }

    pub(super) fn n(&self) -> usize {
        self.n
    }

    pub(super) fn k(&self) -> usize {
        self.k
    }

    /// Writes vector `row` to `out[k]`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n && out.len() == self.k, "row {row} of {}", self.n);
        let panel = &self.data[row / LANES * self.k * LANES..];
        for (slot, &value) in out.iter_mut().zip(panel[row % LANES..].iter().step_by(LANES)) {
            *slot = value;
        }
    }

    /// For every unit of `unit_k` values in `units`, the products of `x[m][units * unit_k]` with the vectors
    /// `cols`, restricted to that unit's values. `emit(row, col, values)` gets them in runs of columns;
    /// each value is one fused chain over the unit, whatever the tiles.
    pub(super) fn product(
        &self,
        kernels: &Kernels,
        x: &[f32],
        m: usize,
        cols: Range<usize>,
        (unit_k, units): (usize, Range<usize>),
        mut emit: impl FnMut(usize, usize, &[f32]),
    ) {
        let width = units.len() * unit_k;
        assert_eq!(x.len(), m * width, "x is [m][owned units * unit_k]");
        assert!(cols.end <= self.n && units.end * unit_k <= self.k, "columns or units out of range");
        if width == 0 || m == 0 || cols.is_empty() {
            return;
        }
        let tiles = m.div_ceil(kernels.rows);
        PACKED.with_borrow_mut(|packed| {
            let packed = pack(x, m, width, tiles, packed);
            let last = (cols.end - 1) / LANES + 1;
            let np_max = (kernels.panels)(m.div_ceil(tiles));
            let mut tile = [0.0; TILE];
            let mut panel = cols.start / LANES;
            while panel < last {
                let left = last - panel;
                let np = np_max.min(1 << left.ilog2());
                let from = (panel * LANES).max(cols.start);
                let to = ((panel + np) * LANES).min(cols.end);
                for t in 0..tiles {
                    let rows = tile_rows(m, tiles, t);
                    let mr = rows.len();
                    let x = &packed[rows.start * width..rows.end * width];
                    for (at, unit) in units.clone().enumerate() {
                        let x = &x[at * unit_k * mr..][..unit_k * mr];
                        let w = &self.data[(panel * self.k + unit * unit_k) * LANES..];
                        (kernels.chain)(mr, np, x, w, self.k * LANES, &mut tile);
                        for (row, values) in rows.clone().zip(tile.chunks_exact(np * LANES)) {
                            emit(row, from, &values[from - panel * LANES..to - panel * LANES]);
                        }
                    }
                }
                panel += np;
            }
        });
    }
}

thread_local! {
    static PACKED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Takes the memory that this thread needs for a product with `floats` inputs, over all its rows. Without that, the first
/// such product takes it.
pub fn reserve_packing(floats: usize) {
    PACKED.with_borrow_mut(|packed| {
        if packed.len() < floats {
            packed.resize(floats, 0.0);
        }
    });
}

/// Rows of tile `t` when `m` rows are shared out evenly over `tiles`.
fn tile_rows(m: usize, tiles: usize, t: usize) -> Range<usize> {
    t * m / tiles..(t + 1) * m / tiles
}

/// `x[m][width]` as one `[width][rows]` block per tile.
fn pack<'a>(x: &'a [f32], m: usize, width: usize, tiles: usize, packed: &'a mut Vec<f32>) -> &'a [f32] {
    if m == 1 {
        return x;
    }
    if packed.len() < x.len() {
        packed.resize(x.len(), 0.0);
    }
    for t in 0..tiles {
        let rows = tile_rows(m, tiles, t);
        let block = &mut packed[rows.start * width..rows.end * width];
        for (lane, row) in rows.clone().enumerate() {
            let row = &x[row * width..][..width];
            for (slot, &value) in block[lane..].iter_mut().step_by(rows.len()).zip(row) {
                *slot = value;
            }
        }
    }
    packed
}
