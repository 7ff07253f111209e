//! What other engines read and write: a control port and a data port on loopback.

use std::{
    convert::Infallible,
    fmt,
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpStream},
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use kvferry_plan::Bytes;

use crate::{
    Description, Limits, MooncakeError, Notification,
    stream::{self, timed_out},
    target::door::Door,
    wire::{self, Address, Alive, Kind, Opcode, REQUEST, Region, Request, Status, VERSION},
};

mod door;

/// Bytes that are received or sent at a time.
const CHUNK: usize = 256 << 10;
/// A request that is worth calls of its own, so that its bytes need not go through a buffer.
const LARGE: u64 = 64 << 10;
/// What a refused peer may still have sent, and is thrown away so that it hears of the refusal.
const DISCARD: usize = 16 << 20;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is to be sent to the peer.
    Read,
    /// The peer writes it.
    Write,
}

/// What came of receiving straight into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// So many bytes; none at the end of the stream.
    Landed(Bytes),
    /// This memory is not received into: pieces of it are to be landed.
    InPieces,
    /// It is not granted any more.
    Refused,
}

/// The memory behind a [`Target`], and who may have which of it. Called on threads of the target, several at a time.
pub trait Ranges: Send + Sync + 'static {
    /// What whoever asks is told. Others may be granted, too.
    fn advertised(&self) -> Vec<Region>;

    /// Whether all of `region` is granted. Asked once for each request, before anything of it moves.
    fn grants(&self, access: Access, region: Region) -> bool;

    /// Lands a piece of a granted write; pieces come in order. False when it is not granted any more.
    fn land(&self, at: Address, piece: &[u8]) -> bool;

    /// Receives what has come of the rest of a granted write over its connection straight into memory, without waiting.
    ///
    /// # Errors
    /// The connection's, [`ErrorKind::WouldBlock`] when nothing has come.
    fn receive(&self, _: Region, _: BorrowedFd<'_>) -> io::Result<Received> {
        Ok(Received::InPieces)
    }

    /// Fills a piece of a granted read. False when it is not granted any more.
    fn serve(&self, at: Address, piece: &mut [u8]) -> bool;

    /// Takes a notification. False when it is not wanted.
    fn notified(&self, notification: Notification) -> bool;
}

/// What a target has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetStats {
    /// Bytes of writes.
    pub landed: Bytes,
    /// Bytes of reads.
    pub served: Bytes,
    /// Requests that were not granted.
    pub refused: u64,
    /// Connections that ended because of what came over them, or because nothing did.
    pub ended: u64,
    /// Connections that were turned away because too many were open.
    pub turned_away: u64,
}

#[derive(Debug, Default)]
struct Counters {
    landed: AtomicU64,
    served: AtomicU64,
    refused: AtomicU64,
    ended: AtomicU64,
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// A control port and a data port. Dropping it closes both and waits for its threads.
pub struct Target {
    control: Door,
    data: Door,
    served: Arc<Served>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").field("control", &self.control.address()).finish_non_exhaustive()
    }
}

impl Target {
    /// Listens on two free ports.
    ///
    /// # Errors
    /// [`MooncakeError::NotLoopback`], [`MooncakeError::Listen`].
    pub fn start(bind: IpAddr, ranges: Arc<dyn Ranges>, limits: Limits) -> Result<Self, MooncakeError> {
        let address = SocketAddr::new(bind, 0);
        if !bind.is_loopback() {
            return Err(MooncakeError::NotLoopback { address });
        }
        let listen = |source| MooncakeError::Listen { address, source };
        let connections = limits.connections;
        let served = Arc::new(Served { ranges, limits, counters: Counters::default() });
        let theirs = Arc::clone(&served);
        let data = Door::open("mooncake-data", address, connections, move |stream| theirs.data(stream))
            .map_err(listen)?;
        let (theirs, data_port) = (Arc::clone(&served), data.address().port());
        let control = Door::open("mooncake-ctl", address, connections, move |stream| {
            theirs.control(stream, data_port);
        })
        .map_err(listen)?;
        Ok(Self { control, data, served })
    }

    /// Where its control port is; by this others name it.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.control.address()
    }

    /// What whoever asks is told.
    #[must_use]
    pub fn description(&self) -> Description {
        self.served.description(self.address(), self.data.address().port())
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> TargetStats {
        let Counters { landed, served, refused, ended } = &self.served.counters;
        let at = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TargetStats {
            landed: Bytes(at(landed)),
            served: Bytes(at(served)),
            refused: at(refused),
            ended: at(ended),
            turned_away: self.control.turned_away() + self.data.turned_away(),
        }
    }

    /// Ends listening and all connections, and waits for them: afterwards nothing lands. Idempotent.
    pub fn close(&self) {
        self.control.close();
        self.data.close();
    }
}

/// What the threads of connections share.
struct Served {
    ranges: Arc<dyn Ranges>,
    limits: Limits,
    counters: Counters,
}

impl Served {
    fn description(&self, control: SocketAddr, data_port: u16) -> Description {
        let regions = self.ranges.advertised();
        Description { name: control.to_string(), data_port, version: VERSION, regions }
    }

    /// One message and its answer.
    fn control(&self, stream: &TcpStream, data_port: u16) {
        let answer = stream::bound(stream, self.limits.connect)
            .and_then(|()| stream::hear(stream, Instant::now() + self.limits.connect))
            .ok()
            .and_then(Result::ok)
            .and_then(|(kind, body)| self.answer(kind, &body, stream.local_addr().ok()?, data_port));
        let Some(answer) = answer else { return add(&self.counters.ended, 1) };
        let mut to = stream;
        let _ = to.write_all(&answer);
        hang_up(stream, self.limits.connect);
    }

    fn answer(&self, kind: Kind, body: &[u8], control: SocketAddr, data_port: u16) -> Option<Vec<u8>> {
        // Of a peer's own description nothing is needed, but it must be one of somebody.
        Some(match kind {
            Kind::Metadata => {
                wire::body::<serde::de::IgnoredAny>(body)?;
                wire::message(kind, &self.description(control, data_port).to_json())
            }
            Kind::Probe => wire::message(kind, &Alive { status: "success".into() }),
            Kind::Notify => {
                let taken = self.ranges.notified(wire::body(body)?);
                let message = if taken { "success" } else { "" };
                wire::message(kind, &Notification { name: String::new(), message: message.into() })
            }
        })
    }

    /// Requests, one after the other.
    fn data(&self, stream: &TcpStream) {
        let outcome = stream::bound(stream, self.limits.stall).map_err(Ended::Lost).and_then(|()| {
            let mut inlet = Inlet::new(stream, &self.limits);
            loop {
                let request = inlet.request()?;
                self.serve(&mut inlet, &request)?;
            }
        });
        let Err(ended): Result<Infallible, _> = outcome;
        match ended {
            Ended::Quiet => {}
            Ended::Lost(error) => {
                tracing::debug!(%error, "a data connection has ended");
                add(&self.counters.ended, 1);
            }
            Ended::Refused => {
                add(&self.counters.refused, 1);
                hang_up(stream, self.limits.stall);
            }
        }
    }

    /// Lands some bytes of the rest of a write.
    fn land(&self, inlet: &mut Inlet<'_>, rest: Region) -> Result<Bytes, Ended> {
        let piece = inlet.piece(rest.len.0)?;
        let landed = Bytes(piece.len() as u64);
        if !self.ranges.land(rest.address, piece) {
            return inlet.refuse();
        }
        inlet.take(landed.index());
        Ok(landed)
    }

    /// As above, straight into memory, once nothing is held; `None` where that is not possible.
    fn receive(&self, inlet: &mut Inlet<'_>, rest: Region) -> Result<Option<Bytes>, Ended> {
        while inlet.held.is_empty() {
            match self.ranges.receive(rest, inlet.stream.as_fd()) {
                Ok(Received::Landed(Bytes(0))) => return Err(Ended::Lost(ErrorKind::UnexpectedEof.into())),
                Ok(Received::Landed(landed)) => return Ok(Some(landed)),
                Ok(Received::InPieces) => break,
                Ok(Received::Refused) => return inlet.refuse(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => inlet.wait().map_err(Ended::Lost)?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Ended::Lost(error)),
            }
        }
        Ok(None)
    }

    fn serve(&self, inlet: &mut Inlet<'_>, request: &Request) -> Result<(), Ended> {
        let Request { opcode, address, len, status } = *request;
        if !status {
            // Nobody would know whether a write has landed.
            tracing::warn!(
                "an engine of Mooncake before 0.3.12 was refused: its writes are not acknowledged"
            );
            return Err(Ended::Refused);
        }
        let access = match opcode {
            Opcode::Read => Access::Read,
            Opcode::Write => Access::Write,
        };
        let sane = len.0 > 0 && address.0.checked_add(len.0).is_some();
        if !sane || !self.ranges.grants(access, Region { address, len }) {
            return inlet.refuse();
        }
        match opcode {
            Opcode::Write => {
                let mut done = 0;
                while done < len.0 {
                    let rest = Region { address: Address(address.0 + done), len: Bytes(len.0 - done) };
                    let landed = if len.0 < LARGE { None } else { self.receive(inlet, rest)? };
                    let landed = match landed {
                        Some(landed) => landed,
                        None => self.land(inlet, rest)?,
                    };
                    done += landed.0;
                    add(&self.counters.landed, landed.0);
                }
                // The next request is likely as long.
                inlet.ahead = if len.0 < LARGE { CHUNK } else { REQUEST };
                inlet.answer(Status::Done);
            }
            Opcode::Read => {
                let mut piece = vec![0; CHUNK.min(usize::try_from(len.0).unwrap_or(CHUNK))];
                inlet.answer(Status::Done);
                let mut done = 0;
                while done < len.0 {
                    let n = piece.len().min(usize::try_from(len.0 - done).unwrap_or(CHUNK));
                    let piece = piece.get_mut(..n).unwrap_or_default();
                    if !self.ranges.serve(Address(address.0 + done), piece) {
                        // The status has been sent: only the end of the connection can say it.
                        return Err(Ended::Refused);
                    }
                    inlet.send(piece)?;
                    done += n as u64;
                    add(&self.counters.served, n as u64);
                }
            }
        }
        Ok(())
    }
}

/// Why a data connection has ended.
enum Ended {
    /// The peer closed it between two requests, or had none for too long.
    Quiet,
    /// It broke, or hung.
    Lost(io::Error),
    /// Something was not granted; the peer has been told.
    Refused,
}

/// A data connection: what has come and is not taken, and answers that are not sent. Answers go out when there is nothing more
/// to take, so that many requests have one call of the system between them.
struct Inlet<'a> {
    stream: &'a TcpStream,
    stall: Duration,
    idle: Duration,
    buffer: Vec<u8>,
    /// Bytes that are taken at most when a request is due.
    ahead: usize,
    held: Range<usize>,
    answers: Vec<u8>,
}

impl<'a> Inlet<'a> {
    fn new(stream: &'a TcpStream, limits: &Limits) -> Self {
        let Limits { stall, idle, .. } = *limits;
        Self { stream, stall, idle, buffer: vec![0; CHUNK], ahead: CHUNK, held: 0..0, answers: Vec::new() }
    }

    fn request(&mut self) -> Result<Request, Ended> {
        let mut bytes = [0; REQUEST];
        let mut filled = 0;
        while filled < REQUEST {
            let piece = if filled == 0 { self.first()? } else { self.piece(REQUEST as u64)? };
            let n = piece.len().min(REQUEST - filled);
            bytes[filled..filled + n].copy_from_slice(&piece[..n]);
            self.take(n);
            filled += n;
        }
        Request::decode(&bytes).ok_or_else(|| Ended::Lost(ErrorKind::InvalidData.into()))
    }

    /// What comes of a next request, however long that takes within [`Limits::idle`].
    fn first(&mut self) -> Result<&[u8], Ended> {
        let since = Instant::now();
        loop {
            match self.come(self.ahead) {
                Ok(()) => return Ok(&self.buffer[self.held.clone()]),
                Err(error) if timed_out(&error) && since.elapsed() + self.stall <= self.idle => {}
                Err(error) if timed_out(&error) || error.kind() == ErrorKind::UnexpectedEof => {
                    return Err(Ended::Quiet);
                }
                Err(error) => return Err(Ended::Lost(error)),
            }
        }
    }

    /// Up to `most` bytes that have come, at least one.
    fn piece(&mut self, most: u64) -> Result<&[u8], Ended> {
        self.come(CHUNK).map_err(Ended::Lost)?;
        let held = &self.buffer[self.held.clone()];
        Ok(&held[..held.len().min(usize::try_from(most).unwrap_or(usize::MAX))])
    }

    /// Waits until something is held, of which at most `most` bytes are taken.
    fn come(&mut self, most: usize) -> io::Result<()> {
        while self.held.is_empty() {
            self.flush()?;
            let mut from = self.stream;
            match from.read(self.buffer.get_mut(..most).unwrap_or_default()) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.held = 0..n,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits until something has come that is not held, or the connection has ended.
    fn wait(&mut self) -> io::Result<()> {
        self.flush()?;
        match self.stream.peek(&mut [0]) {
            Err(error) if error.kind() != ErrorKind::Interrupted => Err(error),
            _ => Ok(()),
        }
    }

    fn take(&mut self, n: usize) {
        self.held.start += n;
    }

    fn answer(&mut self, status: Status) {
        self.answers.extend(status.encode());
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut to = self.stream;
        to.write_all(&std::mem::take(&mut self.answers))
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Ended> {
        let mut to = self.stream;
        self.flush().and_then(|()| to.write_all(bytes)).map_err(Ended::Lost)
    }

    fn refuse<T>(&mut self) -> Result<T, Ended> {
        self.answer(Status::Refused);
        self.flush().map_err(Ended::Lost)?;
        Err(Ended::Refused)
    }
}

/// Closes a connection so that what was said last arrives: waits a little for the peer to close its end, and throws away what
/// it still sends. A connection that is closed over unread bytes is reset.
fn hang_up(stream: &TcpStream, wait: Duration) {
    if stream.shutdown(Shutdown::Write).is_err() || stream.set_read_timeout(Some(wait)).is_err() {
        return;
    }
    let deadline = Instant::now() + wait;
    let mut from = stream;
    let mut waste = vec![0; 64 << 10];
    let mut left = DISCARD;
    while left > 0 && Instant::now() < deadline {
        match from.read(&mut waste) {
            Ok(0) | Err(_) => return,
            Ok(n) => left = left.saturating_sub(n),
        }
    }
}
