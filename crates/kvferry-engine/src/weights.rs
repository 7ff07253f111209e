//! A layer's weights, packed for the kernels. Not for reading files (`checkpoint`), nor for who computes what (`shares`).

use crate::{
    checkpoint::{
        AttentionTensors, FfnTensors, GatedTensors, GqaTensors, KdaTensors, LayerTensors, MlaConfig,
        MlaTensors, ModelConfig, MoeTensors,
    },
    math::{Matrix, RowParallel, exp_once},
};

/// Columns of a feed-forward network that are summed as one unit, whole on one rank.
pub(crate) const FFN_UNIT: usize = 64;

/// Weights of a layer.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attn_norm: Vec<f32>,
    pub(crate) attention: AttentionWeights,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) ffn: FfnWeights,
}

/// Weights of a layer's attention.
#[derive(Debug)]
pub(crate) enum AttentionWeights {
    Gqa(GqaWeights),
    Mla(MlaWeights),
    Kda(KdaWeights),
}

/// Weights of grouped-query attention.
#[derive(Debug)]
pub(crate) struct GqaWeights {
    pub(crate) q: Matrix,
    pub(crate) k: Matrix,
    pub(crate) v: Matrix,
    pub(crate) q_bias: Option<Vec<f32>>,
    pub(crate) k_bias: Option<Vec<f32>>,
    pub(crate) v_bias: Option<Vec<f32>>,
    /// Units are query heads.
    pub(crate) o: RowParallel,
}

/// Weights of latent attention.
#[derive(Debug)]
pub(crate) struct MlaWeights {
    /// To the queries' latent, and its norm.
    pub(crate) q_a: Option<(Matrix, Vec<f32>)>,
    pub(crate) q: Matrix,
    pub(crate) q_bias: Option<Vec<f32>>,
    pub(crate) kv_a: Matrix,
    pub(crate) kv_a_bias: Option<Vec<f32>>,
    pub(crate) latent_norm: Option<Vec<f32>>,
    /// Per head `[lora][nope]`: applied to a query, it gives the query's latent part. Empty when `nope` is 0.
    pub(crate) w_uk: Vec<Matrix>,
    /// Per head `[v_dim][lora]`.
    pub(crate) w_uv: Vec<Matrix>,
    /// Units are query heads.
    pub(crate) o: RowParallel,
}

/// Weights of Kimi delta attention.
#[derive(Debug)]
pub(crate) struct KdaWeights {
    /// Projections of queries, keys and values.
    pub(crate) qkv: [Matrix; 3],
    /// Taps of their convolutions, `[kernel][channels]`.
    pub(crate) taps: [Vec<f32>; 3],
    pub(crate) decay_a: Matrix,
    pub(crate) decay_b: Matrix,
    /// `[channels]`.
    pub(crate) decay_bias: Vec<f32>,
    /// Per head.
    pub(crate) decay_rate: Vec<f32>,
    pub(crate) beta: Matrix,
    pub(crate) gate_a: Matrix,
    pub(crate) gate_b: Matrix,
    /// `[head_dim]`.
    pub(crate) norm: Vec<f32>,
    /// Units are heads.
    pub(crate) o: RowParallel,
}

/// Weights of a layer's feed-forward network.
#[derive(Debug)]
pub(crate) enum FfnWeights {
    Dense(GatedWeights),
    Moe(MoeWeights),
}

/// Weights of a gated feed-forward network.
#[derive(Debug)]
pub(crate) struct GatedWeights {
    pub(crate) gate: Matrix,
    pub(crate) up: Matrix,
    /// Units are [`FFN_UNIT`] columns, the last one padded with zeros.
    pub(crate) down: RowParallel,
}

/// Weights of a mixture of experts.
#[derive(Debug)]
pub(crate) struct MoeWeights {
    pub(crate) router: Matrix,
    pub(crate) bias: Vec<f32>,
    pub(crate) experts: Vec<GatedWeights>,
    pub(crate) shared: Option<GatedWeights>,
}

/// Units of a feed-forward network of `width` columns.
pub(crate) fn ffn_units(width: usize) -> usize {
    width.div_ceil(FFN_UNIT)
}

impl Layer {
    /// Packs a layer; grouped queries as latent attention where `mla` is given.
    pub(crate) fn pack(tensors: LayerTensors, config: &ModelConfig, mla: Option<&MlaConfig>) -> Self {
        let hidden = config.hidden;
        let attention = match (tensors.attention, mla) {
            (AttentionTensors::Gqa(gqa), None) => AttentionWeights::Gqa(pack_gqa(gqa, config)),
            (AttentionTensors::Gqa(gqa), Some(mla)) => {
                AttentionWeights::Mla(pack_mla(gqa.to_mla(config), mla, hidden))
            }
            (AttentionTensors::Mla(tensors), _) => {
                AttentionWeights::Mla(pack_mla(tensors, &config.to_mla(), hidden))
            }
            (AttentionTensors::Kda(tensors), _) => AttentionWeights::Kda(pack_kda(tensors, hidden)),
        };
        Self {
            attn_norm: tensors.attn_norm,
            attention,
            ffn_norm: tensors.ffn_norm,
            ffn: match tensors.ffn {
                FfnTensors::Dense(gated) => FfnWeights::Dense(pack_gated(gated, hidden)),
                FfnTensors::Moe(moe) => FfnWeights::Moe(pack_moe(moe, hidden)),
            },
        }
    }
}

/// A matrix of `columns` columns and as many rows as there are.
fn matrix(columns: usize, w: &[f32]) -> Matrix {
    Matrix::new(w.len() / columns.max(1), columns, w)
}

fn pack_gqa(tensors: GqaTensors, config: &ModelConfig) -> GqaWeights {
    let GqaTensors { q, k, v, q_bias, k_bias, v_bias, o } = tensors;
    let hidden = config.hidden;
    GqaWeights {
        q: matrix(hidden, &q),
        k: matrix(hidden, &k),
        v: matrix(hidden, &v),
        q_bias,
        k_bias,
        v_bias,
        o: RowParallel::new(hidden, config.head_dim, config.heads, &o),
    }
}

fn pack_mla(tensors: MlaTensors, mla: &MlaConfig, hidden: usize) -> MlaWeights {
    let turned = |w: &[f32]| Matrix::new(mla.lora, mla.nope, &transposed(w, mla.lora));
    MlaWeights {
        q: matrix(mla.q_lora.unwrap_or(hidden), &tensors.q),
        q_a: tensors.q_a.map(|(down, norm)| (matrix(hidden, &down), norm)),
        q_bias: tensors.q_bias,
        kv_a: matrix(hidden, &tensors.kv_a),
        kv_a_bias: tensors.kv_a_bias,
        latent_norm: tensors.latent_norm,
        w_uk: tensors.w_uk.chunks_exact((mla.nope * mla.lora).max(1)).map(turned).collect(),
        w_uv: tensors.w_uv.chunks_exact(mla.v_dim * mla.lora).map(|w| matrix(mla.lora, w)).collect(),
        o: RowParallel::new(hidden, mla.v_dim, mla.heads, &tensors.o),
    }
}

fn pack_kda(tensors: KdaTensors, hidden: usize) -> KdaWeights {
    let (dim, heads) = (tensors.norm.len(), tensors.decay_log.len());
    KdaWeights {
        qkv: tensors.qkv.map(|w| matrix(hidden, &w)),
        taps: tensors.conv.map(|w| transposed(&w, w.len() / (heads * dim).max(1))),
        decay_a: matrix(hidden, &tensors.decay_a),
        decay_b: matrix(dim, &tensors.decay_b),
        decay_bias: tensors.decay_bias,
        decay_rate: tensors.decay_log.into_iter().map(exp_once).collect(),
        beta: matrix(hidden, &tensors.beta),
        gate_a: matrix(hidden, &tensors.gate_a),
        gate_b: matrix(dim, &tensors.gate_b),
        norm: tensors.norm,
        o: RowParallel::new(hidden, dim, heads, &tensors.o),
    }
}

fn pack_moe(tensors: MoeTensors, hidden: usize) -> MoeWeights {
    MoeWeights {
        router: matrix(hidden, &tensors.router),
        bias: tensors.bias,
        experts: tensors.experts.into_iter().map(|expert| pack_gated(expert, hidden)).collect(),
        shared: tensors.shared.map(|shared| pack_gated(shared, hidden)),
    }
}

fn pack_gated(tensors: GatedTensors, hidden: usize) -> GatedWeights {
    let GatedTensors { gate, up, down } = tensors;
    let width = gate.len() / hidden.max(1);
    let units = ffn_units(width);
    let padded = units * FFN_UNIT;
    let more_rows = |mut rows: Vec<f32>| {
        rows.resize(padded * hidden, 0.0);
        rows
    };
    let down = if padded == width {
        down
    } else {
        let mut wide = vec![0.0; hidden * padded];
        for (to, from) in wide.chunks_exact_mut(padded).zip(down.chunks_exact(width.max(1))) {
            to[..width].copy_from_slice(from);
        }
        wide
    };
    GatedWeights {
        gate: Matrix::new(padded, hidden, &more_rows(gate)),
        up: Matrix::new(padded, hidden, &more_rows(up)),
        down: RowParallel::new(hidden, FFN_UNIT, units, &down),
    }
}

/// `w[rows][columns]` as `[columns][rows]`.
fn transposed(w: &[f32], columns: usize) -> Vec<f32> {
    let rows = w.len() / columns.max(1);
    let mut turned = vec![0.0; w.len()];
    for (i, row) in w.chunks_exact(columns.max(1)).enumerate() {
        for (j, value) in row.iter().enumerate() {
            turned[j * rows + i] = *value;
        }
    }
    turned
}
