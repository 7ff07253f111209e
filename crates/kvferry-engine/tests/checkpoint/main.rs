//! Checkpoints through their public interface: formats against independent writers, hostile files, the MLA
//! rewriting, texts.

mod alloc;
mod folder;
mod gguf;
mod hostile;
mod mla;
mod text;
mod writer;
