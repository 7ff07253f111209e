//! Deliberate faults of the arithmetic, to prove that comparisons find them. Not for faults of what is moved
//! (`kvferry_transport::Inject`).

/// Arithmetic that is wrong on purpose, on all ranks of an engine. No engine has one unless its configuration says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Ranks that attend to different tokens of a sequence bring their parts together as if their largest scores
    /// (canonical) or log-sum-exps (fast) were equal.
    BlindMerge,
    /// Latent attention does not look at the rotary part of the cached rows.
    DropRope,
    /// The padding rows of a step of fixed shape are stored as if they were the last request's first token.
    PaddingWrites,
}
