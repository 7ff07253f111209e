//! One rank's way through the layers.

use std::sync::Arc;

use kvferry_plan::{LayerId, PageTable};

use super::{attend::Scratch, batch::Batch};
use crate::{
    EngineError, Fault, Model,
    math::{Overflow, Partial, RopeTable, add_assign, rms_norm},
    pool::Pool,
    ranks::{Member, RankError},
    shares::Share,
    weights::{AttentionWeights, Layer},
};

/// What a rank brings home.
#[derive(Debug)]
pub(super) struct RankOutcome {
    /// Logits `[wanted rows][vocabulary]`, on the first rank of the last stage.
    pub(super) logits: Vec<f32>,
    /// Batch rows with a value out of range.
    pub(super) bad: Vec<usize>,
}

/// A rank in a step.
pub(super) struct Rank<'a> {
    pub(super) model: &'a Model,
    pub(super) rope: &'a RopeTable,
    pub(super) pool: &'a Pool,
    pub(super) share: &'a Share,
    pub(super) batch: &'a Batch<'a>,
    pub(super) member: Member<'a>,
    pub(super) dcp: usize,
    pub(super) fault: Option<Fault>,
    /// Layers of the rank's stage, ascending.
    layers: &'a [LayerId],
    pub(super) scratch: Scratch,
    pub(super) bad: Vec<usize>,
}

impl<'a> Rank<'a> {
    pub(super) fn new(
        (model, rope): (&'a Model, &'a RopeTable),
        pool: &'a Pool,
        share: &'a Share,
        batch: &'a Batch<'a>,
        member: Member<'a>,
        (dcp, layers, fault): (usize, &'a [LayerId], Option<Fault>),
    ) -> Self {
        let scratch = Scratch::new(model.arith());
        Self { model, rope, pool, share, batch, member, dcp, fault, layers, scratch, bad: Vec::new() }
    }

    /// Runs the layers of this rank's stage. Every rank of a stage holds the whole residual stream `x[rows][hidden]`, in
    /// the same bits, and hands it on to one rank of the next.
    pub(super) fn run(mut self) -> Result<RankOutcome, RankError> {
        let mut x = match self.member.taken_over()? {
            Some(x) => x,
            None => self.embedded(),
        };
        let mut normed = vec![0.0; x.len()];
        for (layer, weights) in (0..).map(LayerId).zip(self.model.layers()) {
            if self.layers.binary_search(&layer).is_ok() {
                self.layer(layer, weights, &mut x, &mut normed)?;
            }
        }
        let logits = match self.member.hand_on(x)? {
            Some(x) => self.logits(&x)?,
            None => Vec::new(),
        };
        self.bad.sort_unstable();
        self.bad.dedup();
        Ok(RankOutcome { logits, bad: self.bad })
    }

    /// The residual stream as it enters the first layer.
    fn embedded(&self) -> Vec<f32> {
        let hidden = self.model.config().hidden;
        let mut x = vec![0.0; self.batch.rows() * hidden];
        let tokens = self.batch.pieces.iter().flat_map(|piece| piece.tokens);
        for (row, token) in x.chunks_exact_mut(hidden).zip(tokens) {
            self.model.embed(*token, row);
        }
        x
    }

    fn layer(
        &mut self,
        layer: LayerId,
        weights: &Layer,
        x: &mut [f32],
        normed: &mut [f32],
    ) -> Result<(), RankError> {
        let eps = self.model.config().rms_eps;
        rms_norm(x, &weights.attn_norm, eps, normed);
        let partial = match &weights.attention {
            AttentionWeights::Gqa(attention) => self.gqa(layer, attention, normed)?,
            AttentionWeights::Mla(attention) => self.mla(layer, attention, normed)?,
            AttentionWeights::Kda(attention) => self.kda(layer, attention, normed)?,
        };
        self.add_all(partial, x)?;
        rms_norm(x, &weights.ffn_norm, eps, normed);
        let partial = self.ffn(&weights.ffn, normed)?;
        self.add_all(partial, x)
    }

    /// Adds the sum of all ranks' partial results to the residual stream.
    fn add_all(&mut self, partial: Partial, x: &mut [f32]) -> Result<(), RankError> {
        let rows = self.batch.rows();
        let len = x.len();
        let sum = self.member.all(partial, |parts| {
            let mut sum = vec![0.0; len];
            let parts: Vec<&Partial> = parts.iter().collect();
            let overflow = Partial::finish(&parts, 0..rows, &mut sum);
            (sum, overflow)
        })?;
        add_assign(x, &sum.0);
        self.flag(&sum.1, |row| row);
        Ok(())
    }

    /// Notes bad rows; `to_batch` translates their numbers.
    pub(super) fn flag(&mut self, overflow: &Overflow, to_batch: impl Fn(usize) -> usize) {
        self.bad.extend(overflow.rows().iter().map(|row| to_batch(*row)));
    }

    /// Logits of the wanted rows over the whole vocabulary: each rank computes its part of the vocabulary.
    fn logits(&self, x: &[f32]) -> Result<Vec<f32>, RankError> {
        let config = self.model.config();
        let wanted = &self.batch.wanted;
        let mut last = Vec::with_capacity(wanted.len() * config.hidden);
        for row in wanted {
            last.extend_from_slice(row_of(x, config.hidden, *row)?);
        }
        let mut normed = vec![0.0; last.len()];
        rms_norm(&last, self.model.final_norm(), config.rms_eps, &mut normed);
        let mine = self.share.vocab.clone();
        let mut part = vec![0.0; wanted.len() * mine.len()];
        self.model.head().apply(&normed, wanted.len(), mine, &mut part);
        let (rows, vocab) = (wanted.len(), config.vocab);
        let logits = self.member.all(part, |parts| {
            let mut logits = Vec::with_capacity(rows * vocab);
            for row in 0..rows {
                for part in &parts {
                    let width = part.len() / rows;
                    logits.extend_from_slice(&part[row * width..(row + 1) * width]);
                }
            }
            logits
        })?;
        // Only one rank's answer is used; the others spare themselves the copy.
        Ok(if self.member.tp() == 0 { Arc::unwrap_or_clone(logits) } else { Vec::new() })
    }

    /// The rows whose tokens' cache this rank keeps, and their part of `x`.
    pub(super) fn own_rows(&self, x: &[f32]) -> Result<(Vec<OwnRow<'a>>, Vec<f32>), EngineError> {
        let part = self.model.first_part();
        let hidden = self.model.config().hidden;
        let (mut own, mut own_x) = (Vec::new(), Vec::new());
        for (piece, span) in self.batch.pieces.iter().zip(&self.batch.spans) {
            for (row, position) in span.clone().zip(piece.start..) {
                if self.pool.owns(part, position)? {
                    own.push(OwnRow { table: piece.table, position });
                    own_x.extend_from_slice(row_of(x, hidden, row)?);
                }
            }
        }
        Ok((own, own_x))
    }
}

/// A row whose cache this rank keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnRow<'a> {
    pub(super) table: &'a PageTable,
    pub(super) position: u64,
}

/// Row `row` of a matrix of `width` columns.
pub(super) fn row_of(x: &[f32], width: usize, row: usize) -> Result<&[f32], EngineError> {
    x.get(row * width..(row + 1) * width)
        .ok_or_else(|| EngineError::Pool(format!("row {row} of a batch of {}", x.len() / width.max(1))))
}

/// Adds a bias to every row.
pub(super) fn add_bias(x: &mut [f32], bias: Option<&[f32]>) {
    let Some(bias) = bias else { return };
    for row in x.chunks_exact_mut(bias.len().max(1)) {
        add_assign(row, bias);
    }
}

/// `[rows][heads * dim]` to `[heads][rows][dim]`, each head of each row changed by `each(row, head)`.
pub(super) fn by_head(
    x: &[f32],
    (rows, heads, dim): (usize, usize, usize),
    mut each: impl FnMut(usize, &mut [f32]),
) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for (head, out) in out.chunks_exact_mut((rows * dim).max(1)).enumerate() {
        for (row, out) in out.chunks_exact_mut(dim.max(1)).enumerate() {
            let at = (row * heads + head) * dim;
            out.copy_from_slice(&x[at..at + dim]);
            each(row, out);
        }
    }
    out
}
