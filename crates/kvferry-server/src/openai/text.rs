//! Tokens to text as it may be shown: whole characters, nothing of a stop string, each token with the text that it is in.

use std::collections::VecDeque;

use kvferry_engine::tokenizer::Detokenizer;

use super::stops::StopFinder;
use crate::Chosen;

/// A token that may be shown.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spoken {
    /// The token.
    pub(crate) chosen: Chosen,
    /// Characters of the answer before it.
    pub(crate) offset: usize,
}

/// What may be shown after a token.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Shown {
    /// More of the answer.
    pub(crate) text: String,
    /// Tokens whose text is in the answer by now.
    pub(crate) tokens: Vec<Spoken>,
    /// A stop string was found: the answer is over.
    pub(crate) stopped: bool,
}

/// A token that waits for its text, which lies at these bytes of the answer.
struct Waiting {
    spoken: Spoken,
    start: usize,
    end: usize,
}

/// Assembles one answer.
pub(crate) struct Assembler {
    /// None for a model without texts.
    detokenizer: Option<Detokenizer>,
    stops: StopFinder,
    waiting: VecDeque<Waiting>,
    /// Bytes and characters of text that the tokens so far have given.
    bytes: usize,
    characters: usize,
    /// Bytes that were shown.
    shown: usize,
}

impl Assembler {
    /// Begins an answer that ends before any of `stops`.
    pub(crate) fn new(detokenizer: Option<Detokenizer>, stops: Vec<String>) -> Self {
        let stops = StopFinder::new(stops);
        Self { detokenizer, stops, waiting: VecDeque::new(), bytes: 0, characters: 0, shown: 0 }
    }

    /// Takes a token.
    pub(crate) fn push(&mut self, chosen: Chosen) -> Shown {
        let piece = self.detokenizer.as_mut().map(|d| d.push(chosen.id)).unwrap_or_default();
        let (start, offset) = (self.bytes, self.characters);
        self.count(&piece);
        self.waiting.push_back(Waiting { spoken: Spoken { chosen, offset }, start, end: self.bytes });
        let (text, stopped) = self.stops.push(&piece);
        self.show(text, stopped)
    }

    /// What is left when no more tokens come.
    pub(crate) fn finish(&mut self) -> Shown {
        let rest = self.detokenizer.as_mut().map(Detokenizer::finish).unwrap_or_default();
        self.count(&rest);
        let (mut text, stopped) = self.stops.push(&rest);
        if !stopped {
            text += &self.stops.finish();
        }
        self.show(text, stopped)
    }

    fn count(&mut self, piece: &str) {
        self.bytes += piece.len();
        self.characters += piece.chars().count();
    }

    /// A token is shown with the last byte of its text; the one in which a stop string begins, with what is before it.
    fn show(&mut self, text: String, stopped: bool) -> Shown {
        self.shown += text.len();
        let shown = self.shown;
        let may = |waiting: &Waiting| waiting.end <= shown || (stopped && waiting.start < shown);
        let mut tokens = Vec::new();
        while self.waiting.front().is_some_and(may) {
            tokens.extend(self.waiting.pop_front().map(|waiting| waiting.spoken));
        }
        Shown { text, tokens, stopped }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_engine::tokenizer::Tokenizer;

    fn assembler(stops: &[&str]) -> Assembler {
        let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
        Assembler::new(Some(Tokenizer::latin1().detokenizer()), stops)
    }

    fn push(assembler: &mut Assembler, byte: u8) -> (String, String, bool) {
        let chosen = Chosen { id: byte.into(), logprob: 0.0, top: Vec::new() };
        let shown = assembler.push(chosen);
        let tokens = shown.tokens.iter().map(|t| char::from(t.chosen.id as u8)).collect();
        (shown.text, tokens, shown.stopped)
    }

    #[test]
    fn tokens_come_with_their_text() {
        let mut it = assembler(&["bcd"]);
        let said: Vec<_> = b"abcabcd".iter().map(|byte| push(&mut it, *byte)).collect();
        let texts: Vec<_> = said.iter().map(|(text, ..)| text.as_str()).collect();
        assert_eq!(texts, ["a", "", "", "bca", "", "", ""]);
        assert!(said.iter().all(|(text, tokens, _)| text == tokens), "{said:?}");
        assert_eq!(
            said.iter().map(|said| said.2).collect::<Vec<_>>(),
            [false, false, false, false, false, false, true]
        );
    }

    #[test]
    fn what_was_held_back_comes_at_the_end() {
        let mut it = assembler(&["bcd"]);
        assert_eq!(push(&mut it, b'b'), (String::new(), String::new(), false));
        let rest = it.finish();
        assert_eq!((rest.text.as_str(), rest.tokens.len(), rest.stopped), ("b", 1, false));
    }

    #[test]
    fn without_a_tokenizer_tokens_come_without_text() {
        let mut it = Assembler::new(None, Vec::new());
        let (text, tokens, stopped) = push(&mut it, b'x');
        assert_eq!((text.as_str(), tokens.as_str(), stopped), ("", "x", false));
    }
}
