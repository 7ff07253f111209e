//! A stream socket whose every wait is bounded, and the hello that comes first on each.

use std::{
    io::{self, IoSlice},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::OnceLock,
    time::{Duration, Instant},
};

use kvferry_plan::Incarnation;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, sendmsg, shutdown,
        sockopt::{Timeout, set_socket_timeout},
    },
};

use crate::{
    TransportError,
    wire::{self, Hello, MAX_HEADER, VERSION},
};

/// Why a socket cannot be used any more.
#[derive(Debug)]
pub(crate) enum Lost {
    /// The other end closed it, or its process died, between two messages.
    Closed,
    /// As `Closed`, in the middle of one.
    Cut,
    /// It said something that is no message.
    Malformed(&'static str),
    /// It announced something of a length that nothing has.
    Length(&'static str),
    /// Nothing moved for this long.
    Stalled(Duration),
    /// Something else.
    Io(io::Error),
}

impl Lost {
    /// As an error about the peer at `endpoint`.
    pub(crate) fn into_error(self, endpoint: &str) -> TransportError {
        let endpoint = endpoint.to_owned();
        let reason = match self {
            Self::Closed => "it closed the connection".into(),
            Self::Cut => "it closed the connection in the middle of a message".into(),
            Self::Malformed(what) | Self::Length(what) => {
                return TransportError::Protocol { endpoint, reason: what.into() };
            }
            Self::Stalled(waited) => return TransportError::Stalled { endpoint, waited },
            Self::Io(error) => error.to_string(),
        };
        TransportError::PeerGone { endpoint, reason }
    }
}

/// A connected stream socket.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    stall: Duration,
    /// Who was welcomed on it.
    peer: OnceLock<Incarnation>,
}

impl Socket {
    /// Every call on it fails when nothing moves for `stall`.
    pub(crate) fn new(fd: impl Into<OwnedFd>, stall: Duration) -> io::Result<Self> {
        let fd = fd.into();
        set_socket_timeout(&fd, Timeout::Recv, Some(stall))?;
        set_socket_timeout(&fd, Timeout::Send, Some(stall))?;
        Ok(Self { fd, stall, peer: OnceLock::new() })
    }

    /// Who was welcomed on it, once it was.
    pub(crate) fn peer(&self) -> Option<Incarnation> {
        self.peer.get().copied()
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Ends all calls on it, here and at the other end.
    pub(crate) fn hang_up(&self) {
        let _ = shutdown(&self.fd, Shutdown::Both);
    }

    /// What to say when a call of the caller's own has timed out.
    pub(crate) fn stalled(&self) -> Lost {
        Lost::Stalled(self.stall)
    }

    /// True while the other end is there and says nothing.
    pub(crate) fn quiet(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN | PollFlags::RDHUP)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(0) | Err(Errno::INTR))
    }

    /// Waits until something comes, or the end of the connection.
    pub(crate) fn readable(&self) -> Result<(), Lost> {
        let wait = Timespec::try_from(self.stall).map_err(|_| self.stalled())?;
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN | PollFlags::RDHUP)];
        match poll(&mut fds, Some(&wait)) {
            Ok(0) => Err(self.stalled()),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(Lost::Io(error.into())),
        }
    }

    /// Fills `buffer`. Before the first byte the wait is unbounded if `idle`: the other end may have nothing to say.
    pub(crate) fn fill(&self, buffer: &mut [u8], idle: bool) -> Result<(), Lost> {
        self.fill_until(buffer, idle, None)
    }

    fn fill_until(&self, buffer: &mut [u8], idle: bool, deadline: Option<Instant>) -> Result<(), Lost> {
        let mut filled = 0;
        while filled < buffer.len() {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Lost::Stalled(self.stall));
            }
            match recv(&self.fd, &mut buffer[filled..], RecvFlags::empty()) {
                Ok((_, 0)) => return Err(if filled == 0 { Lost::Closed } else { Lost::Cut }),
                Ok((_, n)) => filled += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if idle && filled == 0 => {}
                Err(Errno::AGAIN) => return Err(self.stalled()),
                Err(error) => return Err(Lost::Io(error.into())),
            }
        }
        Ok(())
    }

    /// Sends `head` and `body`.
    pub(crate) fn send(&self, mut head: &[u8], mut body: &[u8]) -> Result<(), Lost> {
        while !head.is_empty() || !body.is_empty() {
            let slices = [IoSlice::new(head), IoSlice::new(body)];
            let flags = SendFlags::NOSIGNAL;
            match sendmsg(&self.fd, &slices, &mut SendAncillaryBuffer::default(), flags) {
                Ok(n) => {
                    let of_head = n.min(head.len());
                    head = &head[of_head..];
                    body = &body[n - of_head..];
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(self.stalled()),
                Err(error) => return Err(Lost::Io(error.into())),
            }
        }
        Ok(())
    }

    /// Reads a message with its length in front.
    pub(crate) fn message<T: for<'b> minicbor::Decode<'b, ()>>(&self) -> Result<T, Lost> {
        self.message_of(MAX_HEADER)
    }

    /// As [`Self::message`], of at most `most` bytes.
    pub(crate) fn message_of<T: for<'b> minicbor::Decode<'b, ()>>(&self, most: u32) -> Result<T, Lost> {
        self.message_after(false, most)
    }

    /// As [`Self::message_of`]. Before the first byte the wait is unbounded if `idle`: the other end may have nothing to
    /// say.
    pub(crate) fn message_after<T: for<'b> minicbor::Decode<'b, ()>>(
        &self,
        idle: bool,
        most: u32,
    ) -> Result<T, Lost> {
        self.message_until(idle, most, None)
    }

    fn message_until<T: for<'b> minicbor::Decode<'b, ()>>(
        &self,
        idle: bool,
        most: u32,
        deadline: Option<Instant>,
    ) -> Result<T, Lost> {
        let mut len = [0; 4];
        self.fill_until(&mut len, idle, deadline)?;
        let len = wire::message_len(len, most).ok_or(Lost::Length("a message of an impossible length"))?;
        let mut bytes = vec![0; len];
        self.fill_until(&mut bytes, false, deadline)?;
        wire::decode(&bytes).ok_or(Lost::Malformed("a message that cannot be decoded"))
    }

    /// Reads the other end's hello, all of it within `limit`.
    fn hear(&self, limit: Duration) -> Result<Hello, Lost> {
        let deadline = Some(Instant::now() + limit);
        let mut magic = [0; wire::MAGIC.len()];
        self.fill_until(&mut magic, false, deadline)?;
        if magic != wire::MAGIC {
            return Err(Lost::Malformed(
                "it does not start with kvferry's magic: something else uses this port",
            ));
        }
        self.message_until(false, MAX_HEADER, deadline)
    }

    /// Says hello to the process at `endpoint` and checks that it is the one that is meant.
    pub(crate) fn greet(
        &self,
        from: Incarnation,
        to: Incarnation,
        limit: Duration,
        endpoint: &str,
    ) -> Result<Hello, TransportError> {
        let lost = |lost: Lost| lost.into_error(endpoint);
        self.send(&wire::hello(&Hello { version: VERSION, from, to, ranks: None }), &[]).map_err(lost)?;
        let answer = self.hear(limit).map_err(lost)?;
        if answer.version != VERSION {
            return Err(TransportError::Protocol {
                endpoint: endpoint.into(),
                reason: format!("it speaks version {} of the data plane, not {VERSION}", answer.version),
            });
        }
        if answer.from != to {
            let (expected, found) = (to, answer.from);
            return Err(TransportError::Restarted { endpoint: endpoint.into(), expected, found });
        }
        Ok(answer)
    }

    /// Hears a peer's hello and answers it: `None` when the peer means another process or speaks another version,
    /// which the answer tells it.
    pub(crate) fn welcome(
        &self,
        us: Incarnation,
        ranks: Option<u32>,
        limit: Duration,
    ) -> Result<Option<Incarnation>, Lost> {
        let hello = self.hear(limit)?;
        let answer = Hello { version: VERSION, from: us, to: hello.from, ranks };
        self.send(&wire::hello(&answer), &[])?;
        if hello.version != VERSION || hello.to != us {
            return Ok(None);
        }
        let peer = *self.peer.get_or_init(|| hello.from);
        Ok(Some(peer))
    }
}
