//! XXH3-64 of bytes that others may write meanwhile. The well-kept crate for it takes a slice, which may not be formed
//! over such bytes; and here a row can be digested by the same loads that copy it, which costs almost nothing beside
//! them. Written after the published algorithm (github.com/Cyan4973/xxHash, doc/xxhash_spec.md); short inputs and the
//! secret come from the crate.

use kvferry_plan::{Bytes, UnitId};
use twox_hash::{XxHash3_64, xxhash3_64::SecretBuffer};

/// Bytes that are taken at once.
const STRIPE: usize = 64;
/// Derived from the seed.
const SECRET: usize = 192;
/// Stripes after which the accumulators are scrambled.
const BLOCK: u64 = ((SECRET - STRIPE) / 8) as u64;
/// Longest input that is hashed in another way.
const SHORT: usize = 240;

const PRIME32: [u32; 3] = [0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D];
const PRIME64: [u64; 5] = [
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x27D4_EB2F_1656_67C5,
];
const START: [u64; 8] = [
    PRIME32[2] as u64,
    PRIME64[0],
    PRIME64[1],
    PRIME64[2],
    PRIME64[3],
    PRIME32[1] as u64,
    PRIME64[4],
    PRIME32[0] as u64,
];

/// Takes the bytes of a unit as they lie in registered memory, in pieces of any length, and says their digest: the
/// same as [`kvferry_plan::UnitHasher`].
#[derive(Clone)]
pub struct RowHasher {
    seed: u64,
    secret: [u8; SECRET],
    lanes: [u64; 8],
    /// Bytes in all.
    total: u64,
    /// Bytes that were taken.
    taken: u64,
    /// Stripes that were taken into the accumulators, of `stripes`: the last one, whole or not, is for the end.
    stripe: u64,
    stripes: u64,
    /// Of at most [`SHORT`] bytes all. Of more, the last stripe that was taken, and behind it `waiting` bytes.
    tail: [u8; 256],
    waiting: usize,
    kernel: Kernel,
}

impl std::fmt::Debug for RowHasher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { total, taken, .. } = self;
        f.debug_struct("RowHasher").field("total", total).field("taken", taken).finish_non_exhaustive()
    }
}

impl RowHasher {
    /// For the unit `id` of `total` bytes.
    #[must_use]
    pub fn new(id: UnitId, total: Bytes) -> Self {
        Self::with(id.seed(), total.0, kernel())
    }

    fn with(seed: u64, total: u64, kernel: Kernel) -> Self {
        let secret =
            SecretBuffer::with_seed(seed, [0; SECRET]).map_or([0; SECRET], SecretBuffer::into_secret);
        let stripes = if total <= SHORT as u64 { 0 } else { (total - 1) / STRIPE as u64 };
        let (taken, stripe, tail, waiting) = (0, 0, [0; 256], 0);
        Self { seed, secret, lanes: START, total, taken, stripe, stripes, tail, waiting, kernel }
    }

    /// The digest, once all bytes were taken; else a number that means nothing.
    #[must_use]
    pub fn digest(&self) -> u64 {
        if self.total <= SHORT as u64 {
            return XxHash3_64::oneshot_with_seed(self.seed, &self.tail[..self.total as usize]);
        }
        let mut lanes = self.lanes;
        let mut last = [0; STRIPE];
        last.copy_from_slice(&self.tail[self.waiting..][..STRIPE]);
        accumulate(&mut lanes, &last, &self.secret[SECRET - STRIPE - 7..]);
        let mut sum = self.total.wrapping_mul(PRIME64[0]);
        for (pair, secret) in lanes.as_chunks::<2>().0.iter().zip(self.secret[11..].as_chunks::<16>().0) {
            let [a, b] = [0, 8].map(|at| word(&secret[at..]));
            let product = u128::from(pair[0] ^ a) * u128::from(pair[1] ^ b);
            sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        sum = (sum ^ (sum >> 37)).wrapping_mul(0x1656_6791_9E37_79F9);
        sum ^ (sum >> 32)
    }

    /// Takes `len` bytes at `from`, and copies them to `to` unless that is null. What comes next is expected `ahead`
    /// bytes further on, wherever that is. Bytes beyond the total are only copied.
    ///
    /// # Safety
    /// `len` bytes may be read from `from`, and written to `to`, where nobody else reads or writes.
    pub(super) unsafe fn take(&mut self, from: *const u8, to: *mut u8, len: usize, ahead: isize) {
        let due = usize::try_from(self.total - self.taken).unwrap_or(usize::MAX).min(len);
        self.taken += due as u64;
        let mut at = Cursor { from, to, left: due };
        // SAFETY: the caller's promise. At most a stripe waits, for which `tail` has room behind another one: whole
        // stripes do not wait, and behind the last one there are 64 bytes at most. Short inputs have at most 240.
        unsafe {
            if self.total <= SHORT as u64 {
                at.keep(self.tail.as_mut_ptr().add(self.waiting), due);
                self.waiting += due;
            } else {
                if self.waiting > 0 {
                    let fits = due.min(STRIPE - self.waiting);
                    at.keep(self.tail.as_mut_ptr().add(STRIPE + self.waiting), fits);
                    self.waiting += fits;
                    if self.waiting == STRIPE && self.stripe < self.stripes {
                        let mut whole = [0; STRIPE];
                        whole.copy_from_slice(&self.tail[STRIPE..2 * STRIPE]);
                        self.stripes(
                            &mut Cursor { from: whole.as_ptr(), to: std::ptr::null_mut(), left: STRIPE },
                            0,
                        );
                        self.waiting = 0;
                    }
                }
                if self.waiting == 0 {
                    self.stripes(&mut at, ahead);
                }
                let rest = at.left;
                at.keep(self.tail.as_mut_ptr().add(STRIPE + self.waiting), rest);
                self.waiting += rest;
            }
            Cursor { left: len - due, ..at }.keep(std::ptr::null_mut(), len - due);
        }
    }

    /// Takes the whole stripes at `at` that are not for the end.
    ///
    /// # Safety
    /// As [`RowHasher::take`].
    unsafe fn stripes(&mut self, at: &mut Cursor, ahead: isize) {
        let count = ((at.left / STRIPE) as u64).min(self.stripes - self.stripe) as usize;
        if count == 0 {
            return;
        }
        // SAFETY: the caller's promise; the kernel was chosen for this processor.
        unsafe {
            (self.kernel)(&mut self.lanes, &self.secret, (self.stripe % BLOCK) as usize, at, count, ahead);
            self.stripe += count as u64;
            if self.stripe == self.stripes {
                let taken = if at.to.is_null() { at.from } else { at.to.cast_const() };
                taken.add((count - 1) * STRIPE).copy_to_nonoverlapping(self.tail.as_mut_ptr(), STRIPE);
            }
            at.advance(count * STRIPE);
        }
    }
}

/// `left` bytes at `from`, to be copied to `to` unless that is null.
struct Cursor {
    from: *const u8,
    to: *mut u8,
    left: usize,
}

impl Cursor {
    /// Copies the next `len` bytes to `kept` and from there to `to`, each unless it is null: so that both are the same
    /// whoever writes meanwhile.
    ///
    /// # Safety
    /// There are `len` bytes, which may be read, and written to `kept` and `to`.
    unsafe fn keep(&mut self, kept: *mut u8, len: usize) {
        if len == 0 {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let mut source = self.from;
            if !kept.is_null() {
                source.copy_to_nonoverlapping(kept, len);
                source = kept;
            }
            if !self.to.is_null() {
                source.copy_to_nonoverlapping(self.to, len);
            }
            self.advance(len);
        }
    }

    /// # Safety
    /// There are `len` bytes.
    unsafe fn advance(&mut self, len: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            self.from = self.from.add(len);
            if !self.to.is_null() {
                self.to = self.to.add(len);
            }
        }
        self.left -= len;
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Takes `count` stripes at a cursor into the accumulators, and copies them; the first one is number `first` of its
/// block.
///
/// # Safety
/// The stripes may be read, and written to where they are copied; the processor has what the kernel uses.
type Kernel = unsafe fn(
    lanes: &mut [u64; 8],
    secret: &[u8; SECRET],
    first: usize,
    at: &Cursor,
    count: usize,
    ahead: isize,
);

fn kernel() -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        return avx2::take;
    }
    scalar
}

/// # Safety
/// As [`Kernel`].
unsafe fn scalar(
    lanes: &mut [u64; 8],
    secret: &[u8; SECRET],
    first: usize,
    at: &Cursor,
    count: usize,
    _: isize,
) {
    let mut at = Cursor { ..*at };
    let mut stripe = first;
    for _ in 0..count {
        let mut bytes = [0; STRIPE];
        // SAFETY: the caller's promise.
        unsafe { at.keep(bytes.as_mut_ptr(), STRIPE) };
        accumulate(lanes, &bytes, &secret[stripe * 8..]);
        stripe += 1;
        if stripe == BLOCK as usize {
            for (lane, secret) in lanes.iter_mut().zip(secret[SECRET - STRIPE..].as_chunks::<8>().0) {
                *lane = (*lane ^ (*lane >> 47) ^ u64::from_le_bytes(*secret)).wrapping_mul(PRIME32[0].into());
            }
            stripe = 0;
        }
    }
}

fn accumulate(lanes: &mut [u64; 8], stripe: &[u8; STRIPE], secret: &[u8]) {
    for (i, (bytes, secret)) in stripe.as_chunks::<8>().0.iter().zip(secret.as_chunks::<8>().0).enumerate() {
        let value = u64::from_le_bytes(*bytes);
        let keyed = value ^ u64::from_le_bytes(*secret);
        lanes[i ^ 1] = lanes[i ^ 1].wrapping_add(value);
        lanes[i] = lanes[i].wrapping_add((keyed & 0xffff_ffff).wrapping_mul(keyed >> 32));
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_add_epi64, _mm256_loadu_si256, _mm256_mul_epu32,
        _mm256_set1_epi64x, _mm256_shuffle_epi32, _mm256_slli_epi64, _mm256_srli_epi64, _mm256_storeu_si256,
        _mm256_xor_si256,
    };

    use super::{BLOCK, Cursor, PRIME32, SECRET, STRIPE};

    const HALF: usize = STRIPE / 2;

    /// # Safety
    /// As [`super::Kernel`]; AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn take(
        lanes: &mut [u64; 8],
        secret: &[u8; SECRET],
        first: usize,
        at: &Cursor,
        count: usize,
        ahead: isize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if at.to.is_null() {
                stripes::<false>(lanes, secret, first, at, count, ahead);
            } else {
                stripes::<true>(lanes, secret, first, at, count, ahead);
            }
        }
    }

    /// # Safety
    /// As [`super::Kernel`]; AVX2; `at.to` is not null if `COPY`.
    #[target_feature(enable = "avx2")]
    unsafe fn stripes<const COPY: bool>(
        lanes: &mut [u64; 8],
        secret: &[u8; SECRET],
        first: usize,
        at: &Cursor,
        count: usize,
        ahead: isize,
    ) {
        let (secret, lanes) = (secret.as_ptr(), lanes.as_mut_ptr().cast::<__m256i>());
        // SAFETY: the caller's promise; `lanes` are two vectors, and stripe numbers below `BLOCK` leave a whole stripe
        // of the secret. Prefetching never faults, wherever it points.
        unsafe {
            let (mut low, mut high) = (_mm256_loadu_si256(lanes), _mm256_loadu_si256(lanes.add(1)));
            let mut stripe = first;
            for n in 0..count {
                let from = at.from.add(n * STRIPE);
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_offset(ahead).cast());
                let bytes = [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(HALF).cast())];
                if COPY {
                    let to = at.to.add(n * STRIPE);
                    _mm256_storeu_si256(to.cast(), bytes[0]);
                    _mm256_storeu_si256(to.add(HALF).cast(), bytes[1]);
                }
                let key = secret.add(stripe * 8);
                low = accumulate(low, bytes[0], _mm256_loadu_si256(key.cast()));
                high = accumulate(high, bytes[1], _mm256_loadu_si256(key.add(HALF).cast()));
                stripe += 1;
                if stripe == BLOCK as usize {
                    let key = secret.add(SECRET - STRIPE);
                    low = scramble(low, _mm256_loadu_si256(key.cast()));
                    high = scramble(high, _mm256_loadu_si256(key.add(HALF).cast()));
                    stripe = 0;
                }
            }
            _mm256_storeu_si256(lanes, low);
            _mm256_storeu_si256(lanes.add(1), high);
        }
    }

    #[target_feature(enable = "avx2")]
    fn accumulate(lanes: __m256i, bytes: __m256i, key: __m256i) -> __m256i {
        let keyed = _mm256_xor_si256(bytes, key);
        let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
        let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(bytes);
        _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped))
    }

    #[target_feature(enable = "avx2")]
    fn scramble(lanes: __m256i, key: __m256i) -> __m256i {
        let mixed = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64::<47>(lanes)), key);
        let prime = _mm256_set1_epi64x(PRIME32[0].into());
        let low = _mm256_mul_epu32(mixed, prime);
        let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
        _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Both kernels, in pieces of any length, say what the crate says of the whole, and copy what they digest.
        #[test]
        fn pieces_of_any_length(
            seed in any::<u64>(),
            bytes in prop::collection::vec(any::<u8>(), 0..5000),
            cuts in prop::collection::vec(prop_oneof![Just(64_usize), Just(1152), 0_usize..70, 0_usize..1500], 0..40),
            copies in prop::collection::vec(any::<bool>(), 41),
            ahead in any::<isize>(),
        ) {
            for kernel in [scalar as Kernel, kernel()] {
                let mut hasher = RowHasher::with(seed, bytes.len() as u64, kernel);
                let mut copied = bytes.clone();
                let mut at = 0;
                for (cut, copy) in cuts.iter().copied().chain([usize::MAX]).zip(&copies) {
                    let len = cut.min(bytes.len() - at);
                    let to = &mut copied[at..at + len];
                    let to = if *copy {
                        to.fill(0);
                        to.as_mut_ptr()
                    } else {
                        std::ptr::null_mut()
                    };
                    // SAFETY: both are slices of `len` bytes.
                    unsafe { hasher.take(bytes[at..].as_ptr(), to, len, ahead) };
                    at += len;
                }
                prop_assert_eq!(hasher.digest(), XxHash3_64::oneshot_with_seed(seed, &bytes));
                // More than was said is copied and does no harm.
                let mut more = vec![0; bytes.len()];
                // SAFETY: both have this length.
                unsafe { hasher.take(bytes.as_ptr(), more.as_mut_ptr(), bytes.len(), ahead) };
                prop_assert_eq!(&copied, &bytes);
                prop_assert_eq!(&more, &bytes);
            }
        }
    }
}
