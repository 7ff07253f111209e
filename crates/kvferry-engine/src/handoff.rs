//! What the engine needs from whoever carries a prompt's cache away; implemented over a node, or in a test.

use kvferry_plan::{RoomKey, TokenRange};

use crate::{Alternative, EngineError};

/// The token that prefill sampled after the last prompt token: decode starts from it.
#[derive(Clone, Debug, PartialEq)]
pub struct FirstToken {
    /// Vocabulary id.
    pub id: u32,
    /// Natural logarithm of its probability, before temperature.
    pub logprob: f32,
    /// The most probable tokens, if they were asked for and are known here.
    pub top: Vec<Alternative>,
}

/// Receives the progress of every [`crate::Engine::prefill`].
///
/// The calls come from the scheduler thread: they **must return at once**, or every request of the instance waits.
/// For one key they come in order: `chunk` for adjoining ranges from token 0 up to the end of the prompt (what a prefix
/// cache had comes first, right after the lease), then `finished`; or `failed` at any point, after which nothing follows.
/// The rows of a chunk are in the pool and do not change before the request's [`crate::RoomLease`] is dropped.
pub trait HandOff: Send + Sync {
    /// The cache of `tokens` is complete on every rank; the next chunk is being computed meanwhile.
    fn chunk(&self, key: RoomKey, tokens: TokenRange);
    /// The whole prompt is computed and `first` follows it.
    fn finished(&self, key: RoomKey, first: FirstToken);
    /// The request is over without a result; [`EngineError::Aborted`] when its lease was dropped early. Otherwise the lease
    /// still holds its pages.
    fn failed(&self, key: RoomKey, cause: &EngineError);
}

/// For engines that hand nothing over.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHandOff;

impl HandOff for NoHandOff {
    fn chunk(&self, _: RoomKey, _: TokenRange) {}
    fn finished(&self, _: RoomKey, _: FirstToken) {}
    fn failed(&self, _: RoomKey, _: &EngineError) {}
}
