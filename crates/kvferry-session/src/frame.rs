//! Messages as bytes: a little-endian u32 length, then one CBOR item of at most [`MAX_MESSAGE`] bytes.

use alloc::{string::String, vec::Vec};
use kvferry_plan::Blame;

use crate::Message;

/// Longest message body. Anything longer ends the connection before it is read.
pub const MAX_MESSAGE: u32 = 4 << 20;

/// Longest body of a first message: nothing is known about its sender yet.
pub const MAX_HELLO: u32 = 256 << 10;

/// Kinds of message that this version knows.
const KINDS: u32 = 11;

/// Why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The length is zero or beyond the bound.
    #[error("a message of {len} bytes; 1 to {max} are allowed")]
    Length {
        /// The length.
        len: u64,
        /// The bound.
        max: u32,
    },
    /// A kind that only a later version knows; safe to skip.
    #[error("message kind {kind} is not known to this version")]
    UnknownKind {
        /// Its number.
        kind: u32,
    },
    /// Not a message.
    #[error("malformed message: {reason}")]
    Malformed {
        /// What the decoder says.
        reason: String,
    },
}

impl WireError {
    /// Who is at fault: always the one who sent it, except for an encoding that came out too long.
    #[must_use]
    pub fn blame(&self) -> Blame {
        Blame::PeerMisbehaved
    }

    fn malformed(reason: &impl alloc::string::ToString) -> Self {
        Self::Malformed { reason: reason.to_string() }
    }
}

/// `message` with its length in front, as it goes over the wire.
///
/// # Errors
/// [`WireError::Length`] when it is longer than [`MAX_MESSAGE`]; use larger chunks then.
///
/// ```
/// use kvferry_session::{Goodbye, Message, decode, encode, frame_len};
/// let message = Message::Goodbye(Goodbye { reason: "drained".into() });
/// let bytes = encode(&message).unwrap();
/// let (len, body) = bytes.split_first_chunk().unwrap();
/// assert_eq!(frame_len(*len, 100), Ok(body.len() as u32));
/// assert_eq!(decode(body), Ok(message));
/// ```
pub fn encode(message: &Message) -> Result<Vec<u8>, WireError> {
    let mut bytes = alloc::vec![0; 4];
    minicbor::encode(message, &mut bytes).map_err(|e| WireError::malformed(&e))?;
    let len = bytes.len().saturating_sub(4);
    let checked = u32::try_from(len).ok().filter(|len| *len <= MAX_MESSAGE);
    let Some(checked) = checked else {
        return Err(WireError::Length { len: len as u64, max: MAX_MESSAGE });
    };
    for (to, from) in bytes.iter_mut().zip(checked.to_le_bytes()) {
        *to = from;
    }
    Ok(bytes)
}

/// The length of the body that follows `prefix`.
///
/// # Errors
/// [`WireError::Length`] when it is zero or above `max`.
pub fn frame_len(prefix: [u8; 4], max: u32) -> Result<u32, WireError> {
    match u32::from_le_bytes(prefix) {
        len if (1..=max).contains(&len) => Ok(len),
        len => Err(WireError::Length { len: len.into(), max }),
    }
}

/// The message in `body`.
///
/// # Errors
/// [`WireError::UnknownKind`] for kinds of later versions, [`WireError::Malformed`] for everything else.
/// Memory use is bounded by the length of `body`.
pub fn decode(body: &[u8]) -> Result<Message, WireError> {
    let mut peek = minicbor::Decoder::new(body);
    let kind = peek.array().and_then(|_| peek.u32()).map_err(|e| WireError::malformed(&e))?;
    if kind >= KINDS {
        return Err(WireError::UnknownKind { kind });
    }
    let mut decoder = minicbor::Decoder::new(body);
    let message = decoder.decode().map_err(|e| WireError::malformed(&e))?;
    if decoder.position() != body.len() {
        return Err(WireError::malformed(&"bytes after the message"));
    }
    Ok(message)
}
