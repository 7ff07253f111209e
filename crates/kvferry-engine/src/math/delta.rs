//! Kimi delta attention: convolution, decay, the state's recurrence and the gated output. Every
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

/// Consecutive tokens of one head. The vectors of `heads` heads lie side by side in a token's row, and the slices begin
/// with this head's vector of the first token: a head's next vector is `heads * dim` further, its next beta `heads`.
#[derive(Clone, Copy, Debug)]
pub struct DeltaTokens<'a> {
    /// Tokens.
    pub count: usize,
    /// Heads in a row.
    pub heads: usize,
    /// Elements of a head's vector, `d`.
    pub dim: usize,
    /// What is left of each key channel's row of the state.
    pub decay: &'a [f32],
    /// Queries.
    pub q: &'a [f32],
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// How much of each token is taken in.
    pub beta: &'a [f32],
}

impl DeltaTokens<'_> {
    /// Floats from a token's vector to the next token's.
    pub(super) fn stride(&self) -> usize {
        self.heads * self.dim
    }
}

/// Takes tokens into a head's `state[d][d]` and writes what each one's query reads afterwards to `out`, which has rows
/// like the vectors'. The bits are those of one token after the other, in as many calls as one likes.
///
/// ```
/// use kvferry_engine::math::{DeltaTokens, delta};
/// let (mut state, mut out) = ([0.0; 4], [0.0; 4]);
/// let tokens = DeltaTokens {
///     count: 2,
///     heads: 1,
///     dim: 2,
///     decay: &[1.0; 4],
///     q: &[0.0, 1.0, 0.0, 2.0],
///     k: &[0.0, 1.0, 0.0, 1.0],
///     v: &[5.0, 7.0, 5.0, 7.0],
///     beta: &[1.0, 1.0],
/// };
/// delta(&mut state, &tokens, &mut out);
/// // What the key has already is not taken in again.
/// assert_eq!((state, out), ([0.0, 0.0, 5.0, 7.0], [5.0, 7.0, 10.0, 14.0]));
/// ```
pub fn delta(state: &mut [f32], tokens: &DeltaTokens<'_>, out: &mut [f32]) {
    let Some(before) = tokens.count.checked_sub(1) else { return };
    let (d, end) = (tokens.dim, before * tokens.stride() + tokens.dim);
    let lengths = [tokens.decay.len(), tokens.q.len(), tokens.k.len(), tokens.v.len(), out.len()];
    assert!(state.len() == d * d && lengths.iter().all(|len| *len >= end), "state is [d][d], the rest rows");
    assert!(d == 0 || tokens.beta.len() > before * tokens.heads, "a beta per token");
    (Kernels::best().delta)(state, tokens, out);
}

/// `x · sigmoid(gate)`.
pub fn gate(x: &mut [f32], gate: &[f32]) {
    assert_eq!(x.len(), gate.len(), "x and gate have one length");
    (Kernels::best().gate)(x, gate);
}
