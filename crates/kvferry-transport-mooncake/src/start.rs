//! A transport over Mooncake's protocol.

use std::time::Duration;

use kvferry_transport::{
    Setup, TransportError,
    slots::{BlockEngine, EngineError, SlotOptions, Slots},
};

use crate::{Limits, MooncakeEngine};

/// How long a peer may be stopped with a block on its way before the block is given up and its slot fenced off. The room's own
/// deadlines are shorter.
const STALL: Duration = Duration::from_secs(30);

/// Starts an end of the `mooncake-tcp` transport.
///
/// # Errors
/// As [`Slots::new`].
pub fn start(setup: Setup, options: SlotOptions) -> Result<Slots, TransportError> {
    let bind = setup.bind;
    let limits = Limits {
        connect: setup.limits.connect,
        stall: STALL,
        connections: setup.limits.connections,
        ..Limits::default()
    };
    let engine = move || match MooncakeEngine::new(bind, limits.clone()) {
        Ok(engine) => Ok(Box::new(engine) as Box<dyn BlockEngine>),
        Err(error) => Err(EngineError::Failed {
            engine: "mooncake-tcp",
            action: "be started",
            reason: error.to_string(),
        }),
    };
    let usage = "write `mooncake-tcp://ADDRESS:PORT`";
    Slots::new(setup, options, ("mooncake-tcp", usage), Box::new(engine))
}
