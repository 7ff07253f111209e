//! One rank's way through the layers.

use std::sync::RwLock;

use kvferry_plan::LayerId;

use super::{
    attend::Kv,
    batch::{Batch, Form},
    meetings::Member,
    space::{Account, OwnRows, Space},
};
use crate::{
    EngineError, Fault, Model,
    math::{Partial, RopeTable, add_assign, rms_norm},
    meeting::RankError,
    pool::{Pool, Sharers},
    profile::Phase,
    shares::Share,
    weights::{AttentionWeights, Layer},
};

/// A rank in a step: everything that it only reads. What it writes to is its [`Space`].
#[derive(Clone, Copy)]
pub(super) struct Rank<'a> {
    pub(super) model: &'a Model,
    pub(super) rope: &'a RopeTable,
    pub(super) pool: &'a Pool,
    pub(super) sharers: Sharers<'a>,
    pub(super) share: &'a Share,
    /// What this rank computes of the step.
    pub(super) batch: &'a Batch,
    /// Where it is a part of the step.
    pub(super) dealt: Option<Dealt<'a>>,
    pub(super) member: Member<'a>,
    pub(super) dcp: usize,
    pub(super) fault: Option<Fault>,
    /// Layers of the rank's stage, ascending.
    pub(super) layers: &'a [LayerId],
    /// Tokens of the longest sequence.
    pub(super) longest: u64,
}

/// A step that is dealt to the ranks of context-parallel prefill.
#[derive(Clone, Copy)]
pub(super) struct Dealt<'a> {
    pub(super) whole: &'a Batch,
    /// By rank.
    pub(super) parts: &'a [RwLock<Batch>],
}

impl Rank<'_> {
    /// Runs the layers of this rank's stage. Every rank of a stage holds the whole residual stream `x[rows][hidden]`, in
    /// the same bits, and hands it on to one rank of the next. Logits and bad rows are in the space then.
    pub(super) fn run(&self, space: &mut Space) -> Result<(), RankError> {
        space.bad.clear();
        space.logits.clear();
        space.account.freeze(self.batch.form == Form::Fixed);
        let kv = Kv::of(self.model);
        if self.batch.form == Form::Capture {
            self.reserve(&kv, space)?;
        }
        self.plan(&kv, &mut space.attend, &space.account)?;
        if !self.member.take_over(&mut space.x)? {
            self.embed(space)?;
        }
        space.account.clock.lap(Phase::Other);
        space.account.zeroed(&mut space.normed, space.x.len())?;
        for (layer, weights) in (0..).map(LayerId).zip(self.model.layers()) {
            if self.layers.binary_search(&layer).is_ok() {
                self.layer(layer, weights, space)?;
            }
        }
        let last = !self.member.hand_on(&mut space.x)?;
        space.account.clock.lap(Phase::Meetings);
        if last {
            self.logits(space)?;
            space.account.clock.lap(Phase::Logits);
        }
        space.bad.sort_unstable();
        space.bad.dedup();
        Ok(())
    }

    /// Takes the memory of what a step that is all padding does not come to; all else it takes as it runs.
    fn reserve(&self, kv: &Kv, space: &mut Space) -> Result<(), EngineError> {
        let Space { account, x, narrow, attend, .. } = space;
        // Stages exchange the memory of their streams, so all must be as large.
        account.cleared(x, self.batch.rows() * self.model.config().hidden)?;
        account.note(narrow, |narrow| narrow.reserve(self.pool.largest()))?;
        self.reserve_attention(kv, attend, account)
    }

    /// The residual stream as it enters the first layer; zeros where there is only padding.
    fn embed(&self, space: &mut Space) -> Result<(), EngineError> {
        let hidden = self.model.config().hidden;
        let x = space.account.zeroed(&mut space.x, self.batch.rows() * hidden)?;
        for (row, token) in x.chunks_exact_mut(hidden).zip(&self.batch.tokens) {
            self.model.embed(*token, row);
        }
        Ok(())
    }

    fn layer(&self, layer: LayerId, weights: &Layer, space: &mut Space) -> Result<(), RankError> {
        self.begin(&weights.attn_norm, space)?;
        match &weights.attention {
            AttentionWeights::Gqa(attention) => self.gqa(layer, attention, space)?,
            AttentionWeights::Mla(attention) => self.mla(layer, attention, space)?,
            AttentionWeights::Kda(attention) => self.kda(layer, attention, space)?,
        }
        self.add_all(space)?;
        self.begin(&weights.ffn_norm, space)?;
        self.ffn(&weights.ffn, space)?;
        self.add_all(space)
    }

    /// The stream after a norm, and a partial result of nothing.
    fn begin(&self, norm: &[f32], space: &mut Space) -> Result<(), EngineError> {
        rms_norm(&space.x, norm, self.model.config().rms_eps, &mut space.normed);
        let rows = self.batch.rows();
        space.account.note(&mut space.partial, |partial| partial.reset(rows))?;
        space.account.clock.lap(Phase::Other);
        Ok(())
    }

    /// Adds the sum of all ranks' partial results to the residual stream.
    fn add_all(&self, space: &mut Space) -> Result<(), RankError> {
        let Space { account, partial, x, bad, .. } = space;
        let (rows, len) = (self.batch.rows(), x.len());
        self.member.sum().meet(
            self.member.tp(),
            partial,
            |parts, whole| {
                let sum = account.zeroed(&mut whole.x, len)?;
                let overflow = Partial::finish(parts, 0..rows, sum);
                whole.bad.clear();
                whole.bad.extend_from_slice(overflow.rows());
                Ok(())
            },
            |whole| {
                add_assign(x, &whole.x);
                bad.extend_from_slice(&whole.bad);
            },
        )?;
        account.clock.lap(Phase::Meetings);
        Ok(())
    }

    /// Logits of the wanted rows over the whole vocabulary: each rank computes its part of the vocabulary.
    fn logits(&self, space: &mut Space) -> Result<(), RankError> {
        let Space { account, x, normed, last, part, logits, .. } = space;
        let config = self.model.config();
        let (wanted, vocab) = (self.batch.wanted.len(), config.vocab);
        account.cleared(last, wanted * config.hidden)?;
        for row in &self.batch.wanted {
            last.extend_from_slice(row_of(x, config.hidden, *row)?);
        }
        let normed = &mut normed[..last.len()];
        rms_norm(last, self.model.final_norm(), config.rms_eps, normed);
        let mine = self.share.vocab.clone();
        if mine.len() == vocab {
            self.model.head().apply(normed, wanted, mine, account.zeroed(logits, wanted * vocab)?);
            return Ok(());
        }
        self.model.head().apply(normed, wanted, mine.clone(), account.zeroed(part, wanted * mine.len())?);
        self.member.logits().meet(
            self.member.tp(),
            part,
            |parts, whole| {
                let whole = account.cleared(whole, wanted * vocab)?;
                for row in 0..wanted {
                    for part in parts.iter() {
                        let width = part.len() / wanted;
                        whole.extend_from_slice(&part[row * width..(row + 1) * width]);
                    }
                }
                Ok(())
            },
            // Only one rank's answer is used; the others spare themselves the copy.
            |whole| match self.member.tp() {
                0 => account.cleared(logits, whole.len()).map(|logits| logits.extend_from_slice(whole)),
                _ => Ok(()),
            },
        )??;
        Ok(())
    }

    /// Waits until all have written their rows of a layer that this rank may read.
    pub(super) fn all_written(&self, account: &Account) -> Result<(), RankError> {
        if let Some((group, place)) = self.member.share() {
            group.written.meet(place, &mut (), |_, ()| Ok(()), |()| ())?;
            account.clock.lap(Phase::Meetings);
        }
        Ok(())
    }

    /// Finds the rows whose tokens' cache this rank computes, and their part of `x`.
    pub(super) fn own_rows(
        &self,
        x: &[f32],
        own: &mut OwnRows,
        account: &Account,
    ) -> Result<(), EngineError> {
        let part = self.model.first_part();
        let hidden = self.model.config().hidden;
        // As much as there ever is for so many rows: which of them are a rank's own differs from step to step.
        account.cleared(&mut own.rows, self.batch.rows())?;
        account.cleared(&mut own.x, self.batch.rows() * hidden)?;
        for (number, span) in self.batch.spans().iter().enumerate() {
            for (row, position) in span.rows.clone().zip(span.start..) {
                if self.pool.owns(part, &span.table, position)? {
                    own.rows.push(OwnRow { span: number, position });
                    own.x.extend_from_slice(row_of(x, hidden, row)?);
                }
            }
        }
        let last =
            self.batch.spans().len().checked_sub(1).filter(|_| self.fault == Some(Fault::PaddingWrites));
        if let Some(span) = last
            && self.pool.owns(part, &self.batch.spans()[span].table, 0)?
        {
            for row in self.batch.tokens.len()..self.batch.rows() {
                own.rows.push(OwnRow { span, position: 0 });
                own.x.extend_from_slice(row_of(x, hidden, row)?);
            }
        }
        Ok(())
    }
}

/// A row whose cache this rank computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnRow {
    /// Number of its span.
    pub(super) span: usize,
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

/// `x[rows][heads * dim]` to `out[heads][rows][dim]`, each head of each row changed by `each(row, head)`.
pub(super) fn by_head(
    x: &[f32],
    (rows, heads, dim): (usize, usize, usize),
    out: &mut [f32],
    mut each: impl FnMut(usize, &mut [f32]),
) {
    for (head, out) in out.chunks_exact_mut((rows * dim).max(1)).enumerate() {
        for (row, out) in out.chunks_exact_mut(dim.max(1)).enumerate() {
            let at = (row * heads + head) * dim;
            out.copy_from_slice(&x[at..at + dim]);
            each(row, out);
        }
    }
}
