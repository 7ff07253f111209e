//! The GGUF tensor table.

use super::{
    super::{
        LoadError,
        quant::Encoding,
        store::{Stored, overlap},
    },
    Cursor, Item,
};
use std::ops::Range;

const MOST_AXES: u32 = 4;

/// One line of the table; the offset counts from the start of the data.
struct Line<'a> {
    name: &'a str,
    encoding: Encoding,
    shape: Vec<u64>,
    offset: u64,
}

/// Reads the table; the cursor stands at its start and ends at the (unaligned) start of the data.
pub(super) fn read(
    file: &str,
    cursor: &mut Cursor<'_>,
    count: u64,
    alignment: u64,
) -> Result<Vec<(String, Stored)>, LoadError> {
    let mut lines = Vec::new();
    for number in 0..count {
        let unnamed = |reason| LoadError::damaged(file, Item::Tensor(format!("number {number}")), reason);
        let name = cursor.text().map_err(unnamed)?;
        lines.push(line(file, cursor, name)?);
    }
    let start = u64::try_from(cursor.at()).unwrap_or(u64::MAX).next_multiple_of(alignment);
    let end = u64::try_from(cursor.at()).unwrap_or(u64::MAX).saturating_add(cursor.left());
    let mut tensors = Vec::new();
    let mut used = Vec::new();
    for (number, line) in lines.into_iter().enumerate() {
        let range = locate(&line, start, end, alignment)
            .map_err(|reason| LoadError::damaged(file, Item::tensor(line.name), reason))?;
        used.push((range.clone(), number));
        let stored = Stored { file: 0, encoding: line.encoding, shape: line.shape, range };
        tensors.push((line.name.to_owned(), stored));
    }
    overlap(file, used, |number| tensors.get(number).map_or("", |(name, _)| name))?;
    Ok(tensors)
}

fn line<'a>(file: &str, cursor: &mut Cursor<'a>, name: &'a str) -> Result<Line<'a>, LoadError> {
    let broken = |reason| LoadError::damaged(file, Item::tensor(name), reason);
    let axes = cursor.u32().map_err(broken)?;
    if !(1..=MOST_AXES).contains(&axes) {
        return Err(broken(format!("{axes} axes are not between 1 and {MOST_AXES}")));
    }
    // The file counts from the innermost axis.
    let mut shape = Vec::new();
    for _ in 0..axes {
        shape.push(cursor.u64().map_err(broken)?);
    }
    shape.reverse();
    let kind = cursor.u32().map_err(broken)?;
    let encoding = encoding(kind).ok_or_else(|| {
        let reason = format!(
            "element type {kind} is not one of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K"
        );
        LoadError::unsupported(file, Item::tensor(name), reason)
    })?;
    let offset = cursor.u64().map_err(broken)?;
    Ok(Line { name, encoding, shape, offset })
}

fn encoding(kind: u32) -> Option<Encoding> {
    Some(match kind {
        0 => Encoding::F32,
        1 => Encoding::F16,
        2 => Encoding::Q4_0,
        3 => Encoding::Q4_1,
        6 => Encoding::Q5_0,
        7 => Encoding::Q5_1,
        8 => Encoding::Q8_0,
        12 => Encoding::Q4K,
        13 => Encoding::Q5K,
        14 => Encoding::Q6K,
        30 => Encoding::Bf16,
        _ => return None,
    })
}

/// The bytes of the file that hold a tensor, or what is wrong.
fn locate(line: &Line<'_>, start: u64, end: u64, alignment: u64) -> Result<Range<usize>, String> {
    let Line { encoding, shape, offset, .. } = line;
    let bytes = encoding
        .tensor_bytes(shape)
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| format!("shape {shape:?} is impossible for blocks of {}", encoding.block()))?;
    if !offset.is_multiple_of(alignment) {
        return Err(format!("offset {offset} is no multiple of {alignment}"));
    }
    let from = start.checked_add(*offset);
    let to = from.and_then(|from| from.checked_add(bytes)).filter(|to| *to <= end);
    let range =
        from.zip(to).and_then(|(from, to)| Some(usize::try_from(from).ok()?..usize::try_from(to).ok()?));
    range.ok_or_else(|| {
        format!(
            "{bytes} bytes at data offset {offset} do not fit in {} bytes of data",
            end.saturating_sub(start)
        )
    })
}
