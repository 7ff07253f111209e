//! Tokenizer and chat template of a checkpoint.

use super::{
    Arch, Item, LoadError, ModelConfig,
    error::printable,
    gguf::Metadata,
    hf::{self, Json},
    store::Store,
    tiktoken,
};
use crate::{
    chat::ChatTemplate,
    tokenizer::{PreTokenizer, Tokenizer, Vocabulary},
};
use serde_json::Value;
use std::{
    collections::{HashMap, hash_map::Entry},
    path::{Path, PathBuf},
};

const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const TYPES: &str = "tokenizer.ggml.token_type";
const TEMPLATE: &str = "tokenizer.chat_template";
/// A vocabulary of this size without a tokenizer is that of latin-1 bytes.
const LATIN1: usize = 256;

/// Where a checkpoint's texts come from.
#[derive(Debug)]
pub(super) enum Texts {
    None,
    Gguf(Metadata),
    Folder(PathBuf),
}

impl Texts {
    pub(super) fn tokenizer(
        &self,
        store: &Store,
        config: &ModelConfig,
    ) -> Result<Option<Tokenizer>, LoadError> {
        let found = match self {
            Self::None => None,
            Self::Gguf(metadata) => gguf_tokenizer(metadata, file_bytes(store), config)?,
            Self::Folder(folder) => match folder_tokenizer(folder)? {
                // Whose text is cut in another way would be read wrongly, and nobody would notice.
                None if config.arch == Arch::KimiLinear => tiktoken::tokenizer(folder, config)?,
                found => found,
            },
        };
        Ok(found.or_else(|| (config.vocab == LATIN1).then(Tokenizer::latin1)))
    }

    pub(super) fn chat_template(&self, store: &Store) -> Result<Option<ChatTemplate>, LoadError> {
        match self {
            Self::None => Ok(None),
            Self::Gguf(metadata) => gguf_template(metadata, file_bytes(store)),
            Self::Folder(folder) => folder_template(folder),
        }
    }
}

/// A GGUF checkpoint is one file.
fn file_bytes(store: &Store) -> &[u8] {
    store.files.first().map_or(&[], |(_, blob)| blob.bytes())
}

/// `None` for kinds of tokenizer that are not byte-level BPE as known here: a wrong split would be silent.
fn gguf_tokenizer(
    metadata: &Metadata,
    bytes: &[u8],
    config: &ModelConfig,
) -> Result<Option<Tokenizer>, LoadError> {
    let Some(model) = metadata.text("tokenizer.ggml.model")? else { return Ok(None) };
    let pre = metadata.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let known = PreTokenizer::named(pre).filter(|_| model == "gpt2");
    let Some(pre) = known else {
        tracing::warn!(
            file = metadata.file(), model = %printable(model), pre = %printable(pre),
            "this tokenizer is not supported; the model is served by ids"
        );
        return Ok(None);
    };
    let damaged = |key: &str, reason: String| LoadError::damaged(metadata.file(), Item::key(key), reason);
    let mut ids = HashMap::new();
    for (id, token) in (0u32..).zip(metadata.texts(bytes, TOKENS)?.ok_or_else(|| metadata.missing(TOKENS))?) {
        match ids.entry(token.to_owned()) {
            Entry::Vacant(free) => free.insert(id),
            Entry::Occupied(taken) => {
                return Err(damaged(TOKENS, format!("token {id} repeats token {}", taken.get())));
            }
        };
    }
    if ids.len() > config.vocab {
        return Err(damaged(
            TOKENS,
            format!("{} tokens exceed the vocabulary of {}", ids.len(), config.vocab),
        ));
    }
    let merges = metadata.texts(bytes, MERGES)?.ok_or_else(|| metadata.missing(MERGES))?;
    let merges = merges.enumerate().map(|(number, line)| {
        let pair = line.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()));
        pair.ok_or_else(|| damaged(MERGES, format!("merge {number} is not a pair of tokens")))
    });
    let merges = merges.collect::<Result<Vec<_>, _>>()?;
    let mut special = Vec::new();
    let mut verbatim = Vec::new();
    if let Some(types) = metadata.integers(bytes, TYPES)? {
        for (token, kind) in metadata.texts(bytes, TOKENS)?.into_iter().flatten().zip(types) {
            match kind {
                3 => special.push(token.to_owned()),
                4 => verbatim.push(token.to_owned()),
                _ => {}
            }
        }
    }
    let begin = match metadata.flag("tokenizer.ggml.add_bos_token")? {
        Some(true) => token_text(metadata, bytes, "tokenizer.ggml.bos_token_id")?,
        _ => None,
    };
    let vocabulary = Vocabulary { ids, merges, pre, special, verbatim, begin };
    Tokenizer::byte_level(vocabulary).map(Some).map_err(|error| damaged(MERGES, error.to_string()))
}

/// The text of the token that a key names.
fn token_text(metadata: &Metadata, bytes: &[u8], key: &str) -> Result<Option<String>, LoadError> {
    let Some(id) = metadata.number(key)? else { return Ok(None) };
    let index = usize::try_from(id).unwrap_or(usize::MAX);
    Ok(metadata.texts(bytes, TOKENS)?.and_then(|mut tokens| tokens.nth(index)).map(ToOwned::to_owned))
}

fn gguf_template(metadata: &Metadata, bytes: &[u8]) -> Result<Option<ChatTemplate>, LoadError> {
    let Some(source) = metadata.text(TEMPLATE)? else { return Ok(None) };
    let bos = token_text(metadata, bytes, "tokenizer.ggml.bos_token_id")?;
    let eos = token_text(metadata, bytes, "tokenizer.ggml.eos_token_id")?;
    template(metadata.file(), TEMPLATE, source, bos, eos)
}

fn template(
    file: &str,
    key: &str,
    source: &str,
    bos: Option<String>,
    eos: Option<String>,
) -> Result<Option<ChatTemplate>, LoadError> {
    let broken = |error: crate::chat::ChatError| LoadError::damaged(file, Item::key(key), error.to_string());
    ChatTemplate::new(source, bos, eos).map(Some).map_err(broken)
}

fn folder_tokenizer(folder: &Path) -> Result<Option<Tokenizer>, LoadError> {
    let path = folder.join("tokenizer.json");
    let Some(json) = hf::text_if_there(&path)? else { return Ok(None) };
    Tokenizer::from_json(json.as_bytes())
        .map(Some)
        .map_err(|error| LoadError::damaged(&path.display().to_string(), Item::Header, error.to_string()))
}

/// `chat_template.jinja` (newer) or `chat_template` in `tokenizer_config.json`: a text, or a list of named ones
/// of which `default` is taken.
fn folder_template(folder: &Path) -> Result<Option<ChatTemplate>, LoadError> {
    let settings = folder.join("tokenizer_config.json");
    let file = settings.display().to_string();
    let settings = Json::read_if_there(&settings)?;
    let value = |key: &str| settings.as_ref().and_then(|json| json.value(key));
    // A token is a text, or an object with its text in `content`.
    let token = |key: &str| {
        let value = value(key)?;
        value.as_str().or_else(|| value.get("content")?.as_str()).map(ToOwned::to_owned)
    };
    let (bos, eos) = (token("bos_token"), token("eos_token"));
    let path = folder.join("chat_template.jinja");
    if let Some(source) = hf::text_if_there(&path)? {
        return template(&path.display().to_string(), "chat_template", &source, bos, eos);
    }
    let named = |list: &Vec<Value>| {
        let default = |entry: &&Value| entry.get("name").and_then(Value::as_str) == Some("default");
        list.iter().find(default)?.get("template")?.as_str().map(ToOwned::to_owned)
    };
    let source = match value("chat_template") {
        Some(Value::String(source)) => Some(source.clone()),
        Some(Value::Array(list)) => named(list),
        _ => None,
    };
    source.map_or(Ok(None), |source| template(&file, "chat_template", &source, bos, eos))
}
