//! What can ever be served: checked on the caller's thread, before any work.

use kvferry_plan::Placement;

use crate::{EngineConfig, EngineError, Model, Request, pages};

/// One limit on the length of a sequence, and what to say about it.
#[derive(Clone, Debug)]
struct Limit {
    tokens: u64,
    because: String,
    remedy: String,
}

/// The limits of one engine.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    vocab: u32,
    /// On prompt and generated tokens together, from the model and the configuration.
    length: Limit,
    /// On tokens whose cache is held.
    pool: Limit,
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
        let length = match config.max_model_len {
            Some(len) if len < 2 => {
                return Err(EngineError::Config(format!(
                    "max-model-len={len}: a prompt token and a generated one need at least 2"
                )));
            }
            Some(len) if len > made_for => {
                return Err(EngineError::Config(format!(
                    "max-model-len={len}: the model was made for {made_for} tokens; use at most that"
                )));
            }
            Some(len) if len < made_for => Limit {
                tokens: u64::from(len),
                because: format!("max-model-len={len}, one token of which is generated"),
                remedy: format!("raise --max-model-len, up to {made_for}, or shorten the prompt"),
            },
            _ => Limit {
                tokens: u64::from(made_for),
                because: format!("the model was made for {made_for} tokens, one of which is generated"),
                remedy: "shorten the prompt, or use a model with a longer context".into(),
            },
        };
        let held = pages::tokens_for(placement, pages);
        let pool = Limit {
            tokens: held,
            because: format!("the KV pool of {pages} pages holds {held} tokens"),
            remedy: "raise --pool-tokens or shorten the prompt".into(),
        };
        Ok(Self { vocab: u32::try_from(model.config().vocab).unwrap_or(u32::MAX), length, pool })
    }

    /// Longest prompt that can be continued here.
    pub(crate) fn longest_whole(&self) -> u64 {
        self.length.tokens.min(self.pool.tokens).saturating_sub(1)
    }

    /// Checks a request that is computed and continued here, and caps its `max_tokens` to what can be held.
    pub(crate) fn whole(&self, mut request: Request) -> Result<Request, EngineError> {
        self.sane(&request)?;
        request.max_tokens = self.reservation(request.prompt.len() as u64, request.max_tokens)?;
        Ok(request)
    }

    /// Checks a request whose prompt alone is computed here; one more token must fit the model.
    pub(crate) fn prompt_only(&self, request: Request) -> Result<Request, EngineError> {
        self.sane(&request)?;
        let tokens = request.prompt.len() as u64;
        fits(tokens, self.length.tokens - 1, &self.length)?;
        fits(tokens, self.pool.tokens, &self.pool)?;
        Ok(request)
    }

    /// Checks that a prompt and a token after it fit, and caps `max_tokens` to what can be held.
    pub(crate) fn reservation(&self, prompt_tokens: u64, max_tokens: u32) -> Result<u32, EngineError> {
        if prompt_tokens == 0 || max_tokens == 0 {
            return Err(EngineError::Request(
                "the prompt and max_tokens must both be at least 1 token".into(),
            ));
        }
        for limit in [&self.length, &self.pool] {
            fits(prompt_tokens, limit.tokens.saturating_sub(1), limit)?;
        }
        let room = self.length.tokens.min(self.pool.tokens) - prompt_tokens;
        Ok(max_tokens.min(u32::try_from(room).unwrap_or(u32::MAX)))
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
        if request.prompt.is_empty() || request.max_tokens == 0 {
            return Err(EngineError::Request(
                "the prompt and max_tokens must both be at least 1 token".into(),
            ));
        }
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

fn fits(tokens: u64, longest: u64, limit: &Limit) -> Result<(), EngineError> {
    if tokens <= longest {
        return Ok(());
    }
    Err(EngineError::NeverFits {
        tokens,
        limit: longest,
        because: limit.because.clone(),
        remedy: limit.remedy.clone(),
    })
}
