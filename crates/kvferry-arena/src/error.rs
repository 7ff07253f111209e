//! What can go wrong with an arena, and whose fault it is.

#![forbid(unsafe_code)]

use kvferry_plan::{Blame, Bytes, LayerId, PageId, Part, SlotId};

/// Why an arena could not be made, mapped, read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The layout has no page.
    #[error("the pool has no pages; give it at least one")]
    Empty,
    /// A buffer does not have the length of what goes in or out.
    #[error("the buffer has {found} bytes where exactly {expected} are needed")]
    Length {
        /// Bytes needed.
        expected: Bytes,
        /// Bytes given.
        found: Bytes,
    },
    /// The pool is larger than the memory that is left.
    #[error("the pool needs {needed} bytes, but the machine has {available} left; give it fewer pages")]
    Memory {
        /// Bytes of the pool.
        needed: Bytes,
        /// Bytes that the machine can give.
        available: Bytes,
    },
    /// The rank does not hold this part of this layer.
    #[error("the pool holds no `{part}` of layer {layer}; check which rank the plan is for")]
    NoRegion {
        /// The layer.
        layer: LayerId,
        /// The part.
        part: Part,
    },
    /// The page does not exist.
    #[error("page {0} is not in the pool")]
    NoPage(PageId),
    /// The state slot does not exist.
    #[error("state slot {0} is not in the pool")]
    NoSlot(SlotId),
    /// The operating system refused.
    #[error(
        "cannot {action} the arena `{name}`: {source}; check memory limits (`ulimit -v`, cgroup, /dev/shm)"
    )]
    Os {
        /// What was tried.
        action: &'static str,
        /// Name of the arena.
        name: String,
        /// Its answer.
        source: std::io::Error,
    },
    /// A read or write that is not wholly inside the arena.
    #[error("{len} bytes at offset {offset} are not inside an arena of {arena} bytes")]
    OutOfBounds {
        /// First byte.
        offset: Bytes,
        /// Length, saturated.
        len: Bytes,
        /// Size of the arena.
        arena: Bytes,
    },
    /// The peer's memory is not as large as its layout says.
    #[error(
        "the peer's arena has {found} bytes, but its layout needs {expected}; its pool differs from what it announced"
    )]
    Size {
        /// Bytes that the layout needs.
        expected: Bytes,
        /// Bytes found.
        found: Bytes,
    },
    /// A socket took or gave nothing.
    #[error("bytes of the arena cannot go through the socket: {0}")]
    Socket(std::io::Error),
    /// The peer's memory could change its size or be written by others; it is not mapped.
    #[error("the peer's arena is not sealed against resizing and writable maps; refuse this peer")]
    Unsealed,
}

impl ArenaError {
    /// Who can do something about it.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Empty
            | Self::Length { .. }
            | Self::NoRegion { .. }
            | Self::NoPage(_)
            | Self::NoSlot(_)
            | Self::OutOfBounds { .. } => Blame::Caller,
            Self::Memory { .. } | Self::Os { .. } | Self::Socket(_) => Blame::Environment,
            Self::Size { .. } | Self::Unsealed => Blame::PeerMisbehaved,
        }
    }
}
