//! What clients read: answers and chunks, in the shapes of both APIs.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use kvferry_engine::{Alternative, Voice, tokenizer::Tokenizer};
use serde::{Serialize, Serializer};

use super::{
    choice::{Delta, Ending},
    request::{Kind, Wanted},
    run::Usage,
    text::Spoken,
};

/// Names the program that answered.
const FINGERPRINT: &str = concat!("fp_kvferry_", env!("CARGO_PKG_VERSION"));
/// Stands for log-probabilities below it, which JSON could not carry if they were infinite.
const LOWEST: f32 = -9999.0;

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[derive(Serialize)]
pub(crate) struct Reply<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
    choices: Vec<Choice>,
    /// `null` in the chunks of a stream that ends with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<PromptIds<'a>>,
}

/// The ids of the prompt; of several, a list for each.
#[derive(Serialize)]
#[serde(untagged)]
enum PromptIds<'a> {
    One(&'a [u32]),
    Several(Vec<&'a [u32]>),
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    #[serde(flatten)]
    said: Said,
    logprobs: Option<Logprobs>,
    finish_reason: Option<Ending>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// The field of a choice that holds its text.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Said {
    Text(String),
    Message { role: &'static str, content: String, refusal: Option<String> },
    Delta(Message),
}

#[derive(Default, Serialize)]
struct Message {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Logprobs {
    Completion {
        tokens: Vec<String>,
        token_logprobs: Vec<f32>,
        top_logprobs: Option<Vec<TopByText>>,
        text_offset: Vec<usize>,
    },
    Chat {
        content: Vec<ChatToken>,
        refusal: Option<String>,
    },
}

/// Alternatives as an object, most probable first.
struct TopByText(Vec<(String, f32)>);

impl Serialize for TopByText {
    fn serialize<S: Serializer>(&self, into: S) -> Result<S::Ok, S::Error> {
        into.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

#[derive(Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: Token,
    top_logprobs: Vec<Token>,
}

#[derive(Serialize)]
struct Token {
    token: String,
    logprob: f32,
    bytes: Option<Vec<u8>>,
}

/// Shapes the answer to one request.
pub(crate) struct Shape {
    id: String,
    created: u64,
    wanted: Arc<Wanted>,
    voice: Voice,
}

impl Shape {
    /// Of the answer to `wanted`; `number` makes its id unique.
    pub(crate) fn new(wanted: Arc<Wanted>, voice: Voice, number: u64) -> Self {
        let prefix = match wanted.kind {
            Kind::Completion => "cmpl",
            Kind::Chat => "chatcmpl",
        };
        Self { id: format!("{prefix}-{number:016x}"), created: now(), wanted, voice }
    }

    /// What was asked.
    pub(crate) fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// A whole answer: everything that was said of each continuation, in one piece.
    pub(crate) fn whole(&self, choices: Vec<Delta>, usage: Usage) -> Reply<'_> {
        let choices = choices.into_iter().map(|delta| {
            self.choice(delta, |text| match self.wanted.kind {
                Kind::Completion => Said::Text(text),
                Kind::Chat => Said::Message { role: "assistant", content: text, refusal: None },
            })
        });
        let object = match self.wanted.kind {
            Kind::Completion => "text_completion",
            Kind::Chat => "chat.completion",
        };
        Reply { usage: Some(Some(usage)), ..self.reply(object, choices.collect(), true) }
    }

    /// The chunks that tell of a delta; `first` of its continuation, `begins` the stream.
    pub(crate) fn chunks(&self, mut delta: Delta, first: bool, begins: bool) -> Vec<Reply<'_>> {
        let (index, ending) = (delta.index, delta.ending.take());
        let mut choices = Vec::new();
        if first && self.wanted.kind == Kind::Chat {
            let said = Said::Delta(Message { role: Some("assistant"), content: Some(String::new()) });
            choices.push(Choice { index, said, logprobs: None, finish_reason: None, token_ids: None });
        }
        if !delta.text.is_empty() || !delta.tokens.is_empty() {
            choices.push(self.choice(delta, |text| match self.wanted.kind {
                Kind::Completion => Said::Text(text),
                Kind::Chat => Said::Delta(Message { role: None, content: Some(text) }),
            }));
        }
        if let Some(ending) = ending {
            let said = match self.wanted.kind {
                Kind::Completion => Said::Text(String::new()),
                Kind::Chat => Said::Delta(Message::default()),
            };
            let token_ids = self.wanted.return_token_ids.then(Vec::new);
            choices.push(Choice { index, said, logprobs: None, finish_reason: Some(ending), token_ids });
        }
        let chunk = |(number, choice)| {
            let usage = self.wanted.include_usage.then_some(None);
            Reply { usage, ..self.reply(self.chunk_object(), vec![choice], begins && number == 0) }
        };
        choices.into_iter().enumerate().map(chunk).collect()
    }

    /// The last chunk of a stream that asked for it.
    pub(crate) fn usage(&self, usage: Usage) -> Reply<'_> {
        Reply { usage: Some(Some(usage)), ..self.reply(self.chunk_object(), Vec::new(), false) }
    }

    fn chunk_object(&self) -> &'static str {
        match self.wanted.kind {
            Kind::Completion => "text_completion",
            Kind::Chat => "chat.completion.chunk",
        }
    }

    /// `begins`: with the ids of the prompt, where they are wanted.
    fn reply(&self, object: &'static str, choices: Vec<Choice>, begins: bool) -> Reply<'_> {
        let prompt_ids = || match self.wanted.prompts.as_slice() {
            [one] => PromptIds::One(one),
            several => PromptIds::Several(several.iter().map(AsRef::as_ref).collect()),
        };
        Reply {
            id: &self.id,
            object,
            created: self.created,
            model: &self.voice.name,
            system_fingerprint: FINGERPRINT,
            choices,
            usage: None,
            prompt_token_ids: (begins && self.wanted.return_token_ids).then(prompt_ids),
        }
    }

    fn choice(&self, delta: Delta, said: impl Fn(String) -> Said) -> Choice {
        let Delta { index, text, tokens, ending, .. } = delta;
        let ids = || tokens.iter().map(|token| token.chosen.id).collect();
        Choice {
            index,
            token_ids: self.wanted.return_token_ids.then(ids),
            logprobs: self.wanted.logprobs.map(|top| self.logprobs(&tokens, top)),
            said: said(text),
            finish_reason: ending,
        }
    }

    fn logprobs(&self, tokens: &[Spoken], top: u32) -> Logprobs {
        match self.wanted.kind {
            Kind::Completion => Logprobs::Completion {
                tokens: tokens.iter().map(|token| self.token(token.chosen.id, 0.0).token).collect(),
                token_logprobs: tokens.iter().map(|token| token.chosen.logprob.max(LOWEST)).collect(),
                top_logprobs: (top > 0).then(|| tokens.iter().map(|token| self.top_by_text(token)).collect()),
                text_offset: tokens.iter().map(|token| token.offset).collect(),
            },
            Kind::Chat => Logprobs::Chat {
                content: tokens.iter().map(|token| self.chat_token(token)).collect(),
                refusal: None,
            },
        }
    }

    /// The alternatives, and the chosen token where it is not among them.
    fn top_by_text(&self, token: &Spoken) -> TopByText {
        let chosen = Alternative { id: token.chosen.id, logprob: token.chosen.logprob };
        let known = token.chosen.top.iter().any(|alternative| alternative.id == chosen.id);
        let all = token.chosen.top.iter().copied().chain((!known).then_some(chosen));
        TopByText(
            all.map(|Alternative { id, logprob }| self.token(id, logprob))
                .map(|Token { token, logprob, .. }| (token, logprob))
                .collect(),
        )
    }

    fn chat_token(&self, token: &Spoken) -> ChatToken {
        let top = token.chosen.top.iter();
        ChatToken {
            token: self.token(token.chosen.id, token.chosen.logprob),
            top_logprobs: top.map(|alternative| self.token(alternative.id, alternative.logprob)).collect(),
        }
    }

    /// A token by its text; by its bytes where they are no text, and by its id for a model without texts.
    fn token(&self, id: u32, logprob: f32) -> Token {
        let logprob = logprob.max(LOWEST);
        let bytes = self.voice.tokenizer.as_ref().and_then(|tokenizer: &Tokenizer| tokenizer.token_bytes(id));
        let token = match &bytes {
            None => format!("token_id:{id}"),
            Some(bytes) => String::from_utf8(bytes.clone()).unwrap_or_else(|_| {
                bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}"))
            }),
        };
        Token { token, logprob, bytes }
    }
}
