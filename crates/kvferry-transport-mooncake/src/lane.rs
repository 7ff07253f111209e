//! A data connection of an initiator: reads and writes, many under way at a time.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, IoSlice, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    os::fd::AsFd,
    time::Duration,
};

use kvferry_arena::{ArenaError, Buffer, Span};
use kvferry_plan::Bytes;
use kvferry_transport::loopback::connect_within;

use crate::{
    Address, Limits, MooncakeError, stream,
    wire::{Opcode, Request, STATUS, Status},
};

/// Requests that go out in one call of the system.
const TOGETHER: usize = 32;

/// Something to be written.
#[derive(Clone, Copy, Debug)]
pub struct Write<'a> {
    /// Where, at the target.
    pub address: Address,
    /// What.
    pub bytes: &'a [u8],
}

/// Something to be read.
#[derive(Debug)]
pub struct Read<'a> {
    /// Where, at the target.
    pub address: Address,
    /// Where it goes.
    pub into: &'a mut [u8],
}

/// A data connection. Mooncake's own initiator sends a request when the one before is answered; this one goes on sending, up to
/// [`Limits::window`], which its targets take as well.
///
/// What is written is borrowed until the target has acknowledged it or the connection is closed: nothing is sent from
/// it afterwards. After any error the lane is closed for good; of the requests of that call any part may have been carried out.
#[derive(Debug)]
pub struct Lane {
    stream: TcpStream,
    peer: SocketAddr,
    stall: Duration,
    window: usize,
    closed: bool,
}

impl Lane {
    pub(crate) fn connect(data: SocketAddr, limits: &Limits) -> Result<Self, MooncakeError> {
        let stream = connect_within(data, limits.connect)
            .map(TcpStream::from)
            .map_err(|error| stream::lost(data, limits.connect, error))?;
        stream::bound(&stream, limits.stall).map_err(|error| stream::lost(data, limits.stall, error))?;
        // Answers of the whole window must fit the buffers of the kernel: nobody takes them while requests are sent.
        let window = limits.window.clamp(1, 1024);
        Ok(Self { stream, peer: data, stall: limits.stall, window, closed: false })
    }

    /// Writes all of it, and returns when all of it lies at the target. Writes of no bytes are none.
    ///
    /// # Errors
    /// [`MooncakeError::Refused`] for a range that is not granted, and those of a connection.
    pub fn write(&mut self, writes: &[Write<'_>]) -> Result<(), MooncakeError> {
        self.run(|lane| lane.write_all(writes))
    }

    /// Reads all of it. Reads of no bytes are none.
    ///
    /// # Errors
    /// As [`Lane::write`].
    pub fn read(&mut self, reads: &mut [Read<'_>]) -> Result<(), MooncakeError> {
        self.run(|lane| lane.read_all(reads))
    }

    /// Sends a span of a buffer to `to`, and does not wait for its status: [`Self::confirm`] does. When this returns, however
    /// it ends, nothing is read from the buffer any more.
    pub(crate) fn send_span(
        &mut self,
        to: Address,
        buffer: &Buffer,
        mut span: Span,
    ) -> Result<Request, MooncakeError> {
        self.run(|lane| {
            let request = request(Opcode::Write, to, span.len.index());
            lane.send(&mut [IoSlice::new(&request.encode())]).map_err(|error| lane.lost(error))?;
            while span.len.0 > 0 {
                let sent = match buffer.send_to(lane.stream.as_fd(), span) {
                    Ok(sent) => Bytes(sent as u64),
                    Err(ArenaError::Socket(error)) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(ArenaError::Socket(error)) => return Err(lane.lost(error)),
                    Err(error) => return Err(lane.lost(io::Error::other(error))),
                };
                span = Span { offset: Bytes(span.offset.0 + sent.0), len: Bytes(span.len.0 - sent.0) };
            }
            Ok(request)
        })
    }

    /// Waits for the status of the span that was sent first of those that have none.
    pub(crate) fn confirm(&mut self, sent: &Request) -> Result<(), MooncakeError> {
        self.run(|lane| {
            let mut status = [0; STATUS];
            lane.fill(&mut status)?;
            lane.check(status, Some(sent))
        })
    }

    /// To break it off from another thread.
    pub(crate) fn hang_up(&self) -> Result<HangUp, MooncakeError> {
        self.stream.try_clone().map(HangUp).map_err(|error| self.lost(error))
    }

    fn run<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T, MooncakeError>) -> Result<T, MooncakeError> {
        if self.closed {
            return Err(MooncakeError::Closed { peer: self.peer });
        }
        let outcome = f(self);
        if outcome.is_err() {
            self.closed = true;
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        outcome
    }

    fn write_all(&mut self, writes: &[Write<'_>]) -> Result<(), MooncakeError> {
        let mut due = VecDeque::new();
        let mut rest = writes.iter().filter(|write| !write.bytes.is_empty()).peekable();
        while rest.peek().is_some() {
            let together: Vec<_> = rest.by_ref().take(TOGETHER.min(self.window)).collect();
            self.confirm_some(&mut due, self.window - together.len())?;
            let headers: Vec<_> = together
                .iter()
                .map(|write| request(Opcode::Write, write.address, write.bytes.len()).encode())
                .collect();
            let slices = headers
                .iter()
                .zip(&together)
                .flat_map(|(header, write)| [IoSlice::new(header), IoSlice::new(write.bytes)]);
            due.extend(together.iter().map(|write| request(Opcode::Write, write.address, write.bytes.len())));
            if let Err(error) = self.send(&mut slices.collect::<Vec<_>>()) {
                // Who refuses closes the connection, and says so first.
                let gone = self.lost(error);
                return Err(match self.confirm_some(&mut due, 0) {
                    Err(refused @ MooncakeError::Refused { .. }) => refused,
                    _ => gone,
                });
            }
        }
        self.confirm_some(&mut due, 0)
    }

    /// Takes statuses until only `left` are due.
    fn confirm_some(&mut self, due: &mut VecDeque<Request>, left: usize) -> Result<(), MooncakeError> {
        let mut statuses = [0; STATUS * 64];
        let mut held = 0;
        while due.len() > left {
            let most = statuses.len().min((due.len() - left) * STATUS);
            let into = statuses.get_mut(held..most).unwrap_or_default();
            held += self.receive(into)?;
            let whole = held - held % STATUS;
            for status in statuses.get(..whole).unwrap_or_default().as_chunks().0 {
                let request = due.pop_front();
                self.check(*status, request.as_ref())?;
            }
            statuses.copy_within(whole..held, 0);
            held -= whole;
        }
        Ok(())
    }

    fn read_all(&mut self, reads: &mut [Read<'_>]) -> Result<(), MooncakeError> {
        let requests: Vec<_> = reads
            .iter()
            .filter(|read| !read.into.is_empty())
            .map(|read| request(Opcode::Read, read.address, read.into.len()))
            .collect();
        let mut later = requests.iter();
        let mut header = Vec::new();
        let first = later.by_ref().take(self.window);
        header.extend(first.flat_map(Request::encode));
        self.send(&mut [IoSlice::new(&header)]).map_err(|error| self.lost(error))?;
        let into = reads.iter_mut().map(|read| &mut *read.into).filter(|into| !into.is_empty());
        for (request, into) in requests.iter().zip(into) {
            let mut status = [0; STATUS];
            self.fill(&mut status)?;
            self.check(status, Some(request))?;
            if let Some(next) = later.next() {
                self.send(&mut [IoSlice::new(&next.encode())]).map_err(|error| self.lost(error))?;
            }
            self.fill(into)?;
        }
        Ok(())
    }

    fn check(&self, status: [u8; STATUS], request: Option<&Request>) -> Result<(), MooncakeError> {
        let peer = self.peer;
        match (Status::decode(status), request) {
            (Some(Status::Done), Some(_)) => Ok(()),
            (Some(Status::Refused), Some(Request { address, len, .. })) => {
                Err(MooncakeError::Refused { peer, address: *address, len: *len })
            }
            _ => {
                let reason = format!("{status:02x?} is no status");
                Err(MooncakeError::Protocol { peer, reason })
            }
        }
    }

    fn send(&mut self, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        while slices.iter().any(|slice| !slice.is_empty()) {
            match self.stream.write_vectored(slices) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => IoSlice::advance_slices(&mut slices, n),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn fill(&mut self, mut buffer: &mut [u8]) -> Result<(), MooncakeError> {
        while !buffer.is_empty() {
            let n = self.receive(buffer)?;
            buffer = buffer.get_mut(n..).unwrap_or_default();
        }
        Ok(())
    }

    /// Some bytes, at least one.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, MooncakeError> {
        loop {
            match self.stream.read(buffer) {
                Ok(0) => return Err(self.lost(ErrorKind::UnexpectedEof.into())),
                Ok(n) => return Ok(n),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lost(error)),
            }
        }
    }

    fn lost(&self, error: io::Error) -> MooncakeError {
        stream::lost(self.peer, self.stall, error)
    }
}

/// Breaks off a lane.
#[derive(Debug)]
pub(crate) struct HangUp(TcpStream);

impl HangUp {
    pub(crate) fn hang_up(&self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

fn request(opcode: Opcode, address: Address, len: usize) -> Request {
    Request { opcode, address, len: Bytes(len as u64), status: true }
}
