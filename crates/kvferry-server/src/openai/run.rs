//! All continuations of one request. The first failure ends them all; so does dropping it.

use std::sync::Arc;

use futures_util::{
    StreamExt,
    stream::{BoxStream, SelectAll},
};
use kvferry_engine::{Voice, tokenizer::Tokenizer};
use kvferry_plan::Blame;
use serde::Serialize;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use super::{
    choice::{Delta, choice},
    request::Wanted,
    text::Assembler,
};
use crate::{Problem, Stage, backend::Backend};

/// What a request took, in tokens. Every prompt counts once, however many continuations it has.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PromptDetails {
    cached_tokens: u64,
}

/// The continuations under way.
pub(crate) struct Run {
    /// Given back with the run.
    _slots: OwnedSemaphorePermit,
    /// It has to end now.
    late: CancellationToken,
    choices: SelectAll<BoxStream<'static, Result<Delta, Problem>>>,
    /// Continuations of each prompt.
    n: usize,
    prompt_tokens: u64,
    completion_tokens: u64,
    /// Of each prompt, what no continuation had to compute.
    cached: Vec<Option<u64>>,
}

impl Run {
    /// Starts all continuations with the first call of [`Self::next`].
    pub(crate) fn new(
        wanted: &Wanted,
        voice: &Voice,
        backend: &Arc<dyn Backend>,
        slots: OwnedSemaphorePermit,
        late: CancellationToken,
    ) -> Self {
        let one = |(index, job)| {
            let detokenizer = voice.tokenizer.as_ref().map(Tokenizer::detokenizer);
            let assembler = Assembler::new(detokenizer, wanted.stops.clone());
            choice(index, Arc::clone(backend), job, assembler).boxed()
        };
        Self {
            _slots: slots,
            late,
            choices: wanted.jobs().enumerate().map(one).collect(),
            n: wanted.n,
            prompt_tokens: wanted.prompts.iter().map(|prompt| prompt.len() as u64).sum(),
            completion_tokens: 0,
            cached: vec![None; wanted.prompts.len()],
        }
    }

    /// More of any continuation; `None` when all have ended.
    ///
    /// # Errors
    /// The first failure of any; the others are given up.
    pub(crate) async fn next(&mut self) -> Result<Option<Delta>, Problem> {
        let next = tokio::select! {
            biased;
            next = self.choices.next() => next,
            () = self.late.cancelled() => {
                let cause = "this process is shutting down and the answer took too long; ask again";
                Some(Err(Problem::new(Blame::Environment, Stage::Compute, cause)))
            }
        };
        match next {
            None => Ok(None),
            Some(Ok(delta)) => {
                self.completion_tokens += delta.generated;
                if delta.ending.is_some()
                    && let Some(cached) = self.cached.get_mut(delta.index / self.n)
                {
                    *cached = Some(cached.map_or(delta.cached, |least| least.min(delta.cached)));
                }
                Ok(Some(delta))
            }
            Some(Err(problem)) => {
                self.choices.clear();
                Err(problem)
            }
        }
    }

    /// What was used so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: self.cached.iter().flatten().sum() },
        }
    }
}
