//! Listening and connecting over loopback TCP, in bounded time. Transports of other crates tune their sockets here, too.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use kvferry_plan::Incarnation;
use rustix::{
    io::Errno,
    net::{
        AddressFamily, SocketFlags, SocketType, connect, socket_with,
        sockopt::{Timeout, set_socket_keepalive, set_socket_timeout, set_tcp_congestion, set_tcp_nodelay},
    },
};

use crate::{Limits, PeerAddr, TransportError, socket::Socket};

const NOT_LOOPBACK: &str = "only loopback addresses are served: connections are not authenticated yet, so any other \
                            host could write the pool";

/// Listens on a free port.
pub(crate) fn listen(bind: IpAddr) -> Result<(TcpListener, SocketAddr), TransportError> {
    if !bind.is_loopback() {
        return Err(TransportError::Endpoint { endpoint: bind.to_string(), reason: NOT_LOOPBACK });
    }
    let io = |source| TransportError::Io { action: "listen", source };
    let listener = TcpListener::bind((bind, 0)).map_err(io)?;
    tune(&listener);
    let address = listener.local_addr().map_err(io)?;
    Ok((listener, address))
}

/// Connects to a peer whose endpoint is `scheme`, an address and a port, and says hello to it. `usage` says how such an
/// endpoint is written.
pub(crate) fn dial(
    from: Incarnation,
    peer: &PeerAddr,
    scheme: &str,
    usage: &'static str,
    limits: &Limits,
) -> Result<Socket, TransportError> {
    let endpoint = &peer.endpoint;
    let refuse = |reason| TransportError::Endpoint { endpoint: endpoint.clone(), reason };
    let address: SocketAddr = endpoint
        .strip_prefix(scheme)
        .and_then(|rest| rest.strip_prefix("://"))
        .and_then(|address| address.parse().ok())
        .ok_or_else(|| refuse(usage))?;
    if !address.ip().is_loopback() {
        return Err(refuse(NOT_LOOPBACK));
    }
    let gone =
        |error: io::Error| TransportError::PeerGone { endpoint: endpoint.clone(), reason: error.to_string() };
    let socket = connect_within(address, limits.connect).and_then(|fd| Socket::new(fd, limits.stall));
    let socket = socket.map_err(gone)?;
    socket.greet(from, peer.incarnation, limits.connect, endpoint)?;
    Ok(socket)
}

/// Connects with a socket that is tuned, within `limit`. How long its calls may take is up to the caller.
///
/// # Errors
/// Those of the system, [`io::ErrorKind::TimedOut`] among them.
pub fn connect_within(address: SocketAddr, limit: Duration) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    loop {
        let fd = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        tune(&fd);
        set_socket_timeout(&fd, Timeout::Send, Some(limit))?;
        match connect(&fd, &address) {
            Ok(()) => return Ok(fd),
            // A socket whose connecting was interrupted cannot be asked again.
            Err(Errno::INTR) => {}
            // What the kernel calls it when the time is over.
            Err(Errno::INPROGRESS) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Best effort: a kernel that refuses is slower, nothing else. For sockets that are not connected yet, and for
/// listening ones, whose connections inherit it: one that has once had a pacing congestion control stays paced.
pub fn tune(stream: impl AsFd) {
    let stream = stream.as_fd();
    // Answers are small and somebody waits for each.
    let _ = set_tcp_nodelay(stream, true);
    let _ = set_socket_keepalive(stream, true);
    // Pacing congestion controls, the default of some hosts, cost a quarter of the rate on short paths.
    if set_tcp_congestion(stream, "cubic").is_err() {
        let _ = set_tcp_congestion(stream, "reno");
    }
}
