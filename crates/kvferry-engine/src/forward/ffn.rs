//! Feed-forward networks: gated ones, split in whole units of columns, and mixtures of them.

use std::ops::Range;

use super::{
    rank::{Rank, row_of},
    space::{Account, Space},
};
use crate::{
    EngineError,
    checkpoint::MoeConfig,
    math::{Partial, Routing, RoutingScratch, reserve_packing, scale, silu_mul},
    meeting::RankError,
    profile::Phase,
    weights::{FFN_UNIT, FfnWeights, GatedWeights, MoeWeights},
};

/// Memory of a layer.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    inner: Inner,
    logits: Vec<f32>,
    routing: RoutingScratch,
    chosen: Vec<Chosen>,
    /// Rows of `chosen`.
    rows: Vec<usize>,
    x: Vec<f32>,
}

/// Memory of a gated network.
#[derive(Debug, Default)]
struct Inner {
    gate: Vec<f32>,
    up: Vec<f32>,
    product: Vec<f32>,
}

/// A token that goes through one of this rank's experts.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    /// Counted from the rank's first.
    expert: usize,
    row: usize,
    weight: f32,
}

impl Rank<'_> {
    /// Adds this rank's part of the network's result.
    pub(super) fn ffn(&self, weights: &FfnWeights, space: &mut Space) -> Result<(), RankError> {
        let Space { account, normed: x, partial, ffn: b, .. } = space;
        match weights {
            FfnWeights::Dense(weights) => {
                let units = self.share.units.clone();
                gated(weights, x, self.batch.rows(), units, &mut b.inner, account, partial)?;
            }
            FfnWeights::Moe(weights) => self.moe(weights, x, b, account, partial)?,
        }
        account.clock.lap(Phase::FeedForward);
        Ok(())
    }

    /// Every rank routes every token, in the same bits; each adds the units of the experts that are its own.
    fn moe(
        &self,
        weights: &MoeWeights,
        x: &[f32],
        b: &mut Buffers,
        account: &Account,
        partial: &mut Partial,
    ) -> Result<(), EngineError> {
        let config = self.model.config();
        let moe =
            config.moe.as_ref().ok_or_else(|| EngineError::Config("the model has no experts".into()))?;
        let rows = self.batch.rows();
        if let Some(shared) = &weights.shared {
            gated(shared, x, rows, self.share.shared_units.clone(), &mut b.inner, account, partial)?;
        }
        let mine = self.share.experts.clone();
        let units = self.share.expert_units.clone();
        if mine.is_empty() || units.is_empty() {
            return Ok(());
        }
        let logits = account.zeroed(&mut b.logits, rows * moe.experts)?;
        weights.router.apply(x, rows, 0..moe.experts, logits);
        let rule = routing(moe);
        account.cleared(&mut b.chosen, rows * moe.per_token)?;
        for (row, logits) in logits.chunks_exact(moe.experts.max(1)).enumerate() {
            for (expert, weight) in rule.choose(logits, &weights.bias, &mut b.routing) {
                if mine.contains(expert) {
                    b.chosen.push(Chosen { expert: expert - mine.start, row, weight: *weight });
                }
            }
        }
        b.chosen.sort_unstable_by_key(|chosen| (chosen.expert, chosen.row));
        account.cleared(&mut b.rows, rows * moe.per_token)?.extend(b.chosen.iter().map(|chosen| chosen.row));
        // Any expert may be the one of all tokens.
        account.cleared(&mut b.x, rows * config.hidden)?;
        b.inner.reserve(rows, units.len(), account)?;
        let mut first = 0;
        for group in b.chosen.chunk_by(|a, b| a.expert == b.expert) {
            let rows = &b.rows[first..first + group.len()];
            first += group.len();
            let Some(expert) = group.first().and_then(|at| weights.experts.get(mine.start + at.expert))
            else {
                continue;
            };
            b.x.clear();
            for row in rows {
                b.x.extend_from_slice(row_of(x, config.hidden, *row)?);
            }
            let inner = b.inner.compute(expert, &b.x, rows.len(), units.clone(), account)?;
            for (inner, chosen) in inner.chunks_exact_mut(units.len() * FFN_UNIT).zip(group) {
                scale(inner, chosen.weight);
            }
            expert.down.partial_of(inner, rows, units.clone(), partial);
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
fn gated(
    weights: &GatedWeights,
    x: &[f32],
    rows: usize,
    units: Range<usize>,
    inner: &mut Inner,
    account: &Account,
    partial: &mut Partial,
) -> Result<(), EngineError> {
    weights.down.partial(inner.compute(weights, x, rows, units.clone(), account)?, rows, units, partial);
    Ok(())
}

impl Inner {
    /// Takes the memory for `rows` rows.
    fn reserve(&mut self, rows: usize, units: usize, account: &Account) -> Result<(), EngineError> {
        let len = rows * units * FFN_UNIT;
        for list in [&mut self.gate, &mut self.up, &mut self.product] {
            account.cleared(list, len)?;
        }
        reserve_packing(len);
        Ok(())
    }

    /// `silu(gate x) * up x` in the columns of `units`.
    fn compute(
        &mut self,
        weights: &GatedWeights,
        x: &[f32],
        rows: usize,
        units: Range<usize>,
        account: &Account,
    ) -> Result<&mut [f32], EngineError> {
        let columns = units.start * FFN_UNIT..units.end * FFN_UNIT;
        let len = rows * columns.len();
        let gate = account.zeroed(&mut self.gate, len)?;
        let up = account.zeroed(&mut self.up, len)?;
        weights.gate.apply(x, rows, columns.clone(), gate);
        weights.up.apply(x, rows, columns, up);
        let product = account.zeroed(&mut self.product, len)?;
        silu_mul(gate, up, product);
        Ok(product)
    }
}
