//! A long text with needles for `needle_kimi`, which was constructed to find them: in latent rows after
//! ` The code of NAME is DIGITS. `, and in the state after the bytes `02 K X`. Prefill reads the text once; each question
//! about it goes on from there, and over whole.

use super::Asked;
use crate::demo::prompts::Prompt;

/// How long a text is, and how many tokens of it are computed in a step.
#[derive(Clone, Copy, Debug)]
pub(in crate::demo) struct Scale {
    pub(in crate::demo) tokens: usize,
    pub(in crate::demo) chunk: u32,
}

/// Few long steps, and many short ones. Both texts are whole pages.
pub(in crate::demo) const LONG: Scale = Scale { tokens: 32_768, chunk: 8192 };
pub(in crate::demo) const SHORT: Scale = Scale { tokens: 896, chunk: 48 };

/// Ranks of decode, which are dealt the tokens one by one.
const RANKS: usize = 4;

/// Filler: no word of a needle is in it.
const WORDS: [&str; 8] = ["ferry ", "lane ", "boat ", "harbour ", "rope ", "deck ", "wave ", "pilot "];

/// A fact in latent rows. The model looks at six bytes, so that names end differently.
struct Fact {
    name: &'static str,
    digits: &'static str,
}

impl Fact {
    fn before(&self) -> String {
        format!(" The code of {} is ", self.name)
    }

    fn text(&self) -> String {
        format!("{}{}. ", self.before(), self.digits)
    }

    fn question(&self) -> String {
        format!(" Q:{}", self.before())
    }
}

const FIRST: Fact = Fact { name: "alpha", digits: "27182" };
const EDGE: Fact = Fact { name: "bravo", digits: "31415" };
const LAST: Fact = Fact { name: "xerox", digits: "90461" };
/// A token on each rank of decode says the answer.
const ON_RANK: [Fact; RANKS] = [
    Fact { name: "delta", digits: "7" },
    Fact { name: "hotel", digits: "3" },
    Fact { name: "india", digits: "8" },
    Fact { name: "oscar", digits: "5" },
];

/// The text alone, and with the question about each needle behind it, by name.
pub(in crate::demo) fn all(scale: Scale) -> Vec<(String, Asked)> {
    let text = text(scale);
    let case = |name: &str, tail: &[u8], answer: Option<&[u8]>| {
        let ids = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).collect::<Vec<_>>();
        let prompt = Prompt { label: name.to_owned(), ids: ids(&[&text, tail].concat()) };
        let cached = if tail.is_empty() { 0 } else { text.len() as u64 };
        (name.to_owned(), Asked { prompt, answer: answer.map(ids), cached: Some(cached) })
    };
    let fact = |name: &str, fact: &Fact, head: String| {
        let answer = if fact.digits.len() > 1 { format!("{}.", fact.digits) } else { fact.digits.into() };
        case(name, (head + &fact.question()).as_bytes(), Some(answer.as_bytes()))
    };
    let mut cases = vec![
        case("the text", b"", None),
        fact("rows of the first page", &FIRST, String::new()),
        fact("rows across a chunk edge", &EDGE, String::new()),
    ];
    let ranks = ON_RANK.iter().enumerate();
    cases.extend(ranks.map(|(rank, it)| fact(&format!("a row of rank {rank}"), it, String::new())));
    cases.extend([
        // It stands in front of its own question, behind the last whole page.
        fact("rows of the last page", &LAST, LAST.text()),
        case("state of the first page", b" Q: \x03k", Some(b"w")),
        case("state across a chunk edge", b" Q: \x03m", Some(b"z")),
        case("state of the last page", b"\x02nv Q: \x03n", Some(b"v")),
    ]);
    cases
}

/// The text. Its first page has needles; two chunk edges lie in needles; behind them each rank has one.
fn text(Scale { tokens: length, chunk }: Scale) -> Vec<u8> {
    let chunk = chunk as usize;
    let mut text: Vec<u8> =
        (0_usize..).flat_map(|n| WORDS[(n * n + n / 7) % WORDS.len()].bytes()).take(length).collect();
    let mut put = |at: usize, needle: &[u8]| text[at..at + needle.len()].copy_from_slice(needle);
    put(2, b"\x02kw");
    put(8, FIRST.text().as_bytes());
    // Behind the first pages the digits begin on one side of an edge and end on the other.
    let edge = chunk * 128_usize.div_ceil(chunk);
    let sentence = EDGE.text();
    put(edge - (sentence.len() - 5), sentence.as_bytes());
    put(2 * edge - 2, b"\x02mz");
    for (rank, fact) in ON_RANK.iter().enumerate() {
        let about = length * (2 * rank + 9) / 16;
        let digit = about.next_multiple_of(RANKS) + rank;
        put(digit - fact.before().len(), fact.text().as_bytes());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needles_stand_where_their_names_say() {
        for scale in [LONG, SHORT] {
            let (text, length, chunk) = (text(scale), scale.tokens, scale.chunk as usize);
            // Whole pages of both sides: nothing of the text is computed twice.
            assert_eq!((text.len(), text.len() % 64), (length, 0));
            let at = |needle: &[u8]| {
                let found: Vec<_> =
                    text.windows(needle.len()).enumerate().filter(|(_, w)| *w == needle).collect();
                assert_eq!(found.len(), 1, "{needle:?}");
                found[0].0
            };
            assert!(at(FIRST.text().as_bytes()) + FIRST.text().len() <= 64);
            assert!(at(b"\x02kw") < 64);
            let digits = at(EDGE.digits.as_bytes());
            let edge = digits.next_multiple_of(chunk);
            assert!(edge > 64 && (digits + 1..digits + 5).contains(&edge), "{digits}");
            assert_eq!(at(b"\x02mz"), 2 * edge - 2);
            for (rank, fact) in ON_RANK.iter().enumerate() {
                let digit = at(fact.text().as_bytes()) + fact.before().len();
                assert_eq!(digit % RANKS, rank);
            }
            let all = all(scale);
            assert_eq!((all[0].1.prompt.ids.len(), all[0].1.cached), (length, Some(0)));
            for (name, asked) in &all[1..] {
                let tail = asked.prompt.ids.len() - length;
                assert!((1..64).contains(&tail) && asked.cached == Some(length as u64), "{name}");
            }
        }
    }
}
