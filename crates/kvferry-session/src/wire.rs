//! The messages of the control plane: what two instances say to each other about rooms.
//!
//! Integer-keyed CBOR maps inside `[kind, {0: body}]`; unknown keys are ignored, so fields may be added. Bytes of
//! the cache never travel here, and no message names an address that its receiver did not grant.

use alloc::{string::String, vec::Vec};
use kvferry_plan::{
    Bytes, Descriptor, Generation, Incarnation, InstanceId, Mismatch, PageId, PartDigest, RankId, RoomKey,
    Rotation, SlotId, TokenRange,
};
use minicbor::{Decode, Encode};

use crate::Cause;

/// What an instance can do beyond the protocol's first version, as a set of bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(transparent)]
pub struct Capabilities(#[n(0)] pub u64);

impl Capabilities {
    /// Executes plans as a source (pushes).
    pub const PUSH: Self = Self(1);
    /// Executes plans as a target (pulls).
    pub const PULL: Self = Self(2);
    /// Takes digests and insists on them.
    pub const DIGEST: Self = Self(4);

    /// Both sets.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True when every bit of `other` is set.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Where one of an instance's transports listens.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Endpoint {
    /// The transport: `tcp`, `shm`, `mem`.
    #[n(0)]
    pub name: String,
    /// Its address, in the transport's own form.
    #[n(1)]
    pub address: String,
}

/// First message of both sides: who I am and what I hold.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Hello {
    /// What the sender can do.
    #[n(0)]
    pub capabilities: Capabilities,
    /// Its name.
    #[n(1)]
    pub instance: InstanceId,
    /// Its start.
    #[n(2)]
    pub incarnation: Incarnation,
    /// What it caches and how.
    #[n(3)]
    pub descriptor: Descriptor,
    /// Pages that requests can own: of each of its ranks' pools, or of all together where pages are sharded.
    #[n(4)]
    pub pages: u32,
    /// Its transports, in its order of preference.
    #[n(5)]
    pub transports: Vec<Endpoint>,
    /// The ranks of its instance that live in the sender's process, ascending; all of them when absent.
    #[n(6)]
    pub hosts: Option<Vec<RankId>>,
    /// State slots of each of its ranks' pools; none when absent.
    #[n(7)]
    pub slots: Option<u32>,
}

impl Hello {
    /// The ranks that live in the sender's process.
    #[must_use]
    pub fn ranks(&self) -> Vec<RankId> {
        let all = || (0..self.descriptor.placement.ranks()).map(RankId).collect();
        self.hosts.clone().unwrap_or_else(all)
    }
}

/// The two do not fit; the connection ends.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Refuse {
    /// In what, as its sender sees it.
    #[n(0)]
    pub mismatch: Mismatch,
}

/// Sign of life; renews every lease of its sender.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Heartbeat {
    /// Counts the sender's heartbeats on this connection.
    #[n(0)]
    pub sequence: u64,
}

/// Addresses a message to one reservation, of one try at one room, between two process starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Head {
    /// The room and the try.
    #[n(0)]
    pub key: RoomKey,
    /// The target's reservation.
    #[n(1)]
    pub generation: Generation,
    /// The sender's start.
    #[n(2)]
    pub from: Incarnation,
    /// The receiver's start.
    #[n(3)]
    pub to: Incarnation,
}

impl Head {
    /// The head of an answer.
    #[must_use]
    pub fn reply(self) -> Self {
        Self { from: self.to, to: self.from, ..self }
    }
}

/// Target to source: the room may be filled. The grant itself stays at the target, which alone knows the pages.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Open {
    /// Address.
    #[n(0)]
    pub head: Head,
    /// Tokens that the target wants.
    #[n(1)]
    pub tokens: TokenRange,
    /// The transport that moves them, one of both sides' [`Hello::transports`].
    #[n(2)]
    pub transport: String,
    /// The prompt that the target was asked to continue. Without one (from an older version) nothing is compared.
    #[n(3)]
    pub prompt: Option<Prompt>,
}

/// Which prompt a side was told, so that two requests that do not belong together are noticed before anything moves.
/// It protects from mistakes, not from malice: whoever may write a request may write this too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
#[cbor(map)]
pub struct Prompt {
    /// Its tokens, all of them.
    #[n(0)]
    pub tokens: u64,
    /// XXH3-64 over the token ids, four little-endian bytes each.
    #[n(1)]
    pub digest: u64,
}

impl Prompt {
    /// Of these vocabulary ids.
    ///
    /// ```
    /// use kvferry_session::Prompt;
    /// assert_eq!(Prompt::of(&[1, 2, 3]).tokens, 3);
    /// assert_ne!(Prompt::of(&[1, 2, 3]), Prompt::of(&[1, 3, 2]));
    /// ```
    #[must_use]
    pub fn of(ids: &[u32]) -> Self {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        Self { tokens: ids.len() as u64, digest: twox_hash::XxHash3_64::oneshot(&bytes) }
    }
}

impl core::fmt::Display for Prompt {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} tokens with digest {:016x}", self.tokens, self.digest)
    }
}

/// A page of a source rank's pool and the generation that it must still have after it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PageRef {
    /// The page.
    #[n(0)]
    pub page: PageId,
    /// Its generation.
    #[n(1)]
    pub generation: Generation,
}

/// A state slot of the source's pool and the generation that it must still have after it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SlotRef {
    /// The slot.
    #[n(0)]
    pub slot: SlotId,
    /// Its generation.
    #[n(1)]
    pub generation: Generation,
}

/// Source to target: a chunk is computed on one source rank.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Offer {
    /// Address.
    #[n(0)]
    pub head: Head,
    /// The source rank.
    #[n(1)]
    pub source: RankId,
    /// The tokens, in coordinates.
    #[n(2)]
    pub tokens: TokenRange,
    /// Where the source rank keeps them, when the target moves: of its own pool the pages that are the
    /// [`kvferry_plan::Placement::entries`] of the request's table, in their order.
    #[n(3)]
    pub pages: Vec<PageRef>,
    /// Where the source keeps the request's state, when the target moves it: with the chunk that ends the room.
    #[n(4)]
    pub slot: Option<SlotRef>,
    /// Which rank of a source that shards its pages owns the request's first one: the same in all offers of a room.
    #[cbor(n(5), skip_if = "Rotation::is_zero")]
    pub rotation: Rotation,
}

/// What went from one source rank to one target rank for one chunk.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Leg {
    /// The target rank.
    #[n(0)]
    pub target: RankId,
    /// The chunk.
    #[n(1)]
    pub tokens: TokenRange,
    /// Digest and bytes of each part.
    #[n(2)]
    pub parts: Vec<PartDigest>,
    /// Strided copies.
    #[n(3)]
    pub copies: u64,
}

impl Leg {
    /// Bytes over all parts.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.parts.iter().fold(0, |sum, p| sum.saturating_add(p.bytes.0)))
    }
}

/// Target to source, when the target moves: it has read a chunk of one source rank and reads it no more.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Settled {
    /// Address.
    #[n(0)]
    pub head: Head,
    /// The source rank.
    #[n(1)]
    pub source: RankId,
    /// The chunk.
    #[n(2)]
    pub tokens: TokenRange,
}

/// The token that prefill sampled after the prompt.
/// Equal when both are equal bit by bit.
#[derive(Clone, Copy, Debug, Encode, Decode)]
#[cbor(map)]
pub struct FirstToken {
    /// Its id.
    #[n(0)]
    pub token: u32,
    /// Its log-probability.
    #[n(1)]
    pub logprob: f32,
}

impl PartialEq for FirstToken {
    fn eq(&self, other: &Self) -> bool {
        (self.token, self.logprob.to_bits()) == (other.token, other.logprob.to_bits())
    }
}

impl Eq for FirstToken {}

/// Source to target: the manifest of one source rank. A rank that has nothing to send says so with no legs.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Final {
    /// Address.
    #[n(0)]
    pub head: Head,
    /// The source rank.
    #[n(1)]
    pub source: RankId,
    /// Every leg that moved bytes.
    #[n(2)]
    pub legs: Vec<Leg>,
    /// The first token; the same from every rank.
    #[n(3)]
    pub first: FirstToken,
}

/// Target to source: every byte is there and verified. The room's good end.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Done {
    /// Address.
    #[n(0)]
    pub head: Head,
    /// Bytes verified.
    #[n(1)]
    pub bytes: Bytes,
}

/// Either way: the sender gives the room up. From the target it is the room's end; from the source it is a
/// request, which the target answers with [`Closed`], because the room may have been completed meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Abort {
    /// Address.
    #[n(0)]
    pub head: Head,
    /// Why.
    #[n(1)]
    pub cause: Cause,
}

/// The room has ended here and nothing of it moves any more. Answers every message for a dead room.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Closed {
    /// Address.
    #[n(0)]
    pub head: Head,
    /// Why; nothing when it was completed.
    #[n(1)]
    pub cause: Option<Cause>,
}

/// The sender takes no new rooms; it closes the connection when those that are open have ended.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Goodbye {
    /// Why.
    #[n(0)]
    pub reason: String,
}

/// Everything that travels on a control connection.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each kind is documented at its type")]
pub enum Message {
    #[n(0)]
    Hello(#[n(0)] Hello),
    #[n(1)]
    Refuse(#[n(0)] Refuse),
    #[n(2)]
    Heartbeat(#[n(0)] Heartbeat),
    #[n(3)]
    Open(#[n(0)] Open),
    #[n(4)]
    Offer(#[n(0)] Offer),
    #[n(5)]
    Settled(#[n(0)] Settled),
    #[n(6)]
    Final(#[n(0)] Final),
    #[n(7)]
    Done(#[n(0)] Done),
    #[n(8)]
    Abort(#[n(0)] Abort),
    #[n(9)]
    Closed(#[n(0)] Closed),
    #[n(10)]
    Goodbye(#[n(0)] Goodbye),
}

impl Message {
    /// The room that the message is about, if it is about one.
    #[must_use]
    pub fn head(&self) -> Option<&Head> {
        match self {
            Self::Hello(_) | Self::Refuse(_) | Self::Heartbeat(_) | Self::Goodbye(_) => None,
            Self::Open(m) => Some(&m.head),
            Self::Offer(m) => Some(&m.head),
            Self::Settled(m) => Some(&m.head),
            Self::Final(m) => Some(&m.head),
            Self::Done(m) => Some(&m.head),
            Self::Abort(m) => Some(&m.head),
            Self::Closed(m) => Some(&m.head),
        }
    }

    /// The kind, for logs and errors.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Refuse(_) => "refuse",
            Self::Heartbeat(_) => "heartbeat",
            Self::Open(_) => "open",
            Self::Offer(_) => "offer",
            Self::Settled(_) => "settled",
            Self::Final(_) => "final",
            Self::Done(_) => "done",
            Self::Abort(_) => "abort",
            Self::Closed(_) => "closed",
            Self::Goodbye(_) => "goodbye",
        }
    }
}
