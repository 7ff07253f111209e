//! What can go wrong, and whose fault it is.

use std::{io, net::SocketAddr, time::Duration};

use kvferry_plan::{Blame, Bytes};

use crate::wire::Address;

/// What can go wrong with a peer, or with a target of one's own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MooncakeError {
    /// An address of another machine.
    #[error(
        "{address} is not a loopback address: Mooncake's TCP protocol has no authentication, so any host could write the \
         memory; use `127.0.0.1`"
    )]
    NotLoopback {
        /// The address.
        address: SocketAddr,
    },
    /// The ports of a target cannot be had.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// A connection was not made or has broken.
    #[error(
        "Mooncake peer {peer} is gone ({source}): see whether its process still runs, and ask for its address again"
    )]
    Gone {
        /// Its address.
        peer: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// Nothing moved.
    #[error("Mooncake peer {peer} has not moved for {waited:?}: it hangs or is stopped")]
    Stalled {
        /// Its address.
        peer: SocketAddr,
        /// How long.
        waited: Duration,
    },
    /// It listens and answers, but has not said what it has.
    #[error(
        "Mooncake peer {peer} listens, but has had nothing to describe for {waited:?}: see in its log whether it still \
         starts, and try again when it has started"
    )]
    NotReady {
        /// Its address.
        peer: SocketAddr,
        /// How long it was asked.
        waited: Duration,
    },
    /// It said something that is not of the protocol.
    #[error("{peer} does not speak Mooncake's TCP protocol: {reason}")]
    Protocol {
        /// Its address.
        peer: SocketAddr,
        /// What it said.
        reason: String,
    },
    /// It speaks a version whose writes are not acknowledged.
    #[error(
        "Mooncake peer {peer} speaks version {found} of the TCP protocol, whose writes are not acknowledged; it must be \
         version 2: Mooncake 0.3.12 or later"
    )]
    Version {
        /// Its address.
        peer: SocketAddr,
        /// What it speaks.
        found: u32,
    },
    /// Memory that the peer does not grant.
    #[error(
        "Mooncake peer {peer} does not grant {len} at {address}: ask for its ranges again, and stay inside one of them"
    )]
    Refused {
        /// Its data port.
        peer: SocketAddr,
        /// The first byte.
        address: Address,
        /// How many.
        len: Bytes,
    },
    /// A message that it did not take.
    #[error("Mooncake peer {peer} did not take the {what}")]
    Rejected {
        /// Its address.
        peer: SocketAddr,
        /// What was said to it.
        what: &'static str,
    },
    /// A lane on which something failed before.
    #[error("the connection to Mooncake peer {peer} was closed after an earlier failure: open another one")]
    Closed {
        /// Its data port.
        peer: SocketAddr,
    },
}

impl MooncakeError {
    /// Who is at fault.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::NotLoopback { .. } | Self::Closed { .. } | Self::Refused { .. } => Blame::Caller,
            Self::Listen { .. } => Blame::Environment,
            Self::Version { .. } => Blame::PeerIncompatible,
            Self::Gone { .. }
            | Self::Stalled { .. }
            | Self::NotReady { .. }
            | Self::Protocol { .. }
            | Self::Rejected { .. } => Blame::PeerMisbehaved,
        }
    }
}
