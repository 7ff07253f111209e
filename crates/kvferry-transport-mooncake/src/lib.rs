//! The TCP protocol of [Mooncake's Transfer Engine](https://github.com/kvcache-ai/Mooncake), spoken natively.
//!
//! No code of Mooncake runs in that: it is a peer of its engines, in both roles. A [`Peer`] is asked what it has, told
//! things, and read and written over [`Lane`]s, many requests at a time. A [`Target`] is what other engines read and write: it
//! listens on loopback only, and a whole request must be inside what its [`Ranges`] grant.
//!
//! The protocol has no authentication, and no written specification: [`wire`] says what is spoken, and the tests hold it
//! against the engine of the Python package `mooncake-transfer-engine-non-cuda` 0.3.13.post1. Spoken is version 2, whose
//! writes are acknowledged; that is Mooncake 0.3.12 and later. Earlier engines are refused by name.
//!
//! [`start`] makes a kvferry transport of it: [`MooncakeEngine`] moves blocks into the landing slots of
//! [`kvferry_transport::slots`], and takes writes only inside of a slot that is granted at that moment.
//!
//! [`sidecar`] is another transport: there the package's own engine moves the bytes.
//!
//! *Not* for RDMA, for memory of devices, or for metadata servers: peers are named by the address of their control port.

#![forbid(unsafe_code)]

mod engine;
mod error;
mod lane;
mod limits;
mod memory;
mod outcomes;
mod peer;
mod sender;
pub mod sidecar;
mod start;
mod stream;
mod target;
pub mod wire;

pub use engine::MooncakeEngine;
pub use error::MooncakeError;
pub use lane::{Lane, Read, Write};
pub use limits::Limits;
pub use peer::Peer;
pub use start::start;
pub use target::{Access, Ranges, Received, Target, TargetStats};
pub use wire::{Address, Description, Notification, Region};
