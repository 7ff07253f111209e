//! The GGUF format: metadata, tensor table, data.

mod config;
mod cursor;
mod metadata;
mod tensors;

pub(super) use config::config;
pub(super) use metadata::Metadata;

use super::{Blob, Item, LoadError, store::Store};
use cursor::Cursor;

/// What a file must begin with.
pub(super) const MAGIC: [u8; 4] = *b"GGUF";

/// More than any model has; keeps small entries from adding up.
const MOST_KEYS: u64 = 1 << 16;
const MOST_TENSORS: u64 = 1 << 18;
/// Bytes of the shortest metadata entry and of the shortest tensor entry.
const LEAST_KEY: u64 = 8 + 1 + 4 + 1;
const LEAST_TENSOR: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// Reads the metadata and the tensor table.
pub(super) fn read(file: &str, blob: Blob) -> Result<(Metadata, Store), LoadError> {
    let mut cursor = Cursor::new(blob.bytes());
    let broken = |reason: String| LoadError::damaged(file, Item::Header, reason);
    if cursor.array::<4>().map_err(broken)? != MAGIC {
        let reason = "it does not begin with \"GGUF\"".to_owned();
        return Err(LoadError::NotAModel { file: file.to_owned(), reason });
    }
    let version = cursor.u32().map_err(broken)?;
    if !matches!(version, 2 | 3) {
        let reason = format!("version {version} is not 2 or 3 in little-endian order");
        return Err(LoadError::unsupported(file, Item::Header, reason));
    }
    let tensors = cursor.u64().map_err(broken)?;
    let keys = cursor.u64().map_err(broken)?;
    for (what, count, least, most) in
        [("tensors", tensors, LEAST_TENSOR, MOST_TENSORS), ("keys", keys, LEAST_KEY, MOST_KEYS)]
    {
        if count > most.min(cursor.left() / least) {
            return Err(broken(format!(
                "{count} {what} cannot be in a file of {} bytes",
                blob.bytes().len()
            )));
        }
    }
    let metadata = Metadata::read(file, &mut cursor, keys)?;
    let tensors = tensors::read(file, &mut cursor, tensors, metadata.alignment()?)?;
    let mut store = Store::new(file);
    store.add(file.to_owned(), blob, tensors)?;
    Ok((metadata, store))
}
