//! Kimi delta attention (KDA): linear attention with a state per request instead of rows per token. Facts of Kimi
//! Linear's own code: q, k and v each go through a short causal convolution and SiLU; a head's state is a matrix
//! that decays per key channel and takes in one row per token by the delta rule.

/// Geometry of the layers with Kimi delta attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KdaConfig {
    /// Heads of q, k and v alike.
    pub heads: usize,
    /// Elements of a head of q, k and v alike: a head's state is `head_dim` x `head_dim`.
    pub head_dim: usize,
    /// Taps of the convolutions: the last `kernel - 1` projections of a request are kept.
    pub kernel: usize,
    /// The layers that have it, from 0, ascending; the others have latent attention.
    pub layers: Vec<u32>,
}

impl KdaConfig {
    /// Channels of q, of k and of v.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Whether a layer has it.
    #[must_use]
    pub fn has(&self, layer: kvferry_plan::LayerId) -> bool {
        self.layers.binary_search(&layer.0).is_ok()
    }
}

/// One layer's weights of Kimi delta attention, row-major `f32`; `channels` are `heads * head_dim`.
#[derive(Clone, Debug, PartialEq)]
pub struct KdaTensors {
    /// Projections of queries, keys and values, `[channels][hidden]` each.
    pub qkv: [Vec<f32>; 3],
    /// Their convolutions, `[channels][kernel]` each, the oldest tap first.
    pub conv: [Vec<f32>; 3],
    /// First half of the decay's projection, `[head_dim][hidden]`.
    pub decay_a: Vec<f32>,
    /// Second half, `[channels][head_dim]`.
    pub decay_b: Vec<f32>,
    /// Added to the decay before its softplus, `[channels]`.
    pub decay_bias: Vec<f32>,
    /// Logarithm of each head's decay rate, `[heads]`.
    pub decay_log: Vec<f32>,
    /// How much of a token is taken in, `[heads][hidden]`.
    pub beta: Vec<f32>,
    /// First half of the output gate's projection, `[head_dim][hidden]`.
    pub gate_a: Vec<f32>,
    /// Second half, `[channels][head_dim]`.
    pub gate_b: Vec<f32>,
    /// RMSNorm weight of a head's output, `[head_dim]`.
    pub norm: Vec<f32>,
    /// Output projection, `[hidden][channels]`.
    pub o: Vec<f32>,
}
