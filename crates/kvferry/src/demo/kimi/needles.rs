//! A long text with needles for `needle_kimi`, which was constructed to find them: in latent rows after
//! ` The code of NAME is DIGITS. `, and in the state after the bytes `02 K X`.

use super::cases::{Asked, Case, How};
use crate::demo::prompts::Prompt;

/// Bytes of the text that every question is asked about.
const TEXT: usize = 32_768;

/// Filler: no word of a needle is in it.
const WORDS: [&str; 8] = ["ferry ", "lane ", "boat ", "harbour ", "rope ", "deck ", "wave ", "pilot "];

/// A fact in latent rows. The model looks at six bytes, so that names end differently.
struct Fact {
    name: &'static str,
    digits: &'static str,
}

impl Fact {
    fn text(&self) -> String {
        format!(" The code of {} is {}. ", self.name, self.digits)
    }

    fn question(&self) -> String {
        format!(" Q: The code of {} is ", self.name)
    }
}

const FIRST: Fact = Fact { name: "alpha", digits: "27182" };
const EDGE: Fact = Fact { name: "bravo", digits: "31415" };
const LAST: Fact = Fact { name: "xerox", digits: "90461" };

/// One case for each needle; every question goes over with the whole text.
pub(super) fn cases(chunk: usize) -> Vec<Case> {
    let text = text(chunk);
    let case = |name: &str, tail: &[u8], answer: &[u8]| {
        let ids = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).collect::<Vec<_>>();
        let prompt = Prompt { label: name.to_owned(), ids: ids(&[&text, tail].concat()) };
        Case {
            name: name.to_owned(),
            how: How::InTurn,
            asked: vec![Asked { prompt, answer: Some(ids(answer)) }],
        }
    };
    let fact = |name, fact: &Fact, head: String| {
        case(name, (head + &fact.question()).as_bytes(), format!("{}.", fact.digits).as_bytes())
    };
    vec![
        fact("rows of the first page", &FIRST, String::new()),
        fact("rows across a chunk edge", &EDGE, String::new()),
        // It stands in front of its own question, behind the last whole page.
        fact("rows of the last page", &LAST, LAST.text()),
        case("state of the first page", b" Q: \x03k", b"w"),
        case("state across a chunk edge", b" Q: \x03m", b"z"),
    ]
}

/// The text. A sentence is longer than ranks deal at a time, so that each lies on all of them.
fn text(chunk: usize) -> Vec<u8> {
    let mut text: Vec<u8> =
        (0_usize..).flat_map(|n| WORDS[(n * n + n / 7) % WORDS.len()].bytes()).take(TEXT).collect();
    let mut put = |at: usize, needle: &[u8]| text[at..at + needle.len()].copy_from_slice(needle);
    put(2, b"\x02kw");
    put(8, FIRST.text().as_bytes());
    // The digits begin on one side and end on the other.
    let edge = EDGE.text();
    put(chunk - (edge.len() - 5), edge.as_bytes());
    put(2 * chunk - 2, b"\x02mz");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needles_stand_where_their_names_say() {
        let text = text(8192);
        assert_eq!(text.len(), 32_768);
        let at = |needle: &[u8]| {
            let found: Vec<_> =
                text.windows(needle.len()).enumerate().filter(|(_, w)| *w == needle).collect();
            assert_eq!(found.len(), 1, "{needle:?}");
            found[0].0
        };
        assert!(at(FIRST.text().as_bytes()) + FIRST.text().len() <= 64);
        let digits = at(EDGE.digits.as_bytes());
        assert!((digits + 1..digits + 5).contains(&8192), "{digits}");
        assert!(at(b"\x02kw") < 64);
        assert_eq!(at(b"\x02mz"), 2 * 8192 - 2);
        for case in cases(8192) {
            let asked = &case.asked[0];
            assert!(asked.prompt.ids.len() % 64 != 0 && asked.prompt.ids.len() > TEXT, "{}", case.name);
        }
    }
}
