//! The checkpoint that is part of the program.

use super::{Checkpoint, LoadError};

/// A tiny llama with random weights (4 layers, 8 query and 4 KV heads, vocabulary 512, no tokenizer), for use
/// when no real model can be had. It proves arithmetic and transfers; its text means nothing.
///
/// # Errors
/// None in practice: the tests open it.
///
/// ```
/// let checkpoint = kvferry_engine::checkpoint::embedded().unwrap();
/// assert_eq!(checkpoint.config().layers, 4);
/// assert!(checkpoint.tokenizer().unwrap().is_none());
/// ```
pub fn embedded() -> Result<Checkpoint, LoadError> {
    const CONFIG: &[u8] = include_bytes!("../../models/llama_tiny/config.json");
    const WEIGHTS: &[u8] = include_bytes!("../../models/llama_tiny/model.safetensors");
    Checkpoint::from_safetensors("llama_tiny", CONFIG, WEIGHTS.into())
}
