//! One request in the scheduler.

use std::sync::Arc;

use kvferry_plan::{Capacity, Hold, Need, RoomKey, TokenRange};

use crate::{
    Event, FirstToken, Request, RoomLease, Sampling, StopReason, limits::Place, mailbox::Sender,
    pages::Lease, request::Sink, rows::PromptState, scheduler::Reply,
};

/// What a request is here for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Prompt and continuation.
    Generate,
    /// The prompt, for somebody else.
    Prefill,
    /// The continuation of a prompt from somebody else.
    Decode,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Waits for pages.
    Queued,
    /// Its prompt is being computed.
    Prefilling,
    /// Has pages; waits for the prompt's cache.
    Reserved,
    /// Generates.
    Decoding,
    /// Over, well or not; its pages wait for the release.
    Finished,
}

/// A request.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) key: Option<RoomKey>,
    pub(crate) kind: Kind,
    pub(crate) state: State,
    pub(crate) prompt: Vec<u32>,
    pub(crate) prompt_tokens: u64,
    /// Most tokens to generate; what the pages are for.
    pub(crate) max_tokens: u32,
    pub(crate) sampling: Sampling,
    pub(crate) ignore_eos: bool,
    pub(crate) top_logprobs: u32,
    /// While it waits.
    pub(crate) place: Option<Place>,
    pub(crate) lease: Option<Lease>,
    /// Prompt tokens whose cache was in the pages already.
    pub(crate) cached: u64,
    /// Positions whose cache is complete: the next one to compute.
    pub(crate) filled: u64,
    /// Where its prompt is cut for a state to be stored, ascending.
    pub(crate) stops: Vec<u64>,
    /// Prompt positions that went through the model here.
    pub(crate) prompt_computed: u64,
    /// What was generated. The cache of the last token is computed next.
    pub(crate) generated: Vec<u32>,
    pub(crate) sink: Option<Sink>,
    pub(crate) granted: Option<Reply<RoomLease>>,
    /// Whether its state after the prompt is to be kept, and then the copy.
    pub(crate) keep: bool,
    pub(crate) kept: Option<Arc<PromptState>>,
    /// Whether it neither begins with what earlier requests left nor leaves anything to later ones.
    pub(crate) apart: bool,
}

impl Job {
    /// A queued request.
    pub(crate) fn new(kind: Kind, key: Option<RoomKey>, request: Request, place: Place) -> Self {
        Self {
            key,
            kind,
            state: State::Queued,
            prompt_tokens: request.prompt.len() as u64,
            prompt: request.prompt,
            max_tokens: request.max_tokens,
            sampling: request.sampling,
            ignore_eos: request.ignore_eos,
            top_logprobs: request.top_logprobs,
            place: Some(place),
            lease: None,
            cached: 0,
            filled: 0,
            stops: Vec::new(),
            prompt_computed: 0,
            generated: Vec::new(),
            sink: None,
            granted: None,
            keep: request.hold.is_some(),
            kept: None,
            apart: false,
        }
    }

    /// What it takes pages for, in an engine that can hold so much.
    pub(crate) fn need(&self, capacity: &Capacity) -> Need {
        let hold = match self.kind {
            Kind::Prefill => Hold::Prompt(capacity.path(self.ignore_eos)),
            Kind::Decode => Hold::Continue,
            Kind::Generate => Hold::Whole,
        };
        Need { hold, prompt_tokens: self.prompt_tokens, max_tokens: self.max_tokens }
    }

    /// Prompt tokens that a step can compute: all that are left, or those up to where the prompt is cut next.
    pub(crate) fn prompt_left(&self) -> u64 {
        if self.state != State::Prefilling {
            return 0;
        }
        let stop = self.stops.iter().find(|stop| **stop > self.filled);
        stop.unwrap_or(&self.prompt_tokens).saturating_sub(self.filled)
    }

    /// Its part of the next step, of `count` tokens: the ids and the position of the first.
    pub(crate) fn next_tokens(&self, count: u64) -> (&[u32], u64) {
        if self.state == State::Decoding {
            return (self.generated.last().map_or(&[], std::slice::from_ref), self.filled);
        }
        let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(self.prompt.len());
        (&self.prompt[index(self.filled)..index(self.filled.saturating_add(count))], self.filled)
    }

    /// The tokens whose cache is complete.
    pub(crate) fn complete(&self) -> Vec<u32> {
        let filled = usize::try_from(self.filled).unwrap_or(usize::MAX);
        self.prompt.iter().chain(&self.generated).take(filled).copied().collect()
    }

    /// Notes what the forward pass computed.
    pub(crate) fn advance(&mut self, computed: TokenRange) {
        let of_prompt = computed.end.0.min(self.prompt_tokens).saturating_sub(computed.start.0);
        self.prompt_computed += of_prompt;
        self.filled = computed.end.0;
    }

    /// True when the reader of its events, or of its grant, has gone.
    pub(crate) fn abandoned(&self) -> bool {
        self.sink.as_ref().is_some_and(Sink::is_closed)
            || self.granted.as_ref().is_some_and(Sender::is_closed)
    }

    /// True when it generates and its reader wants no more.
    pub(crate) fn is_enough(&self) -> bool {
        self.state == State::Decoding && self.sink.as_ref().is_some_and(Sink::is_enough)
    }

    /// Takes a generated token and tells the reader. The reason, when the request is done with it.
    pub(crate) fn push(&mut self, token: FirstToken, eos: &[u32]) -> Option<StopReason> {
        self.generated.push(token.id);
        self.tell(Event::Token { id: token.id, logprob: token.logprob, top: token.top });
        if !self.ignore_eos && eos.contains(&token.id) {
            Some(StopReason::Eos)
        } else if self.generated.len() >= self.max_tokens as usize {
            Some(StopReason::Length)
        } else {
            None
        }
    }

    /// Tells the reader, if there is one.
    pub(crate) fn tell(&self, event: Event) {
        if let Some(sink) = &self.sink {
            sink.tell(event);
        }
    }
}
