//! Attention of one group of query heads over the rows that one rank holds.
//!
//! A rank gathers its local rows into [`KeyPanels`] and [`ValueRows`], then takes queries block by block (see
//! [`query_block`]), each row being one token's query of one head:
//!
//! * canonical: [`Scores::compute`]; all-reduce [`Scores::max`] with [`merge_max`](super::merge_max);
//!   [`Scores::sums`]; [`AttentionSums::finish`] over the parts of all ranks.
//! * fast: [`Scores::attend`], which keeps the scores of one tile of tokens at a time; [`merge_lse`](super::merge_lse) over the
//!   parts of all ranks.
//!
//! Several blocks may be under way at once, so that the ranks meet once for all of them. A rank may hold no token, and
//! a row may see none. Everything here reuses its memory; what was reserved is enough for what it was reserved for.

use std::borrow::Borrow;
use std::mem::{size_of, take};
use std::ops::Range;

use super::Arith;
use super::grid::{self, MAGIC, Overflow};
use super::panels::{Panels, reserve_packing};
use super::simd::{Kernels, WEIGH_LANES, WEIGH_ROWS, Weigh};

/// Tokens whose probabilities are packed at a time.
const TOKEN_BLOCK: usize = 128;

/// Kernel E holds while every |v| stays below this (2^13) ...
const BINADE_VALUE: f32 = 8192.0;
/// ... and the sum of weights times the largest |v| below this (2^19, less a little for roundings).
const BINADE_SUM: f64 = 524_000.0;
/// Sums that could leave `i64` (2^31 in units, less a little) are flagged.
const GRID_SUM: f64 = 2_147_000_000.0;
/// A weight unit in grid steps.
const WEIGHT_ONE: f64 = (1u64 << grid::WEIGHT_BITS) as f64;

/// Tokens whose scores fast attention keeps at a time.
const TILE: usize = 512;

/// Query rows to take at a time over `tokens` local rows: canonical sums need the scores of all tokens, so that these stay
/// within about 2 MiB, at least 12 rows; fast ones need those of a tile of tokens.
pub fn query_block(tokens: usize, arith: Arith) -> usize {
    match arith {
        Arith::Canonical => ((512 << 10) / tokens.max(1)).clamp(12, 384),
        Arith::Fast => 96,
    }
}

/// Key rows `[tokens][d]`, transposed in panels of 16 tokens.
#[derive(Clone, Debug, Default)]
pub struct KeyPanels {
    panels: Panels,
}

impl KeyPanels {
    /// Packs `rows[tokens][d]`.
    pub fn from_rows(rows: &[f32], d: usize) -> Self {
        let mut keys = Self::default();
        keys.fill(rows, d, d);
        keys
    }

    /// Packs again, reusing the memory: the first `d` values of rows that lie `stride` apart (an MLA row is key
    /// and value in one). `rows.len()` is a multiple of `stride`.
    pub fn fill(&mut self, rows: &[f32], d: usize, stride: usize) {
        self.panels.fill(rows.len() / stride.max(1), d, rows, stride);
    }

    /// Takes the memory that `tokens` rows of `d` values need.
    pub fn reserve(&mut self, tokens: usize, d: usize) {
        self.panels.reserve(tokens, d);
    }

    /// Memory held, in bytes.
    pub fn bytes(&self) -> usize {
        self.panels.bytes()
    }

    /// Local tokens.
    pub fn tokens(&self) -> usize {
        self.panels.n()
    }
}

/// Value rows `[tokens][dv]`. In canonical mode the lowest mantissa bit of every value but zero is set on load,
/// whatever the cache's element type, so that sums round the same in any order.
#[derive(Clone, Debug)]
pub struct ValueRows {
    arith: Arith,
    tokens: usize,
    dv: usize,
    padded: usize,
    /// Largest magnitude.
    peak: u32,
    data: Vec<f32>,
}

impl ValueRows {
    /// No rows.
    pub fn new(arith: Arith) -> Self {
        Self { arith, tokens: 0, dv: 0, padded: 0, peak: 0, data: Vec::new() }
    }

    /// Copies `rows[tokens][dv]`.
    pub fn from_rows(rows: &[f32], dv: usize, arith: Arith) -> Self {
        let mut values = Self::new(arith);
        values.fill(rows, dv, dv);
        values
    }

    /// Loads again, reusing the memory: the first `dv` values of rows that lie `stride` apart.
    pub fn fill(&mut self, rows: &[f32], dv: usize, stride: usize) {
        assert!(dv <= stride && rows.len().is_multiple_of(stride.max(1)), "rows are [tokens][stride]");
        self.tokens = rows.len() / stride.max(1);
        self.dv = dv;
        self.padded = dv.next_multiple_of(WEIGH_LANES);
        self.data.clear();
        self.data.resize(self.tokens * self.padded, 0.0);
        for (to, from) in self.data.chunks_exact_mut(self.padded.max(1)).zip(rows.chunks_exact(stride.max(1)))
        {
            to[..dv].copy_from_slice(&from[..dv]);
        }
        self.peak = match self.arith {
            Arith::Canonical => (Kernels::best().stick)(&mut self.data),
            Arith::Fast => 0,
        };
    }

    /// Takes the memory that `tokens` rows of `dv` values need.
    pub fn reserve(&mut self, tokens: usize, dv: usize) {
        reserve(&mut self.data, tokens * dv.next_multiple_of(WEIGH_LANES));
    }

    /// Memory held, in bytes.
    pub fn bytes(&self) -> usize {
        self.data.capacity() * size_of::<f32>()
    }

    /// Local tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// Scores of blocks of query rows, then their weights; a scratch to reuse. Blocks are numbered from 0 in the order in
/// which they were computed, and so are their rows, block after block.
#[derive(Debug, Default)]
pub struct Scores {
    blocks: Vec<Block>,
    visible: Vec<usize>,
    max: Vec<f32>,
    /// Never shortened: what is not a score of a block is of an earlier one.
    data: Vec<f32>,
    acc: Vec<f32>,
}

/// Where the scores of a block lie.
#[derive(Clone, Debug)]
struct Block {
    /// Among all rows.
    rows: Range<usize>,
    /// First float.
    at: usize,
    /// Floats from one row to the next: the local tokens.
    stride: usize,
}

impl Block {
    fn row(&self, row: usize) -> Range<usize> {
        self.at + row * self.stride..self.at + (row + 1) * self.stride
    }

    fn end(&self) -> usize {
        self.at + self.rows.len() * self.stride
    }
}

impl Scores {
    /// An empty scratch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the memory that `blocks` with together `rows` rows of `d` values and `scores` scores need, for values of
    /// `dv`.
    pub fn reserve(&mut self, blocks: usize, rows: usize, scores: usize, (d, dv): (usize, usize)) {
        reserve(&mut self.blocks, blocks);
        reserve(&mut self.visible, rows);
        reserve(&mut self.max, rows);
        reserve(&mut self.data, scores);
        reserve(&mut self.acc, rows * dv.next_multiple_of(WEIGH_LANES));
        reserve_packing(Kernels::best().rows * d);
    }

    /// Memory held, in bytes.
    pub fn bytes(&self) -> usize {
        self.blocks.capacity() * size_of::<Block>()
            + self.visible.capacity() * size_of::<usize>()
            + (self.max.capacity() + self.data.capacity() + self.acc.capacity()) * size_of::<f32>()
    }

    /// No blocks.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.visible.clear();
        self.max.clear();
    }

    /// Scores of one more block, of the rows `q[m][d]`, already rotated and scaled; row i may see the first `visible[i]`
    /// local tokens, and `m = visible.len()`. Each score is one fused chain over `d`.
    pub fn compute(&mut self, q: &[f32], keys: &KeyPanels, visible: &[usize]) {
        let kernels = Kernels::best();
        let m = visible.len();
        let tokens = visible.iter().copied().max().unwrap_or(0);
        assert!(tokens <= keys.tokens(), "{tokens} tokens visible of {}", keys.tokens());
        let at = self.blocks.last().map_or(0, Block::end);
        let first = self.visible.len();
        let block = Block { rows: first..first + m, at, stride: tokens };
        self.visible.extend_from_slice(visible);
        if self.data.len() < block.end() {
            self.data.resize(block.end(), 0.0);
        }
        let data = &mut self.data[at..block.end()];
        let d = keys.panels.k();
        // Tiles of rows, so that a causal block skips the panels that none of the tile's rows sees.
        for first in (0..m).step_by(kernels.rows) {
            let rows = first..m.min(first + kernels.rows);
            let seen = visible[rows.clone()].iter().copied().max().unwrap_or(0);
            let q = &q[rows.start * d..rows.end * d];
            keys.panels.product(kernels, q, rows.len(), 0..seen, (d, 0..1), |row, col, values| {
                data[(first + row) * tokens + col..][..values.len()].copy_from_slice(values);
            });
        }
        for (row, &visible) in visible.iter().enumerate() {
            let (max, peak) = (kernels.peak)(&data[row * tokens..][..visible]);
            self.max.push(if peak < grid::INFINITE { max } else { f32::NAN });
        }
        self.blocks.push(block);
    }

    /// Per row of all blocks the largest visible local score; -∞ if the row sees no local token, NaN if any visible
    /// score is not finite.
    pub fn max(&self) -> &[f32] {
        &self.max
    }

    /// Canonical second pass over block `block`: with `max[m]` of its rows over all ranks, adds this rank's sums of the
    /// weights and of the weighted values (loaded as canonical) to `into`, as further rows. Uses the block's scores up.
    pub fn sums(&mut self, block: usize, max: &[f32], values: &ValueRows, into: &mut AttentionSums) {
        self.sums_with(Kernels::best(), block, max, values, into, true);
    }

    /// `quick` allows kernel E where its bounds hold.
    pub(super) fn sums_with(
        &mut self,
        kernels: &Kernels,
        block: usize,
        max: &[f32],
        values: &ValueRows,
        into: &mut AttentionSums,
        quick: bool,
    ) {
        let block = self.blocks[block].clone();
        let m = block.rows.len();
        assert_eq!(max.len(), m, "maxima are [m]");
        assert_eq!(values.arith, Arith::Canonical, "values are loaded for canonical sums");
        let first = into.extend(m, values.dv, values.padded);
        let value_peak = f32::from_bits(values.peak);
        for (row, &max) in max.iter().enumerate() {
            let visible = self.visible[block.rows.start + row];
            let (seen, hidden) = self.data[block.row(row)].split_at_mut(visible);
            hidden.fill(0.0);
            if !max.is_finite() {
                // -∞: nothing to see anywhere. Else a rank met a bad score: the row is lost.
                let lost = visible > 0 || max != f32::NEG_INFINITY;
                into.peaks[first + row] = if lost { f32::NAN.to_bits() } else { 0 };
                seen.fill(0.0);
                continue;
            }
            into.l[first + row] = (kernels.exp_grid)(seen, max);
            if visible > 0 {
                into.peaks[first + row] = values.peak;
            }
        }
        for rows in tiles(m) {
            let weight = |row: usize| into.l[first + row] as f64 / WEIGHT_ONE;
            let binade = quick
                && value_peak < BINADE_VALUE
                && rows.clone().all(|row| weight(row) * f64::from(value_peak) < BINADE_SUM);
            let range = (first + rows.start) * values.padded..(first + rows.end) * values.padded;
            if binade {
                into.binade.clear();
                into.binade.resize(range.len(), MAGIC);
                self.weigh(&block, 0, values, rows, &mut into.binade, kernels.weigh_binade);
                for (sum, acc) in into.o[range].iter_mut().zip(&into.binade) {
                    *sum = (acc.to_bits() as i64).wrapping_sub(MAGIC.to_bits() as i64);
                }
            } else {
                self.weigh(&block, 0, values, rows, &mut into.o[range], kernels.weigh_wide);
            }
        }
    }

    /// Fast attention of the rows `q[m][d]`, already rotated and scaled, of which row i may see the first `visible[i]` local
    /// tokens: this rank's `out[m][dv]` and natural log-sum-exp `lse[m]` over its own tokens; zeros and -∞ for a row that sees
    /// none. Goes through the tokens in tiles, whose sums are scaled down when a later tile has a larger score. Rows whose
    /// scores or results are not finite are flagged: the merge would not notice them. No block is left.
    pub fn attend(
        &mut self,
        q: &[f32],
        (keys, values): (&KeyPanels, &ValueRows),
        visible: &[usize],
        out: &mut [f32],
        lse: &mut [f32],
    ) -> Overflow {
        let kernels = Kernels::best();
        let (m, d, dv, padded) = (visible.len(), keys.panels.k(), values.dv, values.padded);
        assert!(out.len() == m * dv && lse.len() == m, "out is [m][dv], lse is [m]");
        let tokens = visible.iter().copied().max().unwrap_or(0);
        assert!(tokens <= keys.tokens(), "{tokens} tokens visible of {}", keys.tokens());
        let block = Block { rows: 0..m, at: 0, stride: TILE.min(tokens) };
        self.clear();
        self.visible.extend_from_slice(visible);
        self.max.resize(m, f32::NEG_INFINITY);
        if self.data.len() < block.end() {
            self.data.resize(block.end(), 0.0);
        }
        let mut acc = take(&mut self.acc);
        acc.clear();
        acc.resize(m * padded, 0.0);
        // The sums of weights, for now.
        lse.fill(0.0);
        for from in (0..tokens).step_by(TILE) {
            for first in (0..m).step_by(kernels.rows) {
                let rows = first..m.min(first + kernels.rows);
                let seen = visible[rows.clone()].iter().copied().max().unwrap_or(0).min(from + TILE);
                if seen <= from {
                    continue;
                }
                let (q, data) = (&q[rows.start * d..rows.end * d], &mut self.data);
                keys.panels.product(kernels, q, rows.len(), from..seen, (d, 0..1), |row, col, values| {
                    data[block.row(first + row)][col - from..][..values.len()].copy_from_slice(values);
                });
            }
            for row in 0..m {
                let seen = visible[row].saturating_sub(from).min(block.stride);
                let (seen, hidden) = self.data[block.row(row)].split_at_mut(seen);
                hidden.fill(0.0);
                if seen.is_empty() {
                    continue;
                }
                let (max, peak) = (kernels.peak)(seen);
                let before = self.max[row];
                if peak >= grid::INFINITE {
                    self.max[row] = f32::NAN;
                } else if max > before {
                    let left = super::elementwise::exp(before - max);
                    acc[row * padded..][..padded].iter_mut().for_each(|x| *x *= left);
                    lse[row] *= left;
                    self.max[row] = max;
                }
                lse[row] += (kernels.exp_sum)(seen, self.max[row]);
            }
            for rows in tiles(m) {
                let acc = &mut acc[rows.start * padded..rows.end * padded];
                self.weigh(&block, from, values, rows, acc, kernels.weigh);
            }
        }
        let mut bad = Vec::new();
        for (row, acc) in acc.chunks_exact(padded.max(1)).enumerate() {
            let (out, lse) = (&mut out[row * dv..][..dv], &mut lse[row]);
            if visible[row] == 0 {
                *lse = f32::NEG_INFINITY;
                out.fill(0.0);
                continue;
            }
            for (out, acc) in out.iter_mut().zip(acc) {
                *out = acc / *lse;
            }
            *lse = self.max[row] + super::elementary::ln(f64::from(*lse)) as f32;
            if !lse.is_finite() || out.iter().any(|x| !x.is_finite()) {
                bad.push(row);
            }
        }
        self.acc = acc;
        self.clear();
        Overflow::of(bad)
    }

    /// Feeds the weights of a block's `rows`, which are those of the tokens from `from` on, to a weighing kernel, packed
    /// `[tokens][rows]`, some tokens at a time.
    fn weigh<P: Copy + From<f32>, A>(
        &self,
        block: &Block,
        from: usize,
        values: &ValueRows,
        rows: Range<usize>,
        acc: &mut [A],
        kernel: Weigh<P, A>,
    ) {
        let r = rows.len();
        let visible = &self.visible[block.rows.clone()][rows.clone()];
        let seen = visible.iter().copied().max().unwrap_or(0);
        assert!(seen <= values.tokens, "{seen} tokens visible of {}", values.tokens);
        let seen = seen.saturating_sub(from).min(block.stride);
        let mut packed = [P::from(0.0); TOKEN_BLOCK * WEIGH_ROWS];
        for first in (0..seen).step_by(TOKEN_BLOCK) {
            let count = TOKEN_BLOCK.min(seen - first);
            let packed = &mut packed[..count * r];
            for (lane, row) in rows.clone().enumerate() {
                let weights = &self.data[block.row(row)][first..][..count];
                for (slot, &weight) in packed[lane..].iter_mut().step_by(r).zip(weights) {
                    *slot = weight.into();
                }
            }
            let first = from + first;
            let values = &values.data[first * values.padded..(first + count) * values.padded];
            kernel(r, packed, values, values.len() / count, acc);
        }
    }
}

/// Rows in tiles for the weighing kernels.
fn tiles(m: usize) -> impl Iterator<Item = Range<usize>> {
    let count = m.div_ceil(WEIGH_ROWS);
    (0..count).map(move |t| t * m / count..(t + 1) * m / count)
}

fn reserve<T>(vec: &mut Vec<T>, len: usize) {
    vec.reserve(len.saturating_sub(vec.len()));
}

/// One rank's part of the canonical attention of the rows of some blocks; ranks' parts are added as integers.
#[derive(Clone, Debug, Default)]
pub struct AttentionSums {
    dv: usize,
    padded: usize,
    /// Weights `[m]`, in steps of 2^-40.
    l: Vec<i64>,
    /// Weighted values `[m][padded]`, in steps of 2^-32.
    o: Vec<i64>,
    /// Largest magnitude of a value per row; NaN's bits for a row with a bad score.
    peaks: Vec<u32>,
    binade: Vec<f64>,
}

impl AttentionSums {
    /// No rows: [`Scores::sums`] adds them.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the memory that `m` rows of `dv` values need.
    pub fn reserve(&mut self, m: usize, dv: usize) {
        let padded = dv.next_multiple_of(WEIGH_LANES);
        reserve(&mut self.l, m);
        reserve(&mut self.o, m * padded);
        reserve(&mut self.peaks, m);
        reserve(&mut self.binade, WEIGH_ROWS * padded);
    }

    /// Memory held, in bytes.
    pub fn bytes(&self) -> usize {
        (self.l.capacity() + self.o.capacity()) * size_of::<i64>()
            + self.peaks.capacity() * size_of::<u32>()
            + self.binade.capacity() * size_of::<f64>()
    }

    /// No rows again.
    pub fn clear(&mut self) {
        self.l.clear();
        self.o.clear();
        self.peaks.clear();
    }

    /// Adds `m` rows of zeros; returns the number of the first.
    fn extend(&mut self, m: usize, dv: usize, padded: usize) -> usize {
        let first = self.l.len();
        assert!(first == 0 || (self.dv, self.padded) == (dv, padded), "all blocks have values of one length");
        (self.dv, self.padded) = (dv, padded);
        self.l.resize(first + m, 0);
        self.o.resize((first + m) * padded, 0);
        self.peaks.resize(first + m, 0);
        first
    }

    /// The attention `out[rows.len()][dv]` of `rows`, from the parts of all ranks, which are only read. A row
    /// that sees no token on any rank is zeros; rows that left the grid or met a NaN are flagged.
    pub fn finish<P: Borrow<Self>>(parts: &[P], rows: Range<usize>, out: &mut [f32]) -> Overflow {
        let Some(first) = parts.first().map(Borrow::borrow) else {
            out.fill(0.0);
            return Overflow::default();
        };
        let each = || parts.iter().map(Borrow::borrow);
        let (dv, padded) = (first.dv, first.padded);
        assert!(each().all(|p| p.dv == dv && p.l.len() >= rows.end), "parts are [m][dv]");
        assert_eq!(out.len(), rows.len() * dv, "out is [rows][dv]");
        let mut bad = Vec::new();
        for (at, row) in rows.enumerate() {
            let l = each().fold(0i64, |sum, part| sum.wrapping_add(part.l[row]));
            let peak = each().map(|part| part.peaks[row]).max().unwrap_or(0);
            let sum = l as f64 / WEIGHT_ONE * f64::from(f32::from_bits(peak));
            if peak > grid::LIMIT.to_bits() || sum >= GRID_SUM {
                bad.push(at);
            }
            // Steps of 2^-32 over steps of 2^-40.
            let factor = if l == 0 { 0.0 } else { 256.0 / l as f64 };
            for (col, out) in out[at * dv..][..dv].iter_mut().enumerate() {
                let at = row * padded + col;
                let o = each().fold(0i64, |sum, part| sum.wrapping_add(part.o[at]));
                *out = (o as f64 * factor) as f32;
            }
        }
        Overflow::of(bad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernel E against kernel A on 1.1 million sums of 2,304 terms, with values of few mantissa bits: without
    /// sticky bits nearly every product would be a tie.
    #[test]
    fn kernel_e_has_the_bits_of_kernel_a() {
        let (m, tokens, d) = (48, 2304, 64);
        let value = |i: usize, step: f32| ((i * 7919) % 2003) as f32 * step - 1001.0 * step;
        let q: Vec<f32> = (0..m * d).map(|i| value(i, 1.0 / 4096.0)).collect();
        let k: Vec<f32> = (0..tokens * d).map(|i| value(i + i / 64, 1.0 / 1024.0)).collect();
        let keys = KeyPanels::from_rows(&k, d);
        for kernels in Kernels::available() {
            for exponent in [-34, -33, -30, -20, -12, -3] {
                let v: Vec<f32> = (0..tokens * d).map(|i| value(i + i / 67, 2f32.powi(exponent))).collect();
                let values = ValueRows::from_rows(&v, d, Arith::Canonical);
                let sums = |quick| {
                    let (mut scores, mut sums) = (Scores::new(), AttentionSums::new());
                    scores.compute(&q, &keys, &vec![tokens; m]);
                    let max = scores.max().to_vec();
                    scores.sums_with(kernels, 0, &max, &values, &mut sums, quick);
                    assert_eq!(sums.binade.is_empty(), !quick, "the kernel meant is the one that ran");
                    sums
                };
                let (a, e) = (sums(false), sums(true));
                assert!(a.l == e.l && a.o == e.o, "{} 2^{exponent}", kernels.name);
            }
        }
    }
}
