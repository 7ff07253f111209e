//! CPU engine: models, loaders, KV pools, rank groups and a scheduler.

pub mod chat;
pub mod checkpoint;
pub mod math;
pub mod tokenizer;
