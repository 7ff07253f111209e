//! TCP: the source gathers rows into frames and pushes them, the target checks each frame against its grant and
//! lands it: long runs are received straight into the pool, short ones through a buffer. The frames of a job take turns
//! between its legs, so that the source reads its pages once.
//!
//! One stream per link. Frames say everything about themselves and a leg's state belongs to the connection that
//! brings it, so a link may later deal its legs to several streams without a change of the wire.

mod link;
mod serve;
#[cfg(test)]
mod tests;

use std::{net::SocketAddr, sync::Arc};

use kvferry_plan::{Generation, Incarnation, RankId, RoomKey};

use crate::{
    Grant, Link, Mover, PeerAddr, Registration, Setup, Transport, TransportError, TransportStats,
    listener::Listener, local::Local, loopback,
};

/// An end of the `tcp` transport.
#[derive(Debug)]
pub struct Tcp {
    address: SocketAddr,
    local: Arc<Local>,
    listener: Listener,
}

impl Tcp {
    /// Listens on a free port of [`Setup::bind`].
    ///
    /// # Errors
    /// [`TransportError::Endpoint`] unless the address is a loopback address, [`TransportError::Io`] when it cannot
    /// be bound.
    ///
    /// ```
    /// use kvferry_plan::Incarnation;
    /// use kvferry_transport::{Setup, Tcp, Transport};
    /// let mut setup = Setup::new(Incarnation { started_ms: 1, nonce: 2 });
    /// let end = Tcp::new(setup.clone())?;
    /// assert!(end.endpoint().starts_with("tcp://127.0.0.1:"));
    ///
    /// setup.bind = "0.0.0.0".parse()?;
    /// assert!(Tcp::new(setup).unwrap_err().to_string().contains("not authenticated"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(setup: Setup) -> Result<Self, TransportError> {
        let (listener, address) = loopback::listen(setup.bind)?;
        let local = Arc::new(Local::new(setup));
        let listener = Listener::start("kvferry-tcp-in", listener, &local, serve::serve)
            .map_err(|source| TransportError::Io { action: "start a thread", source })?;
        Ok(Self { address, local, listener })
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn mover(&self) -> Mover {
        Mover::Source
    }

    fn endpoint(&self) -> String {
        format!("tcp://{}", self.address)
    }

    fn register(&self, rank: RankId, memory: Registration) -> Result<(), TransportError> {
        self.local.register(rank, memory)
    }

    fn grant(&self, grant: Grant) -> Result<(), TransportError> {
        self.local.grant(grant)
    }

    fn revoke(&self, key: RoomKey, generation: Generation) {
        self.local.revoke(key, generation);
    }

    fn open(&self, peer: &PeerAddr) -> Result<Arc<dyn Link>, TransportError> {
        self.local.open()?;
        let Setup { incarnation, limits, .. } = &self.local.setup;
        let usage = "write `tcp://ADDRESS:PORT`";
        let socket = loopback::dial(*incarnation, peer, "tcp", usage, limits)?;
        let link = link::open(socket, peer.endpoint.clone(), Arc::clone(&self.local))
            .map_err(|source| TransportError::Io { action: "start a thread", source })?;
        self.local.add_link(&link)?;
        Ok(link)
    }

    fn forget(&self, peer: Incarnation) {
        self.listener.forget(peer);
    }

    fn stats(&self) -> TransportStats {
        self.local.stats()
    }

    fn close(&self) {
        // Peers see the connection end before they see rooms vanish.
        self.listener.close();
        self.local.close();
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.close();
    }
}
