//! What goes over the wire. Parsing is pure and bounded.
//!
//! A peer has two ports. On the *control* port each connection carries one message and its answer: the length of the rest
//! as a `u64`, a byte for the [`Kind`], and JSON. On the *data* port a connection carries requests, one after the other, each
//! answered in order: a [`Request`], for a write its payload, then from the target a [`Status`], for a read the payload behind
//! it. All numbers are little-endian. Requests may be sent before earlier ones are answered.

use std::fmt;

use kvferry_plan::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The version that is spoken: from it on targets answer writes.
pub const VERSION: u32 = 2;
/// Longest control message, as Mooncake has it.
pub const MAX_MESSAGE: u64 = 1 << 20;
/// Bytes of a request without payload.
pub const REQUEST: usize = 24;
/// Bytes of a status.
pub const STATUS: usize = 8;
/// Ranges that a description may have; each costs some thirty bytes of a message.
const MAX_REGIONS: usize = 1 << 15;
/// In the upper half of a status.
const STATUS_MAGIC: u64 = 0x4D43_5456;
/// In an opcode: a status is expected.
const WITH_STATUS: u8 = 0x80;

/// Where something lies, by the target's own count. It need not be an address of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Address(pub u64);

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A range of a target that may be read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first byte.
    pub address: Address,
    /// How long it is, at least a byte.
    pub len: Bytes,
}

impl Region {
    /// How far behind the beginning `len` bytes at `address` lie, if all of them are inside.
    ///
    /// ```
    /// use kvferry_plan::Bytes;
    /// use kvferry_transport_mooncake::{Address, Region};
    /// let region = Region { address: Address(1000), len: Bytes(50) };
    /// assert_eq!(region.offset(Address(1010), Bytes(40)), Some(Bytes(10)));
    /// assert_eq!(region.offset(Address(1010), Bytes(41)), None);
    /// ```
    #[must_use]
    pub fn offset(&self, address: Address, len: Bytes) -> Option<Bytes> {
        let offset = address.0.checked_sub(self.address.0)?;
        (offset.checked_add(len.0)? <= self.len.0).then_some(Bytes(offset))
    }
}

/// What a control message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// What the peer has: a [`Description`], both ways.
    Metadata,
    /// A [`Notification`].
    Notify,
    /// Whether it lives.
    Probe,
}

impl Kind {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Metadata => 1,
            Self::Notify => 2,
            Self::Probe => 3,
        }
    }

    fn of(code: u8) -> Option<Self> {
        [Self::Metadata, Self::Notify, Self::Probe].into_iter().find(|kind| kind.code() == code)
    }
}

/// A control message. Longer ones than [`MAX_MESSAGE`] are not read by anybody.
pub(crate) fn message(kind: Kind, body: &impl Serialize) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    bytes.push(kind.code());
    // What is written is of this module: it has no keys that JSON lacks, and a vector takes everything.
    let written = serde_json::to_writer(&mut bytes, body);
    debug_assert!(written.is_ok(), "{written:?}");
    let len = (bytes.len() - 8) as u64;
    for (to, from) in bytes.iter_mut().zip(len.to_le_bytes()) {
        *to = from;
    }
    bytes
}

/// The length of the rest of a control message, if it is sane.
pub(crate) fn message_len(bytes: [u8; 8]) -> Option<usize> {
    let len = u64::from_le_bytes(bytes);
    (1..=MAX_MESSAGE).contains(&len).then(|| usize::try_from(len).ok())?
}

/// The rest of a control message.
pub(crate) fn open(rest: &[u8]) -> Option<(Kind, &[u8])> {
    let (code, body) = rest.split_first()?;
    Some((Kind::of(*code)?, body))
}

/// The JSON of a message.
pub(crate) fn body<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}

/// What a peer is and has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Address and control port, `127.0.0.1:15003`.
    pub name: String,
    /// Where its memory is read and written, at the same address.
    pub data_port: u16,
    /// The version of the protocol that it speaks.
    pub version: u32,
    /// What may be read and written.
    pub regions: Vec<Region>,
}

impl Description {
    pub(crate) fn to_json(&self) -> Described {
        Described {
            name: self.name.clone(),
            protocol: "tcp".into(),
            tcp_data_port: self.data_port,
            tcp_proto_version: self.version,
            timestamp: String::new(),
            buffers: self
                .regions
                .iter()
                .map(|region| Buffer { name: "cpu:0".into(), addr: region.address, length: region.len.0 })
                .collect(),
        }
    }

    /// What somebody says of himself, if anything yet, or what is wrong with it.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<Self>, String> {
        let described: Option<Described> =
            serde_json::from_slice(bytes).map_err(|error| format!("its description is damaged: {error}"))?;
        let Some(Described { name, protocol, tcp_data_port, tcp_proto_version, buffers, .. }) = described
        else {
            return Ok(None);
        };
        if protocol != "tcp" {
            let shown: String = protocol.chars().take(32).collect();
            return Err(format!("its memory is reached by `{shown}`, not by `tcp`"));
        }
        if tcp_data_port == 0 {
            return Err("it has no data port".into());
        }
        if buffers.len() > MAX_REGIONS {
            return Err(format!("it has {} ranges, more than {MAX_REGIONS}", buffers.len()));
        }
        let regions = buffers
            .into_iter()
            .map(|buffer| Region { address: buffer.addr, len: Bytes(buffer.length) })
            .filter(|region| region.len.0 > 0 && region.address.0.checked_add(region.len.0).is_some())
            .collect();
        Ok(Some(Self { name, data_port: tcp_data_port, version: tcp_proto_version, regions }))
    }
}

/// A [`Description`] in JSON, with the fields that Mooncake's engines look at.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Described {
    #[serde(default)]
    name: String,
    protocol: String,
    #[serde(default)]
    tcp_data_port: u16,
    #[serde(default = "first_version")]
    tcp_proto_version: u32,
    #[serde(default)]
    timestamp: String,
    #[serde(default)]
    buffers: Vec<Buffer>,
}

/// Of engines that do not say which version they speak.
fn first_version() -> u32 {
    1
}

#[derive(Debug, Serialize, Deserialize)]
struct Buffer {
    /// Engines refuse a description with an empty one.
    #[serde(default)]
    name: String,
    addr: Address,
    length: u64,
}

/// A short message from one application to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notification {
    /// Who speaks, or of what.
    pub name: String,
    /// What is said.
    #[serde(rename = "notify_msg")]
    pub message: String,
}

/// The answer to a probe.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Alive {
    pub(crate) status: String,
}

/// What is done with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// The target sends it.
    Read,
    /// The target receives it.
    Write,
}

/// What comes first of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What is to be done.
    pub opcode: Opcode,
    /// The first byte.
    pub address: Address,
    /// How many bytes.
    pub len: Bytes,
    /// Whether a status is expected, as from version 2 on.
    pub status: bool,
}

impl Request {
    /// As sent: length, address, opcode, seven bytes that mean nothing.
    ///
    /// ```
    /// use kvferry_plan::Bytes;
    /// use kvferry_transport_mooncake::{Address, wire::{Opcode, Request}};
    /// let write = Request { opcode: Opcode::Write, address: Address(0x10), len: Bytes(3), status: true };
    /// assert_eq!(write.encode()[..17], [3, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0x81]);
    /// assert_eq!(Request::decode(&write.encode()), Some(write));
    /// ```
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST] {
        let opcode = match self.opcode {
            Opcode::Read => 0,
            Opcode::Write => 1,
        };
        let opcode = if self.status { opcode | WITH_STATUS } else { opcode };
        let mut bytes = [0; REQUEST];
        bytes[..8].copy_from_slice(&self.len.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.address.0.to_le_bytes());
        bytes[16] = opcode;
        bytes
    }

    /// What was sent, unless the opcode is none.
    #[must_use]
    pub fn decode(bytes: &[u8; REQUEST]) -> Option<Self> {
        let (len, rest) = bytes.split_first_chunk::<8>()?;
        let (address, rest) = rest.split_first_chunk::<8>()?;
        let code = *rest.first()?;
        let opcode = match code & !WITH_STATUS {
            0 => Opcode::Read,
            1 => Opcode::Write,
            _ => return None,
        };
        Some(Self {
            opcode,
            address: Address(u64::from_le_bytes(*address)),
            len: Bytes(u64::from_le_bytes(*len)),
            status: code & WITH_STATUS != 0,
        })
    }
}

/// A target's answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// A write has landed; what is to be read follows.
    Done,
    /// The range is not granted. The target closes the connection.
    Refused,
}

impl Status {
    /// As sent.
    #[must_use]
    pub fn encode(self) -> [u8; STATUS] {
        let low = match self {
            Self::Done => 0,
            Self::Refused => 1,
        };
        (STATUS_MAGIC << 32 | low).to_le_bytes()
    }

    /// What was sent, if it is a status.
    #[must_use]
    pub fn decode(bytes: [u8; STATUS]) -> Option<Self> {
        let word = u64::from_le_bytes(bytes);
        match (word >> 32 == STATUS_MAGIC, word & u64::from(u32::MAX)) {
            (true, 0) => Some(Self::Done),
            (true, _) => Some(Self::Refused),
            (false, _) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn region() -> impl Strategy<Value = Region> {
        (any::<u64>(), 1..=u64::MAX).prop_filter_map("it wraps around", |(address, len)| {
            address.checked_add(len)?;
            Some(Region { address: Address(address), len: Bytes(len) })
        })
    }

    fn description() -> impl Strategy<Value = Description> {
        (any::<String>(), 1..=u16::MAX, any::<u32>(), prop::collection::vec(region(), 0..5))
            .prop_map(|(name, data_port, version, regions)| Description { name, data_port, version, regions })
    }

    proptest! {
        /// What is sent is understood, and is as long as it says.
        #[test]
        fn messages_come_back(sent in description(), name in any::<String>(), text in any::<String>()) {
            let bytes = message(Kind::Metadata, &sent.to_json());
            let (len, rest) = bytes.split_first_chunk::<8>().unwrap();
            prop_assert_eq!(message_len(*len), Some(rest.len()));
            let (kind, json) = open(rest).unwrap();
            prop_assert_eq!((kind, Description::parse(json)), (Kind::Metadata, Ok(Some(sent))));
            let note = Notification { name, message: text };
            let bytes = message(Kind::Notify, &note);
            let (kind, json) = open(&bytes[8..]).unwrap();
            prop_assert_eq!((kind, body::<Notification>(json)), (Kind::Notify, Some(note)));
        }

        /// Whatever comes is a message or nothing, and no length exceeds its bound.
        #[test]
        fn anything_may_come(bytes in prop::collection::vec(any::<u8>(), 0..200), len in any::<[u8; 8]>()) {
            if let Some((_, json)) = open(&bytes) {
                let _ = (body::<Notification>(json), body::<Alive>(json), Description::parse(json));
            }
            if let Some(len) = message_len(len) {
                prop_assert!((1..=MAX_MESSAGE).contains(&(len as u64)));
            }
        }

        /// A header that is understood is the one that was sent, its last seven bytes aside.
        #[test]
        fn any_header(bytes in any::<[u8; REQUEST]>()) {
            if let Some(request) = Request::decode(&bytes) {
                prop_assert_eq!(&request.encode()[..17], &bytes[..17]);
            } else {
                prop_assert!(bytes[16] & 0x7f > 1);
            }
        }

        /// A range has exactly the bytes that a count finds in it.
        #[test]
        fn ranges(at in 0_u64..20, len in 1_u64..20, address in 0_u64..50, bytes in 0_u64..50) {
            let region = Region { address: Address(at), len: Bytes(len) };
            let inside = (address..address + bytes).all(|byte| (at..at + len).contains(&byte))
                && (at..=at + len).contains(&address);
            let found = region.offset(Address(address), Bytes(bytes));
            prop_assert_eq!(found, inside.then(|| Bytes(address - at)));
        }
    }

    /// Ranges at the end of all addresses do not wrap around.
    #[test]
    fn far_ranges() {
        let last = Region { address: Address(u64::MAX - 9), len: Bytes(9) };
        assert_eq!(last.offset(Address(u64::MAX - 1), Bytes(1)), Some(Bytes(8)));
        assert_eq!(last.offset(Address(u64::MAX - 1), Bytes(u64::MAX)), None);
        assert_eq!(last.offset(Address(0), Bytes(1)), None);
    }

    /// What Mooncake's own engine says, field by field, with those that nobody here reads.
    #[test]
    fn an_engine_is_understood() {
        let said = br#"{"name":"127.0.0.1:15428","protocol":"tcp","tcp_data_host":"127.0.0.1","tcp_data_port":16971,
            "tcp_proto_version":2,"timestamp":"2026-11-29 10:11:12","rdma_server_name":"x",
            "buffers":[{"name":"*","addr":18446744073709551000,"length":615},{"name":"*","addr":4096,"length":0}]}"#;
        let region = Region { address: Address(18_446_744_073_709_551_000), len: Bytes(615) };
        let expected = Description {
            name: "127.0.0.1:15428".into(),
            data_port: 16971,
            version: 2,
            regions: vec![region],
        };
        assert_eq!(Description::parse(said), Ok(Some(expected)));
        let old = br#"{"name":"a","protocol":"tcp","tcp_data_port":1,"buffers":[]}"#;
        assert_eq!(Description::parse(old).unwrap().unwrap().version, 1);
        let rdma = Description::parse(br#"{"name":"a","protocol":"rdma"}"#).unwrap_err();
        assert_eq!(rdma, "its memory is reached by `rdma`, not by `tcp`");
        assert!(Description::parse(br#"{"protocol":"tcp","buffers":[]}"#).is_err());
        assert_eq!(Description::parse(b"null\n"), Ok(None));
    }

    #[test]
    fn statuses() {
        assert_eq!(Status::Done.encode(), [0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]);
        for status in [Status::Done, Status::Refused] {
            assert_eq!(Status::decode(status.encode()), Some(status));
        }
        assert_eq!(Status::decode([0; 8]), None);
    }
}
