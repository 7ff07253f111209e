//! The checkpoints that are part of the program.

use super::{Checkpoint, LoadError};

/// A checkpoint that is part of the program, for use when no real model can be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Embedded {
    /// A Kimi Linear of 0.6 million parameters that were constructed, not trained (4 layers, one of them latent attention,
    /// three Kimi delta attention; experts whose output is zero). It reads bytes and finds needles: after ` The code of
    /// NAME is DIGITS. ` anywhere, ` Q: The code of NAME is ` is continued with `DIGITS.`, out of latent rows; after the
    /// bytes `02 K X`, `03 K` is continued with `X`, out of the state.
    #[default]
    NeedleKimi,
    /// A tiny llama with random weights (4 layers, 8 query and 4 KV heads, vocabulary 512, no tokenizer). It proves
    /// arithmetic and transfers; its text means nothing.
    LlamaTiny,
    /// Kimi Linear with random weights: 8 layers, 2 of them latent attention; 8 heads, 8 experts, vocabulary 512.
    KimiLinearTiny,
    /// DeepSeek V3 with random weights: 4 layers of latent attention, 8 heads, 8 experts, vocabulary 512.
    DeepseekV3Tiny,
}

impl Embedded {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::NeedleKimi, Self::LlamaTiny, Self::KimiLinearTiny, Self::DeepseekV3Tiny];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NeedleKimi => "needle_kimi",
            Self::LlamaTiny => "llama_tiny",
            Self::KimiLinearTiny => "kimi_linear_tiny",
            Self::DeepseekV3Tiny => "deepseek_v3_tiny",
        }
    }

    /// Opens it.
    ///
    /// # Errors
    /// None in practice: the tests open all.
    ///
    /// ```
    /// use kvferry_engine::checkpoint::Embedded;
    /// let checkpoint = Embedded::NeedleKimi.open()?;
    /// assert_eq!(checkpoint.config().kda.as_ref().map(|kda| kda.layers.as_slice()), Some(&[0, 1, 3][..]));
    /// // Its vocabulary are the bytes of latin-1 text.
    /// assert!(checkpoint.tokenizer()?.is_some());
    /// # Ok::<(), kvferry_engine::checkpoint::LoadError>(())
    /// ```
    pub fn open(self) -> Result<Checkpoint, LoadError> {
        let (config, weights): (&[u8], &'static [u8]) = match self {
            Self::NeedleKimi => (
                include_bytes!("../../models/needle_kimi/config.json"),
                include_bytes!("../../models/needle_kimi/model.safetensors"),
            ),
            Self::LlamaTiny => (
                include_bytes!("../../models/llama_tiny/config.json"),
                include_bytes!("../../models/llama_tiny/model.safetensors"),
            ),
            // These two are also what the tests compare with transformers.
            Self::KimiLinearTiny => (
                include_bytes!("../../tests/data/kimi_linear_tiny/config.json"),
                include_bytes!("../../tests/data/kimi_linear_tiny/model.safetensors"),
            ),
            Self::DeepseekV3Tiny => (
                include_bytes!("../../tests/data/deepseek_v3_tiny/config.json"),
                include_bytes!("../../tests/data/deepseek_v3_tiny/model.safetensors"),
            ),
        };
        Checkpoint::from_safetensors(self.name(), config, weights.into())
    }
}

/// [`Embedded::LlamaTiny`], opened.
///
/// # Errors
/// As [`Embedded::open`].
///
/// ```
/// let checkpoint = kvferry_engine::checkpoint::embedded().unwrap();
/// assert_eq!(checkpoint.config().layers, 4);
/// assert!(checkpoint.tokenizer().unwrap().is_none());
/// ```
pub fn embedded() -> Result<Checkpoint, LoadError> {
    Embedded::LlamaTiny.open()
}
