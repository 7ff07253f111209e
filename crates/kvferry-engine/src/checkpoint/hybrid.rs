//! What `config.json` says of latent attention, Kimi delta attention and experts, in the words of DeepSeek V3 and of
//! Kimi Linear. Not for the numbers that all models have (`hf`), nor for whether they make sense (`config`).

use super::{Arch, KdaConfig, LoadError, MlaConfig, MoeConfig, hf::Json};
use serde_json::Value;

/// What an architecture has beyond llama's numbers.
pub(super) struct Hybrid {
    pub(super) mla: MlaConfig,
    pub(super) kda: Option<KdaConfig>,
    pub(super) moe: Option<MoeConfig>,
    /// DeepSeek's rotary rows lie as pairs, unless the configuration says otherwise.
    pub(super) rope_pairs: bool,
    pub(super) draft_layers: usize,
}

/// Reads it.
pub(super) fn read(json: &Json, arch: Arch, heads: usize) -> Result<Hybrid, LoadError> {
    if json.flag("attention_bias")? {
        return Err(json.unsupported("attention_bias", "is on"));
    }
    let kimi = arch == Arch::KimiLinear;
    if kimi && json.value("mla_use_nope") == Some(&Value::Bool(false)) {
        return Err(json.unsupported("mla_use_nope", "is off: latent attention with positions"));
    }
    let (nope, rope) = (json.size("qk_nope_head_dim")?, json.size("qk_rope_head_dim")?);
    let mla = MlaConfig {
        heads,
        q_lora: json.size_if_there("q_lora_rank")?,
        lora: json.size("kv_lora_rank")?,
        rope,
        nope,
        v_dim: json.size("v_head_dim")?,
        rope_ladder: if kimi { 0 } else { rope },
        scale: scale(nope, rope),
        latent_norm: Some(MlaConfig::LATENT_EPS),
    };
    Ok(Hybrid {
        mla,
        kda: if kimi { Some(kda(json)?) } else { None },
        moe: moe(json, kimi)?,
        rope_pairs: !kimi && json.flag_or("rope_interleave", true)?,
        draft_layers: json.size_if_there("num_nextn_predict_layers")?.unwrap_or(0),
    })
}

#[expect(clippy::cast_precision_loss, reason = "head dimensions are far below 2^24")]
fn scale(nope: usize, rope: usize) -> f32 {
    1.0 / (nope.saturating_add(rope) as f32).sqrt()
}

/// `linear_attn_config`, whose lists count layers from 1.
fn kda(json: &Json) -> Result<KdaConfig, LoadError> {
    const KEY: &str = "linear_attn_config";
    let inner = json.object(KEY)?.ok_or_else(|| json.missing(KEY))?;
    let mut layers = inner.tokens("kda_layers")?;
    let full = inner.tokens("full_attn_layers")?;
    layers.sort_unstable();
    let mut all = [layers.as_slice(), &full].concat();
    all.sort_unstable();
    let count = json.size("num_hidden_layers")?;
    let each_once =
        all.len() == count && all.iter().zip(1..).all(|(layer, expected): (&u32, u32)| *layer == expected);
    if !each_once {
        let reason = format!("a list of each of the layers 1 to {count} once, with full_attn_layers");
        return Err(inner.wrong("kda_layers", &reason));
    }
    Ok(KdaConfig {
        heads: inner.size("num_heads")?,
        head_dim: inner.size("head_dim")?,
        kernel: inner.size("short_conv_kernel_size")?,
        layers: layers.into_iter().map(|layer| layer - 1).collect(),
    })
}

/// Experts; `None` in a model without.
fn moe(json: &Json, kimi: bool) -> Result<Option<MoeConfig>, LoadError> {
    let key =
        |kimi_says: &'static str, deepseek_says: &'static str| if kimi { kimi_says } else { deepseek_says };
    let Some(experts) = json.size_if_there(key("num_experts", "n_routed_experts"))?.filter(|n| *n > 0) else {
        return Ok(None);
    };
    for name in ["moe_router_activation_func", "scoring_func"] {
        if let Some(function) = json.value(name).filter(|function| function.as_str() != Some("sigmoid")) {
            return Err(json.unsupported(name, format!("{function} is not \"sigmoid\"")));
        }
    }
    if let Some(method) = json.value("topk_method").filter(|method| method.as_str() != Some("noaux_tc")) {
        return Err(json.unsupported("topk_method", format!("{method} is not \"noaux_tc\"")));
    }
    if json.size_if_there("moe_layer_freq")?.is_some_and(|every| every != 1) {
        return Err(json.unsupported("moe_layer_freq", "only some layers have experts"));
    }
    let ffn = json.size("moe_intermediate_size")?;
    let shared = json.size_if_there(key("num_shared_experts", "n_shared_experts"))?.unwrap_or(0);
    Ok(Some(MoeConfig {
        experts,
        per_token: json.size(key("num_experts_per_token", "num_experts_per_tok"))?,
        ffn,
        shared_ffn: ffn.saturating_mul(shared),
        groups: json.size_if_there(key("num_expert_group", "n_group"))?.unwrap_or(1),
        groups_per_token: json.size_if_there("topk_group")?.unwrap_or(1),
        renormalise: json.flag_or(key("moe_renormalize", "norm_topk_prob"), true)?,
        scale: json.real("routed_scaling_factor")?.unwrap_or(1.0),
        dense_layers: json.size_if_there("first_k_dense_replace")?.unwrap_or(0),
    }))
}
