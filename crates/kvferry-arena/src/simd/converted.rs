//! Pieces that change their element type on the way out of a mapping. Elements are copied out before they are looked at:
//! others may write the mapped bytes at any time.

use kvferry_plan::Cast;

use super::RowHasher;
use crate::convert;

/// Elements on the way at once.
const STEP: usize = 512;
/// Bytes of the widest element.
const WIDEST: usize = 4;

/// Reads a piece that becomes `len` bytes, packs it at `to` unless that is null, and digests it.
///
/// # Safety
/// As many bytes as become `len` may be read from `from`, and `len` written to `to` unless it is null.
pub(super) unsafe fn read(
    cast: Cast,
    from: *const u8,
    to: *mut u8,
    len: usize,
    mut hasher: Option<&mut RowHasher>,
) {
    let mut done = 0;
    // SAFETY: the caller's promise; `bytes` are memory of `steps`, `len` in all, and are digested without a copy.
    unsafe {
        steps(cast, from, len, |bytes| {
            if !to.is_null() {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.add(done), bytes.len());
            }
            if let Some(hasher) = &mut hasher {
                hasher.take(bytes.as_ptr(), std::ptr::null_mut(), bytes.len(), 0);
            }
            done += bytes.len();
        });
    }
}

/// Writes a piece that becomes `len` bytes to `to`.
///
/// # Safety
/// As many bytes as become `len` may be read from `from`, and `len` written to `to`.
pub(super) unsafe fn piece(cast: Cast, from: *const u8, to: *mut u8, len: usize) {
    let mut to = to;
    // SAFETY: the caller's promise; `bytes` are memory of `steps`, `len` in all.
    unsafe {
        steps(cast, from, len, |bytes| {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            to = to.add(bytes.len());
        });
    }
}

/// Converts what lies at `from` into `len` bytes and hands them out in order, some at a time.
///
/// # Safety
/// As many bytes as become `len` may be read from `from`.
unsafe fn steps(cast: Cast, from: *const u8, len: usize, mut take: impl FnMut(&[u8])) {
    let (before, after) = (cast.from().size().index(), cast.to().size().index());
    let (mut read, mut made) = ([0; STEP * WIDEST], [0; STEP * WIDEST]);
    let elements = len / after;
    for start in (0..elements).step_by(STEP) {
        let count = STEP.min(elements - start);
        let (read, made) = (&mut read[..count * before], &mut made[..count * after]);
        // SAFETY: the caller's promise, up to element `start + count`; `read` is memory of this function.
        unsafe { std::ptr::copy_nonoverlapping(from.add(start * before), read.as_mut_ptr(), read.len()) };
        convert(cast, read, made);
        take(made);
    }
}
