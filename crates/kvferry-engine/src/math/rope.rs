//! Rotary position embedding from one table.

use super::elementary;

/// Cosines and sines `[positions][head_dim / 2]`, built once and shared by all ranks: a rank with its own table
/// could differ in the last bit.
///
/// ```
/// use kvferry_engine::math::RopeTable;
/// let table = RopeTable::new(4, 10_000.0, 8);
/// let mut head = [1.0, 2.0, 3.0, 4.0];
/// table.rotate(&mut head, 0);
/// assert_eq!(head, [1.0, 2.0, 3.0, 4.0], "position 0 turns nothing");
/// ```
#[derive(Debug)]
pub struct RopeTable {
    half: usize,
    /// Per position: `half` cosines, then `half` sines.
    table: Vec<f32>,
}

impl RopeTable {
    /// The usual ladder: frequency i is `theta^(-2i / head_dim)`, rounded to `f32`.
    pub fn new(head_dim: usize, theta: f64, positions: usize) -> Self {
        let log = elementary::ln(theta);
        let frequency = |i| elementary::exp(-log * (2 * i) as f64 / head_dim as f64) as f32;
        let frequencies: Vec<f32> = (0..head_dim / 2).map(frequency).collect();
        Self::with_frequencies(&frequencies, positions)
    }

    /// A ladder given by the checkpoint. Angles are `f32` products, as the models were trained.
    pub fn with_frequencies(frequencies: &[f32], positions: usize) -> Self {
        let half = frequencies.len();
        let mut table = Vec::with_capacity(positions * half * 2);
        for position in 0..positions {
            let turns = frequencies.iter().map(|f| elementary::sin_cos(f64::from(f * position as f32)));
            table.extend(turns.clone().map(|(_, cos)| cos as f32));
            table.extend(turns.map(|(sin, _)| sin as f32));
        }
        Self { half, table }
    }

    /// Values in a head.
    pub fn head_dim(&self) -> usize {
        2 * self.half
    }

    /// Positions in the table.
    pub fn positions(&self) -> usize {
        self.table.len() / (2 * self.half).max(1)
    }

    /// Turns every head in `heads[count][head_dim]` (in the split-halves convention: value i pairs with value
    /// i + head_dim / 2) to `position`. An MLA row whose rope part holds several heads is just several heads.
    /// Panics past the table's last position.
    pub fn rotate(&self, heads: &mut [f32], position: usize) {
        let dim = self.head_dim();
        if dim == 0 {
            return;
        }
        assert!(heads.len().is_multiple_of(dim), "heads are [count][head_dim]");
        assert!(position < self.positions(), "position {position} of {}", self.positions());
        let (cos, sin) = self.table[position * dim..][..dim].split_at(self.half);
        for head in heads.chunks_exact_mut(dim) {
            let (low, high) = head.split_at_mut(self.half);
            for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                let (a, b) = (*low, *high);
                *low = a * cos - b * sin;
                *high = b * cos + a * sin;
            }
        }
    }
}
