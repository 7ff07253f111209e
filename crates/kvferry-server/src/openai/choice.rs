//! One continuation, from the job to what may be shown of it.

use std::sync::Arc;

use futures_util::{Stream, stream};
use serde::Serialize;

use super::text::{Assembler, Shown, Spoken};
use crate::{
    Problem,
    backend::{Answer, Backend, Job, Piece},
};

/// Why a continuation ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ending {
    /// By an end-of-sequence token or a stop string.
    Stop,
    /// By `max_tokens`, or by what fits.
    Length,
}

/// More of a continuation.
#[derive(Debug)]
pub(crate) struct Delta {
    /// Its number in the request.
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) tokens: Vec<Spoken>,
    /// Tokens that were generated since the last delta; some may be held back, or cut off by a stop string.
    pub(crate) generated: u64,
    /// With the last one.
    pub(crate) ending: Option<Ending>,
    /// Prompt tokens that were not computed, with the last one.
    pub(crate) cached: u64,
}

impl Delta {
    /// A continuation of which nothing is known yet.
    pub(crate) fn nothing(index: usize) -> Self {
        Self { index, text: String::new(), tokens: Vec::new(), generated: 0, ending: None, cached: 0 }
    }

    /// What came, then what comes.
    pub(crate) fn append(&mut self, next: Self) {
        self.text += &next.text;
        self.tokens.extend(next.tokens);
        self.generated += next.generated;
        self.ending = next.ending;
        self.cached = next.cached;
    }
}

enum State {
    Waiting(Arc<dyn Backend>, Job),
    Running(Box<dyn Answer>),
    Over,
}

/// Runs a job. Dropping the stream gives it up.
pub(crate) fn choice(
    index: usize,
    backend: Arc<dyn Backend>,
    job: Job,
    assembler: Assembler,
) -> impl Stream<Item = Result<Delta, Problem>> + Send + 'static {
    let choice = Choice { index, assembler, generated: 0, state: State::Waiting(backend, job) };
    stream::unfold(choice, |mut choice| async move {
        let next = choice.next().await?;
        if next.is_err() {
            choice.state = State::Over;
        }
        Some((next, choice))
    })
}

struct Choice {
    index: usize,
    assembler: Assembler,
    generated: u64,
    state: State,
}

impl Choice {
    async fn next(&mut self) -> Option<Result<Delta, Problem>> {
        if let State::Waiting(backend, job) = &self.state {
            match backend.start(job.clone()).await {
                Ok(answer) => self.state = State::Running(answer),
                Err(problem) => return Some(Err(problem)),
            }
        }
        loop {
            let State::Running(answer) = &mut self.state else { return None };
            let (shown, ending, cached) = match answer.next().await {
                Ok(Piece::Token(chosen)) => {
                    self.generated += 1;
                    let shown = self.assembler.push(chosen);
                    if shown.stopped {
                        (shown, Some(Ending::Stop), answer.enough().await.cached_tokens)
                    } else {
                        (shown, None, 0)
                    }
                }
                Ok(Piece::Finish(finish)) => {
                    let shown = self.assembler.finish();
                    let stopped = finish.eos || shown.stopped;
                    (shown, Some(if stopped { Ending::Stop } else { Ending::Length }), finish.cached_tokens)
                }
                Err(problem) => return Some(Err(problem)),
            };
            if ending.is_some() {
                self.state = State::Over;
            }
            let Shown { text, tokens, .. } = shown;
            if ending.is_some() || !text.is_empty() || !tokens.is_empty() {
                let generated = std::mem::take(&mut self.generated);
                return Some(Ok(Delta { index: self.index, text, tokens, generated, ending, cached }));
            }
        }
    }
}
