//! The safetensors format: a length, a JSON header, the tensors.
//!
//! The header is read here rather than by the format's own crate because every fault must name its tensor, names
//! that occur twice must be refused, and sizes that overflow must not be able to panic.

use super::{
    Item, LoadError,
    error::printable,
    quant::Encoding,
    store::{Stored, overlap},
};
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use std::{fmt, ops::Range};

const LENGTH: usize = 8;
/// The format's own limit on its header.
const LONGEST_HEADER: u64 = 100_000_000;

#[derive(Deserialize)]
struct Info {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's tensors in file order, names as they come.
struct Header(Vec<(String, Info)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        tensors.push((name, map.next_value()?));
                    }
                }
                Ok(Header(tensors))
            }
        }
        json.deserialize_map(Entries)
    }
}

/// The tensors of one file. `index` is its place among the files of the checkpoint.
pub(super) fn read(file: &str, index: usize, bytes: &[u8]) -> Result<Vec<(String, Stored)>, LoadError> {
    let broken = |reason: String| LoadError::damaged(file, Item::Header, reason);
    let unreadable =
        |error: serde_json::Error| broken(format!("is not readable: {}", printable(&error.to_string())));
    let (length, rest) = bytes
        .split_first_chunk::<LENGTH>()
        .ok_or_else(|| broken(format!("a file of {} bytes has no header length", bytes.len())))?;
    let length = u64::from_le_bytes(*length);
    let (header, data) =
        usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length)).ok_or_else(|| {
            broken(format!("a header of {length} bytes does not fit in a file of {} bytes", bytes.len()))
        })?;
    if length > LONGEST_HEADER {
        return Err(broken(format!("a header of {length} bytes is longer than {LONGEST_HEADER}")));
    }
    let header: Header = serde_json::from_slice(header).map_err(unreadable)?;
    let start = bytes.len() - data.len();
    let mut used: Vec<(Range<usize>, usize)> = Vec::new();
    let mut tensors = Vec::new();
    for (number, (name, info)) in header.0.into_iter().enumerate() {
        let stored = locate(file, index, &name, info, start, data.len())?;
        used.push((stored.range.clone(), number));
        tensors.push((name, stored));
    }
    overlap(file, used, |number| tensors.get(number).map_or("", |(name, _)| name))?;
    Ok(tensors)
}

fn locate(
    file: &str,
    index: usize,
    name: &str,
    info: Info,
    start: usize,
    data: usize,
) -> Result<Stored, LoadError> {
    let broken = |reason: String| LoadError::damaged(file, Item::tensor(name), reason);
    let encoding = match info.dtype.as_str() {
        "F32" => Encoding::F32,
        "F16" => Encoding::F16,
        "BF16" => Encoding::Bf16,
        other => {
            let reason = format!("elements are {}, not F32, F16 or BF16", printable(other));
            return Err(LoadError::unsupported(file, Item::tensor(name), reason));
        }
    };
    let (from, to) = info.data_offsets;
    let bytes = encoding
        .tensor_bytes(&info.shape)
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| broken(format!("shape {:?} is impossible", info.shape)))?;
    if to.checked_sub(from) != Some(bytes) {
        return Err(broken(format!("offsets {from}..{to} do not hold the {bytes} bytes of its shape")));
    }
    let range = usize::try_from(from).ok().zip(usize::try_from(to).ok()).filter(|(_, to)| *to <= data);
    let (from, to) =
        range.ok_or_else(|| broken(format!("offsets {from}..{to} are outside of {data} bytes of data")))?;
    Ok(Stored { file: index, encoding, shape: info.shape, range: start + from..start + to })
}
