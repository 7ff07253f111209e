//! What can go wrong, and whose fault it is.

use std::{fmt, io, time::Duration};

use kvferry_arena::ArenaError;
use kvferry_plan::{Blame, Bytes, Generation, Incarnation, PageId, RankId, RoomKey, SlotId, Unsupported};
use minicbor::{Decode, Encode};

use crate::slots::EngineError;

/// Why a target refuses a frame. The number is its code on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(index_only)]
#[non_exhaustive]
pub enum Refusal {
    /// Another attempt of the room is granted.
    #[n(0)]
    Attempt,
    /// The room is granted with another generation.
    #[n(1)]
    Generation,
    /// The target could not write its own pool.
    #[n(2)]
    Internal,
    /// The payload does not have the length that the plan says, or is longer than any frame may be.
    #[n(3)]
    Length,
    /// The leg ended before all of its bytes had come.
    #[n(4)]
    Missing,
    /// The room is granted to another process, or to an earlier start of this one.
    #[n(5)]
    Peer,
    /// The target rank is not granted, or the source rank does not exist.
    #[n(6)]
    Rank,
    /// The chunk is not inside the granted tokens.
    #[n(7)]
    Range,
    /// The room is not granted, or not any more.
    #[n(8)]
    Room,
    /// The unit is not the next one of the leg.
    #[n(9)]
    Sequence,
    /// The source's pages are dealt otherwise than an earlier leg of the room said, or than its layout can deal them.
    #[n(10)]
    Rotation,
}

impl Refusal {
    /// All of them, by their code.
    pub const ALL: [Self; 11] = [
        Self::Attempt,
        Self::Generation,
        Self::Internal,
        Self::Length,
        Self::Missing,
        Self::Peer,
        Self::Rank,
        Self::Range,
        Self::Room,
        Self::Sequence,
        Self::Rotation,
    ];
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attempt => "another attempt of the room is granted",
            Self::Generation => "the room is granted with another generation",
            Self::Internal => "the target could not write its own pool",
            Self::Length => "the payload does not have the length of its units",
            Self::Missing => "the leg ended before all of its bytes had come",
            Self::Peer => "the room is granted to another process",
            Self::Rank => "the rank is not granted or does not exist",
            Self::Range => "the chunk is not inside the granted tokens",
            Self::Room => "the room is not granted or not any more",
            Self::Sequence => "the unit is not the next one of its leg",
            Self::Rotation => "the leg's rotation is not that of its room, or not one of the source's layout",
        })
    }
}

/// Why a transport could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// Memory.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The link's queue is full.
    #[error("{queued} jobs wait on this link already; execute more when some are done")]
    Busy {
        /// Jobs that wait.
        queued: usize,
    },
    /// The room was cancelled on this link.
    #[error("the job was cancelled")]
    Cancelled,
    /// The link or the transport is closed.
    #[error("the link is closed; open a new one")]
    Closed,
    /// An engine that moves blocks.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// An endpoint that this transport cannot use.
    #[error("`{endpoint}`: {reason}")]
    Endpoint {
        /// As given.
        endpoint: String,
        /// What is wrong, and what would be right.
        reason: &'static str,
    },
    /// A grant or job that contradicts itself or what is registered.
    #[error("{key}: {reason}")]
    Invalid {
        /// The room.
        key: RoomKey,
        /// What is wrong.
        reason: String,
    },
    /// The operating system refused.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Its answer.
        source: io::Error,
    },
    /// The peer is gone: it closed, died or cannot be reached.
    #[error("the peer at `{endpoint}` is gone: {reason}; every room that it takes part in must be aborted")]
    PeerGone {
        /// Where it was.
        endpoint: String,
        /// How that showed.
        reason: String,
    },
    /// The planner has no plan.
    #[error(transparent)]
    Plan(#[from] Unsupported),
    /// The peer does not speak this protocol, or speaks it wrongly.
    #[error("the peer at `{endpoint}` broke the protocol: {reason}")]
    Protocol {
        /// Where it is.
        endpoint: String,
        /// What it did.
        reason: String,
    },
    /// The rank has memory already.
    #[error("rank {rank} has memory registered already; start another transport for other memory")]
    Registered {
        /// The rank.
        rank: RankId,
    },
    /// The target refused the leg.
    #[error("{key}: the target refuses: {refusal}")]
    Refused {
        /// The room.
        key: RoomKey,
        /// Why.
        refusal: Refusal,
    },
    /// The process at the endpoint is not the one that was meant.
    #[error("the process at `{endpoint}` is {found}, not {expected}: it has restarted; pair with it again")]
    Restarted {
        /// Where.
        endpoint: String,
        /// Who was meant.
        expected: Incarnation,
        /// Who answered.
        found: Incarnation,
    },
    /// A row that is longer than a frame may be.
    #[error("a row of {row} bytes does not fit a frame of {frame}; split heads over more ranks")]
    RowTooLong {
        /// Bytes of the row.
        row: Bytes,
        /// Bytes of the largest frame.
        frame: Bytes,
    },
    /// A source page changed its owner before it was read completely; what was read of it does not count.
    #[error("source page {page} is of generation {found}, not {expected}: its lease expired")]
    StalePage {
        /// The page.
        page: PageId,
        /// As offered.
        expected: Generation,
        /// As found.
        found: Generation,
    },
    /// A source's state slot changed its owner before it was read completely; what was read of it does not count.
    #[error("source state slot {slot} is of generation {found}, not {expected}: its lease expired")]
    StaleSlot {
        /// The slot.
        slot: SlotId,
        /// As offered.
        expected: Generation,
        /// As found.
        found: Generation,
    },
    /// The peer took or sent nothing for too long in the middle of a transfer.
    #[error("the peer at `{endpoint}` made no progress for {waited:?} in the middle of a transfer")]
    Stalled {
        /// Where it is.
        endpoint: String,
        /// How long.
        waited: Duration,
    },
    /// A rank whose memory is not known.
    #[error("rank {rank} has no memory registered {place}")]
    UnknownRank {
        /// The rank.
        rank: RankId,
        /// `here` or `at the peer`.
        place: &'static str,
    },
}

impl TransportError {
    /// Who can do something about it.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Arena(error) => error.blame(),
            Self::Busy { .. }
            | Self::Cancelled
            | Self::Closed
            | Self::Endpoint { .. }
            | Self::Invalid { .. }
            | Self::Plan(_)
            | Self::Refused { .. }
            | Self::Registered { .. }
            | Self::RowTooLong { .. }
            | Self::UnknownRank { .. } => Blame::Caller,
            Self::Engine(_) | Self::Io { .. } => Blame::Environment,
            Self::PeerGone { .. }
            | Self::Protocol { .. }
            | Self::Restarted { .. }
            | Self::StalePage { .. }
            | Self::StaleSlot { .. }
            | Self::Stalled { .. } => Blame::PeerMisbehaved,
        }
    }
}
