//! Hand-offs over [NVIDIA NIXL](https://github.com/ai-dynamo/nixl): its own library moves the blocks, into landing slots
//! ([`kvferry_transport::slots`]).
//!
//! The library is `libnixl_capi.so` of the Python package `nixl-cu12`, a plain C interface with all that it needs beside it.
//! It is loaded when a transport is started, and found by `KVFERRY_NIXL_LIB` (its path), in the active virtual environment
//! (`VIRTUAL_ENV`), or by the loader. Nothing of it is needed to build this crate, and no Python runs.
//!
//! An agent uses NIXL's UCX backend on host memory. UCX takes its settings from the environment as usual:
//! `UCX_TLS=tcp` keeps it off other processes' memory, where containers forbid that. Only loopback is used unless
//! `UCX_NET_DEVICES` says otherwise.
//!
//! *Not* for the grants, digests and fences that make such an engine safe to use: these are [`kvferry_transport`]'s.

#![deny(unsafe_code)]

mod engine;
mod ffi;
mod library;
mod start;

pub use engine::NixlEngine;
pub use library::{INSTALL, located};
pub use start::start;
