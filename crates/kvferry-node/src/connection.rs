//! Control connections: handshake, reader, writer, heartbeats. They know messages but no rooms.

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use kvferry_plan::{Incarnation, Mismatch};
use kvferry_session::{
    Abort, Cause, CauseKind, Heartbeat, MAX_HELLO, MAX_MESSAGE, Message, Open, Pairing, PairingError, Peer,
    Refuse, Side, WireError, decode, encode, frame_len,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, BufReader},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Semaphore, mpsc},
    time::{MissedTickBehavior, interval, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{PeerAddr, core::Shared};

/// A control connection of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnId(pub(crate) u64);

/// Why a connection is no more.
#[derive(Clone, Debug)]
pub(crate) enum Gone {
    /// The two do not fit; the mismatch as we see it.
    Refused(Mismatch),
    /// It never came about.
    Unreachable(String),
    /// It ended.
    Lost(String),
    /// The other end broke the protocol: how, as the ledger counts it, and in words.
    Broken(&'static str, String),
}

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(mismatch) => write!(f, "refused: {mismatch}"),
            Self::Unreachable(reason) | Self::Lost(reason) | Self::Broken(_, reason) => f.write_str(reason),
        }
    }
}

impl From<WireError> for Gone {
    fn from(error: WireError) -> Self {
        let how = match error {
            WireError::Length { .. } => "length",
            _ => "malformed",
        };
        Self::Broken(how, error.to_string())
    }
}

impl From<std::io::Error> for Gone {
    fn from(error: std::io::Error) -> Self {
        Self::Lost(match error.kind() {
            std::io::ErrorKind::UnexpectedEof => "the connection was closed".into(),
            _ => error.to_string(),
        })
    }
}

/// What a connection tells the core, in order.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) conn: ConnId,
    pub(crate) news: News,
}

#[derive(Debug)]
pub(crate) enum News {
    /// The peer fits.
    Paired { peer: Box<Peer>, outbox: Outbox },
    /// The peer says something.
    Said(Message),
    /// The peer takes no new rooms.
    Leaving,
    /// The peer does not fit, and names a room that it will therefore not open.
    Declined(Abort),
    /// The last news, and a way to say something last.
    Gone(Gone, Option<LastWords>),
}

/// The way to a peer that does not fit, for as long as it takes to name the rooms that come to nothing.
#[derive(Debug)]
pub(crate) struct LastWords {
    /// The start that answered, which may be another one than was asked for.
    pub(crate) to: Incarnation,
    pub(crate) outbox: Outbox,
}

/// Messages on their way to one peer, bounded by bytes. Dropping it closes the connection after what is queued has
/// been sent.
#[derive(Debug)]
pub(crate) struct Outbox {
    queue: mpsc::UnboundedSender<Vec<u8>>,
    queued: Arc<AtomicUsize>,
    bound: usize,
    cancel: CancellationToken,
}

impl Outbox {
    /// Queues a message. A peer that has stopped reading is given up when too much waits for it.
    ///
    /// # Errors
    /// When the message is too long for the wire.
    pub(crate) fn send(&self, message: &Message) -> Result<(), WireError> {
        let bytes = encode(message)?;
        let len = bytes.len();
        if self.queued.fetch_add(len, Ordering::Relaxed).saturating_add(len) > self.bound {
            self.cancel.cancel();
        } else {
            // A writer that is gone has told the core, which will get to it.
            self.queue.send(bytes).ok();
        }
        Ok(())
    }
}

/// Accepts control connections, as source.
#[derive(Debug)]
pub(crate) struct Listener {
    shared: Arc<Shared>,
    listener: TcpListener,
}

impl Listener {
    pub(crate) fn new(shared: Arc<Shared>, listener: TcpListener) -> Self {
        Self { shared, listener }
    }

    pub(crate) async fn run(self) {
        let slots = Arc::new(Semaphore::new(self.shared.limits.connections));
        loop {
            let accepted = tokio::select! {
                () = self.shared.listen.cancelled() => return,
                accepted = self.listener.accept() => accepted,
            };
            match (accepted, slots.clone().try_acquire_owned()) {
                (Ok((stream, _)), Ok(slot)) => {
                    let connection = Connection::new(&self.shared, Side::Source, None);
                    self.shared.tracker.spawn(async move {
                        connection.run(stream).await;
                        drop(slot);
                    });
                }
                (Ok((_, from)), Err(_)) => {
                    tracing::warn!(%from, "too many control connections; closed");
                    self.shared.count_broken("full");
                }
                // Such as too many open files: other connections go on, so wait for one to end.
                (Err(error), _) => {
                    tracing::warn!(%error, "cannot accept");
                    sleep(self.shared.limits.heartbeat).await;
                }
            }
        }
    }
}

/// One control connection, from the handshake to its end.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) id: ConnId,
    pub(crate) cancel: CancellationToken,
    shared: Arc<Shared>,
    side: Side,
    expected: Option<PeerAddr>,
}

impl Connection {
    /// A connection on which we are `side`.
    pub(crate) fn new(shared: &Arc<Shared>, side: Side, expected: Option<PeerAddr>) -> Self {
        Self {
            id: ConnId(shared.connection.fetch_add(1, Ordering::Relaxed)),
            cancel: shared.stop.child_token(),
            shared: shared.clone(),
            side,
            expected,
        }
    }

    /// Connects to the expected peer and serves the connection.
    pub(crate) async fn dial(self, endpoint: String) {
        let connect = async {
            let at: SocketAddr = endpoint.parse().map_err(|_| format!("`{endpoint}` is not ADDRESS:PORT"))?;
            if !at.ip().is_loopback() {
                return Err("only loopback peers until connections are authenticated".to_owned());
            }
            TcpStream::connect(at).await.map_err(|e| e.to_string())
        };
        let bound = self.shared.limits.handshake;
        let reason = match timeout(bound, connect).await {
            Ok(Ok(stream)) => return self.run(stream).await,
            Ok(Err(reason)) => reason,
            Err(_) => format!("no answer within {bound:?}"),
        };
        self.tell(News::Gone(Gone::Unreachable(reason), None)).await;
    }

    /// Serves the connection. Its last word to the core is how it ended.
    async fn run(self, stream: TcpStream) {
        stream.set_nodelay(true).ok();
        let (read, mut write) = stream.into_split();
        let mut read = BufReader::with_capacity(64 << 10, read);
        let bound = self.shared.limits.handshake;
        let mut from = None;
        let greeted = tokio::select! {
            () = self.cancel.cancelled() => Err(Gone::Lost("closed here".into())),
            greeted = timeout(bound, self.greet(&mut read, &mut write, &mut from)) => {
                greeted.unwrap_or_else(|_| Err(Gone::Broken("silent", format!("no hello within {bound:?}"))))
            }
        };
        let gone = match (greeted, from) {
            (Ok(peer), _) => self.serve(peer, read, write).await,
            (Err(Gone::Refused(mismatch)), Some(to)) if self.side == Side::Target => {
                return self.part(mismatch, to, read, write).await;
            }
            (Err(Gone::Refused(mismatch)), _) => {
                tokio::select! {
                    () = self.cancel.cancelled() => {}
                    _ = timeout(bound, self.hear_out(&mismatch, &mut read)) => {}
                }
                Gone::Refused(mismatch)
            }
            (Err(gone), _) => gone,
        };
        self.tell(News::Gone(gone, None)).await;
    }

    /// Target: leaves a peer that does not fit, after naming the rooms that were to come from it, so that it does not
    /// keep them for us.
    async fn part(
        &self,
        mismatch: Mismatch,
        to: Incarnation,
        mut read: BufReader<OwnedReadHalf>,
        write: OwnedWriteHalf,
    ) {
        let (queue, messages) = mpsc::unbounded_channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let bound = self.shared.limits.outbox;
        let outbox = Outbox { queue, queued: queued.clone(), bound, cancel: self.cancel.clone() };
        self.tell(News::Gone(Gone::Refused(mismatch), Some(LastWords { to, outbox }))).await;
        let say = async {
            // Until the core has said what it has to say.
            Self::write(write, messages, &queued).await;
            // To close while something is unread would throw away what is still on its way to the peer.
            tokio::io::copy(&mut read, &mut tokio::io::sink()).await.ok();
        };
        tokio::select! {
            () = self.cancel.cancelled() => {}
            _ = timeout(self.shared.limits.handshake, say) => {}
        }
    }

    /// Source: hears from a peer that does not fit which rooms come to nothing.
    async fn hear_out(&self, mismatch: &Mismatch, read: &mut BufReader<OwnedReadHalf>) {
        for _ in 0..self.shared.limits.rooms.waiting {
            let abort = match receive(read, MAX_MESSAGE).await {
                Ok(Message::Abort(abort)) => abort,
                // It has not noticed yet that we do not fit.
                Ok(Message::Open(Open { head, .. })) => {
                    Abort { head, cause: Cause::new(CauseKind::Incompatible, Side::Target, mismatch) }
                }
                Ok(_) => continue,
                Err(_) => return,
            };
            self.tell(News::Declined(abort)).await;
        }
    }

    async fn greet(
        &self,
        read: &mut BufReader<OwnedReadHalf>,
        write: &mut OwnedWriteHalf,
        from: &mut Option<Incarnation>,
    ) -> Result<Peer, Gone> {
        let expected = self.expected.as_ref().map(|e| (e.instance.clone(), e.incarnation));
        let pairing = Pairing::new(self.shared.hello.clone(), self.side, expected);
        write.write_all(&encode(&pairing.hello())?).await?;
        let first = receive(read, MAX_HELLO).await?;
        if let Message::Hello(hello) = &first {
            *from = Some(hello.incarnation);
        }
        match pairing.answer(first) {
            Ok(peer) => Ok(peer),
            Err(error) => {
                if let Some(refusal) = error.refusal() {
                    write.write_all(&encode(&refusal)?).await?;
                }
                tracing::info!(%error, "not paired");
                Err(match error {
                    PairingError::Refused(mismatch) | PairingError::RefusedByPeer(mismatch) => {
                        Gone::Refused(mismatch)
                    }
                    other => Gone::Broken("hello", other.to_string()),
                })
            }
        }
    }

    async fn serve(&self, peer: Peer, read: BufReader<OwnedReadHalf>, write: OwnedWriteHalf) -> Gone {
        let (queue, messages) = mpsc::unbounded_channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let outbox = |queue| Outbox {
            queue,
            queued: queued.clone(),
            bound: self.shared.limits.outbox,
            cancel: self.cancel.clone(),
        };
        let beats = outbox(queue.clone()).downgrade();
        let peer = Box::new(peer);
        self.tell(News::Paired { peer, outbox: outbox(queue) }).await;
        let heard = AtomicBool::new(true);
        tokio::select! {
            () = self.cancel.cancelled() => Gone::Lost(match self.shared.stop.is_cancelled() {
                true => "closed here".into(),
                false => format!("it reads too slowly: more than {} bytes wait for it", self.shared.limits.outbox),
            }),
            gone = self.read(read, &heard) => gone,
            gone = Self::write(write, messages, &queued) => gone,
            gone = self.beat(&beats, &heard) => gone,
        }
    }

    async fn read(&self, mut read: BufReader<OwnedReadHalf>, heard: &AtomicBool) -> Gone {
        let (mut left, mut refused) = (None, None);
        loop {
            let message = receive(&mut read, MAX_MESSAGE).await;
            heard.store(true, Ordering::Relaxed);
            match message {
                Ok(Message::Goodbye(bye)) => {
                    left = Some(bye.reason);
                    self.tell(News::Leaving).await;
                }
                Ok(Message::Refuse(Refuse { mismatch: Mismatch { field, ours, theirs } })) => {
                    let mismatch = Mismatch { field, ours: theirs, theirs: ours };
                    if self.side == Side::Target {
                        return Gone::Refused(mismatch);
                    }
                    // The rooms that come to nothing follow, and then the end.
                    refused = Some(mismatch);
                }
                Ok(message) => self.tell(News::Said(message)).await,
                Err(gone) => {
                    return match (refused, left, gone) {
                        (Some(mismatch), ..) => Gone::Refused(mismatch),
                        (_, Some(reason), Gone::Lost(_)) => Gone::Lost(format!("the peer left: {reason}")),
                        (.., gone) => gone,
                    };
                }
            }
        }
    }

    async fn write(
        mut write: OwnedWriteHalf,
        mut messages: mpsc::UnboundedReceiver<Vec<u8>>,
        queued: &AtomicUsize,
    ) -> Gone {
        while let Some(bytes) = messages.recv().await {
            if let Err(error) = write.write_all(&bytes).await {
                return error.into();
            }
            queued.fetch_sub(bytes.len(), Ordering::Relaxed);
        }
        write.shutdown().await.ok();
        Gone::Lost("closed here".into())
    }

    /// Sends heartbeats and counts those of the peer. Counting our own ticks, and not the time, keeps a machine that
    /// slept from declaring everybody dead.
    async fn beat(&self, outbox: &WeakOutbox, heard: &AtomicBool) -> Gone {
        let limits = &self.shared.limits;
        let mut ticks = interval(limits.heartbeat);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut missed = 0;
        for sequence in 0.. {
            ticks.tick().await;
            missed = if heard.swap(false, Ordering::Relaxed) { 0 } else { missed + 1 };
            if missed >= limits.missed {
                break;
            }
            outbox.beat(&Message::Heartbeat(Heartbeat { sequence }));
        }
        Gone::Lost(format!("silent for {missed} heartbeats of {:?}", limits.heartbeat))
    }

    async fn tell(&self, news: News) {
        // The core is gone only when the node is.
        self.shared.inbox.send(Remote { conn: self.id, news }).await.ok();
    }
}

/// An outbox that does not keep its connection open.
#[derive(Debug)]
struct WeakOutbox {
    queue: mpsc::WeakUnboundedSender<Vec<u8>>,
    queued: Arc<AtomicUsize>,
}

impl Outbox {
    fn downgrade(&self) -> WeakOutbox {
        WeakOutbox { queue: self.queue.downgrade(), queued: self.queued.clone() }
    }
}

impl WeakOutbox {
    fn beat(&self, message: &Message) {
        if let (Some(queue), Ok(bytes)) = (self.queue.upgrade(), encode(message)) {
            self.queued.fetch_add(bytes.len(), Ordering::Relaxed);
            queue.send(bytes).ok();
        }
    }
}

/// The next message that this version knows. Memory grows with what arrives, not with what is announced.
async fn receive(read: &mut BufReader<OwnedReadHalf>, max: u32) -> Result<Message, Gone> {
    loop {
        let mut prefix = [0; 4];
        let (first, rest) = prefix.split_at_mut(1);
        read.read_exact(first).await?;
        read.read_exact(rest).await.map_err(cut)?;
        let len = frame_len(prefix, max)?;
        let mut body = Vec::new();
        read.take(len.into()).read_to_end(&mut body).await?;
        if body.len() as u64 != u64::from(len) {
            return Err(Gone::Broken("cut", "the connection was closed inside a message".into()));
        }
        match decode(&body) {
            Err(WireError::UnknownKind { kind }) => {
                tracing::debug!(kind, "skipped a message of a later version");
            }
            other => return Ok(other?),
        }
    }
}

fn cut(error: std::io::Error) -> Gone {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            Gone::Broken("cut", "the connection was closed inside a message".into())
        }
        _ => error.into(),
    }
}
