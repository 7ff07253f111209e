//! What it takes to speak for a model without running it: its name, its vocabulary and how text becomes tokens.
//!
//! *Not* for weights: a process that only routes requests has a voice and no [`Model`].

#![forbid(unsafe_code)]

use crate::{
    Model,
    chat::ChatTemplate,
    checkpoint::{Checkpoint, LoadError},
    tokenizer::Tokenizer,
};

/// A model's name, vocabulary, tokenizer and chat template.
#[derive(Clone, Debug)]
pub struct Voice {
    /// What clients call the model.
    pub name: String,
    /// SHA-256 of the weights, hexadecimal: whom it speaks for.
    pub sha256: String,
    /// Token ids are below this.
    pub vocab: u32,
    /// Ids that end a text.
    pub eos: Vec<u32>,
    /// `None` for a model that is served by ids.
    pub tokenizer: Option<Tokenizer>,
    /// `None` for a model that was not made for conversations.
    pub chat_template: Option<ChatTemplate>,
}

impl Voice {
    /// Reads what a checkpoint says of texts; its weights are digested, not loaded.
    ///
    /// # Errors
    /// [`LoadError`] when the tokenizer or the chat template is damaged.
    ///
    /// ```
    /// use kvferry_engine::{Voice, checkpoint};
    /// let voice = Voice::from_checkpoint(&checkpoint::embedded()?)?;
    /// assert_eq!((voice.name.as_str(), voice.vocab), ("llama_tiny", 512));
    /// assert!(voice.tokenizer.is_none());
    /// # Ok::<(), checkpoint::LoadError>(())
    /// ```
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self, LoadError> {
        let config = checkpoint.config();
        Ok(Self {
            name: checkpoint.name().to_owned(),
            sha256: checkpoint.digest().to_owned(),
            vocab: u32::try_from(config.vocab).unwrap_or(u32::MAX),
            eos: config.eos.clone(),
            tokenizer: checkpoint.tokenizer()?,
            chat_template: checkpoint.chat_template()?,
        })
    }
}

impl From<&Model> for Voice {
    fn from(model: &Model) -> Self {
        Self {
            name: model.name().to_owned(),
            sha256: model.sha256().to_owned(),
            vocab: u32::try_from(model.config().vocab).unwrap_or(u32::MAX),
            eos: model.eos().to_vec(),
            tokenizer: model.tokenizer().cloned(),
            chat_template: model.chat_template().cloned(),
        }
    }
}
