//! Why the engine refused, failed or gave up a request.

use kvferry_arena::ArenaError;
use kvferry_plan::{Blame, Limit, RankId, RoomKey};

/// What went wrong, who is at fault ([`EngineError::blame`]) and what to do next.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The request was released or its reader went away.
    #[error("the request was aborted")]
    Aborted,
    /// The layout cannot be built for this model.
    #[error("layout: {0}")]
    Layout(String),
    /// The configuration has a number that cannot work.
    #[error("{0}")]
    Config(String),
    /// The prompt can never fit, whatever else finishes first. Refused before any work.
    #[error(transparent)]
    NeverFits(#[from] Limit),
    /// As many requests wait as may.
    #[error(
        "{limit} requests wait here already, and no more may (--max-queued); try again later or ask another instance"
    )]
    QueueFull {
        /// Most requests that wait.
        limit: u32,
    },
    /// The request itself makes no sense.
    #[error("request: {0}")]
    Request(String),
    /// The key is in use already; a retry needs a new attempt.
    #[error("room {0} is in use here already; a retry is a new attempt")]
    RoomInUse(RoomKey),
    /// No request has this key, or it was released.
    #[error("room {0} is not known here: it was never reserved, or it was released")]
    UnknownRoom(RoomKey),
    /// The room exists but is not in a state in which this can be done.
    #[error("room {key}: {reason}")]
    RoomState {
        /// The room.
        key: RoomKey,
        /// Why not.
        reason: String,
    },
    /// A value left the range in which the arithmetic is defined.
    #[error(
        "a value left the range of {what}: the model does not fit this arithmetic; try `--arith fast`, or check \
         the model file"
    )]
    Range {
        /// What overflowed or was not a number.
        what: &'static str,
    },
    /// A rank died in the middle of a step; the requests of that step are lost.
    #[error("rank {rank} failed: {reason}; this is a defect, please report it")]
    Rank {
        /// The rank.
        rank: RankId,
        /// Its last words.
        reason: String,
    },
    /// A step of fixed shape needs more memory than was captured for it; the requests of that step are lost.
    #[error(
        "a step of fixed shape needs {wanted} bytes where {held} were captured; this is a defect, please report it \
         (`--decode-batch eager` does without)"
    )]
    Captured {
        /// Bytes needed.
        wanted: usize,
        /// Bytes captured.
        held: usize,
    },
    /// Memory for the pool could not be had or addressed.
    #[error("KV pool: {0}")]
    Pool(String),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(String),
    /// The engine is shutting down.
    #[error("the engine has stopped")]
    Stopped,
}

impl EngineError {
    /// Who can do something about it.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Aborted
            | Self::Layout(_)
            | Self::Config(_)
            | Self::NeverFits(_)
            | Self::Request(_)
            | Self::RoomInUse(_)
            | Self::UnknownRoom(_)
            | Self::RoomState { .. }
            | Self::Range { .. } => Blame::Caller,
            Self::QueueFull { .. } | Self::Pool(_) | Self::Thread(_) | Self::Stopped => Blame::Environment,
            Self::Rank { .. } | Self::Captured { .. } => Blame::Us,
        }
    }
}

impl From<ArenaError> for EngineError {
    fn from(error: ArenaError) -> Self {
        Self::Pool(error.to_string())
    }
}
