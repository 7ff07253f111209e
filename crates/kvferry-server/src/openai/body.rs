//! A request's body, read as JSON: types only. What is wrong is told with the name of the field.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{
        Error, MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, SeqAccessDeserializer},
    },
};

use super::{error::ApiError, unserved};

/// The fields of both kinds of request; what only the other kind has is ignored, as are fields that nobody knows.
#[derive(Debug, Deserialize)]
pub(crate) struct Body {
    pub(crate) model: Option<String>,
    pub(crate) prompt: Option<Prompts>,
    pub(crate) messages: Option<Vec<Object<MessageBody>>>,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) max_completion_tokens: Option<u32>,
    pub(crate) n: Option<u32>,
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<Object<StreamOptions>>,
    pub(crate) stop: Option<Stops>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) seed: Option<i64>,
    pub(crate) logprobs: Option<Logprobs>,
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) return_token_ids: Option<bool>,
}

impl Body {
    /// Reads a body.
    ///
    /// # Errors
    /// What is no JSON, has a wrong type, or asks for what is not served.
    pub(crate) fn read(text: &[u8]) -> Result<Self, ApiError> {
        let mut json = serde_json::Deserializer::from_slice(text);
        let Object(body) = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            let path = error.path().to_string();
            let said = error.into_inner();
            if !said.is_data() {
                return ApiError::body(format!("the body is not valid JSON: {said}"));
            }
            let said = said.to_string();
            let what = said.rsplit_once(" at line ").map_or(said.as_str(), |(what, _)| what);
            match path.as_str() {
                "." => ApiError::body(format!("the body is no request: {what}")),
                path => ApiError::field(path, format!("{path}: {what}")),
            }
        })?;
        json.end().map_err(|error| ApiError::body(format!("the body is not valid JSON: {error}")))?;
        unserved::check(text)?;
        Ok(body)
    }
}

/// A JSON object. By itself serde also takes a list, for the fields in their order.
#[derive(Debug)]
pub(crate) struct Object<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct It<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for It<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields)).map(Object)
            }
        }
        from.deserialize_map(It(PhantomData))
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct MessageBody {
    pub(crate) role: String,
    pub(crate) content: Option<Content>,
    pub(crate) tool_calls: Option<serde_json::Value>,
}

/// A prompt, as text or as ids.
#[derive(Debug)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// One prompt or several.
#[derive(Debug)]
pub(crate) struct Prompts(pub(crate) Vec<Prompt>);

/// The first element of a list decides of what kind the others are.
enum First {
    Id(u32),
    Prompt(Prompt),
}

impl<'de> Deserialize<'de> for First {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct It;
        impl<'de> Visitor<'de> for It {
            type Value = First;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or a list of token ids")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<First, E> {
                Ok(First::Prompt(Prompt::Text(text.to_owned())))
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<First, E> {
                u32::try_from(id).map(First::Id).map_err(|_| E::custom(format!("{id} is no token id")))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<First, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(|ids| First::Prompt(Prompt::Ids(ids)))
            }
        }
        from.deserialize_any(It)
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct It;
        impl<'de> Visitor<'de> for It {
            type Value = Prompts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a list of strings, a list of token ids or a list of such lists")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts(vec![Prompt::Text(text.to_owned())]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
                Ok(Prompts(match list.next_element()? {
                    None => vec![Prompt::Ids(Vec::new())],
                    Some(First::Id(id)) => vec![Prompt::Ids(rest(list, id, |id| id)?)],
                    Some(First::Prompt(first @ Prompt::Text(_))) => rest(list, first, Prompt::Text)?,
                    Some(First::Prompt(first @ Prompt::Ids(_))) => rest(list, first, Prompt::Ids)?,
                }))
            }
        }
        from.deserialize_any(It)
    }
}

/// A list, of which the first element was read already.
fn rest<'de, A: SeqAccess<'de>, T: Deserialize<'de>, U>(
    mut list: A,
    first: U,
    each: impl Fn(T) -> U,
) -> Result<Vec<U>, A::Error> {
    let mut all = vec![first];
    while let Some(next) = list.next_element()? {
        all.push(each(next));
    }
    Ok(all)
}

/// What a message says: a string, or parts of type `text`.
#[derive(Debug)]
pub(crate) struct Content(pub(crate) String);

#[derive(Deserialize)]
struct AnyPart {
    r#type: String,
    text: Option<String>,
}

#[derive(Deserialize)]
#[serde(try_from = "Object<AnyPart>")]
struct TextPart(String);

impl TryFrom<Object<AnyPart>> for TextPart {
    type Error = String;

    fn try_from(Object(part): Object<AnyPart>) -> Result<Self, String> {
        match part {
            AnyPart { r#type, text: Some(text) } if r#type == "text" => Ok(Self(text)),
            AnyPart { r#type, .. } => {
                Err(format!("a part of type {type:?} is not served; send {{\"type\":\"text\",\"text\":...}}"))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct It;
        impl<'de> Visitor<'de> for It {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of text parts")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Content, A::Error> {
                let mut text = String::new();
                while let Some(TextPart(part)) = parts.next_element()? {
                    text += &part;
                }
                Ok(Content(text))
            }
        }
        from.deserialize_any(It)
    }
}

/// Texts that end an answer: one, or a list.
#[derive(Debug)]
pub(crate) struct Stops(pub(crate) Vec<String>);

impl<'de> Deserialize<'de> for Stops {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct It;
        impl<'de> Visitor<'de> for It {
            type Value = Stops;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Stops, E> {
                Ok(Stops(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Stops, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(Stops)
            }
        }
        from.deserialize_any(It)
    }
}

/// A number for completions, a flag for chats.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Logprobs {
    Flag(bool),
    Count(u64),
}

impl<'de> Deserialize<'de> for Logprobs {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct It;
        impl Visitor<'_> for It {
            type Value = Logprobs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true or false for a chat, a number from 0 to 5 for a completion")
            }

            fn visit_bool<E: Error>(self, flag: bool) -> Result<Logprobs, E> {
                Ok(Logprobs::Flag(flag))
            }

            fn visit_u64<E: Error>(self, count: u64) -> Result<Logprobs, E> {
                Ok(Logprobs::Count(count))
            }
        }
        from.deserialize_any(It)
    }
}
