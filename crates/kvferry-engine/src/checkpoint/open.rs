//! The checkpoint: open, check, read.

use super::{
    AttentionTensors, Blob, FfnTensors, GatedTensors, GqaTensors, Item, KdaTensors, LayerTensors, LoadError,
    MlaTensors, ModelConfig, MoeTensors, gguf,
    hf::{self, Json},
    memory,
    names::{Gated, Global, Input, Kind, Local, Naming},
    safetensors,
    store::{RowOrder, Store},
    text::Texts,
};
use crate::{chat::ChatTemplate, tokenizer::Tokenizer};
use kvferry_plan::LayerId;
use sha2::{Digest, Sha256};
use std::{collections::HashSet, fmt::Write, path::Path, sync::OnceLock};

/// An opened and checked model. Weights stay in the file until they are read, a layer at a time; every read
/// gives a fresh copy, so threads may read layers side by side.
#[derive(Debug)]
pub struct Checkpoint {
    name: String,
    config: ModelConfig,
    naming: Naming,
    store: Store,
    texts: Texts,
    digest: OnceLock<String>,
}

impl Checkpoint {
    /// Opens a GGUF file or a Hugging Face folder (`config.json` and `model.safetensors`, or its shards and
    /// their index). Every tensor is checked for presence, shape and bounds; weights are not read yet.
    ///
    /// # Errors
    /// [`LoadError`], for whatever is wrong; it names the file and the tensor or key.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        if path.is_dir() {
            return Self::open_folder(path);
        }
        let file = path.display().to_string();
        let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy();
        Self::open_gguf(&name, &file, Blob::map(path)?)
    }

    /// Opens a GGUF file that is in memory already. Messages call it `name`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_gguf(name: &str, file: Blob) -> Result<Self, LoadError> {
        Self::open_gguf(name, name, file)
    }

    /// Opens the contents of a `config.json` and of a safetensors file, without tokenizer or chat template.
    /// Messages call both `name`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_safetensors(name: &str, config: &[u8], weights: Blob) -> Result<Self, LoadError> {
        let config = hf::config(&Json::parse(name, config)?, None)?;
        let mut store = Store::new(name);
        let tensors = safetensors::read(name, 0, weights.bytes())?;
        store.add(name.to_owned(), weights, tensors)?;
        Self::checked(name, config, Naming::HuggingFace, store, Texts::None)
    }

    fn open_gguf(name: &str, file: &str, blob: Blob) -> Result<Self, LoadError> {
        let (metadata, store) = gguf::read(file, blob)?;
        let config = gguf::config(&metadata, &store)?;
        Self::checked(name, config, Naming::Gguf, store, Texts::Gguf(metadata))
    }

    fn open_folder(folder: &Path) -> Result<Self, LoadError> {
        let config = folder.join("config.json");
        if !config.is_file() {
            let reason = "the folder has no config.json".to_owned();
            return Err(LoadError::NotAModel { file: folder.display().to_string(), reason });
        }
        let generation = Json::read_if_there(&folder.join("generation_config.json"))?;
        let config = hf::config(&Json::read(&config)?, generation.as_ref())?;
        let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy();
        let texts = Texts::Folder(folder.to_owned());
        Self::checked(&name, config, Naming::HuggingFace, hf::weights(folder)?, texts)
    }

    /// Every tensor the model needs is there in its shape, and none that the engine would ignore.
    fn checked(
        name: &str,
        config: ModelConfig,
        naming: Naming,
        store: Store,
        texts: Texts,
    ) -> Result<Self, LoadError> {
        let mut known: HashSet<String> = HashSet::new();
        for tensor in Global::ALL {
            if tensor.wanted(&config) {
                store.expect(tensor.name(naming), &tensor.shape(&config))?;
            }
            // A tied model may store its head all the same.
            known.insert(tensor.name(naming).to_owned());
        }
        for layer in layers(&config) {
            for tensor in Local::all(&config, layer) {
                let name = store.pick(tensor.names(naming, &config, layer));
                store.expect(&name, &tensor.shape(&config, layer))?;
                known.insert(name);
            }
        }
        let drafts = config.layers..config.layers.saturating_add(config.draft_layers);
        let draft = |name: &str| {
            let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
            layer.and_then(|layer| layer.parse().ok()).is_some_and(|layer: usize| drafts.contains(&layer))
        };
        let derived = |name: &str| name.ends_with(".rotary_emb.inv_freq") || draft(name);
        if let Some(other) = store.names().filter(|name| !known.contains(*name) && !derived(name)).min() {
            let reason = format!("a {:?} model as this engine knows it has no such tensor", config.arch);
            return Err(LoadError::unsupported(&store.label, Item::tensor(other), reason));
        }
        Ok(Self { name: name.to_owned(), config, naming, store, texts, digest: OnceLock::new() })
    }

    /// What people call the model: the file's or folder's name, without `.gguf`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The model's numbers.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// SHA-256 of the weights file, in lower-case hexadecimal; of several files, in the order of their names, as
    /// if they were one. Computed at the first call, which reads all weights.
    pub fn digest(&self) -> &str {
        self.digest.get_or_init(|| {
            let mut hash = Sha256::new();
            for (_, blob) in &self.store.files {
                hash.update(blob.bytes());
            }
            hash.finalize().iter().fold(String::new(), |mut text, byte| {
                let _infallible = write!(text, "{byte:02x}");
                text
            })
        })
    }

    /// Token embedding, `[vocab][hidden]`.
    ///
    /// # Errors
    /// [`LoadError::Damaged`] when the file changed since it was opened.
    pub fn embedding(&self) -> Result<Vec<f32>, LoadError> {
        self.global(Global::Embedding)
    }

    /// RMSNorm weight after the last layer, `[hidden]`.
    ///
    /// # Errors
    /// As [`Self::embedding`].
    pub fn final_norm(&self) -> Result<Vec<f32>, LoadError> {
        self.global(Global::FinalNorm)
    }

    /// Output head, `[vocab][hidden]`; `None` when it is the embedding.
    ///
    /// # Errors
    /// As [`Self::embedding`].
    pub fn head(&self) -> Result<Option<Vec<f32>>, LoadError> {
        if self.config.tie_embeddings { Ok(None) } else { self.global(Global::Head).map(Some) }
    }

    /// One layer's weights.
    ///
    /// # Errors
    /// [`LoadError::NoSuchLayer`] for a layer that the model does not have; else as [`Self::embedding`].
    ///
    /// ```
    /// use kvferry_plan::LayerId;
    /// let checkpoint = kvferry_engine::checkpoint::embedded().unwrap();
    /// let (layer, config) = (checkpoint.layer(LayerId(3)).unwrap(), checkpoint.config());
    /// assert_eq!(layer.attn_norm.len(), config.hidden);
    /// assert!(checkpoint.layer(LayerId(4)).is_err());
    /// ```
    pub fn layer(&self, layer: LayerId) -> Result<LayerTensors, LoadError> {
        if layer.index() >= self.config.layers {
            return Err(LoadError::NoSuchLayer {
                file: self.store.label.clone(),
                layer,
                layers: self.config.layers,
            });
        }
        let read = |tensor: Local| self.local(tensor, layer);
        Ok(LayerTensors {
            attn_norm: read(Local::AttnNorm)?,
            attention: match Kind::of(&self.config, layer) {
                Kind::Gqa => AttentionTensors::Gqa(self.gqa(layer)?),
                Kind::Mla => AttentionTensors::Mla(self.mla(layer)?),
                Kind::Kda => AttentionTensors::Kda(self.kda(layer)?),
            },
            ffn_norm: read(Local::FfnNorm)?,
            ffn: self.ffn(layer)?,
        })
    }

    /// A tensor of a layer, its rotary rows in rotate-half order.
    fn local(&self, tensor: Local, layer: LayerId) -> Result<Vec<f32>, LoadError> {
        let config = &self.config;
        let turns = match (&config.mla, tensor) {
            (None, Local::Proj(Input::Q | Input::K) | Local::Bias(Input::Q | Input::K)) => {
                Some((config.head_dim, config.head_dim))
            }
            (Some(mla), Local::QB | Local::Proj(Input::Q)) => Some((mla.nope + mla.rope, mla.rope)),
            (Some(mla), Local::KvA) => Some((mla.lora + mla.rope, mla.rope)),
            _ => None,
        };
        let order = match turns.filter(|_| config.rope_pairs) {
            Some((head, turned)) => RowOrder::Interleaved { head, turned },
            None => RowOrder::Plain,
        };
        let name = self.store.pick(tensor.names(self.naming, config, layer));
        self.store.read(&name, &tensor.shape(config, layer), order)
    }

    fn gqa(&self, layer: LayerId) -> Result<GqaTensors, LoadError> {
        let read = |tensor: Local| self.local(tensor, layer);
        let bias = |input| self.config.qkv_bias.then(|| read(Local::Bias(input))).transpose();
        Ok(GqaTensors {
            q: read(Local::Proj(Input::Q))?,
            k: read(Local::Proj(Input::K))?,
            v: read(Local::Proj(Input::V))?,
            q_bias: bias(Input::Q)?,
            k_bias: bias(Input::K)?,
            v_bias: bias(Input::V)?,
            o: read(Local::O)?,
        })
    }

    fn mla(&self, layer: LayerId) -> Result<MlaTensors, LoadError> {
        let read = |tensor: Local| self.local(tensor, layer);
        let shape = self.config.to_mla();
        let latent_queries = shape.q_lora.is_some();
        let q_a = || Ok::<_, LoadError>((read(Local::QA)?, read(Local::QANorm)?));
        // Each head has its rows of keys, then its rows of values.
        let kv_b = read(Local::KvB)?;
        let head = (shape.nope + shape.v_dim) * shape.lora;
        let (mut w_uk, mut w_uv) = (Vec::new(), Vec::new());
        for head in kv_b.chunks_exact(head.max(1)) {
            let (keys, values) = head.split_at(shape.nope * shape.lora);
            w_uk.extend_from_slice(keys);
            w_uv.extend_from_slice(values);
        }
        Ok(MlaTensors {
            q_a: latent_queries.then(q_a).transpose()?,
            q: read(if latent_queries { Local::QB } else { Local::Proj(Input::Q) })?,
            q_bias: None,
            kv_a: read(Local::KvA)?,
            kv_a_bias: None,
            latent_norm: Some(read(Local::KvANorm)?),
            w_uk,
            w_uv,
            o: read(Local::O)?,
        })
    }

    fn kda(&self, layer: LayerId) -> Result<KdaTensors, LoadError> {
        let read = |tensor: Local| self.local(tensor, layer);
        let [q, k, v] = Input::ALL.map(|input| read(Local::Proj(input)));
        let [q_conv, k_conv, v_conv] = Input::ALL.map(|input| read(Local::Conv(input)));
        Ok(KdaTensors {
            qkv: [q?, k?, v?],
            conv: [q_conv?, k_conv?, v_conv?],
            decay_a: read(Local::DecayA)?,
            decay_b: read(Local::DecayB)?,
            decay_bias: read(Local::DecayBias)?,
            decay_log: read(Local::DecayLog)?,
            beta: read(Local::Beta)?,
            gate_a: read(Local::GateA)?,
            gate_b: read(Local::GateB)?,
            norm: read(Local::KdaNorm)?,
            o: read(Local::O)?,
        })
    }

    fn ffn(&self, layer: LayerId) -> Result<FfnTensors, LoadError> {
        let gated = |of: &dyn Fn(Gated) -> Local| {
            let read = |part| self.local(of(part), layer);
            Ok::<_, LoadError>(GatedTensors {
                gate: read(Gated::Gate)?,
                up: read(Gated::Up)?,
                down: read(Gated::Down)?,
            })
        };
        let moe = self.config.moe.as_ref().filter(|moe| layer.index() >= moe.dense_layers);
        let Some(moe) = moe else { return gated(&Local::Dense).map(FfnTensors::Dense) };
        let experts = u32::try_from(moe.experts).unwrap_or(u32::MAX);
        Ok(FfnTensors::Moe(MoeTensors {
            router: self.local(Local::Router, layer)?,
            bias: self.local(Local::RouterBias, layer)?,
            experts: (0..experts)
                .map(|expert| gated(&|part| Local::Expert(expert, part)))
                .collect::<Result<_, _>>()?,
            shared: (moe.shared_ffn > 0).then(|| gated(&Local::Shared)).transpose()?,
        }))
    }

    /// Refuses a model whose weights, as `f32`, are larger than the memory that can be had: before any is read.
    ///
    /// # Errors
    /// [`LoadError::TooLarge`] with both numbers.
    pub fn fits_memory(&self) -> Result<(), LoadError> {
        memory::fits(&self.store.label, self.store.elements())
    }

    /// The tokenizer: from the file or folder; latin-1 bytes when there is none and the vocabulary has 256
    /// entries; `None` for a model that is served by ids.
    ///
    /// # Errors
    /// [`LoadError`] when there is one and it is damaged.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>, LoadError> {
        self.texts.tokenizer(&self.store, &self.config)
    }

    /// The chat template, if the file or folder has one.
    ///
    /// # Errors
    /// [`LoadError`] when there is one and it is damaged.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, LoadError> {
        self.texts.chat_template(&self.store)
    }

    fn global(&self, tensor: Global) -> Result<Vec<f32>, LoadError> {
        self.store.read(tensor.name(self.naming), &tensor.shape(&self.config), RowOrder::Plain)
    }
}

fn layers(config: &ModelConfig) -> impl Iterator<Item = LayerId> {
    (0..u32::try_from(config.layers).unwrap_or(u32::MAX)).map(LayerId)
}
