//! Which tensors a model consists of: their names in either format and their shapes.

use super::ModelConfig;
use kvferry_plan::LayerId;

/// A file format's way to name tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    /// `blk.0.attn_q.weight`
    Gguf,
    /// `model.layers.0.self_attn.q_proj.weight`
    HuggingFace,
}

/// A tensor outside of the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    Embedding,
    FinalNorm,
    Head,
}

impl Global {
    pub(super) const ALL: [Self; 3] = [Self::Embedding, Self::FinalNorm, Self::Head];

    pub(super) fn name(self, naming: Naming) -> &'static str {
        match (naming, self) {
            (Naming::Gguf, Self::Embedding) => "token_embd.weight",
            (Naming::Gguf, Self::FinalNorm) => "output_norm.weight",
            (Naming::Gguf, Self::Head) => "output.weight",
            (Naming::HuggingFace, Self::Embedding) => "model.embed_tokens.weight",
            (Naming::HuggingFace, Self::FinalNorm) => "model.norm.weight",
            (Naming::HuggingFace, Self::Head) => "lm_head.weight",
        }
    }

    pub(super) fn shape(self, config: &ModelConfig) -> Vec<u64> {
        match self {
            Self::Embedding | Self::Head => shape(&[config.vocab, config.hidden]),
            Self::FinalNorm => shape(&[config.hidden]),
        }
    }

    pub(super) fn wanted(self, config: &ModelConfig) -> bool {
        self != Self::Head || !config.tie_embeddings
    }
}

/// A tensor that every layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Local {
    AttnNorm,
    Q,
    K,
    V,
    QBias,
    KBias,
    VBias,
    O,
    FfnNorm,
    Gate,
    Up,
    Down,
}

impl Local {
    pub(super) const ALL: [Self; 12] = [
        Self::AttnNorm,
        Self::Q,
        Self::K,
        Self::V,
        Self::QBias,
        Self::KBias,
        Self::VBias,
        Self::O,
        Self::FfnNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    pub(super) fn name(self, naming: Naming, layer: LayerId) -> String {
        match naming {
            Naming::Gguf => format!("blk.{layer}.{}", self.gguf()),
            Naming::HuggingFace => format!("model.layers.{layer}.{}", self.hugging_face()),
        }
    }

    fn gguf(self) -> &'static str {
        match self {
            Self::AttnNorm => "attn_norm.weight",
            Self::Q => "attn_q.weight",
            Self::K => "attn_k.weight",
            Self::V => "attn_v.weight",
            Self::QBias => "attn_q.bias",
            Self::KBias => "attn_k.bias",
            Self::VBias => "attn_v.bias",
            Self::O => "attn_output.weight",
            Self::FfnNorm => "ffn_norm.weight",
            Self::Gate => "ffn_gate.weight",
            Self::Up => "ffn_up.weight",
            Self::Down => "ffn_down.weight",
        }
    }

    fn hugging_face(self) -> &'static str {
        match self {
            Self::AttnNorm => "input_layernorm.weight",
            Self::Q => "self_attn.q_proj.weight",
            Self::K => "self_attn.k_proj.weight",
            Self::V => "self_attn.v_proj.weight",
            Self::QBias => "self_attn.q_proj.bias",
            Self::KBias => "self_attn.k_proj.bias",
            Self::VBias => "self_attn.v_proj.bias",
            Self::O => "self_attn.o_proj.weight",
            Self::FfnNorm => "post_attention_layernorm.weight",
            Self::Gate => "mlp.gate_proj.weight",
            Self::Up => "mlp.up_proj.weight",
            Self::Down => "mlp.down_proj.weight",
        }
    }

    pub(super) fn shape(self, config: &ModelConfig) -> Vec<u64> {
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        match self {
            Self::AttnNorm | Self::FfnNorm => shape(&[config.hidden]),
            Self::Q => shape(&[q, config.hidden]),
            Self::K | Self::V => shape(&[kv, config.hidden]),
            Self::QBias => shape(&[q]),
            Self::KBias | Self::VBias => shape(&[kv]),
            Self::O => shape(&[config.hidden, q]),
            Self::Gate | Self::Up => shape(&[config.ffn, config.hidden]),
            Self::Down => shape(&[config.hidden, config.ffn]),
        }
    }

    pub(super) fn wanted(self, config: &ModelConfig) -> bool {
        config.qkv_bias || !matches!(self, Self::QBias | Self::KBias | Self::VBias)
    }

    /// Its rows are heads of pairs that turn together.
    pub(super) fn rotates(self) -> bool {
        matches!(self, Self::Q | Self::K | Self::QBias | Self::KBias)
    }
}

fn shape(sizes: &[usize]) -> Vec<u64> {
    sizes.iter().map(|size| u64::try_from(*size).unwrap_or(u64::MAX)).collect()
}
