//! What a link is asked to move, and what it answers.

use std::{sync::Arc, time::Duration};

use kvferry_plan::{
    Bytes, Generation, PageId, PartDigest, Plan, RankId, RoomKey, Rotation, SlotId, TokenRange,
};

use crate::TransportError;

/// One chunk of one source rank, to all target ranks of one peer at once, so that each source page is read once.
#[derive(Clone, Debug)]
pub struct Job {
    /// The room and attempt.
    pub key: RoomKey,
    /// Generation of the target's grant.
    pub generation: Generation,
    /// The rank whose memory is read.
    pub source: RankId,
    /// The chunk.
    pub tokens: TokenRange,
    /// Push only: of the source's page table, the same in all jobs of a room. The target plans from it where legs land.
    pub rotation: Rotation,
    /// Whether the reports carry digests; without, sums are 0.
    pub digest: bool,
    /// One per target rank. A rank that gets nothing may have a leg with an empty plan: it is reported like any other.
    pub legs: Vec<Leg>,
}

/// What a job moves to one target rank.
#[derive(Clone, Debug)]
pub struct Leg {
    /// The rank that is written.
    pub target: RankId,
    /// The copy. The executing side uses the rows of its own memory; a source that pushes does not know the target's
    /// pages and plans with [`kvferry_plan::PageTable::identity`] for them, a target that pulls needs both sides.
    pub plan: Arc<Plan>,
    /// Pull only: the pages of the source rank's own pool that the plan reads, with the generations that the source offered. Each is
    /// compared before and after each copy. Empty for a push, where the source pins its own pages.
    pub source_pages: Vec<(PageId, Generation)>,
    /// Pull only: likewise the source slot from which the plan reads state, if it does.
    pub source_slot: Option<(SlotId, Generation)>,
}

/// What has been moved for one leg.
#[derive(Clone, Debug, PartialEq)]
pub struct LegReport {
    /// The rank that is written.
    pub target: RankId,
    /// Bytes of the leg.
    pub bytes: Bytes,
    /// Strided copies that its plan needs: runs x layers.
    pub copies: u64,
    /// Digest and bytes per part, taken by the side that reports over its own memory.
    pub parts: Vec<PartDigest>,
    /// Time from the job's or the leg's first byte to its last, on the clock of the side that reports.
    pub took: Duration,
}

/// Called once with the reports in the order of the job's legs, on a thread of the transport: it must not block. By
/// then the link reads no more bytes of the job, and after a success every byte is in the target's pool.
pub type Done = Box<dyn FnOnce(Result<Vec<LegReport>, TransportError>) + Send>;
