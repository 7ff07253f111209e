//! What is asked of the engine and what comes back.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use kvferry_plan::RoomKey;

use crate::{
    EngineError,
    mailbox::{Receiver, Sender, mailbox},
    scheduler::Command,
};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Only the most probable tokens that together reach this probability are drawn from; 1 keeps all.
    pub top_p: f32,
    /// Of the draws. The same seed gives the same tokens, whatever else runs in the batch.
    pub seed: u64,
}

impl Sampling {
    /// The most probable token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, seed: 0 };
}

impl Default for Sampling {
    fn default() -> Self {
        Self::GREEDY
    }
}

/// A prompt and how it is continued.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Vocabulary ids; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate, the first one included; at least 1.
    pub max_tokens: u32,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Continue past the model's end-of-sequence ids.
    pub ignore_eos: bool,
    /// How many of the most probable tokens are told with each generated one, at most
    /// [`Request::TOP_LOGPROBS`].
    pub top_logprobs: u32,
    /// Keep the pages of a finished [`crate::Engine::generate`] under this key until it is released. What is told to be
    /// held, here or by [`crate::Engine::reserve`], also keeps a copy of its state as it was after the prompt, for
    /// [`crate::Engine::rows`]: in the slot it goes on with the answer.
    pub hold: Option<RoomKey>,
}

impl Request {
    /// Most alternatives that are told with a token.
    pub const TOP_LOGPROBS: u32 = 20;

    /// A greedy request that stops at the model's end-of-sequence ids.
    ///
    /// ```
    /// let request = kvferry_engine::Request::greedy(vec![1, 2, 3], 16);
    /// assert_eq!((request.max_tokens, request.ignore_eos), (16, false));
    /// ```
    #[must_use]
    pub fn greedy(prompt: Vec<u32>, max_tokens: u32) -> Self {
        Self {
            prompt,
            max_tokens,
            sampling: Sampling::GREEDY,
            ignore_eos: false,
            top_logprobs: 0,
            hold: None,
        }
    }
}

/// A token that could have been chosen.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Alternative {
    /// Vocabulary id.
    pub id: u32,
    /// Natural logarithm of its probability over the full softmax, before temperature.
    pub logprob: f32,
}

/// Why a request ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// An end-of-sequence id was generated (it is the last token event).
    Eos,
    /// `max_tokens`, or the longest sequence that this engine serves, was reached.
    Length,
    /// Its reader had enough ([`Events::enough`]).
    Enough,
}

/// What happens to a request, in order: tokens, then `Done` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// A generated token. For [`crate::Engine::decode`] the first is the one that prefill sampled.
    Token {
        /// Vocabulary id.
        id: u32,
        /// Natural logarithm of its probability over the full softmax, before temperature.
        logprob: f32,
        /// The most probable tokens, as many as were asked for, most probable first; none with a first token that
        /// came from elsewhere.
        top: Vec<Alternative>,
    },
    /// The last event of a request that ended well.
    Done {
        /// Why it ended.
        reason: StopReason,
        /// How many of the prompt's tokens went through the model here, counted there.
        prompt_tokens_computed: u64,
        /// How many of the prompt's tokens had their cache here already, from earlier requests.
        prompt_tokens_cached: u64,
    },
    /// The last event of a request that did not.
    Failed(EngineError),
}

/// The writing end of a request's events, and what its reader says of them.
#[derive(Clone, Debug)]
pub(crate) struct Sink {
    events: Sender<Event>,
    enough: Arc<AtomicBool>,
}

impl Sink {
    /// Tells the reader. One who has gone is noticed before the next step.
    pub(crate) fn tell(&self, event: Event) {
        self.events.send(event);
    }

    /// Whether the reader has gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.events.is_closed()
    }

    /// Whether the reader wants no more tokens.
    pub(crate) fn is_enough(&self) -> bool {
        self.enough.load(Ordering::Relaxed)
    }
}

/// Wakes the scheduler when a reader leaves, so that nothing is kept for one who has gone.
#[derive(Debug)]
struct Leaving(Sender<Command>);

impl Drop for Leaving {
    fn drop(&mut self) {
        // An engine that has stopped keeps nothing.
        let _ = self.0.send(Command::ReaderSpoke);
    }
}

/// The events of one request. Dropping it aborts the request.
#[derive(Debug)]
pub struct Events {
    // Goes first: the scheduler must see it closed when it wakes.
    events: Receiver<Event>,
    enough: Arc<AtomicBool>,
    leaving: Leaving,
}

impl Events {
    pub(crate) fn channel(scheduler: &Sender<Command>) -> (Sink, Self) {
        let (sender, events) = mailbox();
        let enough = Arc::new(AtomicBool::new(false));
        let sink = Sink { events: sender, enough: Arc::clone(&enough) };
        (sink, Self { events, enough, leaving: Leaving(scheduler.clone()) })
    }

    /// Says that no more tokens are wanted: after its first token the request ends before the next step, as one that ended
    /// well, by [`Event::Done`] with [`StopReason::Enough`]. Tokens that are on their way come before that.
    pub fn enough(&self) {
        self.enough.store(true, Ordering::Relaxed);
        // An engine that has stopped has told so.
        let _ = self.leaving.0.send(Command::ReaderSpoke);
    }

    /// Waits for the next event; `None` after the last. Needs no particular async runtime.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.next().await
    }

    /// Blocks the thread until the next event; `None` after the last.
    pub fn recv(&mut self) -> Option<Event> {
        self.events.recv()
    }
}

impl Iterator for Events {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.recv()
    }
}

/// An answer that comes when the request's turn comes. A future; or [`Answer::wait`] blocks the thread.
#[derive(Debug)]
pub struct Answer<T> {
    // Goes first: the scheduler must see it closed when it wakes.
    answer: Receiver<Result<T, EngineError>>,
    _leaving: Leaving,
}

impl<T> Answer<T> {
    pub(crate) fn channel(scheduler: &Sender<Command>) -> (Sender<Result<T, EngineError>>, Self) {
        let (sender, answer) = mailbox();
        (sender, Self { answer, _leaving: Leaving(scheduler.clone()) })
    }

    /// Blocks the thread until the answer is there.
    ///
    /// # Errors
    /// Why the request was given up; [`EngineError::Stopped`] when the engine ended first.
    pub fn wait(mut self) -> Result<T, EngineError> {
        self.answer.recv().unwrap_or(Err(EngineError::Stopped))
    }
}

impl<T> Future for Answer<T> {
    type Output = Result<T, EngineError>;

    fn poll(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Self::Output> {
        self.answer.poll(context).map(|answer| answer.unwrap_or(Err(EngineError::Stopped)))
    }
}
