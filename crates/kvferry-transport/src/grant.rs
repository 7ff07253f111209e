//! What a target allows to be written.

use std::{fmt, sync::Arc};

use kvferry_plan::{Generation, Incarnation, PageTable, Pair, RankId, RoomKey, SlotId, TokenRange};

use crate::{LegReport, TransportError};

/// A room that may be written: by whom, which tokens, and onto which pages.
#[derive(Clone)]
pub struct Grant {
    /// The room and attempt.
    pub key: RoomKey,
    /// Counts this target's reservations, so that a frame of an earlier one is recognised.
    pub generation: Generation,
    /// The process that may write. A room that several processes fill has a grant for each, of one generation.
    pub peer: Incarnation,
    /// The layouts of the source and of this side. All ranks of the source may write what they owe.
    pub pair: Arc<Pair>,
    /// The room's pages, the same on all local ranks.
    pub table: PageTable,
    /// The room's state slot, the same on all local ranks; it comes with the chunk that ends the tokens. `None` for a
    /// model without state per request.
    pub slot: Option<SlotId>,
    /// The tokens that may be written. A chunk is any range inside.
    pub tokens: TokenRange,
    /// Local ranks that may be written.
    pub ranks: Vec<RankId>,
    /// Push only: whether the reports of landed legs carry digests; without, sums are 0.
    pub digest: bool,
    /// Push only: told of each leg that has landed or failed here. Called on a thread of the transport, so it must
    /// not block, and possibly once more right after [`crate::Transport::revoke`] for what landed before. A target
    /// that pulls hears of its legs through the job's [`crate::Done`] instead.
    pub landed: Arc<dyn Fn(Landed) + Send + Sync>,
}

impl fmt::Debug for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grant")
            .field("key", &self.key)
            .field("generation", &self.generation)
            .field("peer", &self.peer)
            .field("tokens", &self.tokens)
            .field("ranks", &self.ranks)
            .field("pages", &self.table.0.len())
            .finish_non_exhaustive()
    }
}

/// A leg that a peer pushed has ended here.
#[derive(Debug)]
pub struct Landed {
    /// The room and attempt.
    pub key: RoomKey,
    /// Generation of the grant.
    pub generation: Generation,
    /// The rank that sent.
    pub source: RankId,
    /// The local rank that was written.
    pub target: RankId,
    /// The chunk.
    pub tokens: TokenRange,
    /// The digest over what lies in the pool now, or why not everything of the leg does.
    pub outcome: Result<LegReport, TransportError>,
}
