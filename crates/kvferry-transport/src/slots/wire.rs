//! What goes over the control connection of a link, after the hello: lengths and CBOR maps, little-endian. No payload ever
//! does.

use kvferry_plan::Bytes;
use minicbor::{Decode, Encode, bytes::ByteVec};

use super::{engine::BlockSpan, witness::ProcessId};
use crate::wire::{Answer, LegId, Units};

/// Longest message. Metadata of engines and the frames of jobs with thousands of legs are the longest ones.
pub(super) const MAX_MESSAGE: u32 = 1 << 20;

/// A landing slot that was granted: which one, of which memory, and which time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(map)]
pub(super) struct SlotRef {
    /// The target's memory; it has another one with each new agent.
    #[n(0)]
    pub(super) era: u64,
    #[n(1)]
    pub(super) index: u32,
    /// Counts grants.
    #[n(2)]
    pub(super) serial: u64,
}

/// Units of a leg in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(super) struct BlockFrame {
    #[n(0)]
    pub(super) leg: LegId,
    #[n(1)]
    pub(super) units: Units,
    #[n(2)]
    pub(super) len: u32,
}

/// What the source says first.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(super) struct Opening {
    /// Of its engine.
    #[n(0)]
    pub(super) metadata: ByteVec,
    /// It comes back through the engines, both ways.
    #[n(1)]
    pub(super) token: ByteVec,
    #[n(2)]
    pub(super) process: ProcessId,
}

/// From the source.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub(super) enum Request {
    /// May I have a slot?
    #[n(0)]
    Ask,
    /// I do not want the slots any more that I asked for and did not get.
    #[n(1)]
    Withdraw,
    /// The block lies in the slot completely; nothing is written to it any more.
    #[n(2)]
    Block(#[n(0)] SlotRef, #[n(1)] Vec<BlockFrame>),
    /// Nothing is or will be written to these slots, whatever lies there.
    #[n(3)]
    Release(#[n(0)] Vec<SlotRef>),
    /// The leg is complete; answer with this ticket.
    #[n(4)]
    End(#[n(0)] LegId, #[n(1)] u64),
    /// Nothing is or will be written to any slot that was granted on earlier connections of this process, whether it has
    /// heard of the grant or not, but for these.
    #[n(5)]
    Rest(#[n(0)] Vec<SlotRef>),
}

/// From the target.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub(super) enum Reply {
    /// Write to this memory from now on: at first, and when the agent is a new one.
    #[n(0)]
    Memory(#[n(0)] Memory),
    /// What was sent through the engine has come, and was sent back.
    #[n(1)]
    Ready,
    /// Write to this slot.
    #[n(2)]
    Slot(#[n(0)] SlotRef),
    /// There is no slot yet.
    #[n(3)]
    Wait,
    /// No slot comes for what was asked before.
    #[n(4)]
    Withdrawn,
    /// To the end of a leg.
    #[n(5)]
    Answer(#[n(0)] Answer),
    /// The target's own engine fails; the connection ends.
    #[n(6)]
    Failed(#[n(0)] String),
}

/// The landing slots of a target.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(super) struct Memory {
    #[n(0)]
    pub(super) era: u64,
    /// Of the engine.
    #[n(1)]
    pub(super) metadata: ByteVec,
    #[n(2)]
    pub(super) span: BlockSpan,
    /// Bytes of a slot.
    #[n(3)]
    pub(super) slot: Bytes,
}

impl Memory {
    /// The first `len` bytes of a slot.
    pub(super) fn place(&self, slot: SlotRef, len: Bytes) -> Option<BlockSpan> {
        let at = self.slot.0.checked_mul(u64::from(slot.index))?;
        (slot.era == self.era && len <= self.slot).then(|| self.span.part(Bytes(at), len))?
    }
}
