//! The model's numbers in GGUF metadata.

use super::{
    super::{
        Arch, LoadError, ModelConfig,
        error::printable,
        names::{Global, Naming},
        store::Store,
    },
    Item, Metadata,
};
use kvferry_plan::LayerId;

/// The token that ends a text, and two that some models end a turn with.
const EOS_KEYS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Reads the configuration; what only the tensors tell (tied embeddings, biases, vocabulary) comes from `store`.
pub(in super::super) fn config(metadata: &Metadata, store: &Store) -> Result<ModelConfig, LoadError> {
    const ARCH: &str = "general.architecture";
    let name = metadata.text(ARCH)?.ok_or_else(|| metadata.missing(ARCH))?;
    let arch = match name {
        "llama" => Arch::Llama,
        "qwen2" => Arch::Qwen2,
        other => {
            return Err(metadata.unsupported(ARCH, format!("there is no engine for {}", printable(other))));
        }
    };
    let key = |suffix: &str| format!("{name}.{suffix}");
    let size_if_there = |suffix: &str| {
        let read = metadata.number(&key(suffix))?;
        Ok::<_, LoadError>(read.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
    };
    let size = |suffix: &str| size_if_there(suffix)?.ok_or_else(|| metadata.missing(&key(suffix)));
    refuse_variants(metadata, store, &key)?;
    let (hidden, heads) = (size("embedding_length")?, size("attention.head_count")?);
    let head_dim = match size_if_there("attention.key_length")? {
        Some(head_dim) => head_dim,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let reason = format!("{heads} heads do not divide a width of {hidden}");
            return Err(LoadError::damaged(metadata.file(), Item::key(&key("attention.head_count")), reason));
        }
    };
    for suffix in ["attention.value_length", "rope.dimension_count"] {
        if let Some(other) = size_if_there(suffix)?.filter(|other| *other != head_dim) {
            let reason = format!("{other} is not the head dimension {head_dim}");
            return Err(metadata.unsupported(&key(suffix), reason));
        }
    }
    let embedding = Global::Embedding.name(Naming::Gguf);
    let vocab = store.get(embedding).and_then(|stored| stored.shape.first().copied());
    let vocab = vocab.ok_or_else(|| LoadError::missing(metadata.file(), Item::tensor(embedding)))?;
    let mut eos = Vec::new();
    for key in EOS_KEYS {
        if let Some(token) = metadata.number(key)?
            && !eos.contains(&token)
        {
            eos.push(token);
        }
    }
    let eps_key = key("attention.layer_norm_rms_epsilon");
    let has = |name: &str| store.get(name).is_some();
    ModelConfig {
        arch,
        layers: size("block_count")?,
        hidden,
        heads,
        kv_heads: size_if_there("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        ffn: size("feed_forward_length")?,
        vocab: usize::try_from(vocab).unwrap_or(usize::MAX),
        rope_theta: metadata.real(&key("rope.freq_base"))?.unwrap_or(10_000.0),
        rms_eps: metadata.real(&eps_key)?.ok_or_else(|| metadata.missing(&eps_key))?,
        max_position: u32::try_from(size("context_length")?).unwrap_or(u32::MAX),
        bos: metadata.number("tokenizer.ggml.bos_token_id")?,
        eos,
        tie_embeddings: !has("output.weight"),
        qkv_bias: arch == Arch::Qwen2 || has(&format!("blk.{}.attn_q.bias", LayerId(0))),
        // Converters to GGUF reorder the rows of `llama` q and k; other architectures keep them.
        rope_pairs: arch == Arch::Llama,
        mla: None,
        kda: None,
        moe: None,
        draft_layers: 0,
    }
    .check(metadata.file())
}

/// What would compute something else than this engine does.
fn refuse_variants(
    metadata: &Metadata,
    store: &Store,
    key: &impl Fn(&str) -> String,
) -> Result<(), LoadError> {
    if metadata.number("split.count")?.is_some_and(|count| count > 1) {
        return Err(metadata.unsupported("split.count", "the model is split over several files; join them"));
    }
    let experts = key("expert_count");
    if metadata.number(&experts)?.is_some_and(|count| count > 0) {
        return Err(metadata.unsupported(&experts, "a mixture of experts"));
    }
    let scaling = key("rope.scaling.type");
    if let Some(kind) = metadata.text(&scaling)?.filter(|kind| *kind != "none") {
        return Err(metadata.unsupported(&scaling, format!("rotary scaling {}", printable(kind))));
    }
    if store.get("rope_freqs.weight").is_some() {
        let item = Item::tensor("rope_freqs.weight");
        return Err(LoadError::unsupported(metadata.file(), item, "rotary scaling by a table of factors"));
    }
    Ok(())
}
