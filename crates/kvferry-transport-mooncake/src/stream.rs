//! TCP connections whose every wait is bounded.

use std::{
    io::{self, ErrorKind, Read},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use crate::{
    MooncakeError,
    wire::{self, Kind},
};

/// What the system says when a wait was too long.
pub(crate) fn timed_out(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// As an error about a peer, of whom `waited` was asked for.
pub(crate) fn lost(peer: SocketAddr, waited: Duration, source: io::Error) -> MooncakeError {
    if timed_out(&source) {
        MooncakeError::Stalled { peer, waited }
    } else {
        MooncakeError::Gone { peer, source }
    }
}

/// Every call on it fails when nothing moves for `stall`.
pub(crate) fn bound(stream: &TcpStream, stall: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(stall))?;
    stream.set_write_timeout(Some(stall))
}

/// Reads one control message, all of it by `deadline`. The outer error is the connection's, the inner one says what is wrong
/// with what came.
pub(crate) fn hear(
    stream: &TcpStream,
    deadline: Instant,
) -> io::Result<Result<(Kind, Vec<u8>), &'static str>> {
    let mut len = [0; 8];
    fill(stream, &mut len, deadline)?;
    let Some(len) = wire::message_len(len) else { return Ok(Err("a message of an impossible length")) };
    // Memory is taken for what has come, not for what was announced.
    let mut rest = Vec::new();
    while rest.len() < len {
        let from = rest.len();
        rest.resize(len.min(from + (64 << 10)), 0);
        fill(stream, rest.get_mut(from..).unwrap_or_default(), deadline)?;
    }
    Ok(match wire::open(&rest) {
        Some((kind, body)) => Ok((kind, body.to_vec())),
        None => Err("a message of a kind that TCP peers do not send"),
    })
}

fn fill(mut stream: &TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(rest) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => filled += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
