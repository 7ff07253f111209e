//! An HTTP server whose connections are bounded, in number and in silence, and that counts whom it closes.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Json, Router,
    extract::Request,
    http::{StatusCode, header::CONTENT_LENGTH},
    response::IntoResponse,
};
use hyper::{
    body::Incoming,
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use kvferry_plan::Blame;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, Sleep, sleep},
};

use crate::{Problem, server::BODY};

/// Longest head of a request, in bytes.
const HEAD: usize = 64 << 10;
/// After the system refused to accept, such as for too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// How often clients were refused for how they behaved, by cause.
///
/// | cause | what happened |
/// |---|---|
/// | `cut` | closed in the middle of a request |
/// | `full` | had to wait, because all places were taken |
/// | `length` | a head or a body longer than any may be |
/// | `malformed` | not HTTP |
/// | `silent` | said nothing, or no more in the middle of a request, for as long as the port allows |
///
/// All but the waiting ones had their connection closed.
#[derive(Clone, Debug, Default)]
pub struct Offences(Arc<Mutex<BTreeMap<&'static str, u64>>>);

impl Offences {
    /// The counts since the start; a cause that never happened is absent.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn count(&self, cause: &'static str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(cause).or_default() += 1;
    }
}

/// Serves connections of which each may be silent for a while only, and not too many at a time, so that strangers
/// who connect and send half a request, garbage, or nothing, take nothing from others for long. For short requests;
/// not for answers that stream.
#[derive(Debug)]
pub struct Guarded {
    listener: TcpListener,
    slots: Arc<Semaphore>,
    silence: Duration,
    offences: Offences,
}

impl Guarded {
    /// Connections at a time; others wait to be accepted.
    pub const CONNECTIONS: usize = 512;
    /// How long a client may say nothing; longer than members wait between two heartbeats.
    pub const SILENCE: Duration = Duration::from_secs(5);

    /// Guards `listener`: at most `connections`, each closed after `silence`.
    #[must_use]
    pub fn new(listener: TcpListener, connections: usize, silence: Duration) -> Self {
        let slots = Arc::new(Semaphore::new(connections));
        Self { listener, slots, silence, offences: Offences::default() }
    }

    /// What is counted, also while it serves.
    #[must_use]
    pub fn offences(&self) -> Offences {
        self.offences.clone()
    }

    /// Serves `app` until this future is dropped, which ends all connections.
    pub async fn serve(self, app: Router) {
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let slot = match self.slots.clone().try_acquire_owned() {
                Ok(slot) => Ok(slot),
                Err(_) => {
                    self.offences.count("full");
                    self.slots.clone().acquire_owned().await
                }
            };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let (app, silence, offences) = (app.clone(), self.silence, self.offences.clone());
                    connections.spawn(async move {
                        if let Some(cause) = connection(stream, silence, app, &offences).await {
                            offences.count(cause);
                        }
                        drop(slot);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept");
                    sleep(PAUSE).await;
                }
            }
        }
    }
}

/// Serves one connection; why it was closed, if that was the client's doing.
async fn connection(
    stream: TcpStream,
    silence: Duration,
    app: Router,
    offences: &Offences,
) -> Option<&'static str> {
    // Answers are one small piece each: they are not to wait for the acknowledgement of the one before.
    stream.set_nodelay(true).ok();
    let state = Arc::new(State::default());
    let timer = Box::pin(sleep(silence));
    let io = TokioIo::new(Bounded { stream, silence, timer, state: state.clone() });
    let app = TowerToHyperService::new(app);
    let service = service_fn(|request: Request<Incoming>| {
        state.asked.store(true, Ordering::Relaxed);
        state.answering.store(true, Ordering::Relaxed);
        let length = request.headers().get(CONTENT_LENGTH).and_then(|n| n.to_str().ok()?.parse().ok());
        // What is announced too long is not waited for.
        let answer = length.is_none_or(|n: u64| n <= BODY as u64).then(|| app.call(request));
        let state = state.clone();
        async move {
            let answer = match answer {
                Some(answer) => answer.await?,
                None => (StatusCode::PAYLOAD_TOO_LARGE, Json(too_long())).into_response(),
            };
            state.answering.store(false, Ordering::Relaxed);
            if answer.status() == StatusCode::PAYLOAD_TOO_LARGE {
                offences.count("length");
            }
            Ok::<_, Infallible>(answer)
        }
    });
    let served = http1::Builder::new().max_buf_size(HEAD).serve_connection(io, service).await;
    match served {
        _ if state.silent.load(Ordering::Relaxed) => {
            // Members keep idle connections open; half a request, or none ever, is something else.
            let half = served.is_err() || state.halfway.load(Ordering::Relaxed);
            (half || !state.asked.load(Ordering::Relaxed)).then_some("silent")
        }
        Ok(()) => None,
        Err(error) if error.is_parse_too_large() => Some("length"),
        Err(error) if error.is_parse() => Some("malformed"),
        Err(_) => Some("cut"),
    }
}

fn too_long() -> Problem {
    Problem { error: format!("a body of more than {BODY} bytes"), blame: Blame::Caller }
}

/// How far a connection is.
#[derive(Debug, Default)]
struct State {
    /// A request has come.
    asked: AtomicBool,
    /// A request is being answered.
    answering: AtomicBool,
    /// Nothing has come for too long.
    silent: AtomicBool,
    /// It was in the middle of a request's body.
    halfway: AtomicBool,
}

/// A stream that fails when nothing has come for too long.
#[derive(Debug)]
struct Bounded {
    stream: TcpStream,
    silence: Duration,
    timer: Pin<Box<Sleep>>,
    state: Arc<State>,
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
        self.timer.as_mut().poll(cx).map(|()| {
            let State { answering, silent, halfway, .. } = &*self.state;
            silent.store(true, Ordering::Relaxed);
            halfway.fetch_or(answering.load(Ordering::Relaxed), Ordering::Relaxed);
            Err(io::ErrorKind::TimedOut.into())
        })
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
