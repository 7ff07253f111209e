//! Kimi delta attention: a short convolution and a recurrence per head, over state that a request keeps from step to
//! step in a slot of every rank. What the tokens of a piece are taken into has the bits of one token after the other, so
//! nothing depends on where a prompt is cut.

use std::{ops::Range, sync::PoisonError};

use kvferry_plan::{LayerId, Part, SlotId};

use super::{
    rank::{Dealt, Rank, row_of},
    space::{Account, Space},
};
use crate::{
    EngineError,
    checkpoint::KdaConfig,
    math::{self, DeltaTokens, Matrix, rms_norm, sigmoid},
    meeting::RankError,
    pool::Narrow,
    profile::Phase,
    weights::KdaWeights,
};

/// Memory of a layer.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    inputs: Inputs,
    piece: Piece,
    /// `[kernel][own channels]`.
    taps: [Vec<f32>; 3],
    /// What queries read, the same after its norm, and its gate: `[rows][own channels]`.
    read: Vec<f32>,
    out: Vec<f32>,
    gate: Vec<f32>,
    /// Of a step that is dealt to ranks: the inputs of all of it, and what is read for this rank's rows.
    whole: Vec<f32>,
    mine: Vec<f32>,
}

/// What a rank computes of a step before it comes to the state, `[rows][own channels]` unless said.
#[derive(Debug, Default)]
struct Inputs {
    /// Queries, keys and values before their convolution, as the state keeps them.
    raw: [Vec<f32>; 3],
    /// What is left of the state after each token.
    decay: Vec<f32>,
    /// How much of each token is taken in, `[rows][own heads]`.
    beta: Vec<f32>,
    /// Between two matrices, and after them.
    middle: Vec<f32>,
    through: Vec<f32>,
}

/// What is needed for one request at a time.
#[derive(Debug, Default)]
struct Piece {
    /// Rows of the state, `[q | k | v]`.
    window: Vec<f32>,
    state: Vec<f32>,
    history: Vec<f32>,
    convolved: [Vec<f32>; 3],
}

impl Rank<'_> {
    /// Adds this rank's part of the attention's output projection; moves the state of its heads on.
    pub(super) fn kda(
        &self,
        layer: LayerId,
        weights: &KdaWeights,
        space: &mut Space,
    ) -> Result<(), RankError> {
        let Space { account, normed: x, partial, narrow, kda: b, .. } = space;
        let heads = self.share.linear_heads.clone();
        if heads.is_empty() {
            return Ok(());
        }
        let Some(dealt) = self.dealt else {
            self.kda_rows(layer, weights, x, (b, narrow), account)?;
            weights.o.partial(&b.out, self.batch.rows(), heads, partial);
            account.clock.lap(Phase::Projections);
            return Ok(());
        };
        // The state takes in one token after the other, whoever has them: every rank has all, and the same state.
        let mut whole = std::mem::take(&mut b.whole);
        self.whole_step(&dealt, x, &mut whole, account)?;
        let all = Rank { batch: dealt.whole, ..*self };
        let done = all.kda_rows(layer, weights, &whole, (b, narrow), account);
        b.whole = whole;
        done?;
        let width = b.out.len() / dealt.whole.rows().max(1);
        let mine = account.cleared(&mut b.mine, self.batch.rows() * width)?;
        for row in &self.batch.origin {
            mine.extend_from_slice(row_of(&b.out, width, *row)?);
        }
        weights.o.partial(mine, self.batch.rows(), heads, partial);
        account.clock.lap(Phase::Projections);
        Ok(())
    }

    /// Puts the rows of all ranks in the order of the whole step.
    fn whole_step(
        &self,
        dealt: &Dealt<'_>,
        x: &mut Vec<f32>,
        whole: &mut Vec<f32>,
        account: &Account,
    ) -> Result<(), RankError> {
        let hidden = self.model.config().hidden;
        let lost = || EngineError::Pool("a rank that has a part of a step shares with nobody".into());
        let (group, place) = self.member.share().ok_or_else(lost)?;
        let join = |parts: &mut [Vec<f32>], whole: &mut Vec<f32>| {
            let whole = account.zeroed(whole, dealt.whole.rows() * hidden)?;
            for (part, batch) in parts.iter().zip(dealt.parts) {
                let batch = batch.read().unwrap_or_else(PoisonError::into_inner);
                for (row, x) in batch.origin.iter().zip(part.chunks_exact(hidden)) {
                    if let Some(to) = whole.get_mut(row * hidden..(row + 1) * hidden) {
                        to.copy_from_slice(x);
                    }
                }
            }
            Ok(())
        };
        group.rows.meet(place, x, join, |all| {
            account.cleared(whole, all.len()).map(|whole| whole.extend_from_slice(all))
        })??;
        account.clock.lap(Phase::Meetings);
        Ok(())
    }

    /// What the queries of this rank's heads read, normed and gated: `[rows][own channels]` in the buffers' `out`.
    fn kda_rows(
        &self,
        layer: LayerId,
        weights: &KdaWeights,
        x: &[f32],
        (b, narrow): (&mut Buffers, &mut Narrow),
        account: &Account,
    ) -> Result<(), EngineError> {
        let config = self.model.config();
        let lost = || EngineError::Config("the model has no linear attention".into());
        let kda = config.kda.as_ref().ok_or_else(lost)?;
        let rows = self.batch.rows();
        let heads = self.share.linear_heads.clone();
        let columns = heads.start * kda.head_dim..heads.end * kda.head_dim;
        let width = columns.len();
        self.kda_inputs(kda, weights, x, (&mut b.inputs, narrow), account)?;
        for (taps, own) in weights.taps.iter().zip(&mut b.taps) {
            let own = account.cleared(own, kda.kernel * width)?;
            taps.chunks_exact(kda.channels()).for_each(|row| own.extend_from_slice(&row[columns.clone()]));
        }
        account.clock.lap(Phase::Projections);
        let spans = self.batch.spans();
        let longest = spans.iter().map(|span| span.rows.len()).max().unwrap_or(0).max(1);
        b.piece.reserve(kda, heads.len(), longest, account)?;
        let read = account.zeroed(&mut b.read, rows * width)?;
        for span in spans {
            let slot = span.slot.ok_or_else(|| EngineError::Pool("a request without a state slot".into()))?;
            let out = &mut read[span.rows.start * width..span.rows.end * width];
            let piece = (&mut b.piece, &mut *narrow);
            let (first, rows) = (span.start == 0, span.rows.clone());
            self.kda_piece(kda, (layer, slot), first, rows, (&b.inputs, &b.taps), piece, account, out)?;
        }
        account.clock.lap(Phase::LinearAttention);
        let out = account.zeroed(&mut b.out, read.len())?;
        rms_norm(read, &weights.norm, config.rms_eps, out);
        let gate = (&weights.gate_a, &weights.gate_b);
        through(gate, x, rows, columns, (&mut b.inputs.middle, &mut b.gate), account)?;
        math::gate(out, &b.gate);
        Ok(())
    }

    fn kda_inputs(
        &self,
        kda: &KdaConfig,
        weights: &KdaWeights,
        x: &[f32],
        (into, narrow): (&mut Inputs, &mut Narrow),
        account: &Account,
    ) -> Result<(), EngineError> {
        let rows = self.batch.rows();
        let heads = self.share.linear_heads.clone();
        let columns = heads.start * kda.head_dim..heads.end * kda.head_dim;
        for (matrix, raw) in weights.qkv.iter().zip(&mut into.raw) {
            project(matrix, x, rows, columns.clone(), raw, account)?;
            // What a later chunk reads from the slot and what this one has at hand must be the same number.
            account.note(narrow, |narrow| self.pool.round(Part::Conv, raw, narrow))??;
        }
        let decay = (&weights.decay_a, &weights.decay_b);
        let memory = (&mut into.middle, &mut into.through);
        through(decay, x, rows, columns.clone(), memory, account)?;
        let left = account.zeroed(&mut into.decay, into.through.len())?;
        let bias = &weights.decay_bias[columns];
        let rates = &weights.decay_rate[heads.clone()];
        for (x, left) in into.through.chunks_exact(bias.len()).zip(left.chunks_exact_mut(bias.len())) {
            let of_heads = x.chunks_exact(kda.head_dim).zip(bias.chunks_exact(kda.head_dim)).zip(rates);
            for (((x, bias), rate), left) in of_heads.zip(left.chunks_exact_mut(kda.head_dim)) {
                math::decay(x, bias, *rate, left);
            }
        }
        project(&weights.beta, x, rows, heads, &mut into.beta, account)?;
        into.beta.iter_mut().for_each(|beta| *beta = sigmoid(*beta));
        Ok(())
    }

    /// The tokens `span` of one request: what its queries read goes to `out[tokens][own channels]`.
    #[expect(clippy::too_many_arguments, reason = "the pieces of one formula")]
    fn kda_piece(
        &self,
        kda: &KdaConfig,
        (layer, slot): (LayerId, SlotId),
        first: bool,
        span: Range<usize>,
        (inputs, taps): (&Inputs, &[Vec<f32>; 3]),
        (memory, narrow): (&mut Piece, &mut Narrow),
        account: &Account,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let (dim, kernel) = (kda.head_dim, kda.kernel);
        let heads = self.share.linear_heads.len();
        let width = heads * dim;
        let Piece { window, state, history, convolved } = memory;
        let window = account.zeroed(window, (kernel - 1) * 3 * width)?;
        let state = account.zeroed(state, heads * dim * dim)?;
        if !first {
            self.pool.read_state((layer, Part::Conv), slot, window, narrow)?;
            self.pool.read_state((layer, Part::Recurrent), slot, state, narrow)?;
        }
        for (at, ((raw, taps), out)) in inputs.raw.iter().zip(taps).zip(&mut *convolved).enumerate() {
            let history = account.cleared(history, (kernel - 1 + span.len()) * width)?;
            for row in window.chunks_exact(3 * width) {
                history.extend_from_slice(&row[at * width..(at + 1) * width]);
            }
            history.extend_from_slice(&raw[span.start * width..span.end * width]);
            let out = account.zeroed(out, span.len() * width)?;
            for (t, out) in out.chunks_exact_mut(width).enumerate() {
                math::convolve(&history[t * width..(t + kernel) * width], taps, out);
            }
            let last = &history[span.len() * width..];
            for (row, last) in window.chunks_exact_mut(3 * width).zip(last.chunks_exact(width)) {
                row[at * width..(at + 1) * width].copy_from_slice(last);
            }
        }
        let [q, k, v] = convolved;
        q.chunks_exact_mut(dim).for_each(|q| math::set_length(q, 1.0 / (dim as f32).sqrt()));
        k.chunks_exact_mut(dim).for_each(|k| math::set_length(k, 1.0));
        if span.is_empty() {
            return Ok(());
        }
        for (head, state) in state.chunks_exact_mut(dim * dim).enumerate() {
            let at = head * dim;
            let tokens = DeltaTokens {
                count: span.len(),
                heads,
                dim,
                decay: &inputs.decay[span.start * width + at..],
                q: &q[at..],
                k: &k[at..],
                v: &v[at..],
                beta: &inputs.beta[span.start * heads + head..],
            };
            math::delta(state, &tokens, &mut out[at..]);
        }
        self.pool.write_state((layer, Part::Conv), slot, window, narrow)?;
        self.pool.write_state((layer, Part::Recurrent), slot, state, narrow)
    }
}

impl Piece {
    /// Takes the memory for requests of up to `tokens` tokens.
    fn reserve(
        &mut self,
        kda: &KdaConfig,
        heads: usize,
        tokens: usize,
        account: &Account,
    ) -> Result<(), EngineError> {
        let (dim, width) = (kda.head_dim, heads * kda.head_dim);
        account.cleared(&mut self.window, (kda.kernel - 1) * 3 * width)?;
        account.cleared(&mut self.state, heads * dim * dim)?;
        account.cleared(&mut self.history, (kda.kernel - 1 + tokens) * width)?;
        self.convolved.iter_mut().try_for_each(|list| account.cleared(list, tokens * width).map(|_| ()))
    }
}

/// Some of a matrix's outputs for every row.
fn project(
    matrix: &Matrix,
    x: &[f32],
    rows: usize,
    columns: Range<usize>,
    out: &mut Vec<f32>,
    account: &Account,
) -> Result<(), EngineError> {
    let out = account.zeroed(out, rows * columns.len())?;
    matrix.apply(x, rows, columns, out);
    Ok(())
}

/// Two matrices one after the other, the first of them whole.
fn through(
    (first, second): (&Matrix, &Matrix),
    x: &[f32],
    rows: usize,
    columns: Range<usize>,
    (middle, out): (&mut Vec<f32>, &mut Vec<f32>),
    account: &Account,
) -> Result<(), EngineError> {
    project(first, x, rows, 0..first.n(), middle, account)?;
    project(second, middle, rows, columns, out, account)
}
