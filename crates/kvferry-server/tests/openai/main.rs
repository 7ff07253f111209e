//! The OpenAI-compatible API of a process that serves the built-in model alone, over HTTP.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod answers;
mod errors;
mod leaving;
mod server;
mod streams;
mod words;
