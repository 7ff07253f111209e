//! From logits to probabilities and choices. Same bits in both modes.

use super::elementary;
use super::grid::WEIGHT_BITS;
use super::simd::{Kernels, scalar};

/// Index of the largest logit, the lowest on ties; `None` if there is none or any is NaN.
///
/// ```
/// use kvferry_engine::math::argmax;
/// assert_eq!(argmax(&[1.0, 3.0, 3.0]), Some(1));
/// assert_eq!(argmax(&[1.0, f32::NAN]), None);
/// ```
pub fn argmax(logits: &[f32]) -> Option<usize> {
    let max = max_of(logits)?;
    logits.iter().position(|&x| x == max)
}

/// Logarithm of the softmax at `id`; `None` if `id` is out of range or the logits hold a NaN or +∞.
pub fn log_softmax_at(logits: &[f32], id: usize) -> Option<f32> {
    let at = f64::from(*logits.get(id)?);
    Some((at - log_sum_exp(logits)?) as f32)
}

/// Logarithm of the softmax of all `logits` to `out` of the same length; false (and `out` unspecified) if the
/// logits hold a NaN or +∞, or are empty.
#[must_use]
pub fn log_softmax(logits: &[f32], out: &mut [f32]) -> bool {
    assert_eq!(logits.len(), out.len(), "logits and out have one length");
    let Some(log) = log_sum_exp(logits) else { return false };
    for (out, &x) in out.iter_mut().zip(logits) {
        *out = (f64::from(x) - log) as f32;
    }
    true
}

/// Softmax of `logits / temperature` to `out` of the same length; false as in [`log_softmax`].
#[must_use]
pub fn softmax(logits: &[f32], temperature: f32, out: &mut [f32]) -> bool {
    assert_eq!(logits.len(), out.len(), "logits and out have one length");
    let Some(max) = max_of(logits).filter(|max| max.is_finite()) else { return false };
    for (out, &x) in out.iter_mut().zip(logits) {
        *out = scalar::exp((x - max) / temperature);
    }
    let sum: f64 = out.iter().map(|&p| f64::from(p)).sum();
    let factor = (1.0 / sum) as f32;
    super::scale(out, factor);
    true
}

/// `None` if empty or any is NaN.
fn max_of(logits: &[f32]) -> Option<f32> {
    let mut max = f32::NEG_INFINITY;
    let mut nan = logits.is_empty();
    for &x in logits {
        nan |= x.is_nan();
        max = if x > max { x } else { max };
    }
    (!nan).then_some(max)
}

/// The sum is taken on the integer grid: any order gives the same bits.
fn log_sum_exp(logits: &[f32]) -> Option<f64> {
    let max = max_of(logits).filter(|max| max.is_finite())?;
    let mut weights = logits.to_vec();
    let sum = (Kernels::best().exp_grid)(&mut weights, max);
    let sum = sum as f64 / (1u64 << WEIGHT_BITS) as f64;
    Some(f64::from(max) + elementary::ln(sum))
}
