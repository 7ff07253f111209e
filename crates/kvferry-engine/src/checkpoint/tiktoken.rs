//! `tiktoken.model`: a byte-level BPE as lines of `base64(token) rank`, as Kimi's folders have it. The file says neither
//! how text is cut nor which tokens are special; the first is the model's code, the second `tokenizer_config.json`.

use super::{
    Item, LoadError, ModelConfig,
    error::printable,
    hf::{self, Json},
};
use crate::tokenizer::{PreTokenizer, Tokenizer, Vocabulary};
use serde_json::Value;
use std::{collections::HashMap, path::Path};

/// Longer tokens are nobody's vocabulary: every cut of a token is looked at.
const LONGEST: usize = 512;

/// The tokenizer of a folder that has such a file.
pub(super) fn tokenizer(folder: &Path, config: &ModelConfig) -> Result<Option<Tokenizer>, LoadError> {
    let path = folder.join("tiktoken.model");
    let Some(text) = hf::text_if_there(&path)? else { return Ok(None) };
    let file = path.display().to_string();
    let ranks = ranks(&file, &text, config.vocab)?;
    let merges = merges(&ranks);
    let mut ids: HashMap<String, u32> =
        ranks.into_iter().map(|(token, rank)| (spelled(&token), rank)).collect();
    let settings = Json::read_if_there(&folder.join("tokenizer_config.json"))?;
    let (mut special, mut verbatim) = (Vec::new(), Vec::new());
    if let Some(Value::Object(added)) = settings.as_ref().and_then(|json| json.value("added_tokens_decoder"))
    {
        for (id, token) in added {
            let content = token.get("content").and_then(Value::as_str);
            let known =
                id.parse().ok().filter(|id: &u32| usize::try_from(*id).is_ok_and(|id| id < config.vocab));
            let (Some(content), Some(id)) = (content, known) else {
                let reason = "it is no token of this vocabulary with a text".to_owned();
                return Err(LoadError::damaged(
                    &file,
                    Item::key(&format!("added_tokens_decoder.{id}")),
                    reason,
                ));
            };
            ids.insert(content.to_owned(), id);
            let list = if token.get("special").and_then(Value::as_bool) == Some(true) {
                &mut special
            } else {
                &mut verbatim
            };
            list.push(content.to_owned());
        }
    }
    let vocabulary = Vocabulary { ids, merges, pre: PreTokenizer::Kimi, special, verbatim, begin: None };
    Tokenizer::byte_level(vocabulary)
        .map(Some)
        .map_err(|error| LoadError::damaged(&file, Item::Header, error.to_string()))
}

/// Tokens and their ranks.
fn ranks(file: &str, text: &str, vocab: usize) -> Result<HashMap<Vec<u8>, u32>, LoadError> {
    let mut ranks = HashMap::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.is_empty()) {
        let read = || {
            let (token, rank) = line.split_once(' ')?;
            let rank =
                rank.parse().ok().filter(|rank: &u32| usize::try_from(*rank).is_ok_and(|rank| rank < vocab));
            Some((base64(token).filter(|token| (1..=LONGEST).contains(&token.len()))?, rank?))
        };
        let wrong = |what: &str| {
            let reason = format!("line {number}, {}: {what}", printable(line));
            LoadError::damaged(file, Item::Header, reason)
        };
        let (token, rank) = read().ok_or_else(|| wrong("it is no token and its rank in the vocabulary"))?;
        if ranks.insert(token, rank).is_some() {
            return Err(wrong("the token occurs twice"));
        }
    }
    Ok(ranks)
}

/// Every way to put a token together from two, the most urgent first: of two pairs the one goes first whose result has
/// the lower rank.
fn merges(ranks: &HashMap<Vec<u8>, u32>) -> Vec<(String, String)> {
    let mut ordered: Vec<(&Vec<u8>, u32)> = ranks.iter().map(|(token, rank)| (token, *rank)).collect();
    ordered.sort_unstable_by_key(|(_, rank)| *rank);
    let mut merges = Vec::new();
    for (token, _) in ordered {
        let cut = |at| {
            let (left, right) = token.split_at(at);
            Some((ranks.get(left)?, ranks.get(right)?, left, right))
        };
        let mut cuts: Vec<_> = (1..token.len()).filter_map(cut).collect();
        cuts.sort_unstable();
        merges.extend(cuts.into_iter().map(|(_, _, left, right)| (spelled(left), spelled(right))));
    }
    merges
}

/// Bytes in the byte-level alphabet: printable latin-1 as itself, the others from U+0100 on, in order.
fn spelled(bytes: &[u8]) -> String {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let letter = |byte: u8| {
        let others = (0..byte).filter(|other| !printable(*other)).count();
        if printable(byte) {
            char::from(byte)
        } else {
            u32::try_from(others).ok().and_then(|n| char::from_u32(256 + n)).unwrap_or('?')
        }
    };
    bytes.iter().copied().map(letter).collect()
}

/// Standard base64 with padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let digits = text.trim_end_matches('=');
    if text.len() - digits.len() > 2 {
        return None;
    }
    for group in digits.as_bytes().chunks(4) {
        let mut bits = 0_u32;
        for byte in group {
            bits = bits << 6 | u32::from(digit(*byte)?);
        }
        let [_, first, second, third] = (bits << (6 * (4 - group.len()))).to_be_bytes();
        bytes.extend([first, second, third].into_iter().take(group.len() - 1));
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_any_length() {
        for (text, bytes) in [("IQ==", &b"!"[..]), ("aGk=", b"hi"), ("4pS8", "┼".as_bytes()), ("", b"")] {
            assert_eq!(base64(text).as_deref(), Some(bytes), "{text}");
        }
        for text in ["I", "IQ=", "I===", "I!==", "IQ==IQ=="] {
            assert_eq!(base64(text), None, "{text}");
        }
    }

    #[test]
    fn bytes_are_spelled_in_the_byte_level_alphabet() {
        assert_eq!(spelled(b" a\n"), "Ġa\u{10a}");
        assert_eq!(spelled("é".as_bytes()), "Ã©");
        assert_eq!(spelled(&[0xad, 0x7f, 0x00]), "\u{143}\u{121}\u{100}");
    }
}
