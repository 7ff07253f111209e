//! What goes over sockets: the hello of `tcp` and `shm`, and the frames of `tcp`. Parsing is pure and bounded.
//!
//! A hello is [`MAGIC`], a length and a CBOR map, both ways. A frame is the length of its header, the length of its
//! payload, the header as a CBOR map, the payload. Unknown keys of maps are ignored. Numbers outside CBOR are
//! little-endian.

use kvferry_plan::{Generation, Incarnation, RankId, RoomKey, TokenRange};
use minicbor::{Decode, Encode};

use crate::Refusal;

/// The first bytes of every connection.
pub(crate) const MAGIC: [u8; 8] = *b"kvferry\x01";
/// Version of this module.
pub(crate) const VERSION: u32 = 1;
/// Longest hello and longest header.
pub(crate) const MAX_HEADER: u32 = 512;
/// Longest payload: a unit is split by rows before it gets longer, so this bounds a row.
pub(crate) const MAX_PAYLOAD: u64 = 8 << 20;

/// What both ends of a connection say first.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Hello {
    /// [`VERSION`].
    #[n(0)]
    pub(crate) version: u32,
    /// The process that speaks.
    #[n(1)]
    pub(crate) from: Incarnation,
    /// The process that is meant.
    #[n(2)]
    pub(crate) to: Incarnation,
    /// `shm`, from the source: how many ranks follow.
    #[n(3)]
    pub(crate) ranks: Option<u32>,
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Header {
    /// The leg.
    #[n(0)]
    pub(crate) leg: LegId,
    /// What it carries.
    #[n(1)]
    pub(crate) body: Body,
}

/// What a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct LegId {
    /// The room and attempt.
    #[n(0)]
    pub(crate) key: RoomKey,
    /// The target's grant.
    #[n(1)]
    pub(crate) generation: Generation,
    /// The rank that sends.
    #[n(2)]
    pub(crate) source: RankId,
    /// The rank that is written.
    #[n(3)]
    pub(crate) target: RankId,
    /// The chunk.
    #[n(4)]
    pub(crate) tokens: TokenRange,
}

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) enum Body {
    /// Bytes of units.
    #[n(0)]
    Units(#[n(0)] Units),
    /// The leg is complete; answer with this ticket.
    #[n(1)]
    End(#[n(0)] u64),
}

/// Units `first .. first + count` of the leg's plan, or rows of one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Units {
    /// The first unit.
    #[n(0)]
    pub(crate) first: u64,
    /// How many.
    #[n(1)]
    pub(crate) count: u64,
    /// First row, in a unit that is larger than a frame; else 0.
    #[n(2)]
    pub(crate) row: u64,
    /// Rows of a unit that is larger than a frame; absent for whole units.
    #[n(3)]
    pub(crate) rows: Option<u64>,
}

/// The target's answer to the end of a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Answer {
    /// As asked.
    #[n(0)]
    pub(crate) ticket: u64,
    /// Absent when the leg has landed.
    #[n(1)]
    pub(crate) refusal: Option<Refusal>,
}

/// Encodes a message of this module.
fn encode<T: Encode<()>>(message: &T) -> Vec<u8> {
    // Writing to a vector cannot fail.
    minicbor::to_vec(message).unwrap_or_default()
}

/// A message with its length in front.
pub(crate) fn tagged<T: Encode<()>>(message: &T) -> Vec<u8> {
    let body = encode(message);
    let mut bytes = Vec::with_capacity(4 + body.len());
    bytes.extend_from_slice(&len32(&body));
    bytes.extend_from_slice(&body);
    bytes
}

/// A hello with magic and length.
pub(crate) fn hello(hello: &Hello) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&tagged(hello));
    bytes
}

/// A frame's prefix and header.
pub(crate) fn frame(header: &Header, payload: usize) -> Vec<u8> {
    let body = encode(header);
    let mut bytes = Vec::with_capacity(8 + body.len());
    bytes.extend_from_slice(&len32(&body));
    bytes.extend_from_slice(&u32::try_from(payload).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend_from_slice(&body);
    bytes
}

fn len32(bytes: &[u8]) -> [u8; 4] {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes()
}

/// A length in front of a message or header, if it is sane.
pub(crate) fn message_len(bytes: [u8; 4]) -> Option<usize> {
    let len = u32::from_le_bytes(bytes);
    (1..=MAX_HEADER).contains(&len).then_some(len as usize)
}

/// The lengths of header and payload in front of a frame, if they are sane.
pub(crate) fn frame_lens(bytes: [u8; 8]) -> Option<(usize, u32)> {
    let [a, b, c, d, e, f, g, h] = bytes;
    let payload = u32::from_le_bytes([e, f, g, h]);
    Some((message_len([a, b, c, d])?, payload)).filter(|_| u64::from(payload) <= MAX_PAYLOAD)
}

/// Decodes a message that fills `bytes`.
pub(crate) fn decode<'b, T: Decode<'b, ()>>(bytes: &'b [u8]) -> Option<T> {
    let mut decoder = minicbor::Decoder::new(bytes);
    let message = decoder.decode().ok()?;
    (decoder.position() == bytes.len()).then_some(message)
}
