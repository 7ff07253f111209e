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

use std::{
    io,
    net::{SocketAddr, TcpListener},
    os::fd::AsFd,
    sync::Arc,
};

use kvferry_plan::{Generation, Incarnation, RankId, RoomKey};
use rustix::{
    io::Errno,
    net::{
        AddressFamily, SocketFlags, SocketType, connect, socket_with,
        sockopt::{Timeout, set_socket_keepalive, set_socket_timeout, set_tcp_congestion, set_tcp_nodelay},
    },
};

use crate::{
    Grant, Limits, Link, Mover, PeerAddr, Registration, Setup, Transport, TransportError, TransportStats,
    listener::Listener, local::Local, socket::Socket,
};

const NOT_LOOPBACK: &str = "only loopback addresses are served: connections are not authenticated yet, so any other \
                            host could write the pool";

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
        if !setup.bind.is_loopback() {
            return Err(TransportError::Endpoint { endpoint: setup.bind.to_string(), reason: NOT_LOOPBACK });
        }
        let io = |action| move |source| TransportError::Io { action, source };
        let listener = TcpListener::bind((setup.bind, 0)).map_err(io("listen"))?;
        tune(&listener);
        let address = listener.local_addr().map_err(io("listen"))?;
        let local = Arc::new(Local::new(setup));
        let listener = Listener::start("kvferry-tcp-in", listener, &local, serve::serve)
            .map_err(io("start a thread"))?;
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
        let endpoint = peer.endpoint.clone();
        let refuse = |reason| TransportError::Endpoint { endpoint: endpoint.clone(), reason };
        let address: SocketAddr = endpoint
            .strip_prefix("tcp://")
            .and_then(|address| address.parse().ok())
            .ok_or_else(|| refuse("write `tcp://ADDRESS:PORT`"))?;
        if !address.ip().is_loopback() {
            return Err(refuse(NOT_LOOPBACK));
        }
        let limits = &self.local.setup.limits;
        let gone = |error: io::Error| TransportError::PeerGone {
            endpoint: endpoint.clone(),
            reason: error.to_string(),
        };
        let socket = connect_to(address, limits).map_err(gone)?;
        socket.greet(self.local.setup.incarnation, peer.incarnation, limits.connect, &endpoint)?;
        let link = link::open(socket, endpoint, Arc::clone(&self.local))
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

/// Connects in bounded time.
fn connect_to(address: SocketAddr, limits: &Limits) -> io::Result<Socket> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    loop {
        let fd = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        tune(&fd);
        set_socket_timeout(&fd, Timeout::Send, Some(limits.connect))?;
        match connect(&fd, &address) {
            Ok(()) => return Socket::new(fd, limits.stall),
            // A socket whose connecting was interrupted cannot be asked again.
            Err(Errno::INTR) => {}
            // What the kernel calls it when the time is over.
            Err(Errno::INPROGRESS) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Best effort: a kernel that refuses is slower, nothing else. For sockets that are not connected yet, and for
/// listening ones, whose connections inherit it: one that has once had a pacing congestion control stays paced.
fn tune(stream: impl AsFd) {
    let stream = stream.as_fd();
    // Answers are small and somebody waits for each.
    let _ = set_tcp_nodelay(stream, true);
    let _ = set_socket_keepalive(stream, true);
    // Pacing congestion controls, the default of some hosts, cost a quarter of the rate on short paths.
    if set_tcp_congestion(stream, "cubic").is_err() {
        let _ = set_tcp_congestion(stream, "reno");
    }
}
