//! Newtypes for everything that could be swapped with its neighbour.

use alloc::string::String;
use core::fmt;
use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize,
        )]
        #[cbor(transparent)]
        #[serde(transparent)]
        pub struct $name(#[n(0)] pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl $name {
            /// The number as an index; saturates where `usize` is narrower.
            #[must_use]
            pub fn index(self) -> usize {
                usize::try_from(self.0).unwrap_or(usize::MAX)
            }
        }
    };
}

number! {
    /// A global, 0-based model layer id; never the position of a layer in some rank's list.
    LayerId(u32)
}
number! {
    /// A rank within its instance, `(stage * cp + cp_rank) * tp + tp_rank`.
    RankId(u32)
}
number! {
    /// A page of one rank's pool. Every part of that rank uses the same page ids.
    PageId(u32)
}
number! {
    /// A slot of one rank's pool: what holds the state of one request.
    SlotId(u32)
}
number! {
    /// A key/value head of the whole model.
    HeadId(u32)
}
number! {
    /// A row of one region of a rank's pool: `page * page_size + offset in page`.
    Row(u64)
}
number! {
    /// A token's position in its request, counted from 0 at the start of the prompt.
    Token(u64)
}
number! {
    /// A length or an offset in bytes.
    Bytes(u64)
}
number! {
    /// Counts tries at the same room; a retry is a new attempt.
    Attempt(u32)
}
number! {
    /// Counts the reservations of a target (or the owners of a source page): what was written for one
    /// generation is never accepted for the next.
    Generation(u64)
}

/// A request's hand-off, minted by the server, 128 bit, written as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RoomId(pub u128);

impl RoomId {
    /// Parses 32 hexadecimal digits.
    ///
    /// ```
    /// use kvferry_plan::RoomId;
    /// let room = RoomId(0xabc);
    /// assert_eq!(RoomId::parse(&format!("{room}")), Some(room));
    /// assert_eq!(RoomId::parse("abc"), None);
    /// ```
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        u128::from_str_radix(text, 16).ok().map(Self)
    }
}

impl fmt::Display for RoomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for RoomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RoomId({self})")
    }
}

impl<C> Encode<C> for RoomId {
    fn encode<W: minicbor::encode::Write>(
        &self,
        e: &mut minicbor::Encoder<W>,
        _: &mut C,
    ) -> Result<(), minicbor::encode::Error<W::Error>> {
        e.bytes(&self.0.to_be_bytes())?.ok()
    }
}

impl<'b, C> Decode<'b, C> for RoomId {
    fn decode(d: &mut minicbor::Decoder<'b>, _: &mut C) -> Result<Self, minicbor::decode::Error> {
        let bytes: [u8; 16] =
            d.bytes()?.try_into().map_err(|_| minicbor::decode::Error::message("a room id is 16 bytes"))?;
        Ok(Self(u128::from_be_bytes(bytes)))
    }
}

impl Serialize for RoomId {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RoomId {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom("a room id is 32 hexadecimal digits"))
    }
}

/// One try at one room: what every frame of a hand-off is addressed to.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize,
)]
#[cbor(map)]
pub struct RoomKey {
    /// The room.
    #[n(0)]
    pub room: RoomId,
    /// The try.
    #[n(1)]
    pub attempt: Attempt,
}

impl fmt::Display for RoomKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.room, self.attempt)
    }
}

/// One start of one process. Drawn at start; in every registration, handshake, frame and cache key.
/// A later start compares greater.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize,
)]
#[cbor(map)]
pub struct Incarnation {
    /// Wall-clock start in milliseconds since the Unix epoch; orders restarts.
    #[n(0)]
    pub started_ms: u64,
    /// Random; tells two starts of one millisecond apart.
    #[n(1)]
    pub nonce: u64,
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:016x}", self.started_ms, self.nonce)
    }
}

/// The name of an instance, such as `prefill-0`; the same over restarts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize)]
#[cbor(transparent)]
#[serde(transparent)]
pub struct InstanceId(#[n(0)] pub String);

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Tokens `start .. end` of a request.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize,
)]
#[cbor(map)]
pub struct TokenRange {
    /// First token.
    #[n(0)]
    pub start: Token,
    /// One past the last token.
    #[n(1)]
    pub end: Token,
}

impl TokenRange {
    /// `start .. end`.
    #[must_use]
    pub fn new(start: u64, end: u64) -> Self {
        Self { start: Token(start), end: Token(end) }
    }

    /// Number of tokens; 0 when `end` is not after `start`.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    /// True when it holds no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl fmt::Display for TokenRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// Who is at fault for an error, and so who can do something about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode, Serialize, Deserialize)]
#[cbor(index_only)]
#[serde(rename_all = "snake_case")]
pub enum Blame {
    /// The caller asked for something impossible.
    #[n(0)]
    Caller,
    /// The peer is honest but cannot be served together with us.
    #[n(1)]
    PeerIncompatible,
    /// The peer broke the protocol, went silent or died.
    #[n(2)]
    PeerMisbehaved,
    /// The machine: files, memory, ports.
    #[n(3)]
    Environment,
    /// Our own defect.
    #[n(4)]
    Us,
}

impl fmt::Display for Blame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Caller => "caller",
            Self::PeerIncompatible => "peer incompatible",
            Self::PeerMisbehaved => "peer misbehaved",
            Self::Environment => "environment",
            Self::Us => "internal",
        })
    }
}
