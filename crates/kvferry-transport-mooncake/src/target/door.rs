//! A listening port, each of whose connections has a thread of its own; closing it ends them all.

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use kvferry_transport::loopback::tune;

type Serve = dyn Fn(&TcpStream) + Send + Sync;

pub(super) struct Door {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    listener: TcpListener,
    limit: usize,
    open: Mutex<Open>,
    turned_away: AtomicU64,
    serve: Box<Serve>,
}

#[derive(Default)]
struct Open {
    closed: bool,
    next: u64,
    connections: BTreeMap<u64, TcpStream>,
}

impl Door {
    /// Listens, and calls `serve` with each connection, of which at most `limit` are open.
    pub(super) fn open(
        name: &'static str,
        address: SocketAddr,
        limit: usize,
        serve: impl Fn(&TcpStream) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        tune(&listener);
        let address = listener.local_addr()?;
        let (open, turned_away) = (Mutex::default(), AtomicU64::new(0));
        let shared = Arc::new(Shared { listener, limit, open, turned_away, serve: Box::new(serve) });
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new().name(name.into()).spawn(move || theirs.accept(name))?;
        Ok(Self { shared, address, thread: Mutex::new(Some(thread)) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn turned_away(&self) -> u64 {
        self.shared.turned_away.load(Ordering::Relaxed)
    }

    pub(super) fn close(&self) {
        {
            let mut open = self.shared.open();
            open.closed = true;
            for stream in open.connections.values() {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        // Makes a waiting accept return.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when all connections have ended.
    fn accept(&self, name: &'static str) {
        thread::scope(|scope| {
            loop {
                let accepted = self.listener.accept();
                if self.open().closed {
                    return;
                }
                match accepted {
                    Ok((stream, _)) => {
                        let Some(number) = self.admit(&stream) else { continue };
                        let serve = move || {
                            (self.serve)(&stream);
                            self.open().connections.remove(&number);
                        };
                        if let Err(error) =
                            thread::Builder::new().name(name.into()).spawn_scoped(scope, serve)
                        {
                            tracing::warn!(%error, "a connection could not be served");
                            self.open().connections.remove(&number);
                        }
                    }
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                    Err(error) => {
                        // Too many open files, most likely: it passes.
                        tracing::warn!(%error, "cannot accept connections; trying again");
                        thread::sleep(Duration::from_millis(50));
                    }
                }
            }
        });
    }

    /// The number of a connection that is served.
    fn admit(&self, stream: &TcpStream) -> Option<u64> {
        let mut open = self.open();
        if open.closed || open.connections.len() >= self.limit {
            self.turned_away.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let ours = stream.try_clone().ok()?;
        open.next += 1;
        let number = open.next;
        open.connections.insert(number, ours);
        Some(number)
    }
}
