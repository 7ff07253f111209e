//! Feed-forward networks: gated ones, split in whole units of columns, and mixtures of them.

use std::ops::Range;

use super::rank::{Rank, row_of};
use crate::{
    EngineError,
    checkpoint::MoeConfig,
    math::{Partial, Routing, scale, silu_mul},
    ranks::RankError,
    weights::{FFN_UNIT, FfnWeights, GatedWeights, MoeWeights},
};

impl Rank<'_> {
    /// This rank's part of the network's result.
    pub(super) fn ffn(&self, weights: &FfnWeights, x: &[f32]) -> Result<Partial, RankError> {
        let rows = self.batch.rows();
        let mut partial = Partial::new(self.model.arith(), rows, self.model.config().hidden);
        match weights {
            FfnWeights::Dense(weights) => gated(weights, x, rows, self.share.units.clone(), &mut partial),
            FfnWeights::Moe(weights) => self.moe(weights, x, &mut partial)?,
        }
        Ok(partial)
    }

    /// Every rank routes every token, in the same bits; each adds the units of the experts that are its own.
    fn moe(&self, weights: &MoeWeights, x: &[f32], partial: &mut Partial) -> Result<(), RankError> {
        let config = self.model.config();
        let moe =
            config.moe.as_ref().ok_or_else(|| EngineError::Config("the model has no experts".into()))?;
        let rows = self.batch.rows();
        if let Some(shared) = &weights.shared {
            gated(shared, x, rows, self.share.shared_units.clone(), partial);
        }
        let mine = self.share.experts.clone();
        let units = self.share.expert_units.clone();
        if mine.is_empty() || units.is_empty() {
            return Ok(());
        }
        let mut logits = vec![0.0; rows * moe.experts];
        weights.router.apply(x, rows, 0..moe.experts, &mut logits);
        let rule = routing(moe);
        // Per own expert its rows and their weights.
        let mut tokens: Vec<(Vec<usize>, Vec<f32>)> = vec![Default::default(); mine.len()];
        for (row, logits) in logits.chunks_exact(moe.experts.max(1)).enumerate() {
            for (expert, weight) in rule.choose(logits, &weights.bias) {
                if let Some((rows, weights)) =
                    expert.checked_sub(mine.start).and_then(|at| tokens.get_mut(at))
                {
                    rows.push(row);
                    weights.push(weight);
                }
            }
        }
        for (expert, (rows, factors)) in weights.experts.iter().skip(mine.start).zip(&tokens) {
            let mut own = Vec::with_capacity(rows.len() * config.hidden);
            for row in rows {
                own.extend_from_slice(row_of(x, config.hidden, *row)?);
            }
            let mut inner = inner(expert, &own, rows.len(), units.clone());
            for (inner, factor) in inner.chunks_exact_mut(units.len() * FFN_UNIT).zip(factors) {
                scale(inner, *factor);
            }
            expert.down.partial_of(&inner, rows, units.clone(), partial);
        }
        Ok(())
    }
}

fn routing(moe: &MoeConfig) -> Routing {
    Routing {
        groups: moe.groups,
        groups_per_token: moe.groups_per_token,
        per_token: moe.per_token,
        renormalise: moe.renormalise,
        scale: moe.scale,
    }
}

/// Adds the part of `down(silu(gate x) * up x)` that comes from `units`.
fn gated(weights: &GatedWeights, x: &[f32], rows: usize, units: Range<usize>, partial: &mut Partial) {
    weights.down.partial(&inner(weights, x, rows, units.clone()), rows, units, partial);
}

/// `silu(gate x) * up x` in the columns of `units`.
fn inner(weights: &GatedWeights, x: &[f32], rows: usize, units: Range<usize>) -> Vec<f32> {
    let columns = units.start * FFN_UNIT..units.end * FFN_UNIT;
    let mut gate = vec![0.0; rows * columns.len()];
    let mut up = vec![0.0; gate.len()];
    weights.gate.apply(x, rows, columns.clone(), &mut gate);
    weights.up.apply(x, rows, columns, &mut up);
    let mut inner = vec![0.0; gate.len()];
    silu_mul(&gate, &up, &mut inner);
    inner
}
