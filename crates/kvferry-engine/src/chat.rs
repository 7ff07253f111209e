//! Chat messages to the one text that a model was trained on, by the model's own template.
//!
//! Templates are Jinja with Python's string and list methods. They come out of model files: they can reach nothing
//! but the messages, and each rendering is bounded in steps. It is not bounded in memory (a template may double a
//! text at every step), so a template deserves the trust that its model file does. This module is *not* for
//! tokenizing ([`crate::tokenizer`]).

#![forbid(unsafe_code)]

use kvferry_plan::Blame;
use minijinja::{Environment, ErrorKind, Value, context, syntax::SyntaxConfig};
use serde::{Deserialize, Serialize};
use std::error::Error;

/// Template instructions per rendering; real ones use some tens per message.
const FUEL: u64 = 10_000_000;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// Why a conversation could not be formatted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The template itself is broken, or uses what is not available.
    #[error("the chat template does not work: {0}; send a plain prompt instead")]
    Template(String),
    /// The template refuses these messages.
    #[error("the chat template refuses the messages: {0}; change them as it asks")]
    Refused(String),
}

impl ChatError {
    /// Who can do something about it.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Template(_) => Blame::Environment,
            Self::Refused(_) => Blame::Caller,
        }
    }
}

/// A model's chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// Takes a Jinja template and the texts of the tokens that begin and end a text.
    ///
    /// # Errors
    /// [`ChatError::Template`] when it is not a template.
    pub fn new(source: &str, bos: Option<String>, eos: Option<String>) -> Result<Self, ChatError> {
        environment()?.template_from_str(source).map_err(broken)?;
        Ok(Self { source: source.to_owned(), bos, eos })
    }

    /// The text of a conversation; `add_generation_prompt` also begins the assistant's next turn. It spells out
    /// all special tokens: encode it without adding any.
    ///
    /// # Errors
    /// [`ChatError::Refused`] when the template raises an exception about the messages, else
    /// [`ChatError::Template`].
    ///
    /// ```
    /// use kvferry_engine::chat::{ChatTemplate, Message};
    /// let template = "{% for m in messages %}<{{ m['role'] }}>{{ m.content.strip() }}\n{% endfor %}\
    ///                 {% if add_generation_prompt %}<assistant>{% endif %}";
    /// let template = ChatTemplate::new(template, None, None).unwrap();
    /// let hello = Message { role: "user".into(), content: " Hello ".into() };
    /// assert_eq!(template.render(&[hello], true).unwrap(), "<user>Hello\n<assistant>");
    /// ```
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatError> {
        let environment = environment()?;
        let template = environment.template_from_str(&self.source).map_err(broken)?;
        let text = |token: &Option<String>| token.clone().map_or(Value::UNDEFINED, Value::from);
        let message = |m: &Message| context! { role => m.role.as_str(), content => m.content.as_str() };
        let context = context! {
            messages => messages.iter().map(message).collect::<Value>(),
            add_generation_prompt,
            bos_token => text(&self.bos),
            eos_token => text(&self.eos),
        };
        template.render(context).map_err(|error| match error.source().and_then(|s| s.downcast_ref()) {
            Some(Refusal(reason)) => ChatError::Refused(reason.clone()),
            None => broken(error),
        })
    }
}

/// What a template raises about messages it was not made for.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

#[expect(clippy::needless_pass_by_value, reason = "it maps errors")]
fn broken(error: minijinja::Error) -> ChatError {
    ChatError::Template(error.to_string())
}

/// What templates may use, set up as model authors expect it.
fn environment() -> Result<Environment<'static>, ChatError> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(broken)?;
    let mut environment = Environment::new();
    environment.set_syntax(syntax);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_fuel(Some(FUEL));
    environment.add_function("raise_exception", |reason: String| -> Result<Value, minijinja::Error> {
        let error = minijinja::Error::new(ErrorKind::InvalidOperation, reason.clone());
        Err(error.with_source(Refusal(reason)))
    });
    Ok(environment)
}
