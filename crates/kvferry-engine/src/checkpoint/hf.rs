//! Hugging Face model folders.

use super::{
    Arch, Blob, Item, LoadError, ModelConfig,
    error::printable,
    hybrid, safetensors,
    store::{Store, Stored},
};
use serde_json::{Map, Value};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// Parsed JSON takes many times its text, so that is bounded. Indices of the largest models have some megabytes.
const LONGEST_JSON: usize = 64 << 20;

/// A JSON object out of a file.
pub(super) struct Json {
    file: String,
    map: Map<String, Value>,
}

impl Json {
    /// Parses an object; `file` is what messages call it.
    pub(super) fn parse(file: &str, bytes: &[u8]) -> Result<Self, LoadError> {
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(map)) => Ok(Self { file: file.to_owned(), map }),
            Ok(_) => Err(LoadError::damaged(file, Item::Header, "is JSON, but not an object")),
            Err(error) => {
                let reason = format!("is not readable: {}", printable(&error.to_string()));
                Err(LoadError::damaged(file, Item::Header, reason))
            }
        }
    }

    /// Reads an object from a file.
    pub(super) fn read(path: &Path) -> Result<Self, LoadError> {
        let (file, blob) = (path.display().to_string(), Blob::map(path)?);
        if blob.bytes().len() > LONGEST_JSON {
            let reason = format!("{} bytes are more than any such file has", blob.bytes().len());
            return Err(LoadError::damaged(&file, Item::Header, reason));
        }
        Self::parse(&file, blob.bytes())
    }

    /// Reads an object from a file, if the file exists.
    pub(super) fn read_if_there(path: &Path) -> Result<Option<Self>, LoadError> {
        if path.is_file() { Self::read(path).map(Some) } else { Ok(None) }
    }

    /// A value that is there and not null.
    pub(super) fn value(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn wrong(&self, key: &str, what: &str) -> LoadError {
        LoadError::damaged(&self.file, Item::key(key), format!("is not {what}"))
    }

    pub(super) fn missing(&self, key: &str) -> LoadError {
        LoadError::missing(&self.file, Item::key(key))
    }

    pub(super) fn unsupported(&self, key: &str, reason: impl Into<String>) -> LoadError {
        LoadError::unsupported(&self.file, Item::key(key), reason)
    }

    pub(super) fn size_if_there(&self, key: &str) -> Result<Option<usize>, LoadError> {
        let read = |value: &Value| {
            value.as_u64().and_then(|n| usize::try_from(n).ok()).ok_or_else(|| self.wrong(key, "a size"))
        };
        self.value(key).map(read).transpose()
    }

    pub(super) fn size(&self, key: &str) -> Result<usize, LoadError> {
        self.size_if_there(key)?.ok_or_else(|| self.missing(key))
    }

    #[expect(clippy::cast_possible_truncation, reason = "models compute in f32")]
    pub(super) fn real(&self, key: &str) -> Result<Option<f32>, LoadError> {
        let read =
            |value: &Value| value.as_f64().map(|n| n as f32).ok_or_else(|| self.wrong(key, "a number"));
        self.value(key).map(read).transpose()
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool, LoadError> {
        self.flag_or(key, false)
    }

    pub(super) fn flag_or(&self, key: &str, absent: bool) -> Result<bool, LoadError> {
        let read = |value: &Value| value.as_bool().ok_or_else(|| self.wrong(key, "true or false"));
        self.value(key).map_or(Ok(absent), read)
    }

    /// An object within this one.
    pub(super) fn object(&self, key: &str) -> Result<Option<Self>, LoadError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { file: self.file.clone(), map: map.clone() })),
            Some(_) => Err(self.wrong(key, "an object")),
        }
    }

    /// One token, a list of tokens, or none.
    pub(super) fn tokens(&self, key: &str) -> Result<Vec<u32>, LoadError> {
        let one = |value: &Value| {
            value.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(|| self.wrong(key, "a token id"))
        };
        match self.value(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(one).collect(),
            Some(value) => one(value).map(|token| vec![token]),
        }
    }
}

/// Reads `config.json`; `generation` adds end-of-text tokens.
pub(super) fn config(json: &Json, generation: Option<&Json>) -> Result<ModelConfig, LoadError> {
    let arch = match json.value("model_type").and_then(Value::as_str) {
        Some("llama") => Arch::Llama,
        Some("qwen2") => Arch::Qwen2,
        Some("deepseek_v3") => Arch::DeepseekV3,
        Some("kimi_linear") => Arch::KimiLinear,
        Some(other) => {
            let reason = format!("there is no engine for {}", printable(other));
            return Err(json.unsupported("model_type", reason));
        }
        None => return Err(json.missing("model_type")),
    };
    refuse_variants(json, arch)?;
    let (hidden, heads) = (json.size("hidden_size")?, json.size("num_attention_heads")?);
    let latent = matches!(arch, Arch::DeepseekV3 | Arch::KimiLinear);
    let hybrid = if latent { Some(hybrid::read(json, arch, heads)?) } else { None };
    // What such a model calls `head_dim` is no size of it.
    let own = json.size_if_there("head_dim")?.filter(|_| !latent);
    let head_dim = match hybrid.as_ref().map(|hybrid| hybrid.mla.nope.saturating_add(hybrid.mla.rope)).or(own)
    {
        Some(head_dim) => head_dim,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(json.wrong("num_attention_heads", "a divisor of hidden_size, and head_dim is absent"));
        }
    };
    let mut eos = json.tokens("eos_token_id")?;
    if let Some(generation) = generation {
        for token in generation.tokens("eos_token_id")? {
            if !eos.contains(&token) {
                eos.push(token);
            }
        }
    }
    ModelConfig {
        arch,
        layers: json.size("num_hidden_layers")?,
        hidden,
        heads,
        kv_heads: json.size_if_there("num_key_value_heads")?.filter(|_| !latent).unwrap_or(heads),
        head_dim,
        ffn: json.size("intermediate_size")?,
        vocab: json.size("vocab_size")?,
        rope_theta: rope_theta(json)?,
        rms_eps: json.real("rms_norm_eps")?.ok_or_else(|| json.missing("rms_norm_eps"))?,
        max_position: u32::try_from(longest(json)?).unwrap_or(u32::MAX),
        bos: json.tokens("bos_token_id")?.first().copied(),
        eos,
        tie_embeddings: json.flag("tie_word_embeddings")?,
        qkv_bias: arch == Arch::Qwen2 || json.flag("attention_bias")?,
        rope_pairs: hybrid.as_ref().is_some_and(|hybrid| hybrid.rope_pairs),
        draft_layers: hybrid.as_ref().map_or(0, |hybrid| hybrid.draft_layers),
        kda: hybrid.as_ref().and_then(|hybrid| hybrid.kda.clone()),
        moe: hybrid.as_ref().and_then(|hybrid| hybrid.moe.clone()),
        mla: hybrid.map(|hybrid| hybrid.mla),
    }
    .check(&json.file)
}

/// Tokens of the longest sequence that the model was made for, under either of its names.
fn longest(json: &Json) -> Result<usize, LoadError> {
    match json.size_if_there("max_position_embeddings")? {
        Some(tokens) => Ok(tokens),
        None => {
            json.size_if_there("model_max_length")?.ok_or_else(|| json.missing("max_position_embeddings"))
        }
    }
}

/// What would compute something else than this engine does.
fn refuse_variants(json: &Json, arch: Arch) -> Result<(), LoadError> {
    if let Some(act) = json.value("hidden_act")
        && act.as_str() != Some("silu")
    {
        return Err(json.unsupported("hidden_act", format!("{act} is not \"silu\"")));
    }
    for key in ["use_sliding_window", "mlp_bias"] {
        if json.flag(key)? {
            return Err(json.unsupported(key, "is on"));
        }
    }
    if json.value("quantization_config").is_some() {
        return Err(json.unsupported("quantization_config", "quantized folders are not read"));
    }
    // A qwen2 window counts only with `use_sliding_window`; others may say that theirs is off.
    if let Some(window) = json.value("sliding_window")
        && arch != Arch::Qwen2
        && json.value("use_sliding_window").is_none()
    {
        return Err(
            json.unsupported("sliding_window", format!("{window} is a window, all tokens are read here"))
        );
    }
    let full = |kind: &Value| kind.as_str() == Some("full_attention");
    if let Some(Value::Array(kinds)) = json.value("layer_types")
        && arch != Arch::KimiLinear
        && !kinds.iter().all(full)
    {
        return Err(json.unsupported("layer_types", "not every layer is \"full_attention\""));
    }
    Ok(())
}

/// `rope_parameters.rope_theta` (newer) or `rope_theta` (older); no frequency scaling.
fn rope_theta(json: &Json) -> Result<f32, LoadError> {
    const DEFAULT: f32 = 10_000.0;
    let mut theta = json.real("rope_theta")?;
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(inner) = json.object(key)? else { continue };
        let kind = inner.value("rope_type").or_else(|| inner.value("type"));
        if let Some(kind) = kind.filter(|kind| kind.as_str() != Some("default")) {
            return Err(json
                .unsupported(key, format!("rope type {} is not \"default\"", printable(&kind.to_string()))));
        }
        theta = inner.real("rope_theta")?.or(theta);
    }
    Ok(theta.unwrap_or(DEFAULT))
}

/// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.
pub(super) fn weights(folder: &Path) -> Result<Store, LoadError> {
    let mut store = Store::new(&folder.display().to_string());
    let index_path = folder.join("model.safetensors.index.json");
    let Some(index) = Json::read_if_there(&index_path)? else {
        add(&mut store, folder, "model.safetensors")?;
        return Ok(store);
    };
    let Some(Value::Object(map)) = index.value("weight_map") else { return Err(index.missing("weight_map")) };
    let mut shards: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (tensor, shard) in map {
        // A shard lies in the folder: a name that leads elsewhere is not followed.
        let plain = |shard: &&str| Path::new(shard).file_name().is_some_and(|name| name == *shard);
        let shard = shard.as_str().filter(plain).ok_or_else(|| {
            LoadError::damaged(&index.file, Item::tensor(tensor), "its shard is not a plain file name")
        })?;
        shards.entry(shard).or_default().insert(tensor);
    }
    for (shard, tensors) in shards {
        let before: BTreeSet<String> = add(&mut store, folder, shard)?.into_iter().collect();
        if let Some(absent) = tensors.iter().find(|tensor| !before.contains(**tensor)) {
            return Err(LoadError::missing(&folder.join(shard).display().to_string(), Item::tensor(absent)));
        }
    }
    Ok(store)
}

/// Adds one file's tensors; answers their names.
fn add(store: &mut Store, folder: &Path, name: &str) -> Result<Vec<String>, LoadError> {
    let path = folder.join(name);
    let file = path.display().to_string();
    let blob = Blob::map(&path)?;
    let tensors: Vec<(String, Stored)> = safetensors::read(&file, store.files.len(), blob.bytes())?;
    let names = tensors.iter().map(|(name, _)| name.clone()).collect();
    store.add(file, blob, tensors)?;
    Ok(names)
}

/// The text of a small file, if it exists.
pub(super) fn text_if_there(path: &Path) -> Result<Option<String>, LoadError> {
    if !path.is_file() {
        return Ok(None);
    }
    fs::read_to_string(path)
        .map(Some)
        .map_err(|source| LoadError::Read { file: path.display().to_string(), source })
}
