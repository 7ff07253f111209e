//! The copier: strided pieces between two mappings, or between a mapping and packed buffers. Scalar kernels, and AVX2
//! kernels that are chosen at run time and write the same bytes.
//!
//! Whoever reads for several targets reads a piece for each in turn: what a layout deals row by row then leaves the
//! source in the order in which it lies there, which is up to twice as fast as a pass for each target.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod converted;
mod xxh3;

use kvferry_plan::{Bytes, Cast, StridedMove, Strides};

pub use xxh3::RowHasher;

use crate::{ArenaError, Packed, PackedMut, Pieces, mmap::Mapping};

/// How [`crate::copy_in_turns`] writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Through the cache: right when the bytes are read again soon, for a digest for example.
    Cached,
    /// Past the cache: right for one large sweep.
    Streaming,
}

/// A checked [`StridedMove`].
struct Lane {
    from: *const u8,
    to: *mut u8,
    /// Bytes of a piece at the target.
    len: usize,
    cast: Option<Cast>,
    /// Pieces of a block.
    rows: usize,
    /// Pieces.
    count: usize,
    /// Distances from block to block and from row to row.
    from_step: [usize; 2],
    to_step: [usize; 2],
    /// From a piece to what is fetched while it is copied.
    ahead: isize,
}

impl Lane {
    fn new(src: &Mapping, dst: &Mapping, m: &StridedMove) -> Result<Option<Self>, ArenaError> {
        if m.rows == 0 || m.blocks == 0 || m.len.0 == 0 {
            return Ok(None);
        }
        whole(m.len, m.cast)?;
        let reach = |side: &Strides, len| extent(side, len, m.rows, m.blocks);
        let from = src.source(m.src.offset, reach(&m.src, m.src_len())?)?;
        let to = dst.target(m.dst.offset, reach(&m.dst, m.len)?)?;
        let step = |side: &Strides| [side.block.index(), side.row.index()];
        Ok(Some(Self {
            from,
            to,
            len: m.len.index(),
            cast: m.cast,
            rows: m.rows as usize,
            count: m.rows.saturating_mul(m.blocks) as usize,
            from_step: step(&m.src),
            to_step: step(&m.dst),
            ahead: ahead(&m.src, m.rows, m.blocks),
        }))
    }

    /// Where piece `n`, which is one, comes from and where it goes.
    fn piece(&self, n: usize) -> (*const u8, *mut u8) {
        let at = |step: &[usize; 2]| n / self.rows * step[0] + n % self.rows * step[1];
        (self.from.wrapping_add(at(&self.from_step)), self.to.wrapping_add(at(&self.to_step)))
    }
}

/// Pieces of the lane that has most.
fn turns(lanes: &[Lane]) -> usize {
    lanes.iter().map(|lane| lane.count).max().unwrap_or(0)
}

/// Copies from `src`, a piece of each move in turn, after checking all of them.
pub(crate) fn copy<'a>(
    src: &Mapping,
    moves: impl Iterator<Item = (&'a Mapping, &'a StridedMove)>,
    stores: Stores,
) -> Result<(), ArenaError> {
    let lanes =
        moves.filter_map(|(dst, m)| Lane::new(src, dst, m).transpose()).collect::<Result<Vec<_>, _>>()?;
    // SAFETY: both sides were checked up to their last byte, and AVX2 is only used where it exists.
    unsafe {
        if lanes.iter().any(|lane| lane.cast.is_some()) {
            scalar(&lanes);
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            match stores {
                Stores::Cached => avx2::sweep::<false>(&lanes),
                Stores::Streaming => avx2::sweep::<true>(&lanes),
            }
            return Ok(());
        }
        let _ = stores;
        scalar(&lanes);
    }
    Ok(())
}

/// Piece by piece with the library's copy, or converted.
///
/// # Safety
/// Every piece of every lane lies in memory that may be read and written.
unsafe fn scalar(lanes: &[Lane]) {
    for n in 0..turns(lanes) {
        for lane in lanes.iter().filter(|lane| n < lane.count) {
            let (from, to) = lane.piece(n);
            // SAFETY: the caller's promise. `copy` because an arena may be copied into itself.
            unsafe {
                match lane.cast {
                    Some(cast) => converted::piece(cast, from, to, lane.len),
                    None => std::ptr::copy(from, to, lane.len),
                }
            }
        }
    }
}

/// Bytes from the first byte of the pieces to their last. There is at least one.
fn extent(side: &Strides, len: Bytes, rows: u64, blocks: u64) -> Result<Bytes, ArenaError> {
    let blocks = side.block.0.checked_mul(blocks - 1);
    let rows = side.row.0.checked_mul(rows - 1);
    blocks.and_then(|n| n.checked_add(rows?)?.checked_add(len.0)).map(Bytes).ok_or(ArenaError::OutOfBounds {
        offset: side.offset,
        len: Bytes(u64::MAX),
        arena: Bytes(u64::MAX),
    })
}

/// From a piece to what is worth fetching while it is read: the next pieces, at least a base page further on, where the
/// processor does not look by itself.
fn ahead(side: &Strides, rows: u64, blocks: u64) -> isize {
    const FAR: u64 = 4096;
    let step = match (rows, blocks) {
        (1, 1) => FAR,
        (1, _) => side.block.0,
        _ => side.row.0,
    };
    step.saturating_mul(FAR.div_ceil(step.max(1))) as isize
}

/// Pieces that are read: packed, digested, or both, after a conversion if there is one.
#[derive(Debug)]
pub(crate) struct Read<'a> {
    pub(crate) pieces: Pieces,
    pub(crate) cast: Option<Cast>,
    /// Exactly as many bytes as [`packed`] says.
    pub(crate) into: Option<PackedMut<'a>>,
    pub(crate) hasher: Option<&'a mut RowHasher>,
}

/// Reads from `src`, a piece of each in turn, after checking all of them.
pub(crate) fn read(src: &Mapping, reads: &mut [Read<'_>]) -> Result<(), ArenaError> {
    let mut lanes = Vec::with_capacity(reads.len());
    for Read { pieces, cast, into, hasher } in reads {
        if let Some(into) = into {
            sized(packed(pieces, *cast), into.len())?;
        }
        if pieces.bytes().0 == 0 {
            continue;
        }
        let Pieces { strides, len, rows, blocks } = *pieces;
        let base = src.source(strides.offset, extent(&strides, len, rows, blocks)?)?;
        let count = rows.saturating_mul(blocks) as usize;
        let each = packed(&Pieces { rows: 1, blocks: 1, ..*pieces }, *cast);
        lanes.push((base, pieces, count, ahead(&strides, rows, blocks), (*cast, each.index()), into, hasher));
    }
    for n in 0..lanes.iter().map(|(_, _, count, ..)| *count).max().unwrap_or(0) {
        let pieces = lanes.iter_mut().filter(|(_, _, count, ..)| n < *count);
        for (base, pieces, _, ahead, (cast, each), into, hasher) in pieces {
            let Pieces { strides, rows, len, .. } = **pieces;
            let (b, i, len) = (n / rows as usize, n % rows as usize, len.index());
            let from = base.wrapping_add(b * strides.block.index() + i * strides.row.index());
            // Sized above: piece `n` has its place.
            let to =
                into.as_mut().map_or(std::ptr::null_mut(), |into| into.as_mut_ptr().wrapping_add(n * *each));
            if let Some(cast) = *cast {
                // SAFETY: the extent of all pieces was checked; `to` is null, or exclusive memory of `each` bytes.
                unsafe { converted::read(cast, from, to, *each, hasher.as_deref_mut()) };
                continue;
            }
            // SAFETY: the extent of all pieces was checked; `to` is exclusive memory that is not part of the mapping.
            unsafe {
                match hasher {
                    Some(hasher) => hasher.take(from, to, len, *ahead),
                    None if to.is_null() => {}
                    None => pack(from, to, len, *ahead),
                }
            }
        }
    }
    Ok(())
}

/// # Safety
/// `len` bytes may be read from `from` and written to `to`, which is no part of a mapping.
unsafe fn pack(from: *const u8, to: *mut u8, len: usize, ahead: isize) {
    // SAFETY: the caller's promise, and AVX2 is only used where it exists.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            return avx2::piece::<false>(from, to, len, ahead);
        }
        let _ = ahead;
        std::ptr::copy_nonoverlapping(from, to, len);
    }
}

/// Writes packed `data` to `pieces`.
pub(crate) fn scatter(dst: &Mapping, pieces: &Pieces, data: Packed<'_>) -> Result<(), ArenaError> {
    sized(pieces.bytes(), data.len())?;
    let Pieces { strides, len, rows, blocks } = *pieces;
    if data.len() == 0 {
        return Ok(());
    }
    let to = dst.target(strides.offset, extent(&strides, len, rows, blocks)?)?;
    let len = len.index();
    let ahead = ahead(&strides, rows, blocks);
    for n in 0..data.len() / len {
        let (b, i) = (n / rows as usize, n % rows as usize);
        // SAFETY: the extent of all pieces was checked, and that `data` has `len` bytes for each; `data` is borrowed
        // memory that is not part of the mapping.
        unsafe {
            let at = to.add(b * strides.block.index() + i * strides.row.index());
            fetch(at.wrapping_offset(ahead), len);
            std::ptr::copy_nonoverlapping(data.as_ptr().add(n * len), at, len);
        }
    }
    Ok(())
}

/// Asks for `len` bytes at `at`, wherever that is: a hint that never faults. Long pieces need none, the processor sees
/// where they go.
fn fetch(at: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len <= 4096 {
        for line in (0..len).step_by(64) {
            // SAFETY: a prefetch is a hint; SSE is part of x86-64.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                    at.wrapping_add(line).cast(),
                );
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, len);
}

/// Bytes that pieces of a source have when they have been converted.
pub(crate) fn packed(pieces: &Pieces, cast: Option<Cast>) -> Bytes {
    cast.map_or(pieces.bytes(), |cast| cast.target_len(pieces.bytes()))
}

/// Refuses pieces that end within an element.
fn whole(len: Bytes, cast: Option<Cast>) -> Result<(), ArenaError> {
    let elements = cast.map_or(len, |cast| cast.target_len(cast.source_len(len)));
    if elements == len { Ok(()) } else { Err(ArenaError::Length { expected: elements, found: len }) }
}

fn sized(expected: Bytes, len: usize) -> Result<(), ArenaError> {
    let found = Bytes(len as u64);
    if expected == found { Ok(()) } else { Err(ArenaError::Length { expected, found }) }
}
