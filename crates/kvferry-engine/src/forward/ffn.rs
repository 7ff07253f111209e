//! The gated feed-forward network, split in whole units of columns.

use super::rank::Rank;
use crate::{
    math::{Partial, silu_mul},
    model::{FFN_UNIT, Layer},
};

impl Rank<'_> {
    /// This rank's part of `down(silu(gate x) * up x)`.
    pub(super) fn ffn(&self, weights: &Layer, x: &[f32]) -> Partial {
        let rows = self.batch.rows();
        let units = self.share.units.clone();
        let columns = units.start * FFN_UNIT..units.end * FFN_UNIT;
        let mut gate = vec![0.0; rows * columns.len()];
        let mut up = vec![0.0; gate.len()];
        weights.gate.apply(x, rows, columns.clone(), &mut gate);
        weights.up.apply(x, rows, columns, &mut up);
        let mut inner = vec![0.0; gate.len()];
        silu_mul(&gate, &up, &mut inner);
        let mut partial = Partial::new(self.model.arith(), rows, weights.down.n());
        weights.down.partial(&inner, rows, units, &mut partial);
        partial
    }
}
