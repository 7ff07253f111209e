//! The weights of one layer, dequantised.

use super::{KdaTensors, MlaTensors, MoeTensors};

/// One layer's weights as row-major `f32`, `[rows][columns]`: a matrix is applied as `y[row] = row . x`.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerTensors {
    /// RMSNorm weight before attention, `[hidden]`.
    pub attn_norm: Vec<f32>,
    /// Attention.
    pub attention: AttentionTensors,
    /// RMSNorm weight before the feed-forward network, `[hidden]`.
    pub ffn_norm: Vec<f32>,
    /// Feed-forward network.
    pub ffn: FfnTensors,
}

/// One layer's attention, as the checkpoint has it.
#[derive(Clone, Debug, PartialEq)]
pub enum AttentionTensors {
    /// Grouped queries.
    Gqa(GqaTensors),
    /// Multi-head latent attention.
    Mla(MlaTensors),
    /// Kimi delta attention.
    Kda(KdaTensors),
}

/// Grouped-query attention. Rows of q and k are in rotate-half order: element `i` of a head turns together with
/// `i + head_dim/2`.
#[derive(Clone, Debug, PartialEq)]
pub struct GqaTensors {
    /// Query projection, `[heads * head_dim][hidden]`.
    pub q: Vec<f32>,
    /// Key projection, `[kv_heads * head_dim][hidden]`.
    pub k: Vec<f32>,
    /// Value projection, `[kv_heads * head_dim][hidden]`.
    pub v: Vec<f32>,
    /// Query bias, `[heads * head_dim]`.
    pub q_bias: Option<Vec<f32>>,
    /// Key bias, `[kv_heads * head_dim]`.
    pub k_bias: Option<Vec<f32>>,
    /// Value bias, `[kv_heads * head_dim]`.
    pub v_bias: Option<Vec<f32>>,
    /// Output projection, `[hidden][heads * head_dim]`.
    pub o: Vec<f32>,
}

/// One layer's feed-forward network.
#[derive(Clone, Debug, PartialEq)]
pub enum FfnTensors {
    /// One for all tokens.
    Dense(GatedTensors),
    /// Some of many for each token.
    Moe(MoeTensors),
}

/// A gated feed-forward network (SwiGLU) of inner width `ffn`.
#[derive(Clone, Debug, PartialEq)]
pub struct GatedTensors {
    /// Gate, `[ffn][hidden]`.
    pub gate: Vec<f32>,
    /// Up projection, `[ffn][hidden]`.
    pub up: Vec<f32>,
    /// Down projection, `[hidden][ffn]`.
    pub down: Vec<f32>,
}
