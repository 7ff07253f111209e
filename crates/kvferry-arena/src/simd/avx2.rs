//! The AVX2 kernels of the copier.

use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_store_si256,
    _mm256_stream_si256,
};

use super::Lane;

const LINE: usize = 64;
const VECTOR: usize = size_of::<__m256i>();
/// Pieces for which the library's copy has better ways.
const LONG: usize = 16 << 10;

/// Stores, non-temporal ones if `PAST` the cache, one line at a time, and a prefetch for each line.
///
/// # Safety
/// As [`super::scalar`], and the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn sweep<const PAST: bool>(lanes: &[Lane]) {
    for n in 0..super::turns(lanes) {
        for lane in lanes.iter().filter(|lane| n < lane.count) {
            let (from, to) = lane.piece(n);
            // SAFETY: the caller's promise.
            unsafe {
                if PAST || lane.len < LONG {
                    piece::<PAST>(from, to, lane.len, lane.ahead);
                } else {
                    std::ptr::copy(from, to, lane.len);
                }
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
pub(super) unsafe fn piece<const PAST: bool>(from: *const u8, to: *mut u8, len: usize, ahead: isize) {
    let head = to.align_offset(VECTOR).min(len);
    let lines = (len - head) / LINE;
    // SAFETY: head, lines and tail together are the `len` bytes; vector stores are aligned after the head.
    // Prefetching never faults, wherever it points.
    unsafe {
        if head > 0 {
            std::ptr::copy(from, to, head);
        }
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
        if tail < len {
            std::ptr::copy(from.add(tail), to.add(tail), len - tail);
        }
    }
}
