//! What an API needs of whoever computes: this process (`mono`), or a pair of instances that a router chose. Not for
//! texts: prompts and answers are token ids here.

use std::{pin::Pin, sync::Arc};

use futures_util::Stream;

use crate::{Chosen, Problem, SamplingSpec};

/// One continuation that is wanted.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Job {
    /// Vocabulary ids.
    pub(crate) prompt: Arc<[u32]>,
    /// Most tokens to generate. What the instances can hold caps it.
    pub(crate) max_tokens: u32,
    /// How tokens are chosen.
    pub(crate) sampling: SamplingSpec,
    /// Continue past the model's end-of-sequence ids.
    pub(crate) ignore_eos: bool,
    /// How many of the most probable tokens are told with each one.
    pub(crate) top_logprobs: u32,
}

/// How a continuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Finish {
    /// Whether an end-of-sequence id was generated (it was the last token), or `max_tokens` reached.
    pub(crate) eos: bool,
    /// Prompt tokens whose cache was there already when the prompt was computed.
    pub(crate) cached_tokens: u64,
}

/// One piece of an answer: tokens, then the end.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Piece {
    /// A generated token.
    Token(Chosen),
    /// The last piece of an answer that ended well.
    Finish(Finish),
}

/// An answer as it comes. Its last item is [`Piece::Finish`] or a problem. Dropping it frees everything that the
/// request holds, on every instance, at the next chunk or step.
pub(crate) type Answer = Pin<Box<dyn Stream<Item = Result<Piece, Problem>> + Send>>;

/// Where continuations come from.
pub(crate) trait Backend: Send + Sync + 'static {
    /// Takes a job in. The future ends when the first token is there, or with the reason why there will be none, so that
    /// an HTTP status can still tell; a prompt that can never fit is refused before anybody computes.
    fn start(&self, job: Job) -> Pin<Box<dyn Future<Output = Result<Answer, Problem>> + Send + '_>>;

    /// Checks a prompt's length against what could ever be served, before anything is begun: the whole of a request
    /// with several continuations is refused at once.
    fn check(&self, prompt_tokens: u64, max_tokens: u32) -> Result<(), Problem>;

    /// Whether work would be taken now; if not, why.
    fn ready(&self) -> Result<(), Problem>;
}
