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

use kvferry_plan::{CacheShape, LayerId, Part, PartShape};

use crate::{
    chat::ChatTemplate,
    checkpoint::{Checkpoint, LoadError, MlaConfig, ModelConfig},
    math::{Arith, Matrix, RopeTable},
    tokenizer::Tokenizer,
    weights::Layer,
};

/// The form in which attention is run, and so what is cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Attention {
    /// As the checkpoint has it: keys and values of each KV head, or latent rows in a model made with them.
    #[default]
    Gqa,
    /// Grouped queries are rewritten exactly as multi-head latent attention: one latent row for all heads.
    Mla,
}

/// The epsilon of the norms of latent attention, in models made with it. The engines of the field do not agree, and the
/// checkpoints do not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LatentEps {
    /// [`MlaConfig::LATENT_EPS`], as in the published model code.
    #[default]
    Published,
    /// The configuration's `rms_norm_eps`, as in all other norms.
    Configured,
}

/// How a model is prepared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LoadOptions {
    /// Form of attention.
    pub attention: Attention,
    /// Arithmetic.
    pub arith: Arith,
    /// Epsilon of the latents' norms.
    pub latent_eps: LatentEps,
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
    /// [`LoadError`] names the file and the tensor or key; [`LoadError::TooLarge`] comes before any weight is read.
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
        checkpoint.fits_memory()?;
        let config = checkpoint.config().clone();
        let latent = config.mla.is_some() || options.attention == Attention::Mla;
        let eps = match options.latent_eps {
            LatentEps::Published => MlaConfig::LATENT_EPS,
            LatentEps::Configured => config.rms_eps,
        };
        let mla = latent.then(|| config.to_mla());
        let mla = mla.map(|mla| MlaConfig { latent_norm: mla.latent_norm.map(|_| eps), ..mla });
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
            "{sha256} {} {}{}",
            if latent { "mla" } else { "gqa" },
            match arith {
                Arith::Canonical => "canonical",
                Arith::Fast => "fast",
            },
            match options.latent_eps {
                LatentEps::Configured if config.mla.is_some() => " latent-eps=configured",
                _ => "",
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

    /// What it caches, per token and per request.
    #[must_use]
    pub fn shape(&self) -> CacheShape {
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let layers = narrow(self.config.layers);
        match (&self.mla, &self.config.kda) {
            (Some(mla), Some(kda)) => {
                let full = (0..layers).map(LayerId).filter(|layer| !kda.has(*layer)).collect();
                let rows = PartShape::rows(Part::Latent, full, 1, narrow(mla.lora + mla.rope));
                let linear = kda.layers.iter().copied().map(LayerId).collect();
                let [conv, recurrent] =
                    CacheShape::kda(linear, narrow(kda.heads), narrow(kda.head_dim), narrow(kda.kernel));
                CacheShape { parts: vec![rows, conv, recurrent] }
            }
            (Some(mla), None) => CacheShape::mla(layers, narrow(mla.lora + mla.rope)),
            (None, _) => CacheShape::gqa(layers, narrow(self.config.kv_heads), narrow(self.config.head_dim)),
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
                    let packed =
                        checkpoint.layer(id).map(|tensors| Layer::pack(tensors, checkpoint.config(), mla));
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((layer, packed));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(layer, _)| *layer);
    done.into_iter().map(|(_, layer)| layer).collect()
}
