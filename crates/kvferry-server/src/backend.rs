//! What an API needs of whoever computes: this process (`mono`), or a pair of instances that a router chose. Not for
//! texts: prompts and answers are token ids here.

use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::{Chosen, Problem, SamplingSpec, TraceContext};

/// A continuation, as far as it matters to whether it can be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u64,
    /// Most tokens to generate.
    pub(crate) max_tokens: u32,
    /// Continue past the model's end-of-sequence ids.
    pub(crate) ignore_eos: bool,
}

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
    /// The trace that it is a part of.
    pub(crate) trace: Option<TraceContext>,
}

impl Job {
    /// What has to be held.
    pub(crate) fn extent(&self) -> Extent {
        let Self { max_tokens, ignore_eos, .. } = *self;
        Extent { prompt_tokens: self.prompt.len() as u64, max_tokens, ignore_eos }
    }
}

/// How a continuation ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Finish {
    /// Whether an end-of-sequence id was generated (it was the last token); otherwise `max_tokens` was reached, or it was
    /// enough.
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

/// An answer as it comes. Dropping it frees everything that the request holds, on every instance, at the next chunk or
/// step.
pub(crate) trait Answer: Send {
    /// What comes next. The last piece is [`Piece::Finish`] or a problem.
    fn next(&mut self) -> BoxFuture<'_, Result<Piece, Problem>>;

    /// What has come is all that is wanted. The answer ends before its time and still well, on every instance.
    fn enough(&mut self) -> BoxFuture<'_, Finish>;
}

/// Where continuations come from.
pub(crate) trait Backend: Send + Sync + 'static {
    /// Takes a job in. The future ends when the first token is there, or with the reason why there will be none, so that
    /// an HTTP status can still tell; a prompt that can never fit is refused before anybody computes.
    fn start(&self, job: Job) -> BoxFuture<'_, Result<Box<dyn Answer>, Problem>>;

    /// Checks a prompt's length against what could ever be served, before anything is begun: the whole of a request
    /// with several continuations is refused at once.
    fn check(&self, extent: Extent) -> Result<(), Problem>;

    /// Whether work would be taken now; if not, why.
    fn ready(&self) -> Result<(), Problem>;
}
