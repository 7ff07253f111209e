//! Why a room ended without its bytes.

use alloc::string::{String, ToString};
use core::fmt;
use kvferry_plan::Blame;
use minicbor::{Decode, Encode};

/// One of the two sides of a room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
#[cbor(index_only)]
pub enum Side {
    /// Prefill: has the bytes.
    #[n(0)]
    Source,
    /// Decode: needs the bytes, and decides whether it has them.
    #[n(1)]
    Target,
}

impl Side {
    /// The other side.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Source => Self::Target,
            Self::Target => Self::Source,
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "prefill",
            Self::Target => "decode",
        })
    }
}

/// What kind of end it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CauseKind {
    /// The client or the engine gave the room up.
    Aborted,
    /// The connection or the process at the other end is gone.
    Lost,
    /// The responsible side made no progress within its limit.
    Stalled,
    /// What landed is not what was declared.
    Corrupt,
    /// A transport could not move the bytes.
    Transport,
    /// A message that the protocol does not allow here.
    Protocol,
    /// The room is not known there (any more).
    Unknown,
    /// The process is shutting down, or has too much to do.
    Unavailable,
    /// The two sides were asked for different things.
    Mismatch,
    /// The two instances cannot serve each other; the text names the field.
    Incompatible,
    /// No link came about over the transport: nothing has moved, and another may do.
    Link,
    /// A kind that only a later version knows.
    Other,
}

impl CauseKind {
    const ALL: [Self; 12] = [
        Self::Other,
        Self::Aborted,
        Self::Lost,
        Self::Stalled,
        Self::Corrupt,
        Self::Transport,
        Self::Protocol,
        Self::Unknown,
        Self::Unavailable,
        Self::Mismatch,
        Self::Incompatible,
        Self::Link,
    ];
}

impl<C> Encode<C> for CauseKind {
    fn encode<W: minicbor::encode::Write>(
        &self,
        e: &mut minicbor::Encoder<W>,
        _: &mut C,
    ) -> Result<(), minicbor::encode::Error<W::Error>> {
        let code = Self::ALL.iter().position(|k| k == self).unwrap_or(0);
        e.u8(u8::try_from(code).unwrap_or(0))?.ok()
    }
}

impl<'b, C> Decode<'b, C> for CauseKind {
    fn decode(d: &mut minicbor::Decoder<'b>, _: &mut C) -> Result<Self, minicbor::decode::Error> {
        let code = usize::try_from(d.u32()?).unwrap_or(usize::MAX);
        Ok(Self::ALL.get(code).copied().unwrap_or(Self::Other))
    }
}

/// Why a room ended without its bytes, in words that both sides can show.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Cause {
    /// The kind.
    #[n(0)]
    pub kind: CauseKind,
    /// The side that it happened on, or that failed to do its part.
    #[n(1)]
    pub at: Side,
    /// What happened, with the numbers.
    #[n(2)]
    #[cbor(decode_with = "short")]
    pub text: String,
}

/// A text that somebody else chose: kept as short as our own.
fn short<C>(d: &mut minicbor::Decoder<'_>, _: &mut C) -> Result<String, minicbor::decode::Error> {
    Ok(cut(d.str()?).into())
}

/// The beginning of a text, of a sane length.
fn cut(text: &str) -> &str {
    let end = (0..=Cause::MAX_TEXT.min(text.len())).rev().find(|&i| text.is_char_boundary(i));
    &text[..end.unwrap_or(0)]
}

impl Cause {
    /// Longest text that is kept.
    const MAX_TEXT: usize = 1024;

    /// A cause with `text` cut to a sane length.
    #[must_use]
    pub fn new(kind: CauseKind, at: Side, text: impl fmt::Display) -> Self {
        let mut text = text.to_string();
        text.truncate(cut(&text).len());
        Self { kind, at, text }
    }

    /// Who is at fault, as seen from `side`.
    #[must_use]
    pub fn blame(&self, side: Side) -> Blame {
        match self.kind {
            CauseKind::Aborted | CauseKind::Mismatch => Blame::Caller,
            CauseKind::Unavailable | CauseKind::Link => Blame::Environment,
            CauseKind::Incompatible => Blame::PeerIncompatible,
            // Who is here to tell it was not lost and does not hang: it is the way between the two, or too little machine.
            CauseKind::Lost | CauseKind::Stalled if self.at == side => Blame::Environment,
            _ if self.at == side => Blame::Us,
            _ => Blame::PeerMisbehaved,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            CauseKind::Aborted => "aborted by",
            CauseKind::Lost => "lost",
            CauseKind::Stalled => "no progress at",
            CauseKind::Corrupt => "wrong bytes from",
            CauseKind::Transport => "transport failed at",
            CauseKind::Protocol => "protocol broken by",
            CauseKind::Unknown => "room not known at",
            CauseKind::Unavailable => "not available:",
            CauseKind::Mismatch => "refused, not the request of",
            CauseKind::Incompatible => "not paired with",
            CauseKind::Link => "no link from",
            CauseKind::Other => "failed at",
        };
        write!(f, "{what} {}: {}", self.at, self.text)
    }
}

impl core::error::Error for Cause {}
