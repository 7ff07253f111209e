//! Which tensors a model consists of: their names in either format and their shapes.

use super::{Arch, ModelConfig};
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

/// What a layer's attention is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Gqa,
    Mla,
    Kda,
}

impl Kind {
    /// The kind of a layer.
    pub(super) fn of(config: &ModelConfig, layer: LayerId) -> Self {
        match (&config.kda, &config.mla) {
            (Some(kda), _) if kda.has(layer) => Self::Kda,
            (_, Some(_)) => Self::Mla,
            _ => Self::Gqa,
        }
    }
}

/// A matrix of a gated feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gated {
    Gate,
    Up,
    Down,
}

impl Gated {
    pub(super) const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];
}

/// One of the three inputs of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    Q,
    K,
    V,
}

impl Input {
    pub(super) const ALL: [Self; 3] = [Self::Q, Self::K, Self::V];

    fn letter(self) -> char {
        match self {
            Self::Q => 'q',
            Self::K => 'k',
            Self::V => 'v',
        }
    }
}

/// A tensor of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Local {
    AttnNorm,
    FfnNorm,
    /// Projection of an input; with latent attention only of queries.
    Proj(Input),
    Bias(Input),
    O,
    QA,
    QANorm,
    QB,
    KvA,
    KvANorm,
    KvB,
    Conv(Input),
    DecayA,
    DecayB,
    DecayBias,
    DecayLog,
    Beta,
    GateA,
    GateB,
    KdaNorm,
    Dense(Gated),
    Router,
    RouterBias,
    Expert(u32, Gated),
    Shared(Gated),
}

impl Local {
    /// The tensors that a layer has.
    pub(super) fn all(config: &ModelConfig, layer: LayerId) -> impl Iterator<Item = Self> {
        const GQA: &[Local] = &[
            Local::Proj(Input::Q),
            Local::Proj(Input::K),
            Local::Proj(Input::V),
            Local::Bias(Input::Q),
            Local::Bias(Input::K),
            Local::Bias(Input::V),
        ];
        const MLA: &[Local] = &[
            Local::Proj(Input::Q),
            Local::QA,
            Local::QANorm,
            Local::QB,
            Local::KvA,
            Local::KvANorm,
            Local::KvB,
        ];
        const KDA: &[Local] = &[
            Local::Proj(Input::Q),
            Local::Proj(Input::K),
            Local::Proj(Input::V),
            Local::Conv(Input::Q),
            Local::Conv(Input::K),
            Local::Conv(Input::V),
            Local::DecayA,
            Local::DecayB,
            Local::DecayBias,
            Local::DecayLog,
            Local::Beta,
            Local::GateA,
            Local::GateB,
            Local::KdaNorm,
        ];
        let kind = Kind::of(config, layer);
        let attention = match kind {
            Kind::Gqa => GQA,
            Kind::Mla => MLA,
            Kind::Kda => KDA,
        };
        let latent_queries = config.mla.as_ref().is_some_and(|mla| mla.q_lora.is_some());
        let biases = config.qkv_bias;
        let wanted = move |tensor: &Self| match tensor {
            Self::Bias(_) => biases,
            Self::Proj(_) => kind != Kind::Mla || !latent_queries,
            Self::QA | Self::QANorm | Self::QB => latent_queries,
            _ => true,
        };
        let moe = config.moe.as_ref().filter(|moe| layer.index() >= moe.dense_layers);
        let experts = moe.map_or(0, |moe| u32::try_from(moe.experts).unwrap_or(u32::MAX));
        let shared = moe.is_some_and(|moe| moe.shared_ffn > 0);
        let each =
            |make: fn(Gated) -> Self, there: bool| Gated::ALL.map(make).into_iter().filter(move |_| there);
        [Self::AttnNorm]
            .into_iter()
            .chain(attention.iter().copied().filter(wanted))
            .chain([Self::O, Self::FfnNorm])
            .chain(each(Self::Dense, moe.is_none()))
            .chain([Self::Router, Self::RouterBias].into_iter().filter(move |_| moe.is_some()))
            .chain(each(Self::Shared, shared))
            .chain((0..experts).flat_map(|e| Gated::ALL.into_iter().map(move |part| Self::Expert(e, part))))
    }

    /// What the tensor may be called, the usual name first; nothing in a format that has no such tensors.
    pub(super) fn names(self, naming: Naming, config: &ModelConfig, layer: LayerId) -> Vec<String> {
        match naming {
            Naming::Gguf => self.gguf().into_iter().map(|name| format!("blk.{layer}.{name}")).collect(),
            Naming::HuggingFace => self
                .hugging_face(config)
                .into_iter()
                .map(|name| format!("model.layers.{layer}.{name}"))
                .collect(),
        }
    }

    fn gguf(self) -> Option<&'static str> {
        Some(match self {
            Self::AttnNorm => "attn_norm.weight",
            Self::Proj(Input::Q) => "attn_q.weight",
            Self::Proj(Input::K) => "attn_k.weight",
            Self::Proj(Input::V) => "attn_v.weight",
            Self::Bias(Input::Q) => "attn_q.bias",
            Self::Bias(Input::K) => "attn_k.bias",
            Self::Bias(Input::V) => "attn_v.bias",
            Self::O => "attn_output.weight",
            Self::FfnNorm => "ffn_norm.weight",
            Self::Dense(Gated::Gate) => "ffn_gate.weight",
            Self::Dense(Gated::Up) => "ffn_up.weight",
            Self::Dense(Gated::Down) => "ffn_down.weight",
            _ => return None,
        })
    }

    fn hugging_face(self, config: &ModelConfig) -> Vec<String> {
        let one = |name: &str| vec![name.to_owned()];
        let attention = |name: &str| vec![format!("self_attn.{name}")];
        let gated = |part| match part {
            Gated::Gate => "gate_proj",
            Gated::Up => "up_proj",
            Gated::Down => "down_proj",
        };
        // Published and converted checkpoints of Kimi Linear put networks under different names.
        let sparse = |name: String| match config.arch {
            Arch::KimiLinear => vec![format!("block_sparse_moe.{name}"), format!("mlp.{name}")],
            _ => vec![format!("mlp.{name}")],
        };
        match self {
            Self::AttnNorm => one("input_layernorm.weight"),
            Self::FfnNorm => one("post_attention_layernorm.weight"),
            Self::Proj(input) => attention(&format!("{}_proj.weight", input.letter())),
            Self::Bias(input) => attention(&format!("{}_proj.bias", input.letter())),
            Self::O => attention("o_proj.weight"),
            Self::QA => attention("q_a_proj.weight"),
            Self::QANorm => attention("q_a_layernorm.weight"),
            Self::QB => attention("q_b_proj.weight"),
            Self::KvA => attention("kv_a_proj_with_mqa.weight"),
            Self::KvANorm => attention("kv_a_layernorm.weight"),
            Self::KvB => attention("kv_b_proj.weight"),
            Self::Conv(input) => attention(&format!("{}_conv1d.weight", input.letter())),
            Self::DecayA => attention("f_a_proj.weight"),
            Self::DecayB => attention("f_b_proj.weight"),
            Self::DecayBias => attention("dt_bias"),
            Self::DecayLog => attention("A_log"),
            Self::Beta => attention("b_proj.weight"),
            Self::GateA => attention("g_a_proj.weight"),
            Self::GateB => attention("g_b_proj.weight"),
            Self::KdaNorm => attention("o_norm.weight"),
            Self::Dense(part) => sparse(format!("{}.weight", gated(part))),
            Self::Router => sparse("gate.weight".into()),
            Self::RouterBias => sparse("gate.e_score_correction_bias".into()),
            Self::Shared(part) => sparse(format!("shared_experts.{}.weight", gated(part))),
            Self::Expert(expert, part) => {
                let short = match part {
                    Gated::Gate => "w1",
                    Gated::Down => "w2",
                    Gated::Up => "w3",
                };
                let named = |name| sparse(format!("experts.{expert}.{name}.weight"));
                match config.arch {
                    Arch::KimiLinear => [named(short), named(gated(part))].concat(),
                    _ => named(gated(part)),
                }
            }
        }
    }

    pub(super) fn shape(self, config: &ModelConfig, layer: LayerId) -> Vec<u64> {
        let hidden = config.hidden;
        let kv = config.kv_heads * config.head_dim;
        let mla = config.mla.as_ref();
        let (lora, rope) = mla.map_or((0, 0), |mla| (mla.lora, mla.rope));
        let (nope, v_dim) = mla.map_or((0, 0), |mla| (mla.nope, mla.v_dim));
        let q_lora = mla.and_then(|mla| mla.q_lora).unwrap_or(0);
        let (kda_heads, channels, kda_dim, kernel) = config
            .kda
            .as_ref()
            .map_or((0, 0, 0, 0), |kda| (kda.heads, kda.channels(), kda.head_dim, kda.kernel));
        let experts = config.moe.as_ref().map_or(0, |moe| moe.experts);
        let kind = Kind::of(config, layer);
        let (q, kv, out) = match kind {
            Kind::Gqa => (config.heads * config.head_dim, kv, config.heads * config.head_dim),
            Kind::Mla => (config.heads * (nope + rope), 0, config.heads * v_dim),
            Kind::Kda => (channels, channels, channels),
        };
        let gated = |part, ffn: usize| match part {
            Gated::Gate | Gated::Up => shape(&[ffn, hidden]),
            Gated::Down => shape(&[hidden, ffn]),
        };
        let moe = |of: fn(&super::MoeConfig) -> usize| config.moe.as_ref().map_or(0, of);
        match self {
            Self::AttnNorm | Self::FfnNorm => shape(&[hidden]),
            Self::Proj(Input::Q) => shape(&[q, hidden]),
            Self::Proj(_) => shape(&[kv, hidden]),
            Self::Bias(Input::Q) => shape(&[q]),
            Self::Bias(_) => shape(&[kv]),
            Self::O => shape(&[hidden, out]),
            Self::QA => shape(&[q_lora, hidden]),
            Self::QANorm => shape(&[q_lora]),
            Self::QB => shape(&[q, q_lora]),
            Self::KvA => shape(&[lora + rope, hidden]),
            Self::KvANorm => shape(&[lora]),
            Self::KvB => shape(&[config.heads * (nope + v_dim), lora]),
            Self::Conv(_) => shape(&[channels, 1, kernel]),
            Self::DecayA | Self::GateA => shape(&[kda_dim, hidden]),
            Self::DecayB | Self::GateB => shape(&[channels, kda_dim]),
            Self::DecayBias => shape(&[channels]),
            Self::DecayLog => shape(&[1, 1, kda_heads, 1]),
            Self::Beta => shape(&[kda_heads, hidden]),
            Self::KdaNorm => shape(&[kda_dim]),
            Self::Dense(part) => gated(part, config.ffn),
            Self::Router => shape(&[experts, hidden]),
            Self::RouterBias => shape(&[experts]),
            Self::Expert(_, part) => gated(part, moe(|moe| moe.ffn)),
            Self::Shared(part) => gated(part, moe(|moe| moe.shared_ffn)),
        }
    }
}

fn shape(sizes: &[usize]) -> Vec<u64> {
    sizes.iter().map(|size| u64::try_from(*size).unwrap_or(u64::MAX)).collect()
}
