//! Kimi delta attention, token by token: convolution, decay, the state's recurrence and the gated output. Every
//! function takes the elements of one head or one row in a fixed order, so results depend neither on how heads are
//! dealt to ranks nor on where a prompt is cut.
//!
//! The recurrence of a head with state `S[k][v]` (facts of Kimi Linear's own code): `S` decays per key channel, then
//! takes in `k uᵀ` with `u = beta (v - kᵀ S)`; its output is `qᵀ S`.

use super::elementary;
use super::simd::{Kernels, scalar};

/// Added to a squared length before its root is divided by.
const LENGTH_EPS: f32 = 1e-6;

/// `1 / (1 + e⁻ˣ)`.
///
/// ```
/// use kvferry_engine::math::sigmoid;
/// assert_eq!(sigmoid(0.0), 0.5);
/// assert!(sigmoid(-100.0) >= 0.0 && sigmoid(100.0) == 1.0);
/// ```
pub fn sigmoid(x: f32) -> f32 {
    scalar::sigmoid(x)
}

/// A short causal convolution per channel, then SiLU: `out[n] = silu(sum_j window[j][n] · taps[j][n])`, the oldest row
/// of the window first.
pub fn convolve(window: &[f32], taps: &[f32], out: &mut [f32]) {
    assert!(window.len() == taps.len() && taps.len().is_multiple_of(out.len().max(1)), "window is [taps][n]");
    (Kernels::best().convolve)(window, taps, out);
}

/// Scales a vector to `length`, as `x · length / sqrt(sum x² + 1e-6)`.
///
/// ```
/// use kvferry_engine::math::set_length;
/// let mut x = [3.0, 4.0];
/// set_length(&mut x, 10.0);
/// assert!((x[0] - 6.0).abs() < 1e-5 && (x[1] - 8.0).abs() < 1e-5);
/// ```
pub fn set_length(x: &mut [f32], length: f32) {
    (Kernels::best().set_length)(x, LENGTH_EPS, length);
}

/// How much of a head's state is left after a token, per key channel: `e^(-rate · softplus(x + bias))`.
pub fn decay(x: &[f32], bias: &[f32], rate: f32, out: &mut [f32]) {
    assert!(x.len() == bias.len() && x.len() == out.len(), "x, bias and out have one length");
    (Kernels::best().decay)(x, bias, rate, out);
}

/// `e^x` of a checkpoint's number, for what is computed once.
pub(crate) fn exp_once(x: f32) -> f32 {
    // Outside of it f32 has no number.
    elementary::exp(f64::from(x.clamp(-150.0, 150.0))) as f32
}

/// One token of one head.
#[derive(Clone, Copy, Debug)]
pub struct DeltaToken<'a> {
    /// What is left of each key channel's row of the state, `[d]`.
    pub decay: &'a [f32],
    /// Query, `[d]`.
    pub q: &'a [f32],
    /// Key, `[d]`.
    pub k: &'a [f32],
    /// Value, `[d]`.
    pub v: &'a [f32],
    /// How much of the token is taken in.
    pub beta: f32,
}

/// Takes a token into a head's `state[d][d]` and writes what its query reads afterwards to `out[d]`.
///
/// ```
/// use kvferry_engine::math::{DeltaToken, delta};
/// let (mut state, mut out) = ([0.0; 4], [0.0; 2]);
/// let token = DeltaToken { decay: &[1.0, 1.0], q: &[0.0, 1.0], k: &[0.0, 1.0], v: &[5.0, 7.0], beta: 1.0 };
/// delta(&mut state, &token, &mut out);
/// assert_eq!((state, out), ([0.0, 0.0, 5.0, 7.0], [5.0, 7.0]));
/// // What the key has already is not taken in again.
/// delta(&mut state, &token, &mut out);
/// assert_eq!(state, [0.0, 0.0, 5.0, 7.0]);
/// ```
pub fn delta(state: &mut [f32], token: &DeltaToken<'_>, out: &mut [f32]) {
    let d = out.len();
    let lengths = [token.decay.len(), token.q.len(), token.k.len(), token.v.len()];
    assert!(state.len() == d * d && lengths == [d; 4], "state is [d][d], the rest is [d]");
    (Kernels::best().delta)(state, token, out);
}

/// `x · sigmoid(gate)`.
pub fn gate(x: &mut [f32], gate: &[f32]) {
    assert_eq!(x.len(), gate.len(), "x and gate have one length");
    (Kernels::best().gate)(x, gate);
}
