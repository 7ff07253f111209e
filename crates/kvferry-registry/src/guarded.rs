//! An HTTP server whose clients are bounded: in number, in how long a request may take to come, in how much of one there may be,
//! and in how long an answer may lie unread. It counts whom it closes. Not for what is asked and answered.

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
    Router,
    body::Body,
    http::{HeaderValue, Request, StatusCode, header, request::Parts},
    response::Response,
};
use http_body_util::BodyExt;
use hyper::{
    body::{Body as _, Incoming},
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    task::JoinSet,
    time::{Sleep, sleep, timeout},
};

/// Longest head of a request, in bytes.
const HEAD: usize = 32 << 10;
/// What is read of a longer one, so that it can be answered; hyper cuts off the rest without a word.
const BUFFER: usize = 256 << 10;
/// Most headers of a request.
const HEADERS: usize = 512;
/// How long the rest of a request that is refused is read.
const LINGER: Duration = Duration::from_secs(1);
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
/// | `silent` | had not said a whole request after as long as the port allows |
/// | `unread` | did not read its answer for as long as the port allows |
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

/// What a port allows its clients.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Connections at a time; others wait to be accepted.
    pub connections: usize,
    /// How long the head of a request may take to come, from the beginning of the connection or the answer before it; and
    /// how long its body may take after that. So an idle connection is kept for this long.
    pub asking: Duration,
    /// How long a client may leave unread what is sent to it.
    pub unread: Duration,
    /// Largest body of a request, in bytes.
    pub body: usize,
}

/// How a port words what it refuses by itself, before the application is asked.
pub type Refuse = fn(StatusCode, String) -> Response;

/// Serves connections within [`Bounds`], so that strangers who connect and send half a request, garbage, or nothing, or who
/// do not read, take nothing from others for long.
#[derive(Debug)]
pub struct Guarded {
    listener: TcpListener,
    slots: Arc<Semaphore>,
    bounds: Bounds,
    refuse: Refuse,
    offences: Offences,
}

impl Guarded {
    /// Guards `listener`.
    #[must_use]
    pub fn new(listener: TcpListener, bounds: Bounds, refuse: Refuse) -> Self {
        let slots = Arc::new(Semaphore::new(bounds.connections));
        Self { listener, slots, bounds, refuse, offences: Offences::default() }
    }

    /// What is counted, also while it serves.
    #[must_use]
    pub fn offences(&self) -> Offences {
        self.offences.clone()
    }

    /// Serves `app`, which gets whole bodies, until `drain` comes true: then nobody is let in any more, connections on which
    /// nothing is asked end at once, and this future ends with the last answer. Dropping it ends all connections.
    pub async fn serve(self, app: Router, drain: impl Future<Output = ()>) {
        let Self { listener, slots, bounds, refuse, offences } = self;
        let (draining, drained) = watch::channel(false);
        let mut connections = JoinSet::new();
        let accepting = async {
            loop {
                while connections.try_join_next().is_some() {}
                let slot = match slots.clone().try_acquire_owned() {
                    Ok(slot) => Ok(slot),
                    Err(_) => {
                        offences.count("full");
                        slots.clone().acquire_owned().await
                    }
                };
                match listener.accept().await {
                    Ok((stream, _)) => {
                        let port =
                            Port { bounds, refuse, offences: offences.clone(), drained: drained.clone() };
                        let app = app.clone();
                        connections.spawn(async move {
                            if let Some(cause) = port.serve(stream, app).await {
                                port.offences.count(cause);
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
        };
        tokio::select! {
            () = accepting => {}
            () = drain => {}
        }
        drop(listener);
        draining.send_replace(true);
        while connections.join_next().await.is_some() {}
    }
}

/// Why a request is refused before the application sees it, and as which offence that counts.
struct Refusal {
    status: StatusCode,
    text: String,
    offence: Option<&'static str>,
}

/// What the connections of a port share.
struct Port {
    bounds: Bounds,
    refuse: Refuse,
    offences: Offences,
    drained: watch::Receiver<bool>,
}

impl Port {
    /// Serves one connection; why it was closed, if that was the client's doing.
    async fn serve(&self, stream: TcpStream, app: Router) -> Option<&'static str> {
        // Answers are small pieces: they are not to wait for the acknowledgement of the one before.
        stream.set_nodelay(true).ok();
        let (asked, unread) = (AtomicBool::new(false), Arc::new(AtomicBool::new(false)));
        let app = TowerToHyperService::new(app);
        let service = service_fn(|request: Request<Incoming>| {
            asked.store(true, Ordering::Relaxed);
            let app = app.clone();
            async move {
                let (head, mut body) = request.into_parts();
                Ok::<_, Infallible>(match self.whole(&head, &mut body).await {
                    Ok(body) => app.call(Request::from_parts(head, Body::from(body))).await?,
                    Err(refusal) => self.sent_away(refusal, &head, &mut body).await,
                })
            }
        });
        let io = TokioIo::new(Patient {
            stream,
            patience: self.bounds.unread,
            timer: None,
            unread: unread.clone(),
        });
        let mut connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.bounds.asking)
            .max_buf_size(BUFFER)
            .max_headers(HEADERS)
            .serve_connection(io, service);
        let mut served = Pin::new(&mut connection);
        let served = tokio::select! {
            served = &mut served => served,
            () = self.drained() => {
                if !asked.load(Ordering::Relaxed) {
                    return None;
                }
                served.as_mut().graceful_shutdown();
                served.await
            }
        };
        match served {
            _ if unread.load(Ordering::Relaxed) => Some("unread"),
            Ok(()) => None,
            Err(error) if error.is_timeout() => {
                // Clients keep idle connections open; half a request, or none ever, is something else.
                let half = !connection.into_parts().read_buf.is_empty();
                (half || !asked.load(Ordering::Relaxed)).then_some("silent")
            }
            Err(error) if error.is_parse_too_large() => Some("length"),
            Err(error) if error.is_parse() => Some("malformed"),
            Err(_) => Some("cut"),
        }
    }

    /// Comes true when the port takes no more requests.
    async fn drained(&self) {
        let _ = self.drained.clone().wait_for(|drained| *drained).await;
    }

    /// Waits for a request's body.
    async fn whole(&self, head: &Parts, body: &mut Incoming) -> Result<Vec<u8>, Refusal> {
        let named = head.headers.iter().map(|(name, value)| name.as_str().len() + value.len());
        let target = head.uri.path_and_query().map_or(0, |target| target.as_str().len());
        if named.sum::<usize>() + target > HEAD {
            let text = format!("the request's head has more than {HEAD} bytes, which is the limit");
            let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
            return Err(Refusal { status, text, offence: Some("length") });
        }
        let limit = self.bounds.body;
        let too_long = || Refusal {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            text: format!("the request's body has more than {limit} bytes, which is the limit"),
            offence: Some("length"),
        };
        // What is announced too long is not waited for.
        if body.size_hint().lower() > limit as u64 {
            return Err(too_long());
        }
        let read = async {
            let mut whole = Vec::new();
            while let Some(frame) = body.frame().await {
                let Ok(data) = frame.map_err(|error| broken_off(&error))?.into_data() else { continue };
                if whole.len() + data.len() > limit {
                    return Err(too_long());
                }
                whole.extend_from_slice(&data);
            }
            Ok(whole)
        };
        tokio::select! {
            // What is there is served.
            biased;
            read = timeout(self.bounds.asking, read) => read.unwrap_or_else(|_| {
                let seconds = self.bounds.asking.as_secs_f64();
                let text = format!("the request's body was not there after {seconds} s");
                Err(Refusal { status: StatusCode::REQUEST_TIMEOUT, text, offence: Some("silent") })
            }),
            () = self.drained() => {
                let text = "this process is shutting down; ask another one".to_owned();
                Err(Refusal { status: StatusCode::SERVICE_UNAVAILABLE, text, offence: None })
            }
        }
    }

    /// The answer to who is refused, and the end of the connection.
    async fn sent_away(&self, refusal: Refusal, head: &Parts, body: &mut Incoming) -> Response {
        if let Some(cause) = refusal.offence {
            self.offences.count(cause);
        }
        // Most clients listen only when they have spoken; the others ask before they send a body.
        if !head.headers.contains_key(header::EXPECT) {
            tokio::select! {
                _ = timeout(LINGER, async { while let Some(Ok(_)) = body.frame().await {} }) => {}
                () = self.drained() => {}
            }
        }
        let mut answer = (self.refuse)(refusal.status, refusal.text);
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        answer
    }
}

fn broken_off(error: &hyper::Error) -> Refusal {
    Refusal { status: StatusCode::BAD_REQUEST, text: format!("the request's body: {error}"), offence: None }
}

/// A stream that fails when nothing that is written has been read for too long.
#[derive(Debug)]
struct Patient {
    stream: TcpStream,
    patience: Duration,
    /// While it waits.
    timer: Option<Pin<Box<Sleep>>>,
    unread: Arc<AtomicBool>,
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = Pin::new(&mut self.stream).poll_write(cx, bytes) {
            self.timer = None;
            return Poll::Ready(written);
        }
        let patience = self.patience;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(patience)));
        std::task::ready!(timer.as_mut().poll(cx));
        self.unread.store(true, Ordering::Relaxed);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
