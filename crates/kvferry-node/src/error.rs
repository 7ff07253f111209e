//! What can go wrong, whose fault it is, and what to do next.

use std::net::SocketAddr;

use kvferry_plan::{Blame, InstanceId, Mismatch, RoomKey};
use kvferry_session::{Cause, Side};
use kvferry_transport::TransportError;

use crate::TransportKind;

/// Why a node does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// A bind address that others could reach, while connections are not authenticated.
    #[error("will not listen on {0}: connections are not authenticated yet, so only loopback is allowed")]
    NotLoopback(SocketAddr),
    /// The configuration contradicts itself.
    #[error("node configuration: {0}")]
    Config(String),
    /// The control plane cannot listen.
    #[error("cannot listen on {bind}: {source}")]
    Bind {
        /// The address.
        bind: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// The system has no randomness to draw an incarnation from.
    #[error("no randomness for this start's incarnation: {0}")]
    Nonce(String),
    /// A transport does not start.
    #[error("transport {kind}: {source}")]
    Transport {
        /// Which.
        kind: TransportKind,
        /// Why.
        source: TransportError,
    },
}

impl NodeError {
    /// Who is at fault.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::NotLoopback(_) | Self::Config(_) => Blame::Caller,
            Self::Bind { .. } | Self::Nonce(_) => Blame::Environment,
            Self::Transport { source, .. } => source.blame(),
        }
    }
}

/// Why a room ended without its bytes. Its pages are free all the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RoomError {
    /// The two instances cannot serve each other; choose another pair.
    #[error("{peer} cannot be paired with: {mismatch}")]
    Incompatible {
        /// The peer.
        peer: InstanceId,
        /// The field and both values.
        mismatch: Mismatch,
    },
    /// No connection to the peer; it may be gone or restarted: look it up again.
    #[error("{peer} at {endpoint} cannot be reached: {reason}")]
    Unreachable {
        /// The peer.
        peer: InstanceId,
        /// The address that was tried.
        endpoint: String,
        /// What happened.
        reason: String,
    },
    /// The room was opened and ended; the same is told to both sides. A retry is a new attempt.
    #[error("room {key}: {cause}")]
    Ended {
        /// The room.
        key: RoomKey,
        /// Why.
        cause: Cause,
        /// Which side we are.
        side: Side,
    },
    /// The room cannot be started like this.
    #[error("room {key}: {reason}")]
    Rejected {
        /// The room.
        key: RoomKey,
        /// What is wrong with it.
        reason: String,
    },
    /// This node is shut down or shutting down.
    #[error("the node is shut down")]
    ShutDown,
}

impl RoomError {
    /// Who is at fault.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Incompatible { .. } => Blame::PeerIncompatible,
            Self::Unreachable { .. } => Blame::PeerMisbehaved,
            Self::Ended { cause, side, .. } => cause.blame(*side),
            Self::Rejected { .. } => Blame::Caller,
            Self::ShutDown => Blame::Environment,
        }
    }

    /// The field in which two instances differ, if that is what it is about.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Incompatible { mismatch, .. } => Some(&mismatch.field),
            _ => None,
        }
    }
}
