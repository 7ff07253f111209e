//! Text to token ids and back.
//!
//! Two kinds: the model's own tokenizer (byte-level BPE from GGUF metadata, a `tokenizer.json` or a `tiktoken.model`), and latin-1
//! bytes for models whose vocabulary is the 256 bytes. It is *not* for chat formatting ([`crate::chat`]).

#![forbid(unsafe_code)]

use kvferry_plan::Blame;
use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
    fmt, panic,
    sync::Arc,
};
use tokenizers::{
    AddedToken, DecoderWrapper, Encoding, Model as _, NormalizerWrapper, OffsetType, PostProcessorWrapper,
    PreTokenizer as _, PreTokenizerWrapper, SplitDelimiterBehavior,
    models::bpe::BPE,
    normalizers::NFC,
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
    processors::template::TemplateProcessing,
};

/// How Qwen 2 cuts a text before merging: contractions, words with one leading character, single digits,
/// punctuation, and runs of white space.
const QWEN2_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How Kimi cuts a text before merging: runs of Han; words of other letters with one leading character, capitals before
/// small letters, and contractions; up to three digits; punctuation; and runs of white space.
const KIMI_SPLIT: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Keeps a special token from being found: a code point that Unicode reserves for such uses and that no text has.
const SHIELD: char = '\u{10FFFE}';

/// Why text could not be turned into tokens, or a tokenizer could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A character outside of latin-1, for a model that reads bytes.
    #[error(
        "character {character:?} at byte {at} is outside of latin-1, which is all that this model reads; \
         remove it"
    )]
    NotLatin1 {
        /// The character.
        character: char,
        /// Its offset in the text, in bytes.
        at: usize,
    },
    /// The tokenizer itself could not take the text.
    #[error("the tokenizer cannot take this text: {0}; shorten or split it")]
    Text(String),
    /// The tokenizer's definition contradicts itself.
    #[error("the tokenizer is not usable: {0}")]
    Definition(String),
}

impl TokenizerError {
    /// Who can do something about it.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::NotLatin1 { .. } | Self::Text(_) => Blame::Caller,
            Self::Definition(_) => Blame::Environment,
        }
    }
}

/// A cut of the text before merging, as GGUF files name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PreTokenizer {
    /// Words, numbers and punctuation, each with one leading space.
    Gpt2,
    /// As GPT-2, every digit on its own.
    SmolLm,
    /// As its pattern says; text is normalised to NFC.
    Qwen2,
    /// As its pattern says.
    Kimi,
}

impl PreTokenizer {
    /// Files without a name, or with `default`, come from converters that did not know better than GPT-2.
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "gpt2" | "gpt-2" | "default" => Some(Self::Gpt2),
            "smollm" => Some(Self::SmolLm),
            "qwen2" => Some(Self::Qwen2),
            _ => None,
        }
    }

    fn build(self) -> Result<PreTokenizerWrapper, tokenizers::Error> {
        let byte_level = ByteLevel::default().add_prefix_space(false);
        let parts: Vec<PreTokenizerWrapper> = match self {
            Self::Gpt2 => vec![byte_level.into()],
            Self::SmolLm => vec![Digits::new(true).into(), byte_level.into()],
            Self::Qwen2 | Self::Kimi => {
                let pattern = if self == Self::Kimi { KIMI_SPLIT } else { QWEN2_SPLIT };
                let pattern = SplitPattern::Regex(pattern.to_owned());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?;
                vec![split.into(), byte_level.use_regex(false).into()]
            }
        };
        Ok(Sequence::new(parts).into())
    }
}

/// A byte-level BPE tokenizer as data.
pub(crate) struct Vocabulary {
    /// Ids of tokens, written in the byte-level alphabet.
    pub(crate) ids: HashMap<String, u32>,
    /// Pairs to merge, most urgent first.
    pub(crate) merges: Vec<(String, String)>,
    /// How text is cut before merging.
    pub(crate) pre: PreTokenizer,
    /// Control tokens: found in text, left out when decoding.
    pub(crate) special: Vec<String>,
    /// Tokens that are found in text before merging.
    pub(crate) verbatim: Vec<String>,
    /// Begins every text that is encoded with special tokens.
    pub(crate) begin: Option<String>,
}

#[derive(Clone)]
enum Kind {
    Latin1,
    Model(Arc<tokenizers::Tokenizer>),
}

/// A tokenizer; cloning shares it.
#[derive(Clone)]
pub struct Tokenizer(Kind);

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Latin1 => "Tokenizer(latin-1)",
            Kind::Model(_) => "Tokenizer(model)",
        })
    }
}

impl Tokenizer {
    /// Token `n` is the character `n` of latin-1.
    ///
    /// ```
    /// use kvferry_engine::tokenizer::Tokenizer;
    /// let bytes = Tokenizer::latin1();
    /// assert_eq!(bytes.encode("aé", true).unwrap(), [97, 233]);
    /// assert_eq!(bytes.decode(&[97, 233]), "aé");
    /// assert!(bytes.encode("→", true).is_err());
    /// ```
    #[must_use]
    pub fn latin1() -> Self {
        Self(Kind::Latin1)
    }

    /// Builds a byte-level BPE tokenizer.
    pub(crate) fn byte_level(vocabulary: Vocabulary) -> Result<Self, TokenizerError> {
        let Vocabulary { ids, merges, pre, special, verbatim, begin } = vocabulary;
        let definition = |error: tokenizers::Error| TokenizerError::Definition(error.to_string());
        // The library takes for granted that a merged token is no longer than the longest token.
        let mut merged = String::new();
        for (first, second) in &merges {
            merged.clear();
            merged.extend([first.as_str(), second]);
            if let Some(absent) = [first, second, &merged].into_iter().find(|token| !ids.contains_key(*token))
            {
                return Err(TokenizerError::Definition(format!("merges use {absent:?}, which is no token")));
            }
        }
        let begin = begin.and_then(|token| ids.get(&token).map(|id| (token.clone(), *id)));
        let bpe = BPE::builder()
            .vocab_and_merges(ids.into_iter().collect::<tokenizers::models::bpe::Vocab>(), merges)
            // A piece that is a token is not put together: so do the readers of `tiktoken.model`.
            .ignore_merges(pre == PreTokenizer::Kimi);
        let mut model = tokenizers::Tokenizer::new(bpe.build().map_err(definition)?);
        model.with_pre_tokenizer(Some(pre.build().map_err(definition)?));
        model.with_decoder(Some(DecoderWrapper::from(ByteLevel::default())));
        if pre == PreTokenizer::Qwen2 {
            model.with_normalizer(Some(NormalizerWrapper::from(NFC))).map_err(definition)?;
        }
        if let Some((token, id)) = begin {
            let template = TemplateProcessing::builder()
                .try_single(vec![token.clone(), "$A".to_owned()])
                .map_err(TokenizerError::Definition)?
                .special_tokens(vec![(token, id)])
                .build()
                .map_err(|error| TokenizerError::Definition(error.to_string()))?;
            model.with_post_processor(Some(PostProcessorWrapper::from(template)));
        }
        let added = |tokens: Vec<String>, special| {
            tokens.into_iter().map(move |token| AddedToken::from(token, special).normalized(false))
        };
        model.add_special_tokens(added(special, true)).map_err(definition)?;
        model.add_tokens(added(verbatim, false)).map_err(definition)?;
        Ok(Self(Kind::Model(Arc::new(model))))
    }

    /// Reads a `tokenizer.json`.
    pub(crate) fn from_json(json: &[u8]) -> Result<Self, TokenizerError> {
        // The library panics on some definitions (merges longer than any token), and a file may hold anything.
        let built = panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(json));
        let model = built.map_err(|_| TokenizerError::Definition("it contradicts itself".to_owned()))?;
        let model = model.map_err(|error| TokenizerError::Definition(error.to_string()))?;
        Ok(Self(Kind::Model(Arc::new(model))))
    }

    /// The tokens of a text. Special tokens that are spelled out in the text are recognised, unless they are
    /// [shielded](Self::shield); `special` also adds those that the model wants around every text (a chat template has written them already).
    ///
    /// # Errors
    /// [`TokenizerError::NotLatin1`] or [`TokenizerError::Text`], when the text cannot be taken.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        match &self.0 {
            Kind::Latin1 => text
                .char_indices()
                .map(|(at, character)| {
                    u8::try_from(character)
                        .map(u32::from)
                        .map_err(|_| TokenizerError::NotLatin1 { character, at })
                })
                .collect(),
            Kind::Model(model) => {
                let encoding = match text.contains(SHIELD) {
                    true => encode_shielded(model, text, special),
                    false => model.encode_fast(text, special),
                };
                let encoding = encoding.map_err(|error| TokenizerError::Text(error.to_string()))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The same text, such that [`Self::encode`] takes the special tokens that are spelled out in it for text. It may then
    /// be put between real ones: what strangers write begins and ends no turns of a conversation.
    ///
    /// ```
    /// use kvferry_engine::tokenizer::Tokenizer;
    /// // A tokenizer without special tokens has nothing to protect.
    /// assert_eq!(Tokenizer::latin1().shield("<|im_end|>"), "<|im_end|>");
    /// ```
    #[must_use]
    pub fn shield<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let Kind::Model(model) = &self.0 else { return text.into() };
        // After the first character of every special token.
        let mut cuts = BTreeSet::new();
        for token in model.get_added_vocabulary().get_added_tokens_decoder().values() {
            let Some(first) = token.content.chars().next().filter(|_| token.special) else { continue };
            let mut from = 0;
            while let Some(found) = text.get(from..).and_then(|rest| rest.find(&token.content)) {
                from += found + first.len_utf8();
                cuts.insert(from);
            }
        }
        if cuts.is_empty() {
            return text.into();
        }
        let (mut shielded, mut begun) = (String::with_capacity(text.len() + 4 * cuts.len()), 0);
        for cut in cuts {
            shielded.push_str(text.get(begun..cut).unwrap_or_default());
            shielded.push(SHIELD);
            begun = cut;
        }
        (shielded + text.get(begun..).unwrap_or_default()).into()
    }

    /// The text of tokens: special tokens and ids outside of the vocabulary are left out, bytes that are no UTF-8
    /// become U+FFFD.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.0 {
            Kind::Latin1 => ids.iter().filter_map(|id| u8::try_from(*id).ok()).map(char::from).collect(),
            Kind::Model(model) => model.decode(ids, true).unwrap_or_default(),
        }
    }

    /// What one token stands for, as bytes: it may be a part of a character. Special tokens stand for how they are
    /// written. `None` for an id that is no token, or whose bytes depend on its neighbours.
    ///
    /// ```
    /// use kvferry_engine::tokenizer::Tokenizer;
    /// assert_eq!(Tokenizer::latin1().token_bytes(233).unwrap(), "é".as_bytes());
    /// assert_eq!(Tokenizer::latin1().token_bytes(256), None);
    /// ```
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let model = match &self.0 {
            Kind::Latin1 => return u8::try_from(id).ok().map(|byte| char::from(byte).to_string().into()),
            Kind::Model(model) => model,
        };
        let token = model.id_to_token(id)?;
        if model.get_added_vocabulary().get_vocab().contains_key(&token) {
            return Some(token.into());
        }
        if matches!(model.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return token.chars().map(byte_of).collect();
        }
        let text = model.decode(&[id], false).ok()?;
        (!text.contains(char::REPLACEMENT_CHARACTER)).then(|| text.into())
    }

    /// Whether [`Self::decode`] does not leave the token out.
    fn shows(&self, id: u32) -> bool {
        match &self.0 {
            Kind::Latin1 => u8::try_from(id).is_ok(),
            Kind::Model(model) => model
                .id_to_token(id)
                .is_some_and(|token| !model.get_added_vocabulary().is_special_token(&token)),
        }
    }

    /// Decodes tokens one by one.
    #[must_use]
    pub fn detokenizer(&self) -> Detokenizer {
        Detokenizer { tokenizer: self.clone(), window: Vec::new(), shown: 0 }
    }
}

/// Encodes as the library does, with one step more: once the special tokens are found, what kept others from being found
/// is taken out of the text between them.
fn encode_shielded(
    model: &tokenizers::Tokenizer,
    text: &str,
    special: bool,
) -> Result<Encoding, tokenizers::Error> {
    let mut pieces = model.get_added_vocabulary().extract_and_normalize(model.get_normalizer(), text);
    pieces.normalize(|piece| piece.replace(SHIELD, ""))?;
    if let Some(pre_tokenizer) = model.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut pieces)?;
    }
    pieces.tokenize(|piece| model.get_model().tokenize(piece.get()))?;
    model.post_process(pieces.into_encoding(None, 0, OffsetType::None)?, None, special)
}

/// Decodes a stream of tokens: what [`push`](Self::push) returns, concatenated, and the rest from
/// [`finish`](Self::finish) are the text of all tokens. No piece ends inside of a character.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    /// The last tokens: decoded together, because a token's text may depend on those before it.
    window: Vec<u32>,
    /// Bytes of the window's text that were returned already.
    shown: usize,
}

impl Detokenizer {
    /// The window is cut to `KEPT` tokens when it reaches `LONGEST`. A character has at most four bytes and a
    /// token in the window at least one, so a character that is not complete began in the last three.
    const LONGEST: usize = 12;
    const KEPT: usize = 4;

    /// Takes a token; answers the text that is certain now, often empty.
    ///
    /// ```
    /// use kvferry_engine::tokenizer::Tokenizer;
    /// let mut stream = Tokenizer::latin1().detokenizer();
    /// assert_eq!(stream.push(65), "A");
    /// assert_eq!(stream.finish(), "");
    /// ```
    pub fn push(&mut self, id: u32) -> String {
        if !self.tokenizer.shows(id) {
            return String::new();
        }
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window);
        let end = certain(&text);
        let new = text.get(self.shown..end).unwrap_or_default().to_owned();
        self.shown = self.shown.max(end);
        if self.window.len() >= Self::LONGEST {
            self.window.drain(..self.window.len() - Self::KEPT);
            self.shown = certain(&self.tokenizer.decode(&self.window));
        }
        new
    }

    /// The text that was held back, at the end of the stream.
    pub fn finish(&mut self) -> String {
        let text = self.tokenizer.decode(&self.window);
        let rest = text.get(self.shown..).unwrap_or_default().to_owned();
        (self.window, self.shown) = (Vec::new(), 0);
        rest
    }
}

/// The byte that a character of the byte-level alphabet stands for: printable bytes stand for themselves, the others
/// follow from U+0100 on.
fn byte_of(character: char) -> Option<u8> {
    let byte = match u32::from(character) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code,
        code @ 0x100..=0x120 => code - 0x100,
        code @ 0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// The length of a text without a replacement character at its end: it may stand for the beginning of a
/// character whose other bytes are still to come. Earlier ones cannot change any more.
fn certain(text: &str) -> usize {
    text.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(text).len()
}
