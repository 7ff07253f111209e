//! Landing slots: a push over an engine that moves blocks between registered memory and knows nothing of grants.
//!
//! Such engines (NIXL, Mooncake) write where the sender says, and go on writing after a failure was reported or a request
//! released. So they never write into a pool. The source packs a chunk's rows into a registered *block*, in the
//! planner's order; the engine moves it to a *landing slot* that the target has granted for this one block; the target scatters
//! the block into its pool by its own grant, digests what it wrote, and only then says that a leg has landed.
//!
//! Both ends speak over a control connection, which carries no payload: it tells at once when a process dies. A slot that was
//! granted is granted again only after a *fence*: the source has said that the write has settled, or its process has
//! ended, or the target's own agent was closed. Time frees nothing. When all slots are fenced off, the agent is started
//! again on other memory; what is left of the old one stays mapped for as long as somebody may write it.
//!
//! Slots and blocks are few, so memory is bounded: a source without a slot waits, and is told so.
//!
//! *Not* for memory that the engine may write for good: a pool is registered with nobody.

mod agent;
mod bank;
mod engine;
mod host;
mod link;
mod serve;
mod staging;
#[cfg(test)]
mod tests;
mod wire;
mod witness;

use std::{net::SocketAddr, sync::Arc};

use kvferry_plan::{Bytes, Generation, Incarnation, RankId, RoomKey};

pub use engine::{BlockEngine, BlockSpan, EngineError, EnginePeer, Gate, Progress, StartEngine, WriteId};

use crate::{
    Grant, Link, Mover, PeerAddr, Registration, Setup, Transport, TransportError, TransportStats,
    listener::Listener, local::Local, loopback,
};
use host::Host;

/// Memory of a transport that has landing slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotOptions {
    /// Bytes of a slot and of a block. The longest row must fit.
    pub slot: Bytes,
    /// Landing slots. Taken when the first peer opens a link.
    pub slots: u32,
    /// Blocks that are packed or on their way, over all links. Taken with the first job.
    pub staging: u32,
    /// Blocks of one link that are on their way.
    pub window: u32,
    /// Landing memory of closed agents that is kept at most, because somebody may still write it.
    pub kept: u32,
}

impl Default for SlotOptions {
    fn default() -> Self {
        Self { slot: Bytes(2 << 20), slots: 16, staging: 16, window: 6, kept: 8 }
    }
}

/// An end of a transport with landing slots, over any engine.
#[derive(Debug)]
pub struct Slots {
    scheme: &'static str,
    usage: &'static str,
    address: SocketAddr,
    host: Arc<Host>,
    listener: Listener,
}

impl Slots {
    /// Starts the engine and listens on a free port of [`Setup::bind`], for control connections. `scheme` is the name of the
    /// transport and of its endpoints, `usage` what to say when an endpoint is none of these.
    ///
    /// # Errors
    /// [`TransportError::Endpoint`] unless the address is a loopback address, [`TransportError::Io`] when it cannot be
    /// bound, [`TransportError::Engine`].
    pub fn new(
        setup: Setup,
        options: SlotOptions,
        (scheme, usage): (&'static str, &'static str),
        start: StartEngine,
    ) -> Result<Self, TransportError> {
        let (socket, address) = loopback::listen(setup.bind)?;
        let local = Arc::new(Local::new(setup));
        let host = Arc::new(Host::new(Arc::clone(&local), options, scheme, start)?);
        let theirs = Arc::clone(&host);
        let listener = Listener::start("kvferry-slots-in", socket, &local, move |_, socket| {
            serve::serve(&theirs, socket)
        })
        .map_err(|source| TransportError::Io { action: "start a thread", source })?;
        Ok(Self { scheme, usage, address, host, listener })
    }
}

impl Transport for Slots {
    fn name(&self) -> &'static str {
        self.scheme
    }

    fn mover(&self) -> Mover {
        Mover::Source
    }

    fn endpoint(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    fn register(&self, rank: RankId, memory: Registration) -> Result<(), TransportError> {
        self.host.local.register(rank, memory)
    }

    fn grant(&self, grant: Grant) -> Result<(), TransportError> {
        self.host.local.grant(grant)
    }

    fn revoke(&self, key: RoomKey, generation: Generation) {
        self.host.local.revoke(key, generation);
    }

    fn open(&self, peer: &PeerAddr) -> Result<Arc<dyn Link>, TransportError> {
        let local = &self.host.local;
        local.open()?;
        let Setup { incarnation, limits, .. } = &local.setup;
        let socket = loopback::dial(*incarnation, peer, self.scheme, self.usage, limits)?;
        let link = link::open(socket, peer, &self.host)?;
        local.add_link(&link)?;
        Ok(link)
    }

    fn forget(&self, peer: Incarnation) {
        self.listener.forget(peer);
    }

    fn stats(&self) -> TransportStats {
        self.host.local.stats()
    }

    fn close(&self) {
        // Peers see the connection end before they see rooms vanish.
        self.listener.close();
        self.host.local.close();
        self.host.close();
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.close();
    }
}
