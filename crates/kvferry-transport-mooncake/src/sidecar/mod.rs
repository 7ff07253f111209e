//! Mooncake's own engine, of the Python package `mooncake-transfer-engine-non-cuda`: it moves the blocks, into landing slots
//! ([`kvferry_transport::slots`]).
//!
//! The engine has no interface but Python's, no way to cancel, and one that waits by spinning. So it runs in processes of its
//! own, *sidecars*, which are told what to do over a socket and map the memory that it moves: no byte is copied on the way
//! to it. One sidecar per agent is written to by others; one per peer writes, and is ended when a write of its fails:
//! the only cancellation that there is. A write that failed is reported once its process is gone, so nothing is read for it
//! any more. A sidecar ends when its process does, whatever way that ends.
//!
//! Python is found by `KVFERRY_PYTHON`, in the active virtual environment (`VIRTUAL_ENV`), or on the path. Nothing of it is
//! needed to build this crate.
//!
//! The engine listens on all interfaces, has no authentication, and cannot be told otherwise: who reaches its ports can read
//! and write staging and landing slots. It runs only where somebody asks for it by name.
//!
//! *Not* for machines with RDMA or memory of devices: there it is untried, and kept to TCP.

mod engine;
mod packets;
mod process;
mod python;

use std::time::Duration;

use kvferry_transport::{
    Setup, TransportError,
    slots::{BlockEngine, EngineError, SlotOptions, Slots},
};

pub use engine::SidecarEngine;
pub use python::{INSTALL, Tuned};

use crate::outcomes::Outcomes;

/// What everybody should know who uses it.
pub const CAUTION: &str = "the engine of `--transport mooncake` listens on all interfaces and has no authentication: who reaches \
                           its ports can read and write what is on its way; use it where all who can are trusted";

/// A sidecar may have to start while a link is opened, or while its first block waits.
const PATIENCE: Duration = Duration::from_secs(10);

/// Starts an end of the `mooncake` transport.
///
/// # Errors
/// [`EngineError::Missing`] with the command that installs the package when it is not there; otherwise as [`Slots::new`].
pub fn start(setup: Setup, options: SlotOptions) -> Result<Slots, TransportError> {
    let mut setup = setup;
    setup.limits.connect = setup.limits.connect.max(PATIENCE);
    setup.limits.stall = setup.limits.stall.max(PATIENCE);
    let engine = || Ok(Box::new(SidecarEngine::new(Tuned::Blocks)?) as Box<dyn BlockEngine>);
    Slots::new(setup, options, ("mooncake", "write `mooncake://ADDRESS:PORT`"), Box::new(engine))
}

/// The package that a transport would use, whose engine is started for a trial: its name, its version, and the interpreter.
///
/// # Errors
/// [`EngineError::Missing`] when there is none, or one of another version.
pub fn located() -> Result<String, EngineError> {
    let ready = process::Sidecar::start(Tuned::Blocks, &Outcomes::default())?.ready()?;
    Ok(format!("{} with {}", ready.package, python::interpreter().display()))
}
