//! Kernels: matrix products, norms, rotary tables, attention; a scalar twin of each and SIMD versions of the same
//! bits, chosen at run time.
//!
//! Two arithmetic modes ([`Arith`]). *Canonical* results do not depend on how work is split: not on tensor
//! parallelism, decode context parallelism, page size, chunking or batch. Three rules give that:
//!
//! 1. An output of a column-parallel product ([`Matrix`]) is one fused-multiply-add chain over `k`.
//! 2. What ranks must add up is added as integers on a fixed grid ([`RowParallel`], [`AttentionSums`]), where
//!    order does not matter. A term that leaves the grid raises [`Overflow`]; the request then fails.
//! 3. Nothing calls the system's mathematics library: `exp`, `ln`, `sin` and `cos` are arithmetic written here.
//!
//! *Fast* results may depend on the split. All arrays are row-major `f32` unless said. Functions here panic only
//! when the caller's array lengths contradict the shapes it states: that is a bug of the engine, never an input.
//!
//! This module is *not* for threading (the caller runs ranks on threads), nor for pages and pools (the caller
//! gathers rows first).

mod attention;
mod delta;
mod elementary;
mod elementwise;
mod grid;
mod logits;
mod matrix;
mod merge;
mod panels;
mod rope;
mod route;
mod row_parallel;
mod simd;

pub use attention::{AttentionSums, KeyPanels, Scores, ValueRows, query_block};
pub(crate) use delta::exp_once;
pub use delta::{DeltaTokens, convolve, decay, delta, gate, set_length, sigmoid};
pub use elementwise::{add_assign, exp, rms_norm, scale, silu_mul};
pub use grid::Overflow;
pub use kvferry_arena::{narrow_bf16, narrow_fp8, widen_bf16, widen_fp8};
pub use logits::{argmax, log_softmax, log_softmax_at, softmax};
pub use matrix::Matrix;
pub use merge::{merge_lse, merge_max};
pub use panels::reserve_packing;
pub use rope::RopeTable;
pub use route::{Routing, RoutingScratch};
pub use row_parallel::{Partial, RowParallel};

/// Which arithmetic a model runs in; see the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Arith {
    /// Bits do not depend on the layout.
    #[default]
    Canonical,
    /// The quickest kernels; the last bits depend on the layout.
    Fast,
}

/// The instruction set whose kernels run here: `avx512`, `avx2` or `scalar`. All give the same bits.
pub fn instruction_set() -> &'static str {
    simd::Kernels::best().name
}
