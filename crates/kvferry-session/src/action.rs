//! What a room's machine wants its driver to do.

use alloc::vec::Vec;
use core::time::Duration;
use kvferry_plan::{Bytes, RankId, Rotation, TokenRange};

use crate::{Cause, FirstToken, Message, PageRef, SlotRef};

/// Which side executes plans; a property of the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mover {
    /// The source pushes.
    Source,
    /// The target pulls.
    Target,
}

/// One side's half of one chunk of one source rank: the mover moves it to all target ranks at once; a source
/// that does not move takes the digests of its own memory instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// The source rank.
    pub source: RankId,
    /// The chunk.
    pub tokens: TokenRange,
    /// The source's pages when the target moves, as in [`crate::Offer::pages`].
    pub pages: Vec<PageRef>,
    /// Who owns the first page of the source's table.
    pub rotation: Rotation,
    /// The source's state slot when the target moves and this chunk ends the room, in a model with state.
    pub slot: Option<SlotRef>,
}

/// Something to do. Machines hand actions out in order, through `poll`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send to the peer.
    Send(Message),
    /// Target: make the room writable, then call `granted`. Before it nothing may be announced.
    Grant,
    /// Do our half of a chunk, then call `executed`, in any order.
    Execute(Work),
    /// Stop everything that moves bytes of this room. Pieces of work that are under way still report through
    /// `executed`. At the target, call `fenced` when no byte can land any more.
    Fence,
    /// The fence took too long: close the link that the room's bytes move over.
    Sever,
    /// The room has ended and its pages are free; nothing comes after this.
    Finish,
}

/// A target's room that was completed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Received {
    /// The token that prefill sampled.
    pub first: FirstToken,
    /// Bytes that landed, all verified.
    pub bytes: Bytes,
    /// Bytes that the planner says are due.
    pub planned: Bytes,
    /// Strided copies.
    pub copies: u64,
    /// From the first offer to the verdict.
    pub elapsed: Duration,
}

/// A source's room that was completed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sent {
    /// Bytes sent to all target ranks.
    pub bytes: Bytes,
    /// Strided copies; 0 when the target moves.
    pub copies: u64,
    /// From the end of the computation to the target's verdict.
    pub exposed: Duration,
}

/// How a room ended.
pub type Outcome<T> = Result<T, Cause>;
