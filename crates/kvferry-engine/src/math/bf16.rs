//! bf16 bits to f32 and back.

/// Exact. `src` and `dst` have one length.
///
/// ```
/// use kvferry_engine::math::{narrow_bf16, widen_bf16};
/// let (mut bits, mut back) = ([0; 2], [0.0; 2]);
/// narrow_bf16(&[1.0, 1.0 + 1.0 / 256.0], &mut bits);
/// widen_bf16(&bits, &mut back);
/// assert_eq!(back, [1.0, 1.0], "a tie goes to the even neighbour");
/// ```
pub fn widen_bf16(src: &[u16], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len(), "src and dst have one length");
    for (dst, &bits) in dst.iter_mut().zip(src) {
        *dst = f32::from_bits(u32::from(bits) << 16);
    }
}

/// To the nearest bf16, ties to even; NaN stays a (quiet) NaN, overflow becomes infinity.
pub fn narrow_bf16(src: &[f32], dst: &mut [u16]) {
    assert_eq!(src.len(), dst.len(), "src and dst have one length");
    for (dst, value) in dst.iter_mut().zip(src) {
        let bits = value.to_bits();
        let even = (bits >> 16) & 1;
        let rounded = bits.wrapping_add(0x7fff).wrapping_add(even) >> 16;
        let quiet = (bits >> 16) | 0x40;
        *dst = if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded } as u16;
    }
}
