//! The numbers that define a model.

use super::{Item, LoadError};

/// A model architecture. Both are pre-norm transformers with RMSNorm, GQA, rotary positions and SwiGLU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Arch {
    /// Llama and its kin (SmolLM2).
    Llama,
    /// Qwen 2 and 2.5: llama with biases on q, k and v.
    Qwen2,
}

/// The numbers that define a model, checked: none is zero, heads divide evenly, head dimensions are even.
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
    /// Key/value heads; divides `heads`. Query head `h` reads KV head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Elements of one head; even.
    pub head_dim: usize,
    /// Inner width of the feed-forward network.
    pub ffn: usize,
    /// Vocabulary: rows of the embedding.
    pub vocab: usize,
    /// Base of the rotary frequency ladder: pair `i` turns by `theta^(-2i/head_dim)` a token.
    pub rope_theta: f32,
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
}

impl ModelConfig {
    /// Query heads per KV head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// Refuses numbers that no model has, so that later arithmetic on them can neither overflow nor divide by
    /// zero, and so that nothing derived from them is out of proportion to the file.
    pub(super) fn check(self, file: &str) -> Result<Self, LoadError> {
        const WIDEST: usize = 1 << 20;
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
        if !self.head_dim.is_multiple_of(2) {
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
        for token in self.bos.iter().chain(&self.eos) {
            if usize::try_from(*token).is_ok_and(|t| t >= self.vocab) {
                let reason = format!("token {token} is outside the vocabulary of {}", self.vocab);
                return Err(damaged("special tokens", reason));
            }
        }
        Ok(self)
    }
}
