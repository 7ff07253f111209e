//! The copier: strided pieces between two mappings, or between a mapping and a packed buffer. A scalar kernel and an
//! AVX2 kernel that is chosen at run time and writes the same bytes.

use kvferry_plan::{Bytes, StridedMove, Strides};

use crate::{ArenaError, Pieces, mmap::Mapping};

/// How [`crate::Arena::copy_from`] writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Through the cache: right when the bytes are read again soon, for a digest for example.
    Cached,
    /// As `Cached`, fetching the source `ahead` bytes in front of the copy, anywhere.
    Fetching {
        /// Distance from the piece that is copied to the bytes that are fetched.
        ahead: i64,
    },
    /// Past the cache, fetching the source `ahead` bytes in front of the copy: right for one large sweep. `ahead`
    /// may be negative and may point anywhere.
    Streaming {
        /// Distance from the piece that is copied to the bytes that are fetched.
        ahead: i64,
    },
}

/// Copies `m` from `src` to `dst`, after checking all of it.
pub(crate) fn copy(src: &Mapping, dst: &Mapping, m: &StridedMove, stores: Stores) -> Result<(), ArenaError> {
    if m.rows == 0 || m.blocks == 0 || m.len.0 == 0 {
        return Ok(());
    }
    let from = src.source(m.src.offset, reach(&m.src, m)?)?;
    let to = dst.target(m.dst.offset, reach(&m.dst, m)?)?;
    let kernel = kernel(stores);
    // SAFETY: both sides were checked up to their last byte, and AVX2 is only chosen where it exists.
    unsafe { kernel(from, to, m, stores) };
    Ok(())
}

/// Bytes from the first byte of a side of `m` to its last.
fn reach(side: &Strides, m: &StridedMove) -> Result<Bytes, ArenaError> {
    extent(side, m.len, m.rows, m.blocks)
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

/// Packs `pieces` into `out`.
pub(crate) fn gather(src: &Mapping, pieces: &Pieces, out: &mut [u8]) -> Result<(), ArenaError> {
    sized(pieces, out.len())?;
    let Pieces { strides, len, rows, blocks } = *pieces;
    if out.is_empty() {
        return Ok(());
    }
    let from = src.source(strides.offset, extent(&strides, len, rows, blocks)?)?;
    let len = len.index();
    for (n, piece) in out.chunks_exact_mut(len).enumerate() {
        let (b, i) = (n / rows as usize, n % rows as usize);
        // SAFETY: the extent of all pieces was checked; `piece` is exclusive memory that is not part of the mapping.
        unsafe {
            let at = from.add(b * strides.block.index() + i * strides.row.index());
            fetch(at.wrapping_add(strides.row.index().wrapping_mul(FETCH)), len);
            std::ptr::copy_nonoverlapping(at, piece.as_mut_ptr(), len);
        }
    }
    Ok(())
}

/// Pieces between the one that is gathered and the one that is fetched into the cache.
const FETCH: usize = 4;

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

/// Writes packed `data` to `pieces`.
pub(crate) fn scatter(dst: &Mapping, pieces: &Pieces, data: &[u8]) -> Result<(), ArenaError> {
    sized(pieces, data.len())?;
    let Pieces { strides, len, rows, blocks } = *pieces;
    if data.is_empty() {
        return Ok(());
    }
    let to = dst.target(strides.offset, extent(&strides, len, rows, blocks)?)?;
    let len = len.index();
    for (n, piece) in data.chunks_exact(len).enumerate() {
        let (b, i) = (n / rows as usize, n % rows as usize);
        // SAFETY: the extent of all pieces was checked; `piece` is borrowed memory that is not part of the mapping.
        unsafe {
            let at = to.add(b * strides.block.index() + i * strides.row.index());
            fetch(at.wrapping_add(strides.row.index().wrapping_mul(FETCH)), len);
            std::ptr::copy_nonoverlapping(piece.as_ptr(), at, len);
        }
    }
    Ok(())
}

fn sized(pieces: &Pieces, len: usize) -> Result<(), ArenaError> {
    let (expected, found) = (pieces.bytes(), Bytes(len as u64));
    if expected == found { Ok(()) } else { Err(ArenaError::Length { expected, found }) }
}

type Kernel = unsafe fn(*const u8, *mut u8, &StridedMove, Stores);

fn kernel(stores: Stores) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        match stores {
            Stores::Cached => {}
            Stores::Fetching { .. } => return avx2::sweep::<false>,
            Stores::Streaming { .. } => return avx2::sweep::<true>,
        }
    }
    let _ = stores;
    scalar
}

/// Piece by piece with the library's copy, which is as fast as anything while the target stays in the cache.
///
/// # Safety
/// Every piece of `m`, relative to its first, lies in memory that may be read from `from` and written from `to`.
unsafe fn scalar(from: *const u8, to: *mut u8, m: &StridedMove, _: Stores) {
    for b in 0..m.blocks as usize {
        for i in 0..m.rows as usize {
            // SAFETY: the caller's promise. `copy` because an arena may be copied into itself.
            unsafe {
                let from = from.add(b * m.src.block.index() + i * m.src.row.index());
                let to = to.add(b * m.dst.block.index() + i * m.dst.row.index());
                std::ptr::copy(from, to, m.len.index());
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_store_si256,
        _mm256_stream_si256,
    };

    use super::{Stores, StridedMove};

    const LINE: usize = 64;
    const VECTOR: usize = size_of::<__m256i>();

    /// Stores, non-temporal ones if `PAST` the cache, one line at a time, and a prefetch for each line.
    ///
    /// # Safety
    /// As [`super::scalar`], and the processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn sweep<const PAST: bool>(
        from: *const u8,
        to: *mut u8,
        m: &StridedMove,
        stores: Stores,
    ) {
        let ahead = match stores {
            Stores::Cached => 0,
            Stores::Fetching { ahead } | Stores::Streaming { ahead } => ahead as isize,
        };
        for b in 0..m.blocks as usize {
            for i in 0..m.rows as usize {
                // SAFETY: the caller's promise.
                unsafe {
                    let from = from.add(b * m.src.block.index() + i * m.src.row.index());
                    let to = to.add(b * m.dst.block.index() + i * m.dst.row.index());
                    piece::<PAST>(from, to, m.len.index(), ahead);
                }
            }
        }
        // Streamed stores are not ordered with the unlock or the message that tells others of them.
        if PAST {
            _mm_sfence();
        }
    }

    /// # Safety
    /// `len` bytes may be read from `from` and written to `to`; AVX2.
    #[target_feature(enable = "avx2")]
    unsafe fn piece<const PAST: bool>(from: *const u8, to: *mut u8, len: usize, ahead: isize) {
        let head = to.align_offset(VECTOR).min(len);
        let lines = (len - head) / LINE;
        // SAFETY: head, lines and tail together are the `len` bytes; vector stores are aligned after the head.
        // Prefetching never faults, wherever it points.
        unsafe {
            std::ptr::copy(from, to, head);
            for line in 0..lines {
                let at = head + line * LINE;
                let source = from.add(at);
                _mm_prefetch::<_MM_HINT_T0>(source.wrapping_offset(ahead).cast());
                let low = _mm256_loadu_si256(source.cast());
                let high = _mm256_loadu_si256(source.add(VECTOR).cast());
                if PAST {
                    _mm256_stream_si256(to.add(at).cast(), low);
                    _mm256_stream_si256(to.add(at + VECTOR).cast(), high);
                } else {
                    _mm256_store_si256(to.add(at).cast(), low);
                    _mm256_store_si256(to.add(at + VECTOR).cast(), high);
                }
            }
            let tail = head + lines * LINE;
            std::ptr::copy(from.add(tail), to.add(tail), len - tail);
        }
    }
}
