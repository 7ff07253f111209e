//! A transport over NIXL.

#![forbid(unsafe_code)]

use kvferry_transport::{
    Setup, TransportError,
    slots::{BlockEngine, SlotOptions, Slots},
};

use crate::NixlEngine;

/// Starts an end of the `nixl` transport.
///
/// # Errors
/// [`kvferry_transport::slots::EngineError::Missing`] with the command that installs the library when it is not there;
/// otherwise as [`Slots::new`].
pub fn start(setup: Setup, options: SlotOptions) -> Result<Slots, TransportError> {
    let engine = || Ok(Box::new(NixlEngine::new()?) as Box<dyn BlockEngine>);
    Slots::new(setup, options, ("nixl", "write `nixl://ADDRESS:PORT`"), Box::new(engine))
}
