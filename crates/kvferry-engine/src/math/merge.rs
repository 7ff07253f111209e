//! Bringing the ranks' parts of an attention together.

use super::elementary;
use super::simd::scalar;

/// Element-wise maximum over ranks of [`Scores::max`](super::Scores::max), in place. NaN wins, so that a rank
/// with a score that is not finite is heard by all.
pub fn merge_max(into: &mut [f32], other: &[f32]) {
    assert_eq!(into.len(), other.len(), "maxima are [m]");
    for (into, &other) in into.iter_mut().zip(other) {
        *into = if into.is_nan() || other.is_nan() { f32::NAN } else { into.max(other) };
    }
}

/// Merges the ranks' softmax attentions over disjoint tokens (fast mode). `parts` gives per rank
/// `(out[m][dv], lse[m])` with natural logarithms; writes the whole attention to `out[m][dv]` and its
/// log-sum-exp to `lse[m]`.
///
/// A part whose `lse` is -∞, +∞ or NaN has no weight and its values are not read; where no part has weight the
/// result is zeros and -∞.
///
/// ```
/// use kvferry_engine::math::merge_lse;
/// let (mut out, mut lse) = ([0.0], [0.0]);
/// let parts = [(&[4.0f32][..], &[0.0f32][..]), (&[f32::NAN], &[f32::NEG_INFINITY]), (&[2.0], &[0.0])];
/// merge_lse(&parts.iter().copied(), 1, &mut out, &mut lse);
/// assert_eq!(out, [3.0]);
/// assert!((lse[0] - 2f32.ln()).abs() < 1e-6);
/// ```
pub fn merge_lse<'p>(
    parts: &(impl Iterator<Item = (&'p [f32], &'p [f32])> + Clone),
    dv: usize,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let m = lse.len();
    assert_eq!(out.len(), m * dv, "out is [m][dv]");
    assert!(parts.clone().all(|(o, l)| o.len() == m * dv && l.len() == m), "parts are [m][dv] and [m]");
    out.fill(0.0);
    for row in 0..m {
        let weights = parts.clone().map(|(_, lse)| lse[row]).filter(|x| x.is_finite());
        let max = weights.fold(f32::NEG_INFINITY, f32::max);
        lse[row] = f32::NEG_INFINITY;
        if max == f32::NEG_INFINITY {
            continue;
        }
        let out = &mut out[row * dv..][..dv];
        let mut total = 0.0;
        for (part, part_lse) in parts.clone().filter(|(_, lse)| lse[row].is_finite()) {
            let weight = scalar::exp(part_lse[row] - max);
            total += weight;
            for (out, value) in out.iter_mut().zip(&part[row * dv..][..dv]) {
                *out = weight.mul_add(*value, *out);
            }
        }
        for out in out {
            *out /= total;
        }
        lse[row] = max + elementary::ln(f64::from(total)) as f32;
    }
}
