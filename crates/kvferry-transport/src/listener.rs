//! Accepts connections, each served by a thread of its own, and ends them all when dropped.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use kvferry_plan::Incarnation;
use rustix::{
    io::Errno,
    net::{Shutdown, SocketFlags, accept_with, shutdown},
};

use crate::{
    local::{Local, lock},
    socket::{Lost, Socket},
    stats::{Gauge, add},
};

/// What a connection's thread does.
pub(crate) type Serve = dyn Fn(&Arc<Local>, &Socket) -> Result<(), Lost> + Send + Sync;

struct Connection {
    /// The thread's: the descriptor is closed when it ends.
    socket: Weak<Socket>,
    thread: JoinHandle<()>,
}

struct Shared {
    listener: OwnedFd,
    closing: AtomicBool,
    connections: Mutex<Vec<Connection>>,
    local: Arc<Local>,
    serve: Box<Serve>,
}

/// A listening socket and everything that was accepted from it.
pub(crate) struct Listener {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener").field("fd", &self.shared.listener).finish_non_exhaustive()
    }
}

impl Listener {
    pub(crate) fn start(
        name: &'static str,
        listener: impl Into<OwnedFd>,
        local: &Arc<Local>,
        serve: impl Fn(&Arc<Local>, &Socket) -> Result<(), Lost> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            listener: listener.into(),
            closing: AtomicBool::new(false),
            connections: Mutex::default(),
            local: Arc::clone(local),
            serve: Box::new(serve),
        });
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new().name(name.into()).spawn(move || theirs.accept(name))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Ends the connections of a peer.
    pub(crate) fn forget(&self, peer: Incarnation) {
        for connection in lock(&self.shared.connections).iter() {
            if let Some(socket) = connection.socket.upgrade().filter(|s| s.peer() == Some(peer)) {
                socket.hang_up();
            }
        }
    }

    /// Ends listening and all connections, and waits for their threads.
    pub(crate) fn close(&self) {
        self.shared.closing.store(true, Ordering::Release);
        // Makes a waiting accept return.
        let _ = shutdown(self.shared.listener.as_fd(), Shutdown::Both);
        join(lock(&self.thread).take());
        for connection in std::mem::take(&mut *lock(&self.shared.connections)) {
            if let Some(socket) = connection.socket.upgrade() {
                socket.hang_up();
            }
            join(Some(connection.thread));
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
    }
}

/// Waits for a thread, unless it is the one that asks: a callback may drop the transport that calls it.
fn join(thread: Option<JoinHandle<()>>) {
    if let Some(thread) = thread.filter(|t| t.thread().id() != thread::current().id()) {
        let _ = thread.join();
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, name: &str) {
        while !self.closing.load(Ordering::Acquire) {
            match accept_with(&self.listener, SocketFlags::CLOEXEC) {
                Ok(fd) => {
                    if let Err(error) = self.admit(name, fd) {
                        tracing::warn!(%error, "a connection could not be served");
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) if self.closing.load(Ordering::Acquire) => {}
                Err(error) => {
                    // Too many open files, most likely: it passes.
                    tracing::warn!(%error, "cannot accept connections; trying again");
                    thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, name: &str, fd: OwnedFd) -> io::Result<()> {
        let limits = &self.local.setup.limits;
        let mut connections = lock(&self.connections);
        connections.retain(|connection| !connection.thread.is_finished());
        if connections.len() >= limits.connections {
            add(&self.local.counters.turned_away, 1);
            return Ok(());
        }
        let socket = Arc::new(Socket::new(fd, limits.stall)?);
        let (weak, shared) = (Arc::downgrade(&socket), Arc::clone(self));
        let gauge = Gauge::new(&self.local.counters, |c| &c.connections);
        let thread = thread::Builder::new().name(name.into()).spawn(move || {
            let counters = &shared.local.counters;
            match (shared.serve)(&shared.local, &socket) {
                Err(Lost::Malformed(what)) => {
                    add(&counters.malformed, 1);
                    tracing::warn!(what, "a connection was ended");
                }
                Err(Lost::Length(what)) => {
                    add(&counters.length, 1);
                    tracing::warn!(what, "a connection was ended");
                }
                Err(Lost::Cut) => add(&counters.cut, 1),
                Err(Lost::Stalled(_)) => add(&counters.stalled, 1),
                Ok(()) | Err(Lost::Closed | Lost::Io(_)) => {}
            }
            socket.hang_up();
            drop(socket);
            drop(gauge);
        })?;
        connections.push(Connection { socket: weak, thread });
        Ok(())
    }
}
