//! What goes over sockets: the hello of all back ends that have some, and the frames of `tcp`. Parsing is pure and bounded.
//!
//! A hello is [`MAGIC`], a length and a CBOR map, both ways. A frame is the length of its header, the length of its
//! payload, the header as a CBOR map, the payload. Unknown keys of maps are ignored. Numbers outside CBOR are
//! little-endian.

use kvferry_plan::{Generation, Incarnation, RankId, RoomKey, Rotation, TokenRange};
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
    /// Of the source's page table; 0 is not sent.
    #[cbor(n(5), skip_if = "Rotation::is_zero")]
    pub(crate) rotation: Rotation,
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
pub(crate) fn message_len(bytes: [u8; 4], most: u32) -> Option<usize> {
    let len = u32::from_le_bytes(bytes);
    (1..=most).contains(&len).then_some(len as usize)
}

/// The lengths of header and payload in front of a frame, if they are sane.
pub(crate) fn frame_lens(bytes: [u8; 8]) -> Option<(usize, u32)> {
    let [a, b, c, d, e, f, g, h] = bytes;
    let payload = u32::from_le_bytes([e, f, g, h]);
    Some((message_len([a, b, c, d], MAX_HEADER)?, payload)).filter(|_| u64::from(payload) <= MAX_PAYLOAD)
}

/// Decodes a message that fills `bytes`.
pub(crate) fn decode<'b, T: Decode<'b, ()>>(bytes: &'b [u8]) -> Option<T> {
    let mut decoder = minicbor::Decoder::new(bytes);
    let message = decoder.decode().ok()?;
    (decoder.position() == bytes.len()).then_some(message)
}

#[cfg(test)]
mod tests {
    use kvferry_plan::{Attempt, RoomId};
    use proptest::prelude::*;

    use super::*;

    fn headers() -> impl Strategy<Value = Header> {
        let key = (any::<u128>(), any::<u32>())
            .prop_map(|(room, attempt)| RoomKey { room: RoomId(room), attempt: Attempt(attempt) });
        let ranks = (any::<u32>(), any::<u32>(), prop_oneof![Just(0), any::<u32>()]);
        let leg = (key, any::<u64>(), ranks, any::<u64>(), any::<u64>()).prop_map(
            |(key, generation, (source, target, rotation), start, end)| LegId {
                key,
                generation: Generation(generation),
                source: RankId(source),
                target: RankId(target),
                tokens: TokenRange::new(start, end),
                rotation: Rotation(rotation),
            },
        );
        let units = (any::<u64>(), any::<u64>(), any::<u64>(), any::<Option<u64>>())
            .prop_map(|(first, count, row, rows)| Body::Units(Units { first, count, row, rows }));
        (leg, prop_oneof![units, any::<u64>().prop_map(Body::End)])
            .prop_map(|(leg, body)| Header { leg, body })
    }

    proptest! {
        /// What is sent is understood, and fits the bounds that the other side insists on.
        #[test]
        fn frames_come_back(header in headers(), payload in 0..=MAX_PAYLOAD) {
            let bytes = frame(&header, payload.try_into().unwrap());
            let (prefix, body) = bytes.split_at(8);
            let (head, length) = frame_lens(prefix.try_into().unwrap()).unwrap();
            prop_assert_eq!((head, u64::from(length)), (body.len(), payload));
            prop_assert_eq!(decode::<Header>(body), Some(header));
        }

        /// Whatever comes, parsing ends in a message or nothing, and no length exceeds its bound.
        #[test]
        fn anything_may_come(bytes in prop::collection::vec(any::<u8>(), 0..600), prefix in any::<[u8; 8]>()) {
            let _ = (decode::<Header>(&bytes), decode::<Hello>(&bytes), decode::<Answer>(&bytes));
            if let Some((head, payload)) = frame_lens(prefix) {
                prop_assert!(head <= MAX_HEADER as usize && u64::from(payload) <= MAX_PAYLOAD);
            }
        }

        /// A damaged header is another header or none.
        #[test]
        fn damaged_headers(header in headers(), at in any::<prop::sample::Index>(), bits in 1_u8..) {
            let mut bytes = encode(&header);
            let at = at.index(bytes.len());
            bytes[at] ^= bits;
            prop_assert_ne!(decode::<Header>(&bytes), Some(header));
            bytes.truncate(at);
            prop_assert_eq!(decode::<Header>(&bytes), None);
        }
    }

    /// A later version may add keys.
    #[test]
    fn unknown_keys_are_ignored() {
        let answer = Answer { ticket: 7, refusal: Some(Refusal::Room) };
        let mut bytes = encode(&answer);
        // One more entry in the map, with the key 9.
        assert_eq!(bytes[0], 0xa2);
        bytes[0] = 0xa3;
        bytes.extend([9, 0x65]);
        bytes.extend(b"later");
        assert_eq!(decode::<Answer>(&bytes), Some(answer));
    }

    /// The bytes of version 1: later code must read them.
    #[test]
    fn version_1_is_kept() {
        let from = Incarnation { started_ms: 1, nonce: 2 };
        let to = Incarnation { started_ms: 3, nonce: 4 };
        let bytes = hello(&Hello { version: VERSION, from, to, ranks: Some(5) });
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "6b7666657272790111000000a4000101a200010102".to_owned() + "02a2000301040305");
        let leg = LegId {
            key: RoomKey { room: RoomId(0xab), attempt: Attempt(1) },
            generation: Generation(2),
            source: RankId(3),
            target: RankId(4),
            tokens: TokenRange::new(5, 6),
            rotation: Rotation(0),
        };
        let units = Units { first: 7, count: 8, row: 9, rows: Some(10) };
        let bytes = frame(&Header { leg, body: Body::Units(units) }, 11);
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        let key = "a20050000000000000000000000000000000ab0101";
        assert_eq!(
            hex,
            format!("320000000b000000a200a500{key}010202030304{}", "04a20005010601820081a4000701080209030a")
        );
        let bytes = frame(&Header { leg: LegId { rotation: Rotation(3), ..leg }, body: Body::End(11) }, 0);
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, format!("2c00000000000000a200a600{key}010202030304{}", "04a2000501060503018201810b"));
    }
}
