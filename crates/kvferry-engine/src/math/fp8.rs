//! fp8 e4m3fn to f32 and back: 1 sign bit, 4 exponent bits of bias 7, 3 mantissa bits; no infinities, the largest number
//! is 448, and only the codes `0x7f` and `0xff` are not numbers (Micikevicius et al., "FP8 formats for deep
//! learning", 2022, table 1).

/// The largest number.
const MAX: u32 = 0x7e;
/// Not a number.
const NAN: u32 = 0x7f;
/// The smallest normal number, 2^-6, as `f32` bits.
const NORMAL: u32 = (127 - 6) << 23;

/// What each code means.
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
/// use kvferry_engine::math::{narrow_fp8, widen_fp8};
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
    for (dst, value) in dst.iter_mut().zip(src) {
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
        *dst = (sign | code) as u8;
    }
}
