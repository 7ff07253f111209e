//! What is let in: checked on the caller's thread, before any work.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use kvferry_plan::{Capacity, Fit, Hold, Need, Placement};

use crate::{EngineConfig, EngineError, Model, Request};

/// What one engine takes in.
#[derive(Debug)]
pub(crate) struct Limits {
    vocab: u32,
    capacity: Capacity,
    places: Arc<AtomicU32>,
    max_queued: u32,
}

/// A waiting request's place in the queue, which is bounded; free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Place(Arc<AtomicU32>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Limits {
    /// The limits of an engine with `pages` pages.
    pub(crate) fn new(
        model: &Model,
        config: &EngineConfig,
        placement: &Placement,
        pages: u32,
    ) -> Result<Self, EngineError> {
        let made_for = model.config().max_position;
        let max_model_len = config.max_model_len.unwrap_or(made_for);
        if max_model_len < 2 {
            return Err(EngineError::Config(format!(
                "max-model-len={max_model_len}: a prompt token and a generated one need at least 2"
            )));
        }
        if max_model_len > model.config().longest_possible() {
            return Err(EngineError::Config(format!(
                "max-model-len={max_model_len}: the model was made for {made_for} tokens; use at most that"
            )));
        }
        if config.max_queued == 0 {
            return Err(EngineError::Config(
                "max-queued=0: every request passes the queue; it needs at least 1 place".into(),
            ));
        }
        Ok(Self {
            vocab: u32::try_from(model.config().vocab).unwrap_or(u32::MAX),
            capacity: Capacity {
                max_model_len: max_model_len.into(),
                made_for: made_for.max(max_model_len).into(),
                pages,
                parts: placement.parts.clone(),
                prefix_cache: config.prefix_cache && placement.prefix_block().is_some(),
            },
            places: Arc::default(),
            max_queued: config.max_queued,
        })
    }

    /// What can be held.
    pub(crate) fn capacity(&self) -> &Capacity {
        &self.capacity
    }

    /// Checks a request of which `hold` is wanted, caps its `max_tokens` to what can be held, and takes its place in
    /// the queue.
    pub(crate) fn admit(&self, hold: Hold, mut request: Request) -> Result<(Request, Place), EngineError> {
        request.max_tokens = self.check(hold, &request)?;
        Ok((request, self.place()?))
    }

    /// Checks a request of which `hold` is wanted; its `max_tokens` capped to what can be held.
    pub(crate) fn check(&self, hold: Hold, request: &Request) -> Result<u32, EngineError> {
        self.sane(request)?;
        let (prompt_tokens, max_tokens) = (request.prompt.len() as u64, request.max_tokens);
        self.fit(Need { hold, prompt_tokens, max_tokens })
    }

    /// Caps `max_tokens` to what can be held; refuses what never can.
    pub(crate) fn fit(&self, need: Need) -> Result<u32, EngineError> {
        if need.prompt_tokens == 0 || need.max_tokens == 0 {
            return Err(EngineError::Request(
                "the prompt and max_tokens must both be at least 1 token".into(),
            ));
        }
        match self.capacity.fit(need, self.capacity.pages) {
            Fit::Now { max_tokens, .. } | Fit::Later { max_tokens, .. } => Ok(max_tokens),
            Fit::Never(limit) => Err(limit.into()),
        }
    }

    fn place(&self) -> Result<Place, EngineError> {
        let taken = |taken| (taken < self.max_queued).then_some(taken + 1);
        match self.places.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken) {
            Ok(_) => Ok(Place(Arc::clone(&self.places))),
            Err(_) => Err(EngineError::QueueFull { limit: self.max_queued }),
        }
    }

    /// Checks that all ids are in the vocabulary.
    pub(crate) fn vocabulary(&self, ids: &[u32]) -> Result<(), EngineError> {
        match ids.iter().find(|id| **id >= self.vocab) {
            None => Ok(()),
            Some(id) => Err(EngineError::Request(format!(
                "token {id} is not in the vocabulary of {}; ids are 0 to {}",
                self.vocab,
                self.vocab - 1
            ))),
        }
    }

    fn sane(&self, request: &Request) -> Result<(), EngineError> {
        let sampling = &request.sampling;
        if !(sampling.temperature.is_finite() && sampling.temperature >= 0.0) {
            return Err(EngineError::Request(format!(
                "temperature {} must be 0 or a positive number",
                sampling.temperature
            )));
        }
        if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
            return Err(EngineError::Request(format!(
                "top_p {} must be above 0 and at most 1",
                sampling.top_p
            )));
        }
        if request.top_logprobs > Request::TOP_LOGPROBS {
            return Err(EngineError::Request(format!(
                "top_logprobs {}: at most {} are told",
                request.top_logprobs,
                Request::TOP_LOGPROBS
            )));
        }
        self.vocabulary(&request.prompt)
    }
}
