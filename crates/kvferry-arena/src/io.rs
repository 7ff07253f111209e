//! Bytes between an arena and a socket without a buffer between: one call, several spans. Unsafe code lives here, in
//! `mmap` and in `simd`. *Not* for waiting: callers know how long they may.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use kvferry_plan::Bytes;

use crate::{ArenaError, mmap::Mapping};

/// `len` bytes at `offset` of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub offset: Bytes,
    /// Bytes.
    pub len: Bytes,
}

/// What to do when nothing has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// As long as the socket is set to.
    Socket,
    /// Not at all.
    Never,
}

/// Spans that one call takes; more are left for the next.
const SPANS: usize = 64;

/// Sends bytes of `spans`, in order, and returns how many the socket took. Blocks as the socket does.
pub(crate) fn send(mapping: &Mapping, socket: BorrowedFd<'_>, spans: &[Span]) -> Result<usize, ArenaError> {
    call(
        spans,
        |span| Ok(mapping.source(span.offset, span.len)?.cast_mut()),
        |message| {
            // SAFETY: every vector of `message` was checked to be readable memory of the mapping, which lives as long
            // as this borrow; the kernel only reads it.
            unsafe { libc::sendmsg(socket.as_raw_fd(), message, libc::MSG_NOSIGNAL) }
        },
    )
}

/// Receives into `spans`, in order, and returns how many bytes came; 0 when the peer has closed.
pub(crate) fn receive(
    mapping: &Mapping,
    socket: BorrowedFd<'_>,
    spans: &[Span],
    wait: Wait,
) -> Result<usize, ArenaError> {
    let flags = match wait {
        Wait::Socket => 0,
        Wait::Never => libc::MSG_DONTWAIT,
    };
    call(
        spans,
        |span| mapping.target(span.offset, span.len),
        |message| {
            // SAFETY: every vector of `message` was checked to be writable memory of the mapping, which lives as long
            // as this borrow.
            unsafe { libc::recvmsg(socket.as_raw_fd(), message, flags) }
        },
    )
}

fn call(
    spans: &[Span],
    at: impl Fn(&Span) -> Result<*mut u8, ArenaError>,
    system: impl FnOnce(*mut libc::msghdr) -> libc::ssize_t,
) -> Result<usize, ArenaError> {
    let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; SPANS];
    let mut used = 0;
    for (vector, span) in vectors.iter_mut().zip(spans) {
        *vector = libc::iovec { iov_base: at(span)?.cast(), iov_len: span.len.index() };
        used += 1;
    }
    // SAFETY: a message header of zeros is a valid one that names nothing.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = used as _;
    let moved = system(&raw mut message);
    usize::try_from(moved).map_err(|_| ArenaError::Socket(io::Error::last_os_error()))
}
