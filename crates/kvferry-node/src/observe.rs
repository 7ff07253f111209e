//! What rooms go through, told as it happens. Not for deciding anything: who is told only watches.

use std::{fmt, time::Duration};

use kvferry_plan::{Bytes, InstanceId, RankId, RoomKey, TokenRange};
use kvferry_session::Side;

use crate::TransportKind;

/// Something that happened to a room. Which ones come, and how often, depends on side and transport; one of a room
/// that has just ended may still come.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Moment {
    /// The peer is connected and the two fit. At the source: a target has opened the room.
    Paired {
        /// The other instance.
        peer: InstanceId,
        /// What will move the bytes.
        transport: TransportKind,
    },
    /// No link came about over a transport that both have: to the mover, and at a target that was told so by its source. The
    /// room goes on with another, if there is one.
    Unlinked {
        /// The other instance.
        peer: InstanceId,
        /// The transport.
        transport: TransportKind,
    },
    /// Target: the pages may be written, and the source was asked.
    Granted,
    /// Target: the source has a chunk.
    Offered,
    /// A piece of work is done: a chunk of one source rank was pushed, or pulled, or landed at one target rank.
    Moved {
        /// The rank that had the bytes.
        source: RankId,
        /// The chunk.
        tokens: TokenRange,
        /// Payload.
        bytes: Bytes,
        /// Strided copies; 0 on the side that does not move.
        copies: u64,
        /// How long it took on this side, waiting behind other work included.
        took: Duration,
    },
    /// Source: the whole prompt is computed.
    Computed,
    /// Target: a source rank has said what it sent in all, so that what landed can be compared.
    Declared,
}

/// Somebody who watches a node's rooms. Called on the task that decides rooms: it must return at once.
pub trait Observer: fmt::Debug + Send + Sync {
    /// Something happened to a room, of which this node is that side.
    fn saw(&self, side: Side, key: RoomKey, moment: Moment);
}
