//! Fields that would change the answer and are not served. They are refused unless their value asks for nothing, so that
//! nobody takes a different answer for the one that they asked for.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::{Value, json};

use super::error::ApiError;

/// A field, what works instead, and values that ask for nothing besides `null`, `false`, 0 and what is empty.
struct Unserved {
    field: &'static str,
    instead: &'static str,
    harmless: fn(&Value) -> bool,
}

const fn unserved(field: &'static str, instead: &'static str) -> Unserved {
    Unserved { field, instead, harmless: |_| false }
}

impl Unserved {
    const fn but(self, harmless: fn(&Value) -> bool) -> Self {
        Self { harmless, ..self }
    }
}

const ALL: [Unserved; 23] = [
    unserved("audio", "answers are text"),
    unserved("best_of", "ask for `n` and choose yourself").but(|value| *value == 1),
    unserved("echo", "the prompt is not repeated; `return_token_ids` gives its ids"),
    unserved("frequency_penalty", "leave it out"),
    unserved("function_call", "this server calls no functions")
        .but(|value| *value == "none" || *value == "auto"),
    unserved("functions", "this server calls no functions"),
    unserved("guided_json", "answers are not constrained"),
    unserved("guided_regex", "answers are not constrained"),
    unserved("logit_bias", "leave it out"),
    unserved("min_p", "use `top_p`"),
    unserved("min_tokens", "use `ignore_eos` with `max_tokens`"),
    unserved("modalities", "answers are text").but(|value| *value == json!(["text"])),
    unserved("prediction", "leave it out"),
    unserved("presence_penalty", "leave it out"),
    unserved("repetition_penalty", "leave it out").but(|value| value.as_f64() == Some(1.0)),
    unserved("response_format", "answers are plain text").but(|value| value["type"] == "text"),
    unserved("stop_token_ids", "use `stop`"),
    unserved("suffix", "text is continued at its end only"),
    unserved("tool_choice", "this server calls no tools").but(|value| *value == "none" || *value == "auto"),
    unserved("tools", "this server calls no tools"),
    unserved("top_k", "use `top_p`").but(|value| *value == -1),
    unserved("use_beam_search", "ask for `n` and choose yourself"),
    unserved("web_search_options", "this server searches nothing"),
];

/// Whether a value asks for nothing.
fn asks_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

/// The first field that is refused.
struct Refused(Option<&'static Unserved>);

impl<'de> Deserialize<'de> for Refused {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct It;
        impl<'de> Visitor<'de> for It {
            type Value = Refused;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Refused, A::Error> {
                let mut refused = None;
                while let Some(name) = fields.next_key::<Cow<'_, str>>()? {
                    let Some(unserved) = ALL.iter().find(|unserved| unserved.field == name) else {
                        fields.next_value::<IgnoredAny>()?;
                        continue;
                    };
                    let value: Value = fields.next_value()?;
                    if !asks_nothing(&value) && !(unserved.harmless)(&value) {
                        refused = refused.or(Some(unserved));
                    }
                }
                Ok(Refused(refused))
            }
        }
        from.deserialize_map(It)
    }
}

/// Refuses a body that asks for what is not served.
pub(crate) fn check(text: &[u8]) -> Result<(), ApiError> {
    match serde_json::from_slice(text) {
        Ok(Refused(None)) => Ok(()),
        Ok(Refused(Some(Unserved { field, instead, .. }))) => {
            Err(ApiError::field(*field, format!("{field} is not served: {instead}")))
        }
        Err(error) => Err(ApiError::body(format!("the body is no request: {error}"))),
    }
}
