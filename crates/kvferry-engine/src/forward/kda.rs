//! Kimi delta attention: a short convolution and a recurrence per head, over state that a request keeps from step to
//! step in a slot of every rank. What the tokens of a piece are taken into has the bits of one token after the other, so
//! nothing depends on where a prompt is cut.

use std::ops::Range;

use kvferry_plan::{LayerId, Part, SlotId};

use super::rank::Rank;
use crate::{
    EngineError,
    checkpoint::KdaConfig,
    math::{self, DeltaTokens, Matrix, Partial, rms_norm, sigmoid},
    ranks::RankError,
    weights::KdaWeights,
};

/// What a rank computes of a step before it comes to the state, `[rows][own channels]` unless said.
struct Inputs {
    /// Queries, keys and values before their convolution, as the state keeps them.
    raw: [Vec<f32>; 3],
    /// What is left of the state after each token.
    decay: Vec<f32>,
    /// How much of each token is taken in, `[rows][own heads]`.
    beta: Vec<f32>,
}

impl Rank<'_> {
    /// This rank's part of the attention's output projection; moves the state of its heads on.
    pub(super) fn kda(
        &mut self,
        layer: LayerId,
        weights: &KdaWeights,
        x: &[f32],
    ) -> Result<Partial, RankError> {
        let config = self.model.config();
        let lost = || EngineError::Config("the model has no linear attention".into());
        let kda = config.kda.as_ref().ok_or_else(lost)?;
        let rows = self.batch.rows();
        let mut partial = Partial::new(self.model.arith(), rows, config.hidden);
        let heads = self.share.linear_heads.clone();
        if heads.is_empty() {
            return Ok(partial);
        }
        let columns = heads.start * kda.head_dim..heads.end * kda.head_dim;
        let width = columns.len();
        let inputs = self.kda_inputs(kda, weights, x)?;
        let taps: [Vec<f32>; 3] = weights.taps.each_ref().map(|taps| {
            taps.chunks_exact(kda.channels()).flat_map(|row| &row[columns.clone()]).copied().collect()
        });
        let mut read = vec![0.0; rows * width];
        for (piece, span) in self.batch.pieces.iter().zip(&self.batch.spans) {
            let slot =
                piece.slot.ok_or_else(|| EngineError::Pool("a request without a state slot".into()))?;
            let out = &mut read[span.start * width..span.end * width];
            self.kda_piece(kda, (layer, slot), piece.start == 0, span.clone(), &inputs, &taps, out)?;
        }
        let mut out = vec![0.0; read.len()];
        rms_norm(&read, &weights.norm, config.rms_eps, &mut out);
        math::gate(&mut out, &through(&weights.gate_a, &weights.gate_b, x, rows, columns));
        weights.o.partial(&out, rows, heads, &mut partial);
        Ok(partial)
    }

    fn kda_inputs(&self, kda: &KdaConfig, weights: &KdaWeights, x: &[f32]) -> Result<Inputs, EngineError> {
        let rows = self.batch.rows();
        let heads = self.share.linear_heads.clone();
        let columns = heads.start * kda.head_dim..heads.end * kda.head_dim;
        let mut raw = weights.qkv.each_ref().map(|matrix| project(matrix, x, rows, columns.clone()));
        for raw in &mut raw {
            // What a later chunk reads from the slot and what this one has at hand must be the same number.
            self.pool.round(Part::Conv, raw)?;
        }
        let decay = through(&weights.decay_a, &weights.decay_b, x, rows, columns.clone());
        let mut left = vec![0.0; decay.len()];
        let bias = &weights.decay_bias[columns];
        let rates = &weights.decay_rate[heads.clone()];
        for (x, left) in decay.chunks_exact(bias.len()).zip(left.chunks_exact_mut(bias.len())) {
            let of_heads = x.chunks_exact(kda.head_dim).zip(bias.chunks_exact(kda.head_dim)).zip(rates);
            for (((x, bias), rate), left) in of_heads.zip(left.chunks_exact_mut(kda.head_dim)) {
                math::decay(x, bias, *rate, left);
            }
        }
        let mut beta = project(&weights.beta, x, rows, heads);
        beta.iter_mut().for_each(|beta| *beta = sigmoid(*beta));
        Ok(Inputs { raw, decay: left, beta })
    }

    /// The tokens `span` of one request: what its queries read goes to `out[tokens][own channels]`.
    #[expect(clippy::too_many_arguments, reason = "the pieces of one formula")]
    fn kda_piece(
        &self,
        kda: &KdaConfig,
        (layer, slot): (LayerId, SlotId),
        first: bool,
        span: Range<usize>,
        inputs: &Inputs,
        taps: &[Vec<f32>; 3],
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let (dim, kernel) = (kda.head_dim, kda.kernel);
        let heads = self.share.linear_heads.len();
        let width = heads * dim;
        // Rows of the state are `[q | k | v]`.
        let mut window = vec![0.0; (kernel - 1) * 3 * width];
        let mut state = vec![0.0; heads * dim * dim];
        if !first {
            self.pool.read_state((layer, Part::Conv), slot, &mut window)?;
            self.pool.read_state((layer, Part::Recurrent), slot, &mut state)?;
        }
        let mut convolved: [Vec<f32>; 3] = Default::default();
        for (at, ((raw, taps), out)) in inputs.raw.iter().zip(taps).zip(&mut convolved).enumerate() {
            let mut history: Vec<f32> = Vec::with_capacity((kernel - 1 + span.len()) * width);
            for row in window.chunks_exact(3 * width) {
                history.extend_from_slice(&row[at * width..(at + 1) * width]);
            }
            history.extend_from_slice(&raw[span.start * width..span.end * width]);
            out.resize(span.len() * width, 0.0);
            for (t, out) in out.chunks_exact_mut(width).enumerate() {
                math::convolve(&history[t * width..(t + kernel) * width], taps, out);
            }
            let last = &history[span.len() * width..];
            for (row, last) in window.chunks_exact_mut(3 * width).zip(last.chunks_exact(width)) {
                row[at * width..(at + 1) * width].copy_from_slice(last);
            }
        }
        let [q, k, v] = &mut convolved;
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
        self.pool.write_state((layer, Part::Conv), slot, &window)?;
        self.pool.write_state((layer, Part::Recurrent), slot, &state)
    }
}

/// Some of a matrix's outputs for every row.
fn project(matrix: &Matrix, x: &[f32], rows: usize, columns: Range<usize>) -> Vec<f32> {
    let mut out = vec![0.0; rows * columns.len()];
    matrix.apply(x, rows, columns, &mut out);
    out
}

/// Two matrices one after the other, the first of them whole.
fn through(first: &Matrix, second: &Matrix, x: &[f32], rows: usize, columns: Range<usize>) -> Vec<f32> {
    project(second, &project(first, x, rows, 0..first.n()), rows, columns)
}
