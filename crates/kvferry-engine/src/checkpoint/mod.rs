//! Model files: what they hold, as plain row-major `f32` in one order of axes and rotary halves.
//!
//! [`Checkpoint::open`] reads a GGUF file or a Hugging Face folder and checks all of it (sizes, shapes, names,
//! bounds) before any weight is read, so that the forward pass sees one kind of model whatever the file was.
//! A file is never trusted: whatever its bytes are, the answer is a checkpoint or a [`LoadError`] that names the
//! file and the tensor or key.
//!
//! It is *not* for quantised arithmetic (weights are dequantised when they are read), nor for deciding who holds
//! which slice of a matrix (the engine cuts by `kvferry_plan`'s split rule).

mod blob;
mod config;
mod embedded;
mod error;
mod gguf;
mod hf;
mod hybrid;
mod kda;
mod layer;
mod memory;
mod mla;
mod mmap;
mod moe;
mod names;
mod open;
mod quant;
mod safetensors;
mod store;
mod text;
mod tiktoken;

pub use blob::Blob;
pub use config::{Arch, ModelConfig};
pub use embedded::{Embedded, embedded};
pub use error::{Item, LoadError};
pub use kda::{KdaConfig, KdaTensors};
pub use layer::{AttentionTensors, FfnTensors, GatedTensors, GqaTensors, LayerTensors};
pub(crate) use memory::available;
pub use mla::{MlaConfig, MlaTensors};
pub use moe::{MoeConfig, MoeTensors};
pub use open::Checkpoint;
