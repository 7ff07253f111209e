//! Shared memory: the target maps the source's sealed arenas read-only and pulls, one sweep over each source page
//! for all of its ranks.
//!
//! The source listens on an abstract Unix socket, which leaves no file behind however the process ends, and passes the
//! descriptors of its arenas to whoever runs as the same user and names its incarnation. The target can read all of
//! the source's pool from then on; it can never write it. A page that changes its owner while it is read is found out
//! by its generation.

mod fds;
mod pull;
mod serve;
#[cfg(test)]
mod tests;

use std::{
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use kvferry_plan::{Generation, Incarnation, RankId, RoomKey};
use rustix::{
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
        sockopt::{Timeout, set_socket_timeout, socket_peercred},
    },
    process::geteuid,
};

use crate::{
    Grant, Limits, Link, Mover, PeerAddr, Registration, Setup, Transport, TransportError, TransportStats,
    listener::Listener, local::Local, socket::Socket,
};

/// An end of the `shm` transport.
#[derive(Debug)]
pub struct Shm {
    name: String,
    local: Arc<Local>,
    listener: Listener,
}

/// A name that no other end has.
fn fresh_name(setup: &Setup) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("kvferry-{}-{:x}-{number}", std::process::id(), setup.incarnation.nonce)
}

impl Shm {
    /// Listens on a new abstract Unix socket.
    ///
    /// # Errors
    /// [`TransportError::Io`].
    pub fn new(setup: Setup) -> Result<Self, TransportError> {
        let io = |action| move |source| TransportError::Io { action, source };
        let name = fresh_name(&setup);
        let listener = SocketAddr::from_abstract_name(&name)
            .and_then(|address| UnixListener::bind_addr(&address))
            .map_err(io("listen"))?;
        let local = Arc::new(Local::new(setup));
        let listener = Listener::start("kvferry-shm-in", listener, &local, serve::serve)
            .map_err(io("start a thread"))?;
        Ok(Self { name, local, listener })
    }
}

impl Transport for Shm {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn mover(&self) -> Mover {
        Mover::Target
    }

    fn endpoint(&self) -> String {
        format!("shm://@{}", self.name)
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
        let name = endpoint.strip_prefix("shm://@").filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| TransportError::Endpoint {
            endpoint: endpoint.clone(),
            reason: "write `shm://@NAME`, the name of an abstract Unix socket of this machine",
        })?;
        let limits = &self.local.setup.limits;
        let gone = |error: io::Error| TransportError::PeerGone {
            endpoint: endpoint.clone(),
            reason: error.to_string(),
        };
        let socket = connect_to(name, limits).map_err(gone)?;
        if !ours(&socket) {
            let reason = "its process runs as another user, or as one that cannot be seen from here".into();
            return Err(TransportError::Protocol { endpoint, reason });
        }
        let hello =
            socket.greet(self.local.setup.incarnation, peer.incarnation, limits.connect, &endpoint)?;
        let views = fds::receive(&socket, &hello, peer)?;
        let link = pull::open(socket, views, peer, &self.local)
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

/// Connects, in bounded time also when nobody accepts.
fn connect_to(name: &str, limits: &Limits) -> io::Result<Socket> {
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&fd, Timeout::Send, Some(limits.connect))?;
    connect(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Socket::new(fd, limits.stall)
}

/// True when the process at the other end runs as our user. An abstract socket has no owner and no mode, so this is
/// what keeps the other users of the machine out.
fn ours(socket: &Socket) -> bool {
    socket_peercred(socket.fd()).is_ok_and(|peer| peer.uid == geteuid())
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.close();
    }
}
