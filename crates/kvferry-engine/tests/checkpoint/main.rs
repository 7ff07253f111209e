//! Checkpoints through their public interface: formats against independent writers, hostile files, the MLA
//! rewriting, texts.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod alloc;
mod folder;
mod gguf;
mod hostile;
mod hybrid;
mod mla;
mod text;
mod writer;
