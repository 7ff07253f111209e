//! The tensors of a checkpoint's files, by name, wherever and however they are stored.

use super::{Blob, Item, LoadError, error::printable, quant::Encoding};
use std::{
    collections::{HashMap, hash_map::Entry},
    ops::Range,
};

/// Where one tensor lies. The readers made sure that the range is inside the file and as long as shape and
/// encoding say.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) file: usize,
    pub(super) encoding: Encoding,
    /// Outermost axis first.
    pub(super) shape: Vec<u64>,
    pub(super) range: Range<usize>,
}

/// The order of a matrix's rows in the file.
#[derive(Clone, Copy, Debug)]
pub(super) enum RowOrder {
    /// As wanted.
    Plain,
    /// Heads of `head` rows, of which the last `turned` ones rotate: of these, row `2i` and row `2i + 1` are rows `i`
    /// and `i + turned/2` of the rotate-half order.
    Interleaved { head: usize, turned: usize },
}

impl RowOrder {
    /// The stored row that becomes row `row`.
    fn stored(self, row: usize) -> usize {
        match self {
            Self::Plain => row,
            Self::Interleaved { head, turned } => {
                let half = (turned / 2).max(1);
                let within = row % head.max(1);
                match within.checked_sub(head.saturating_sub(2 * half)) {
                    Some(turning) => row - turning + 2 * (turning % half) + turning / half,
                    None => row,
                }
            }
        }
    }
}

/// Files and the tensors in them.
#[derive(Debug, Default)]
pub(super) struct Store {
    /// What messages call the whole.
    pub(super) label: String,
    /// Name and content of each file.
    pub(super) files: Vec<(String, Blob)>,
    tensors: HashMap<String, Stored>,
}

impl Store {
    pub(super) fn new(label: &str) -> Self {
        Self { label: label.to_owned(), ..Self::default() }
    }

    /// Adds a file's tensors; a name may occur once in all files.
    pub(super) fn add(
        &mut self,
        file: String,
        blob: Blob,
        tensors: Vec<(String, Stored)>,
    ) -> Result<(), LoadError> {
        for (name, stored) in tensors {
            match self.tensors.entry(name) {
                Entry::Vacant(free) => free.insert(stored),
                Entry::Occupied(taken) => {
                    return Err(LoadError::damaged(&file, Item::tensor(taken.key()), "occurs twice"));
                }
            };
        }
        self.files.push((file, blob));
        Ok(())
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(super) fn get(&self, name: &str) -> Option<&Stored> {
        self.tensors.get(name)
    }

    /// The first of a tensor's names that is there, or else the first.
    pub(super) fn pick(&self, names: Vec<String>) -> String {
        let there = names.iter().position(|name| self.get(name).is_some()).unwrap_or(0);
        names.into_iter().nth(there).unwrap_or_default()
    }

    /// Elements of all tensors.
    pub(super) fn elements(&self) -> u64 {
        let of = |stored: &Stored| stored.shape.iter().fold(1, |all: u64, n| all.saturating_mul(*n));
        self.tensors.values().map(of).fold(0, u64::saturating_add)
    }

    /// The tensor, if it is there with that shape.
    pub(super) fn expect(&self, name: &str, wanted: &[u64]) -> Result<&Stored, LoadError> {
        let stored = self.get(name).ok_or_else(|| LoadError::missing(&self.label, Item::tensor(name)))?;
        if stored.shape == wanted {
            return Ok(stored);
        }
        Err(LoadError::Shape {
            file: self.file_of(stored).to_owned(),
            tensor: printable(name),
            found: stored.shape.clone(),
            wanted: wanted.to_vec(),
        })
    }

    fn file_of(&self, stored: &Stored) -> &str {
        self.files.get(stored.file).map_or(&self.label, |(name, _)| name)
    }

    /// Reads a tensor as `f32`, row-major.
    pub(super) fn read(&self, name: &str, wanted: &[u64], order: RowOrder) -> Result<Vec<f32>, LoadError> {
        let stored = self.expect(name, wanted)?;
        let bytes = self.files.get(stored.file).and_then(|(_, blob)| blob.bytes().get(stored.range.clone()));
        let outside =
            || LoadError::damaged(self.file_of(stored), Item::tensor(name), "lies outside of the file");
        let bytes = bytes.ok_or_else(outside)?;
        let rows = stored.shape.first().and_then(|rows| usize::try_from(*rows).ok()).unwrap_or(0).max(1);
        let elements = stored.encoding.elements(bytes.len());
        let mut values = vec![0.0; elements];
        match order {
            RowOrder::Plain => stored.encoding.dequantise(bytes, &mut values),
            RowOrder::Interleaved { .. } => {
                let (row_bytes, row_values) = (bytes.len() / rows, elements / rows);
                for (row, to) in values.chunks_exact_mut(row_values.max(1)).enumerate() {
                    let from = order.stored(row) * row_bytes;
                    let from = bytes.get(from..from + row_bytes).ok_or_else(outside)?;
                    stored.encoding.dequantise(from, to);
                }
            }
        }
        Ok(values)
    }
}

/// Refuses tensors that share bytes: they would let a small file ask for any amount of memory.
pub(super) fn overlap<'a>(
    file: &str,
    mut used: Vec<(Range<usize>, usize)>,
    name: impl Fn(usize) -> &'a str,
) -> Result<(), LoadError> {
    used.sort_by_key(|(range, _)| range.start);
    for pair in used.windows(2) {
        if let [(first, a), (second, b)] = pair
            && second.start < first.end
        {
            let reason = format!("shares bytes with tensor {}", printable(name(*a)));
            return Err(LoadError::damaged(file, Item::tensor(name(*b)), reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::RowOrder;

    #[test]
    fn interleaved_rows_come_out_in_halves() {
        let stored = |order: RowOrder| (0..12).map(|row| order.stored(row)).collect::<Vec<_>>();
        let whole = RowOrder::Interleaved { head: 6, turned: 6 };
        assert_eq!(stored(whole), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        let part = RowOrder::Interleaved { head: 6, turned: 4 };
        assert_eq!(stored(part), [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]);
    }
}
