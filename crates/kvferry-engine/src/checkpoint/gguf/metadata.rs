//! GGUF metadata: typed values by key.

use super::{super::LoadError, Cursor, Item};
use std::collections::{BTreeMap, btree_map::Entry};

const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// One value. Lists stay in the file and are read when they are wanted.
#[derive(Debug)]
enum Value {
    Integer(i128),
    Real(f64),
    Flag(bool),
    Text(String),
    List { kind: u32, count: u64, at: usize },
}

/// All metadata of a file.
#[derive(Debug)]
pub(in super::super) struct Metadata {
    file: String,
    values: BTreeMap<String, Value>,
}

impl Metadata {
    pub(super) fn read(file: &str, cursor: &mut Cursor<'_>, keys: u64) -> Result<Self, LoadError> {
        let mut values = BTreeMap::new();
        for number in 0..keys {
            let unnamed = |reason| LoadError::damaged(file, Item::Key(format!("number {number}")), reason);
            let name = cursor.text().map_err(unnamed)?;
            let broken = |reason| LoadError::damaged(file, Item::key(name), reason);
            let value = cursor.u32().and_then(|kind| Value::read(kind, cursor)).map_err(broken)?;
            match values.entry(name.to_owned()) {
                Entry::Vacant(free) => free.insert(value),
                Entry::Occupied(_) => return Err(broken("occurs twice".to_owned())),
            };
        }
        Ok(Self { file: file.to_owned(), values })
    }

    /// The file, as messages call it.
    pub(in super::super) fn file(&self) -> &str {
        &self.file
    }

    fn wrong(&self, key: &str, what: &str) -> LoadError {
        LoadError::damaged(&self.file, Item::key(key), format!("is not {what}"))
    }

    pub(in super::super) fn missing(&self, key: &str) -> LoadError {
        LoadError::missing(&self.file, Item::key(key))
    }

    pub(in super::super) fn unsupported(&self, key: &str, reason: impl Into<String>) -> LoadError {
        LoadError::unsupported(&self.file, Item::key(key), reason)
    }

    /// An unsigned integer of 32 bits, whatever type it is stored as.
    pub(in super::super) fn number(&self, key: &str) -> Result<Option<u32>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Integer(n)) if u32::try_from(*n).is_ok() => Ok(u32::try_from(*n).ok()),
            Some(_) => Err(self.wrong(key, "an unsigned 32-bit number")),
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "models compute in f32")]
    pub(super) fn real(&self, key: &str) -> Result<Option<f32>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Real(n)) => Ok(Some(*n as f32)),
            Some(_) => Err(self.wrong(key, "a floating-point number")),
        }
    }

    pub(in super::super) fn flag(&self, key: &str) -> Result<Option<bool>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Flag(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    pub(in super::super) fn text(&self, key: &str) -> Result<Option<&str>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "text")),
        }
    }

    /// The texts of a list; `bytes` are the file's.
    pub(in super::super) fn texts<'a>(
        &self,
        bytes: &'a [u8],
        key: &str,
    ) -> Result<Option<impl Iterator<Item = &'a str> + use<'a>>, LoadError> {
        let list = match self.values.get(key) {
            None => return Ok(None),
            Some(Value::List { kind: STRING, count, at }) => (*count, *at),
            Some(_) => return Err(self.wrong(key, "a list of texts")),
        };
        let (count, mut cursor) = (list.0, Cursor::new(bytes));
        cursor.skip_to(list.1);
        Ok(Some((0..count).map_while(move |_| cursor.text().ok())))
    }

    /// The integers of a list; `bytes` are the file's.
    pub(in super::super) fn integers<'a>(
        &self,
        bytes: &'a [u8],
        key: &str,
    ) -> Result<Option<impl Iterator<Item = i128> + use<'a>>, LoadError> {
        let list = match self.values.get(key) {
            None => return Ok(None),
            Some(Value::List { kind, count, at }) if !matches!(*kind, STRING | 6 | 7 | 12) => {
                (*kind, *count, *at)
            }
            Some(_) => return Err(self.wrong(key, "a list of integers")),
        };
        let ((kind, count, at), mut cursor) = (list, Cursor::new(bytes));
        cursor.skip_to(at);
        Ok(Some((0..count).map_while(move |_| match Value::read(kind, &mut cursor) {
            Ok(Value::Integer(n)) => Some(n),
            _ => None,
        })))
    }

    /// Tensor data starts, and each tensor starts, at a multiple of this.
    pub(super) fn alignment(&self) -> Result<u64, LoadError> {
        const KEY: &str = "general.alignment";
        let alignment = self.number(KEY)?.unwrap_or(32);
        if alignment.is_power_of_two() && alignment <= 1 << 20 {
            return Ok(u64::from(alignment));
        }
        Err(self.wrong(KEY, "a power of two up to 1048576"))
    }
}

impl Value {
    fn read(kind: u32, cursor: &mut Cursor<'_>) -> Result<Self, String> {
        Ok(match kind {
            0 => Self::Integer(cursor.u8()?.into()),
            1 => Self::Integer(i8::from_le_bytes(cursor.array()?).into()),
            2 => Self::Integer(u16::from_le_bytes(cursor.array()?).into()),
            3 => Self::Integer(i16::from_le_bytes(cursor.array()?).into()),
            4 => Self::Integer(cursor.u32()?.into()),
            5 => Self::Integer(i32::from_le_bytes(cursor.array()?).into()),
            6 => Self::Real(f32::from_le_bytes(cursor.array()?).into()),
            7 => match cursor.u8()? {
                0 => Self::Flag(false),
                1 => Self::Flag(true),
                other => return Err(format!("{other} is neither true nor false")),
            },
            STRING => Self::Text(cursor.text()?.to_owned()),
            ARRAY => Self::list(cursor)?,
            10 => Self::Integer(cursor.u64()?.into()),
            11 => Self::Integer(i64::from_le_bytes(cursor.array()?).into()),
            12 => Self::Real(f64::from_le_bytes(cursor.array()?)),
            other => return Err(format!("value type {other} is unknown")),
        })
    }

    /// Checks a list's extent (and its texts) without keeping it.
    fn list(cursor: &mut Cursor<'_>) -> Result<Self, String> {
        let (kind, count) = (cursor.u32()?, cursor.u64()?);
        let at = cursor.at();
        let width = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            STRING => {
                for _ in 0..count {
                    cursor.text()?;
                }
                return Ok(Self::List { kind, count, at });
            }
            ARRAY => return Err("a list of lists is not supported".to_owned()),
            other => return Err(format!("list element type {other} is unknown")),
        };
        let bytes = count.checked_mul(width).ok_or_else(|| format!("a list of {count} values overflows"))?;
        cursor.take(bytes)?;
        Ok(Self::List { kind, count, at })
    }
}
