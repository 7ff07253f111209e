//! A model ready to run: weights packed for the kernels, one copy that all ranks share.

use std::sync::Arc;
use std::{
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use kvferry_plan::{CacheShape, LayerId, Part};

use crate::{
    chat::ChatTemplate,
    checkpoint::{Checkpoint, LayerTensors, LoadError, MlaConfig, MlaTensors, ModelConfig},
    math::{Arith, Matrix, RopeTable, RowParallel},
    tokenizer::Tokenizer,
};

/// Columns of the feed-forward network that are summed as one unit, whole on one rank.
pub(crate) const FFN_UNIT: usize = 64;

/// The form in which attention is run, and so what is cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Attention {
    /// As the checkpoint has it: keys and values of each KV head.
    #[default]
    Gqa,
    /// Rewritten exactly as multi-head latent attention: one latent row for all heads.
    Mla,
}

/// How a model is prepared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LoadOptions {
    /// Form of attention.
    pub attention: Attention,
    /// Arithmetic.
    pub arith: Arith,
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
    pub(crate) q: Matrix,
    pub(crate) q_bias: Option<Vec<f32>>,
    pub(crate) kv_a: Matrix,
    pub(crate) kv_a_bias: Option<Vec<f32>>,
    /// Per head `[lora][nope]`: applied to a query, it gives the query's latent part. Empty when `nope` is 0.
    pub(crate) w_uk: Vec<Matrix>,
    /// Per head `[v_dim][lora]`.
    pub(crate) w_uv: Vec<Matrix>,
    /// Units are query heads.
    pub(crate) o: RowParallel,
}

/// Weights of a layer's attention.
#[derive(Debug)]
pub(crate) enum AttentionWeights {
    Gqa(GqaWeights),
    Mla(MlaWeights),
}

/// Weights of a layer.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attn_norm: Vec<f32>,
    pub(crate) attention: AttentionWeights,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) gate: Matrix,
    pub(crate) up: Matrix,
    /// Units are [`FFN_UNIT`] columns, the last one padded with zeros.
    pub(crate) down: RowParallel,
}

/// A loaded model.
#[derive(Debug)]
pub struct Model {
    name: String,
    sha256: String,
    digest: String,
    config: ModelConfig,
    options: LoadOptions,
    mla: Option<MlaConfig>,
    /// Absent when the output head is the embedding.
    embedding: Option<Vec<f32>>,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    head: Matrix,
    tokenizer: Option<Tokenizer>,
    chat_template: Option<ChatTemplate>,
}

impl Model {
    /// Loads a GGUF file or a Hugging Face folder, on all cores.
    ///
    /// # Errors
    /// [`LoadError`] names the file and the tensor or key.
    pub fn load(path: &Path, options: LoadOptions) -> Result<Arc<Self>, LoadError> {
        Self::from_checkpoint(&Checkpoint::open(path)?, options)
    }

    /// Prepares an open checkpoint.
    ///
    /// # Errors
    /// As [`Model::load`].
    ///
    /// ```
    /// use kvferry_engine::{LoadOptions, Model, checkpoint};
    /// let model = Model::from_checkpoint(&checkpoint::embedded()?, LoadOptions::default())?;
    /// assert_eq!(model.config().layers, 4);
    /// # Ok::<(), checkpoint::LoadError>(())
    /// ```
    pub fn from_checkpoint(checkpoint: &Checkpoint, options: LoadOptions) -> Result<Arc<Self>, LoadError> {
        let config = checkpoint.config().clone();
        let mla = (options.attention == Attention::Mla).then(|| config.to_mla());
        let arith = options.arith;
        let (layers, sha256) = thread::scope(|scope| {
            let sha256 = scope.spawn(|| checkpoint.digest().to_owned());
            let layers = layers(checkpoint, mla.as_ref());
            // A thread that panicked is a defect; it goes on here as one.
            let sha256 = sha256.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            layers.map(|layers| (layers, sha256))
        })?;
        let embedding = checkpoint.embedding()?;
        let (embedding, head) = match checkpoint.head()? {
            Some(head) => (Some(embedding), head),
            None => (None, embedding),
        };
        let digest = format!(
            "{sha256} {} {}",
            match options.attention {
                Attention::Gqa => "gqa",
                Attention::Mla => "mla",
            },
            match arith {
                Arith::Canonical => "canonical",
                Arith::Fast => "fast",
            }
        );
        Ok(Arc::new(Self {
            name: checkpoint.name().to_owned(),
            sha256,
            digest,
            options,
            mla,
            embedding,
            layers,
            final_norm: checkpoint.final_norm()?,
            head: Matrix::new(config.vocab, config.hidden, &head),
            tokenizer: checkpoint.tokenizer()?,
            chat_template: checkpoint.chat_template()?,
            config,
        }))
    }

    /// What people call it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// SHA-256 of the weights file, hexadecimal.
    #[must_use]
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Identity of the weights and of how they are used (form of attention, arithmetic): two instances with the same
    /// digest compute the same cache.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The model's numbers.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How it was prepared.
    #[must_use]
    pub fn options(&self) -> LoadOptions {
        self.options
    }

    /// What it caches per token.
    #[must_use]
    pub fn shape(&self) -> CacheShape {
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let layers = narrow(self.config.layers);
        match &self.mla {
            Some(mla) => CacheShape::mla(layers, narrow(mla.lora + mla.rope)),
            None => CacheShape::gqa(layers, narrow(self.config.kv_heads), narrow(self.config.head_dim)),
        }
    }

    /// End-of-sequence ids.
    #[must_use]
    pub fn eos(&self) -> &[u32] {
        &self.config.eos
    }

    /// The tokenizer; `None` for a model that is served by ids.
    #[must_use]
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// The chat template, if the checkpoint has one.
    #[must_use]
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    pub(crate) fn arith(&self) -> Arith {
        self.options.arith
    }

    pub(crate) fn mla(&self) -> Option<&MlaConfig> {
        self.mla.as_ref()
    }

    /// The part whose token map tells which rows a rank computes; all parts share it.
    pub(crate) fn first_part(&self) -> Part {
        if self.mla.is_some() { Part::Latent } else { Part::Key }
    }

    /// Rotations of the first `positions` positions. The longest context that a checkpoint claims says nothing about
    /// what an engine can hold, so the table is as long as the engine's longest sequence.
    pub(crate) fn rope(&self, positions: usize) -> RopeTable {
        let ladder = self.mla.as_ref().map_or(self.config.head_dim, |mla| mla.rope_ladder);
        RopeTable::new(ladder, f64::from(self.config.rope_theta), positions)
    }

    /// Factor on scores before the softmax.
    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.config.head_dim as f32).sqrt()
    }

    pub(crate) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    pub(crate) fn final_norm(&self) -> &[f32] {
        &self.final_norm
    }

    pub(crate) fn head(&self) -> &Matrix {
        &self.head
    }

    pub(crate) fn ffn_units(&self) -> usize {
        self.config.ffn.div_ceil(FFN_UNIT)
    }

    /// The embedding of `token`, `[hidden]`; zeros for an id that is not in the vocabulary.
    pub(crate) fn embed(&self, token: u32, row: &mut [f32]) {
        let token = token as usize;
        if token >= self.config.vocab {
            row.fill(0.0);
            return;
        }
        match &self.embedding {
            Some(embedding) => {
                row.copy_from_slice(&embedding[token * self.config.hidden..][..self.config.hidden]);
            }
            None => self.head.row(token, row),
        }
    }
}

/// Reads and packs all layers, on all cores.
fn layers(checkpoint: &Checkpoint, mla: Option<&MlaConfig>) -> Result<Vec<Layer>, LoadError> {
    let count = checkpoint.config().layers;
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Result<Layer, LoadError>)>> = Mutex::new(Vec::with_capacity(count));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from).min(count) {
            scope.spawn(|| {
                loop {
                    let layer = next.fetch_add(1, Ordering::Relaxed);
                    if layer >= count {
                        break;
                    }
                    let id = LayerId(u32::try_from(layer).unwrap_or(u32::MAX));
                    let packed = checkpoint.layer(id).map(|tensors| pack(tensors, checkpoint.config(), mla));
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((layer, packed));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(layer, _)| *layer);
    done.into_iter().map(|(_, layer)| layer).collect()
}

fn pack(tensors: LayerTensors, config: &ModelConfig, mla: Option<&MlaConfig>) -> Layer {
    let (hidden, heads, dim) = (config.hidden, config.heads, config.head_dim);
    let latent = mla.map(|mla| pack_mla(tensors.to_mla(config), mla, hidden));
    let LayerTensors { attn_norm, q, k, v, q_bias, k_bias, v_bias, o, ffn_norm, gate, up, down } = tensors;
    let attention = latent.map_or_else(
        || {
            AttentionWeights::Gqa(GqaWeights {
                q: Matrix::new(heads * dim, hidden, &q),
                k: Matrix::new(config.kv_heads * dim, hidden, &k),
                v: Matrix::new(config.kv_heads * dim, hidden, &v),
                q_bias,
                k_bias,
                v_bias,
                o: RowParallel::new(hidden, dim, heads, &o),
            })
        },
        AttentionWeights::Mla,
    );
    let units = config.ffn.div_ceil(FFN_UNIT);
    let padded = units * FFN_UNIT;
    let more_rows = |mut matrix: Vec<f32>| {
        matrix.resize(padded * hidden, 0.0);
        matrix
    };
    let down = if padded == config.ffn {
        down
    } else {
        let mut wide = vec![0.0; hidden * padded];
        for (to, from) in wide.chunks_exact_mut(padded).zip(down.chunks_exact(config.ffn)) {
            to[..config.ffn].copy_from_slice(from);
        }
        wide
    };
    Layer {
        attn_norm,
        attention,
        ffn_norm,
        gate: Matrix::new(padded, hidden, &more_rows(gate)),
        up: Matrix::new(padded, hidden, &more_rows(up)),
        down: RowParallel::new(hidden, FFN_UNIT, units, &down),
    }
}

fn pack_mla(tensors: MlaTensors, mla: &MlaConfig, hidden: usize) -> MlaWeights {
    let transposed = |w: &[f32]| {
        let mut turned = vec![0.0; w.len()];
        for (i, row) in w.chunks_exact(mla.lora).enumerate() {
            for (j, value) in row.iter().enumerate() {
                turned[j * mla.nope + i] = *value;
            }
        }
        Matrix::new(mla.lora, mla.nope, &turned)
    };
    MlaWeights {
        q: Matrix::new(mla.heads * (mla.nope + mla.rope), hidden, &tensors.q),
        q_bias: tensors.q_bias,
        kv_a: Matrix::new(mla.lora + mla.rope, hidden, &tensors.kv_a),
        kv_a_bias: tensors.kv_a_bias,
        w_uk: tensors.w_uk.chunks_exact((mla.nope * mla.lora).max(1)).map(transposed).collect(),
        w_uv: tensors
            .w_uv
            .chunks_exact(mla.v_dim * mla.lora)
            .map(|w| Matrix::new(mla.v_dim, mla.lora, w))
            .collect(),
        o: RowParallel::new(hidden, mla.v_dim, mla.heads, &tensors.o),
    }
}
