//! A body, understood against the model: prompts as ids, every number within its bounds.

use std::{fmt, ops::RangeInclusive, sync::Arc};

use kvferry_engine::{
    Request, Voice,
    chat::{ChatError, Message},
    tokenizer::{Tokenizer, TokenizerError},
};

use super::{
    body::{Body, Logprobs, MessageBody, Object, Prompt, Prompts},
    error::ApiError,
};
use crate::{
    Problem, SamplingSpec, Stage, TraceContext,
    backend::{Extent, Job},
};

/// Most continuations of one request, over all its prompts.
const CONTINUATIONS: usize = 128;
/// Most stop strings, and bytes of one.
const STOPS: usize = 4;
const STOP_BYTES: usize = 512;
/// Tokens of a completion that does not say how many.
const COMPLETION_TOKENS: u32 = 16;
/// Alternatives that a completion may ask for; a chat may ask for as many as the engine tells.
const COMPLETION_LOGPROBS: u64 = 5;

/// Which of the two APIs a request speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Completion,
    Chat,
}

impl Kind {
    /// The field that holds the prompt.
    pub(crate) fn prompt_field(self) -> &'static str {
        match self {
            Self::Completion => "prompt",
            Self::Chat => "messages",
        }
    }
}

/// A request that can be served if there is room.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) kind: Kind,
    /// At least one, none of them empty.
    pub(crate) prompts: Vec<Arc<[u32]>>,
    /// Continuations of each prompt.
    pub(crate) n: usize,
    pub(crate) max_tokens: u32,
    /// Its seed is that of the first continuation.
    sampling: SamplingSpec,
    ignore_eos: bool,
    /// Alternatives to be told with each token; `None` when no log-probabilities are wanted.
    pub(crate) logprobs: Option<u32>,
    pub(crate) stops: Vec<String>,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) return_token_ids: bool,
    /// The caller's trace, which this is a part of.
    pub(crate) trace: Option<TraceContext>,
}

impl Wanted {
    /// Understands a body; `seed` is used where it has none. Tokenizing may take a moment.
    ///
    /// # Errors
    /// The field that cannot be served, and what could.
    pub(crate) fn new(kind: Kind, body: Body, voice: &Voice, seed: u64) -> Result<Self, ApiError> {
        if let Some(model) = body.model.as_ref().filter(|model| **model != voice.name) {
            return Err(ApiError::unknown_model(model, &voice.name));
        }
        let temperature = within("temperature", body.temperature.unwrap_or(1.0), 0.0..=2.0)?;
        // A nucleus of nothing still holds the most probable token.
        let top_p = within("top_p", body.top_p.unwrap_or(1.0), 0.0..=1.0)?.max(f32::MIN_POSITIVE);
        let n = within("n", body.n.unwrap_or(1), 1..=CONTINUATIONS as u32)? as usize;
        let max_tokens = max_tokens(kind, &body)?;
        let logprobs = logprobs(kind, &body)?;
        let stops = stops(body.stop.map(|stops| stops.0).unwrap_or_default(), voice)?;
        let prompts = match kind {
            Kind::Completion => completion(body.prompt, voice)?,
            Kind::Chat => vec![chat(body.messages, voice)?],
        };
        if prompts.len().saturating_mul(n) > CONTINUATIONS {
            let message =
                format!("{} prompts with n={n} are more than {CONTINUATIONS} continuations", prompts.len());
            return Err(ApiError::field("n", message));
        }
        Ok(Self {
            kind,
            prompts,
            n,
            max_tokens,
            sampling: SamplingSpec { temperature, top_p, seed: body.seed.map_or(seed, i64::cast_unsigned) },
            ignore_eos: body.ignore_eos.unwrap_or(false),
            logprobs,
            stops,
            stream: body.stream.unwrap_or(false),
            include_usage: body
                .stream_options
                .and_then(|Object(options)| options.include_usage)
                .unwrap_or(false),
            return_token_ids: body.return_token_ids.unwrap_or(false),
            trace: None,
        })
    }

    /// How many continuations there are.
    pub(crate) fn continuations(&self) -> usize {
        self.prompts.len() * self.n
    }

    /// What has to be held for a continuation of a prompt.
    pub(crate) fn extent(&self, prompt: &[u32]) -> Extent {
        let Self { max_tokens, ignore_eos, .. } = *self;
        Extent { prompt_tokens: prompt.len() as u64, max_tokens, ignore_eos }
    }

    /// One job per continuation: those of the first prompt, then those of the next.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = Job> {
        let prompts = self.prompts.iter().flat_map(|prompt| std::iter::repeat_n(prompt, self.n));
        (0..).zip(prompts).map(|(index, prompt)| Job {
            prompt: Arc::clone(prompt),
            max_tokens: self.max_tokens,
            sampling: SamplingSpec { seed: seed_of(self.sampling.seed, index), ..self.sampling },
            ignore_eos: self.ignore_eos,
            top_logprobs: self.logprobs.unwrap_or(0),
            trace: self.trace,
        })
    }
}

/// The seed of a continuation: the request's own for the first, far from it and from each other for the rest.
fn seed_of(seed: u64, index: u64) -> u64 {
    if index == 0 {
        return seed;
    }
    // The finalizer of splitmix64, by its published constants.
    let mut mixed = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

fn within<T: PartialOrd + fmt::Display>(
    field: &str,
    value: T,
    bounds: RangeInclusive<T>,
) -> Result<T, ApiError> {
    if bounds.contains(&value) {
        return Ok(value);
    }
    let message = format!("{field}: {value} is not between {} and {}", bounds.start(), bounds.end());
    Err(ApiError::field(field, message))
}

fn max_tokens(kind: Kind, body: &Body) -> Result<u32, ApiError> {
    let (field, asked) = match (kind, body.max_completion_tokens) {
        (Kind::Chat, Some(tokens)) => ("max_completion_tokens", Some(tokens)),
        _ => ("max_tokens", body.max_tokens),
    };
    match (kind, asked) {
        (_, Some(0)) => Err(ApiError::field(field, format!("{field} must be at least 1"))),
        (_, Some(tokens)) => Ok(tokens),
        (Kind::Completion, None) => Ok(COMPLETION_TOKENS),
        // What fits: whoever computes caps it.
        (Kind::Chat, None) => Ok(u32::MAX),
    }
}

fn logprobs(kind: Kind, body: &Body) -> Result<Option<u32>, ApiError> {
    let wrong = |message: &str| Err(ApiError::field("logprobs", message));
    match (kind, body.logprobs) {
        (Kind::Completion, None) => Ok(None),
        (Kind::Completion, Some(Logprobs::Count(count))) => {
            within("logprobs", count, 0..=COMPLETION_LOGPROBS).map(|count| u32::try_from(count).ok())
        }
        (Kind::Completion, Some(Logprobs::Flag(_))) => {
            wrong("logprobs: a completion wants a number from 0 to 5")
        }
        (Kind::Chat, Some(Logprobs::Count(_))) => {
            wrong("logprobs: a chat wants true or false, and `top_logprobs`")
        }
        (Kind::Chat, Some(Logprobs::Flag(true))) => {
            within("top_logprobs", body.top_logprobs.unwrap_or(0), 0..=Request::TOP_LOGPROBS).map(Some)
        }
        (Kind::Chat, _) if body.top_logprobs.is_some_and(|top| top > 0) => {
            Err(ApiError::field("top_logprobs", "top_logprobs needs `logprobs`: true"))
        }
        (Kind::Chat, _) => Ok(None),
    }
}

fn stops(stops: Vec<String>, voice: &Voice) -> Result<Vec<String>, ApiError> {
    let wrong = |message: String| Err(ApiError::field("stop", message));
    if stops.len() > STOPS {
        return wrong(format!("stop: {} strings are more than {STOPS}", stops.len()));
    }
    if let Some(stop) = stops.iter().find(|stop| stop.is_empty() || stop.len() > STOP_BYTES) {
        return wrong(format!("stop: a string of {} bytes is not between 1 and {STOP_BYTES}", stop.len()));
    }
    if !stops.is_empty() && voice.tokenizer.is_none() {
        return wrong(format!(
            "stop: {} has no tokenizer, so its answers have no text to stop at",
            voice.name
        ));
    }
    Ok(stops)
}

fn tokenizer<'a>(voice: &'a Voice, field: &str) -> Result<&'a Tokenizer, ApiError> {
    voice.tokenizer.as_ref().ok_or_else(|| {
        let message =
            format!("{} has no tokenizer: send token ids in `prompt` to /v1/completions", voice.name);
        ApiError::field(field, message)
    })
}

fn encoded(tokenizer: &Tokenizer, text: &str, special: bool, field: &str) -> Result<Arc<[u32]>, ApiError> {
    tokenizer.encode(text, special).map(Arc::from).map_err(|error: TokenizerError| match error.blame() {
        kvferry_plan::Blame::Caller => ApiError::field(field, error.to_string()),
        blame => Problem::new(blame, Stage::Request, error).into(),
    })
}

fn completion(prompts: Option<Prompts>, voice: &Voice) -> Result<Vec<Arc<[u32]>>, ApiError> {
    let Some(Prompts(prompts)) = prompts else {
        return Err(ApiError::field("prompt", "prompt is missing: a string, token ids, or a list of either"));
    };
    if prompts.len() > CONTINUATIONS {
        let message = format!("{} prompts are more than {CONTINUATIONS}", prompts.len());
        return Err(ApiError::field("prompt", message));
    }
    let one = |prompt| {
        let ids = match prompt {
            Prompt::Text(text) => encoded(tokenizer(voice, "prompt")?, &text, true, "prompt")?,
            Prompt::Ids(ids) => ids.into(),
        };
        if ids.is_empty() {
            return Err(ApiError::field("prompt", "prompt is empty: there is nothing to continue"));
        }
        match ids.iter().find(|id| **id >= voice.vocab) {
            None => Ok(ids),
            Some(id) => {
                let last = voice.vocab.saturating_sub(1);
                let message = format!(
                    "prompt: token {id} is not in the vocabulary of {}; ids are 0 to {last}",
                    voice.name
                );
                Err(ApiError::field("prompt", message))
            }
        }
    };
    prompts.into_iter().map(one).collect()
}

fn chat(messages: Option<Vec<Object<MessageBody>>>, voice: &Voice) -> Result<Arc<[u32]>, ApiError> {
    let messages = messages.filter(|messages| !messages.is_empty()).ok_or_else(|| {
        ApiError::field("messages", "messages is missing or empty: send at least one message")
    })?;
    let tokenizer = tokenizer(voice, "messages")?;
    let message = |(index, Object(body)): (usize, Object<MessageBody>)| {
        if body.tool_calls.is_some_and(|calls| !calls.is_null() && calls != serde_json::json!([])) {
            let field = format!("messages[{index}].tool_calls");
            let message = format!("{field} is not served: this server calls no tools");
            return Err(ApiError::field(field, message));
        }
        // The newer name of what templates know as the system's part.
        let role = if body.role == "developer" { "system".to_owned() } else { body.role };
        let content = body.content.map(|content| content.0).unwrap_or_default();
        // Turns are begun and ended by the template alone.
        let [role, content] = [role, content].map(|said| tokenizer.shield(&said).into_owned());
        Ok(Message { role, content })
    };
    let messages: Vec<Message> = messages.into_iter().enumerate().map(message).collect::<Result<_, _>>()?;
    let template = voice.chat_template.as_ref().ok_or_else(|| {
        let message = format!("{} has no chat template: send a plain prompt to /v1/completions", voice.name);
        ApiError::field("messages", message)
    })?;
    let text = template.render(&messages, true).map_err(|error: ChatError| match error.blame() {
        kvferry_plan::Blame::Caller => ApiError::field("messages", error.to_string()),
        blame => Problem::new(blame, Stage::Request, error).into(),
    })?;
    let ids = encoded(tokenizer, &text, false, "messages")?;
    if ids.is_empty() {
        return Err(ApiError::field("messages", "messages: the chat template makes an empty prompt of them"));
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_of_continuations_differ() {
        let seeds: std::collections::HashSet<u64> = [0, 1, u64::MAX]
            .into_iter()
            .flat_map(|seed| (0..128).map(move |index| seed_of(seed, index)))
            .collect();
        assert_eq!((seeds.len(), seed_of(7, 0)), (3 * 128, 7));
    }
}
