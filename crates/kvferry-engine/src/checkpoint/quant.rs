//! Element encodings and their way back to `f32`.
//!
//! A block format stores a run of weights as small integers with shared scales. All arithmetic is in `f32`,
//! in the order written here, without fused operations: values equal those of other readers bit for bit.

use half::{bf16, f16};

/// How elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4K,
    Q5K,
    Q6K,
}

impl Encoding {
    /// Elements of a block; a row is a whole number of blocks.
    pub(super) fn block(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub(super) fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Elements in that many bytes of whole blocks.
    pub(super) fn elements(self, bytes: usize) -> usize {
        bytes / self.block_bytes() * self.block()
    }

    /// Bytes of a tensor; `None` when the sizes overflow or a row is not a whole number of blocks.
    pub(super) fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        let block = u64::try_from(self.block()).ok()?;
        let columns = shape.last().copied().unwrap_or(1);
        if !columns.is_multiple_of(block) {
            return None;
        }
        let elements = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size))?;
        (elements / block).checked_mul(u64::try_from(self.block_bytes()).ok()?)
    }

    /// Decodes whole blocks. What does not fit on either side is left out.
    pub(super) fn dequantise(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => each(bytes, out, |b: &[u8; 4], y: &mut [f32; 1]| y[0] = f32::from_le_bytes(*b)),
            Self::F16 => {
                each(bytes, out, |b: &[u8; 2], y: &mut [f32; 1]| y[0] = f16::from_le_bytes(*b).to_f32());
            }
            Self::Bf16 => {
                each(bytes, out, |b: &[u8; 2], y: &mut [f32; 1]| y[0] = bf16::from_le_bytes(*b).to_f32());
            }
            Self::Q8_0 => each(bytes, out, q8_0),
            Self::Q4_0 => each(bytes, out, q4_0),
            Self::Q4_1 => each(bytes, out, q4_1),
            Self::Q5_0 => each(bytes, out, q5_0),
            Self::Q5_1 => each(bytes, out, q5_1),
            Self::Q4K => each(bytes, out, q4_k),
            Self::Q5K => each(bytes, out, q5_k),
            Self::Q6K => each(bytes, out, q6_k),
        }
    }
}

/// Applies a block's decoder to every block.
fn each<const B: usize, const N: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; B], &mut [f32; N]),
) {
    for (block, values) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<N>().0) {
        decode(block, values);
    }
}

/// The half-precision number at a fixed place of a block.
fn half_at<const B: usize>(block: &[u8; B], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn q8_0(block: &[u8; 34], y: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (y, q) in y.iter_mut().zip(&block[2..]) {
        *y = d * f32::from(q.cast_signed());
    }
}

/// The 32 nibbles of 16 bytes: all low ones, then all high ones.
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    let mut values = [0; 32];
    let (low, high) = values.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
    values
}

/// The same with a fifth bit each, from a little-endian word.
fn quintets(high: &[u8], low: &[u8]) -> [u8; 32] {
    let mut values = nibbles(low);
    for (i, value) in values.iter_mut().enumerate() {
        *value |= (high[i / 8] >> (i % 8) & 1) << 4;
    }
    values
}

fn q4_0(block: &[u8; 18], y: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (y, q) in y.iter_mut().zip(nibbles(&block[2..])) {
        *y = d * (f32::from(q) - 8.0);
    }
}

fn q4_1(block: &[u8; 20], y: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (y, q) in y.iter_mut().zip(nibbles(&block[4..])) {
        *y = d * f32::from(q) + m;
    }
}

fn q5_0(block: &[u8; 22], y: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (y, q) in y.iter_mut().zip(quintets(&block[2..6], &block[6..])) {
        *y = d * (f32::from(q) - 16.0);
    }
}

fn q5_1(block: &[u8; 24], y: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (y, q) in y.iter_mut().zip(quintets(&block[4..8], &block[8..])) {
        *y = d * f32::from(q) + m;
    }
}

/// Scale and minimum of sub-block `i` of 8: six bits each, the upper two of the last four kept apart.
fn scale_min(scales: &[u8], i: usize) -> (f32, f32) {
    let (scale, min) = if i < 4 {
        (scales[i] & 63, scales[i + 4] & 63)
    } else {
        (scales[i + 4] & 15 | scales[i - 4] >> 6 << 4, scales[i + 4] >> 4 | scales[i] >> 6 << 4)
    };
    (f32::from(scale), f32::from(min))
}

/// Q4_K and Q5_K: 8 sub-blocks of 32, two to 32 bytes of nibbles; `fifth` gives the bit above a nibble.
fn k_block(header: &[u8; 16], nibbles: &[u8], fifth: impl Fn(usize, usize) -> u8, y: &mut [f32; 256]) {
    let (d, dmin) = (half_at(header, 0), half_at(header, 2));
    for (i, values) in y.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_min(&header[4..], i);
        let (scale, min) = (d * scale, dmin * min);
        for (j, (y, byte)) in values.iter_mut().zip(&nibbles[i / 2 * 32..]).enumerate() {
            let q = byte >> (i % 2 * 4) & 15 | fifth(i, j) << 4;
            *y = scale * f32::from(q) - min;
        }
    }
}

/// The 16 leading bytes of a block.
fn header<const B: usize>(block: &[u8; B]) -> [u8; 16] {
    core::array::from_fn(|i| block[i])
}

fn q4_k(block: &[u8; 144], y: &mut [f32; 256]) {
    k_block(&header(block), &block[16..], |_, _| 0, y);
}

fn q5_k(block: &[u8; 176], y: &mut [f32; 256]) {
    k_block(&header(block), &block[48..], |i, j| block[16 + j] >> i & 1, y);
}

/// Two halves of 128; in each, four runs of 32 share 64 bytes of nibbles and 32 bytes of upper bit pairs.
fn q6_k(block: &[u8; 210], y: &mut [f32; 256]) {
    let d = half_at(block, 208);
    for (half, values) in y.chunks_exact_mut(128).enumerate() {
        let (low, high, scales) = (&block[half * 64..], &block[128 + half * 32..], &block[192 + half * 8..]);
        for (run, values) in values.chunks_exact_mut(32).enumerate() {
            for (j, y) in values.iter_mut().enumerate() {
                let nibble = low[run % 2 * 32 + j] >> (run / 2 * 4) & 15;
                let q = nibble | (high[j] >> (run * 2) & 3) << 4;
                let scale = f32::from(scales[run * 2 + j / 16].cast_signed());
                *y = d * scale * (f32::from(q) - 32.0);
            }
        }
    }
}
