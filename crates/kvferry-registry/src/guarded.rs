//! A listener whose connections are bounded, in number and in silence.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep},
};

/// Accepts connections of which each may be silent for a while only, and not too many at a time, so that strangers
/// who connect and send half a request, or nothing, take nothing from others for long. For short requests; not for
/// answers that stream.
#[derive(Debug)]
pub struct Guarded {
    listener: TcpListener,
    slots: Arc<Semaphore>,
    silence: Duration,
}

impl Guarded {
    /// Connections at a time; others wait to be accepted.
    pub const CONNECTIONS: usize = 512;
    /// How long a client may say nothing; longer than members wait between two heartbeats.
    pub const SILENCE: Duration = Duration::from_secs(5);

    /// Guards `listener`: at most `connections`, each closed after `silence`.
    #[must_use]
    pub fn new(listener: TcpListener, connections: usize, silence: Duration) -> Self {
        Self { listener, slots: Arc::new(Semaphore::new(connections)), silence }
    }
}

impl Listener for Guarded {
    type Io = Bounded;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Bounded, SocketAddr) {
        let slot = self.slots.clone().acquire_owned().await.ok();
        // The listener of axum waits and goes on when too many files are open.
        let (stream, from) = Listener::accept(&mut self.listener).await;
        // Answers are one small piece each: they are not to wait for the acknowledgement of the one before.
        stream.set_nodelay(true).ok();
        let timer = Box::pin(sleep(self.silence));
        (Bounded { stream, silence: self.silence, timer, _slot: slot }, from)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection of [`Guarded`].
#[derive(Debug)]
pub struct Bounded {
    stream: TcpStream,
    silence: Duration,
    timer: Pin<Box<Sleep>>,
    _slot: Option<OwnedSemaphorePermit>,
}

impl AsyncRead for Bounded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let silence = self.silence;
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, into) {
            self.timer.as_mut().reset(Instant::now() + silence);
            return Poll::Ready(read);
        }
        self.timer.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for Bounded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
