//! Norm, activation and residual: functions of one row.

use super::simd::{Kernels, scalar};

/// eˣ without the system's library: relative error below 2e-7; +0 below -87; inputs above 88 count as 88;
/// NaN stays NaN. Scalar and SIMD give the same bits.
///
/// ```
/// use kvferry_engine::math::exp;
/// assert_eq!(exp(0.0), 1.0);
/// assert!((exp(1.0) - std::f32::consts::E).abs() < 1e-6);
/// assert_eq!(exp(-100.0), 0.0);
/// ```
pub fn exp(x: f32) -> f32 {
    scalar::exp(x)
}

/// Root-mean-square norm of each row: `out[m][n] = x[m][n] / sqrt(mean(x²) + eps) · weight[n]`.
///
/// ```
/// use kvferry_engine::math::rms_norm;
/// let mut out = [0.0; 2];
/// rms_norm(&[3.0, 3.0], &[1.0, 2.0], 0.0, &mut out);
/// assert_eq!(out, [1.0, 2.0]);
/// ```
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == out.len() && x.len().is_multiple_of(weight.len().max(1)), "x and out are [m][n]");
    let n = weight.len().max(1);
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        (Kernels::best().rms_norm)(x, weight, eps, out);
    }
}

/// `out = gate / (1 + exp(-gate)) · up`, all of one length.
pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && up.len() == out.len(), "gate, up and out have one length");
    (Kernels::best().silu_mul)(gate, up, out);
}

/// `x += y`.
pub fn add_assign(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "x and y have one length");
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// `x *= factor`: queries, by 1/sqrt(head size), after their rotation.
pub fn scale(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}
