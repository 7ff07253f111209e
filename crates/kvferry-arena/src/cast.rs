//! Casts between the element types of caches: f32, bf16, and fp8 e4m3fn (1 sign bit, 4 exponent bits of bias 7, 3 mantissa
//! bits; no infinities, the largest number is 448, and only the codes `0x7f` and `0xff` are not numbers: Micikevicius et al.,
//! "FP8 formats for deep learning", 2022, table 1).
//!
//! Widening is exact. Narrowing goes to the nearest number, ties to even; NaN stays NaN. There is no scale.

#![forbid(unsafe_code)]

use kvferry_plan::{Cast, Dtype};

/// The largest fp8 number.
const MAX: u32 = 0x7e;
/// Not an fp8 number.
const NAN: u32 = 0x7f;
/// The smallest normal fp8 number, 2^-6, as `f32` bits.
const NORMAL: u32 = (127 - 6) << 23;

/// What each fp8 code means.
const WIDE: [f32; 256] = {
    let mut wide = [0.0; 256];
    let mut code = 0;
    while code < 256_u32 {
        let (sign, exponent, mantissa) = (code >> 7, (code >> 3) & 15, code & 7);
        let bits = match (code & 0x7f, exponent) {
            (NAN, _) => f32::NAN.to_bits(),
            // Steps of 2^-9.
            (_, 0) => (mantissa as f32 / 512.0).to_bits(),
            _ => (exponent + 127 - 7) << 23 | mantissa << 20,
        };
        wide[code as usize] = f32::from_bits(bits | sign << 31);
        code += 1;
    }
    wide
};

/// Exact. `src` and `dst` have one length.
///
/// ```
/// use kvferry_arena::{narrow_bf16, widen_bf16};
/// let (mut bits, mut back) = ([0; 2], [0.0; 2]);
/// narrow_bf16(&[1.0, 1.0 + 1.0 / 256.0], &mut bits);
/// widen_bf16(&bits, &mut back);
/// assert_eq!(back, [1.0, 1.0], "a tie goes to the even neighbour");
/// ```
pub fn widen_bf16(src: &[u16], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len(), "src and dst have one length");
    for (dst, &bits) in dst.iter_mut().zip(src) {
        *dst = of_bf16(bits);
    }
}

/// To the nearest bf16, ties to even; NaN stays a (quiet) NaN, overflow becomes infinity. `src` and `dst` have one length.
pub fn narrow_bf16(src: &[f32], dst: &mut [u16]) {
    assert_eq!(src.len(), dst.len(), "src and dst have one length");
    for (dst, &value) in dst.iter_mut().zip(src) {
        *dst = to_bf16(value);
    }
}

/// Exact. `src` and `dst` have one length.
///
/// ```
/// use kvferry_arena::{narrow_fp8, widen_fp8};
/// let (mut codes, mut back) = ([0; 4], [0.0; 4]);
/// narrow_fp8(&[1.0, 1.0625, -0.001, f32::INFINITY], &mut codes);
/// widen_fp8(&codes, &mut back);
/// // A tie goes to the even neighbour; what is too small goes to the next step of 2^-9; what is too large to 448.
/// assert_eq!(back, [1.0, 1.0, -0.001953125, 448.0]);
/// ```
pub fn widen_fp8(src: &[u8], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len(), "src and dst have one length");
    for (dst, &code) in dst.iter_mut().zip(src) {
        *dst = WIDE[usize::from(code)];
    }
}

/// To the nearest fp8 number, ties to even; beyond the largest number to that one, infinities included. NaN stays NaN, with
/// its sign. `src` and `dst` have one length.
pub fn narrow_fp8(src: &[f32], dst: &mut [u8]) {
    assert_eq!(src.len(), dst.len(), "src and dst have one length");
    for (dst, &value) in dst.iter_mut().zip(src) {
        *dst = to_fp8(value);
    }
}

/// Casts the elements of `src` into `dst`, both as they lie in an arena: packed, of any alignment, in the machine's order of
/// bytes. As many as both have; bytes of half an element are left alone.
///
/// ```
/// use kvferry_arena::convert;
/// use kvferry_plan::{Cast, Dtype};
/// let cast = Cast::between(Dtype::F32, Dtype::Fp8E4m3).unwrap();
/// let mut codes = [0; 2];
/// convert(cast, [1.0_f32, -1e9].map(f32::to_ne_bytes).as_flattened(), &mut codes);
/// assert_eq!(codes, [0x38, 0xfe]);
/// ```
pub fn convert(cast: Cast, src: &[u8], dst: &mut [u8]) {
    use Dtype::{Bf16, F32, Fp8E4m3};
    match (cast.from(), cast.to()) {
        (F32, Bf16) => each(src, dst, |x| to_bf16(f32::from_ne_bytes(x)).to_ne_bytes()),
        (F32, Fp8E4m3) => each(src, dst, |x| [to_fp8(f32::from_ne_bytes(x))]),
        (Bf16, F32) => each(src, dst, |x| of_bf16(u16::from_ne_bytes(x)).to_ne_bytes()),
        (Bf16, Fp8E4m3) => each(src, dst, |x| [to_fp8(of_bf16(u16::from_ne_bytes(x)))]),
        (Fp8E4m3, F32) => each(src, dst, |[code]| WIDE[usize::from(code)].to_ne_bytes()),
        (Fp8E4m3, Bf16) => each(src, dst, |[code]| to_bf16(WIDE[usize::from(code)]).to_ne_bytes()),
        _ => debug_assert!(false, "nobody casts {cast}"),
    }
}

fn each<const FROM: usize, const TO: usize>(
    src: &[u8],
    dst: &mut [u8],
    cast: impl Fn([u8; FROM]) -> [u8; TO],
) {
    for (dst, src) in dst.as_chunks_mut().0.iter_mut().zip(src.as_chunks().0) {
        *dst = cast(*src);
    }
}

fn of_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let even = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7fff).wrapping_add(even) >> 16;
    let quiet = (bits >> 16) | 0x40;
    if bits & 0x7fff_ffff > 0x7f80_0000 { quiet as u16 } else { rounded as u16 }
}

fn to_fp8(value: f32) -> u8 {
    let sign = value.to_bits() >> 31 << 7;
    let size = value.abs();
    let bits = size.to_bits();
    let code = if size.is_nan() {
        NAN
    } else if bits < NORMAL {
        // Exact up to the rounding; a carry gives the smallest normal number.
        (size * 512.0).round_ties_even() as u32
    } else {
        let even = bits >> 20 & 1;
        let rounded = (bits + 0x7_ffff + even) >> 20;
        (rounded - ((127 - 7) << 3)).min(MAX)
    };
    (sign | code) as u8
}
