//! Shared memory: the target maps the source's sealed arenas read-only and pulls, one sweep over each source page
//! for all of its ranks.
//!
//! The source listens on a socket in a directory that only its user may enter, and passes the descriptors of its
//! arenas to whoever names its incarnation. The target can read all of the source's pool from then on; it can never
//! write it. A page that changes its owner while it is read is found out by its generation.

mod fds;
mod pull;
mod serve;
#[cfg(test)]
mod tests;

use std::{
    fs, io,
    os::unix::{fs::DirBuilderExt, net::UnixListener},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use kvferry_plan::{Generation, Incarnation, RankId, RoomKey};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    sockopt::{Timeout, set_socket_timeout},
};

use crate::{
    Grant, Limits, Link, Mover, PeerAddr, Registration, Setup, Transport, TransportError, TransportStats,
    listener::Listener, local::Local, socket::Socket,
};

/// An end of the `shm` transport.
#[derive(Debug)]
pub struct Shm {
    directory: Directory,
    local: Arc<Local>,
    listener: Listener,
}

/// A private directory that is removed with this value.
#[derive(Debug)]
struct Directory(PathBuf);

impl Directory {
    fn new(setup: &Setup) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvferry-{}-{:x}-{number}", std::process::id(), setup.incarnation.nonce);
        let path = std::env::temp_dir().join(name);
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    fn socket(&self) -> PathBuf {
        self.0.join("sock")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Shm {
    /// Listens on a socket in a new private directory under the system's directory for temporary files.
    ///
    /// # Errors
    /// [`TransportError::Io`].
    pub fn new(setup: Setup) -> Result<Self, TransportError> {
        let io = |action| move |source| TransportError::Io { action, source };
        let directory = Directory::new(&setup).map_err(io("make a private directory"))?;
        let listener = UnixListener::bind(directory.socket()).map_err(io("listen"))?;
        let local = Arc::new(Local::new(setup));
        let listener = Listener::start("kvferry-shm-in", listener, &local, serve::serve)
            .map_err(io("start a thread"))?;
        Ok(Self { directory, local, listener })
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
        format!("shm://{}", self.directory.socket().display())
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
        let path =
            endpoint.strip_prefix("shm://").map(Path::new).filter(|path| path.is_absolute()).ok_or_else(
                || TransportError::Endpoint {
                    endpoint: endpoint.clone(),
                    reason: "write `shm:///PATH/OF/SOCKET`",
                },
            )?;
        let limits = &self.local.setup.limits;
        let gone = |error: io::Error| TransportError::PeerGone {
            endpoint: endpoint.clone(),
            reason: error.to_string(),
        };
        let socket = connect_to(path, limits).map_err(gone)?;
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
fn connect_to(path: &Path, limits: &Limits) -> io::Result<Socket> {
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&fd, Timeout::Send, Some(limits.connect))?;
    connect(&fd, &SocketAddrUnix::new(path)?)?;
    Socket::new(fd, limits.stall)
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.close();
    }
}
