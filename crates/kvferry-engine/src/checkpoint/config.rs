//! The numbers that define a model.

use super::{Item, KdaConfig, LoadError, MlaConfig, MoeConfig};

/// A model architecture. All are pre-norm transformers with RMSNorm and SwiGLU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Arch {
    /// Llama and its kin (SmolLM2): grouped queries, rotary positions.
    Llama,
    /// Qwen 2 and 2.5: llama with biases on q, k and v.
    Qwen2,
    /// DeepSeek V3: latent attention with rotary positions, and experts.
    DeepseekV3,
    /// Kimi Linear: layers of Kimi delta attention among layers of latent attention without positions; experts.
    KimiLinear,
}

/// The numbers that define a model, checked: none is zero, heads divide evenly, what turns is even.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture.
    pub arch: Arch,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`. Query head `h` reads KV head `h / (heads / kv_heads)`. With latent attention
    /// every head has its own.
    pub kv_heads: usize,
    /// Elements of one head of queries and keys.
    pub head_dim: usize,
    /// Inner width of the feed-forward network; of one without experts where there are such.
    pub ffn: usize,
    /// Vocabulary: rows of the embedding.
    pub vocab: usize,
    /// Base of the rotary frequency ladder: pair `i` turns by `theta^(-2i/head_dim)` a token.
    pub rope_theta: f32,
    /// Rotary rows lie in the file as pairs side by side; they are read in rotate-half order.
    pub rope_pairs: bool,
    /// Added to the mean square in RMSNorm.
    pub rms_eps: f32,
    /// Longest sequence the model was made for, in tokens.
    pub max_position: u32,
    /// Token that begins a text, if there is one.
    pub bos: Option<u32>,
    /// Tokens that end a text; may be empty.
    pub eos: Vec<u32>,
    /// The output head is the embedding.
    pub tie_embeddings: bool,
    /// q, k and v have biases.
    pub qkv_bias: bool,
    /// Latent attention; absent in models with grouped queries.
    pub mla: Option<MlaConfig>,
    /// Kimi delta attention, in the layers that it names.
    pub kda: Option<KdaConfig>,
    /// Experts.
    pub moe: Option<MoeConfig>,
    /// Layers after the last one that only guess ahead: their tensors may be there and are not read.
    pub draft_layers: usize,
}

/// Most of anything that a width, a height or a count of layers can be.
const WIDEST: usize = 1 << 20;

/// A key and what is wrong with it.
type Wrong = (&'static str, String);

/// Sizes that must be between 1 and their largest.
fn between<const N: usize>(sizes: [(&'static str, usize, usize); N]) -> Result<(), Wrong> {
    match sizes.into_iter().find(|(_, value, most)| *value == 0 || value > most) {
        Some((what, value, most)) => Err((what, format!("{value} is not between 1 and {most}"))),
        None => Ok(()),
    }
}

impl ModelConfig {
    /// Query heads per KV head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// Longest sequence that may be asked for, in tokens: what the model was made for, or any where its attention knows no
    /// positions (Kimi Linear), so that no token is out of place.
    #[must_use]
    pub fn longest_possible(&self) -> u32 {
        let without_positions = self.mla.as_ref().is_some_and(|mla| mla.rope_ladder == 0);
        if without_positions { u32::MAX } else { self.max_position }
    }

    /// Longest sequence that is served when `asked` is asked for: what the model was made for when nobody asks.
    ///
    /// ```
    /// use kvferry_engine::checkpoint::Embedded;
    /// let longest = |model: Embedded, asked| model.open().unwrap().config().longest(asked);
    /// assert_eq!(longest(Embedded::KimiLinearTiny, None), 4096);
    /// assert_eq!(longest(Embedded::KimiLinearTiny, Some(10_000)), 10_000);
    /// assert_eq!(longest(Embedded::LlamaTiny, Some(1_000_000)), longest(Embedded::LlamaTiny, None));
    /// ```
    #[must_use]
    pub fn longest(&self, asked: Option<u32>) -> u32 {
        asked.map_or(self.max_position, |asked| asked.min(self.longest_possible()))
    }

    /// Refuses numbers that no model has, so that later arithmetic on them can neither overflow nor divide by
    /// zero, and so that nothing derived from them is out of proportion to the file.
    pub(super) fn check(self, file: &str) -> Result<Self, LoadError> {
        const LONGEST: usize = 1 << 28;
        let sizes = [
            ("layers", self.layers, WIDEST),
            ("hidden size", self.hidden, WIDEST),
            ("attention heads", self.heads, WIDEST),
            ("key/value heads", self.kv_heads, WIDEST),
            ("head dimension", self.head_dim, WIDEST),
            ("feed-forward size", self.ffn, WIDEST),
            ("vocabulary", self.vocab, LONGEST),
        ];
        let damaged = |key: &str, reason: String| LoadError::damaged(file, Item::key(key), reason);
        for (what, value, most) in sizes {
            if value == 0 || value > most {
                return Err(damaged(what, format!("{value} is not between 1 and {most}")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let reason = format!("{} query heads are no multiple of {} kv heads", self.heads, self.kv_heads);
            return Err(damaged("key/value heads", reason));
        }
        if self.mla.is_none() && !self.head_dim.is_multiple_of(2) {
            return Err(damaged("head dimension", format!("{} is odd, rotary needs pairs", self.head_dim)));
        }
        if self.heads * self.head_dim > 64 * self.hidden {
            let reason = format!(
                "{} heads of {} elements are more than 64 times the hidden size {}",
                self.heads, self.head_dim, self.hidden
            );
            return Err(damaged("attention heads", reason));
        }
        for (what, value) in [("rope theta", self.rope_theta), ("rms epsilon", self.rms_eps)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(damaged(what, format!("{value} is not a positive number")));
            }
        }
        if self.max_position == 0 {
            return Err(damaged("max position", "0 tokens fit".to_owned()));
        }
        let wrong = |(key, reason): (&str, String)| damaged(key, reason);
        self.mla.as_ref().map_or(Ok(()), |mla| self.check_mla(mla)).map_err(wrong)?;
        self.kda.as_ref().map_or(Ok(()), |kda| self.check_kda(kda)).map_err(wrong)?;
        self.moe.as_ref().map_or(Ok(()), |moe| self.check_moe(moe)).map_err(wrong)?;
        for token in self.bos.iter().chain(&self.eos) {
            if usize::try_from(*token).is_ok_and(|t| t >= self.vocab) {
                let reason = format!("token {token} is outside the vocabulary of {}", self.vocab);
                return Err(damaged("special tokens", reason));
            }
        }
        Ok(self)
    }

    fn check_mla(&self, mla: &MlaConfig) -> Result<(), Wrong> {
        between([
            ("latent size", mla.lora, WIDEST),
            ("query latent size", mla.q_lora.unwrap_or(1), WIDEST),
            ("rotary part", mla.rope, WIDEST),
            ("position-free part", mla.nope, WIDEST),
            ("value head dimension", mla.v_dim, WIDEST),
        ])?;
        if !mla.rope.is_multiple_of(2) {
            return Err(("rotary part", format!("{} is odd, rotary needs pairs", mla.rope)));
        }
        // Per-head matrices of queries and values, and the row that is cached.
        let widest = 64 * self.hidden;
        let wide = [("value heads", mla.heads * mla.v_dim), ("latent size", mla.lora + mla.rope)];
        match wide.into_iter().find(|(_, elements)| *elements > widest) {
            Some((what, elements)) => Err((
                what,
                format!("{elements} elements are more than 64 times the hidden size {}", self.hidden),
            )),
            None => Ok(()),
        }
    }

    fn check_kda(&self, kda: &KdaConfig) -> Result<(), Wrong> {
        // A head's state is the square of its size.
        between([
            ("linear attention heads", kda.heads, WIDEST),
            ("linear attention head dimension", kda.head_dim, 1024),
            ("convolution taps", kda.kernel, 64),
        ])?;
        if kda.kernel < 2 {
            return Err(("convolution taps", "1 tap leaves no state".into()));
        }
        if kda.channels() > 64 * self.hidden {
            let reason =
                format!("{} channels are more than 64 times the hidden size {}", kda.channels(), self.hidden);
            return Err(("linear attention heads", reason));
        }
        let last = kda.layers.last().map_or(0, |layer| *layer as usize);
        if last >= self.layers || !kda.layers.is_sorted_by(|a, b| a < b) {
            return Err((
                "linear attention layers",
                format!("they are not layers 1 to {}, each once", self.layers),
            ));
        }
        if kda.layers.len() >= self.layers {
            return Err(("linear attention layers", "no layer is left for full attention".into()));
        }
        Ok(())
    }

    fn check_moe(&self, moe: &MoeConfig) -> Result<(), Wrong> {
        between([
            ("experts", moe.experts, 1 << 16),
            ("expert groups", moe.groups, moe.experts.max(1)),
            ("groups per token", moe.groups_per_token, moe.groups.max(1)),
            ("expert size", moe.ffn, WIDEST),
            ("shared expert size", moe.shared_ffn.max(1), WIDEST),
        ])?;
        let of_group = moe.experts / moe.groups;
        if !moe.experts.is_multiple_of(moe.groups) || (moe.groups > 1 && of_group < 2) {
            let reason = format!("{} experts make no {} groups of at least 2", moe.experts, moe.groups);
            return Err(("expert groups", reason));
        }
        between([("experts per token", moe.per_token, of_group * moe.groups_per_token)])?;
        if !(moe.scale.is_finite() && moe.scale > 0.0) {
            return Err(("routed scaling factor", format!("{} is not a positive number", moe.scale)));
        }
        Ok(())
    }
}
