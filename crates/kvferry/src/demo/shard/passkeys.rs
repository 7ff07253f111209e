//! Prompts with one exact answer each, which SmolLM2 gives: a number is told somewhere in a long text and asked for at its
//! end. Not for checking answers (`demo::report`).

use kvferry_engine::tokenizer::Tokenizer;
use kvferry_plan::Blame;

use crate::{
    demo::{prompts::Prompt, suite::Asked},
    failure::Failure,
};

const LIST: &str = include_str!("passkeys.txt");

/// One prompt, as text.
#[derive(Debug, PartialEq, Eq)]
struct PassKey {
    key: &'static str,
    text: String,
    /// Of the prompt, with SmolLM2's vocabulary.
    tokens: usize,
}

/// All prompts with their answers, in the ids of SmolLM2.
pub(super) fn all(tokenizer: &Tokenizer) -> Result<Vec<Asked>, Failure> {
    read()?
        .into_iter()
        .map(|PassKey { key, text, tokens }| {
            let ids = tokenizer.encode(&text, true)?;
            if ids.len() != tokens {
                let text = format!("the prompt of pass key {key} has {} tokens, not {tokens}", ids.len());
                return Err(Failure::new(Blame::Us, text));
            }
            let answer = tokenizer.encode(&format!(" {key}"), false)?;
            let prompt = Prompt { label: format!("pass key {key}"), ids };
            Ok(Asked { answer: Some(answer), ..Asked::new(prompt) })
        })
        .collect()
}

fn read() -> Result<Vec<PassKey>, Failure> {
    let wrong = |line: &str| Failure::new(Blame::Us, format!("passkeys.txt: {line}"));
    let lines = || LIST.lines().filter(|line| !line.starts_with('#'));
    let of = |kind: &'static str| {
        lines().filter_map(move |line| line.strip_prefix(kind)?.strip_prefix(' ').map(str::trim))
    };
    let filler: Vec<&str> = of("fill").collect();
    let one = |kind| of(kind).next().ok_or_else(|| wrong(kind));
    let (tell, ask) = (one("tell")?, one("ask")?);
    let prompt = |line: &'static str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [key, before, after, tokens] = *words else { return None };
        let [before, after, tokens] = [before.parse().ok()?, after.parse().ok()?, tokens.parse().ok()?];
        let mut sentences: Vec<&str> = filler.iter().cycle().take(before + after).copied().collect();
        let tell = tell.replace("KEY", key);
        sentences.insert(before, &tell);
        sentences.push(ask);
        Some(PassKey { key, text: sentences.join(" "), tokens })
    };
    of("key").map(|line| prompt(line).ok_or_else(|| wrong(line))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompts_have_the_sizes_that_were_asked_for_and_tell_their_key_only() {
        let all = read().unwrap();
        assert_eq!(all.len(), 8);
        assert!(all.iter().all(|one| (200..=2000).contains(&one.tokens)));
        assert!(all.iter().map(|one| one.tokens).sum::<usize>() <= 6000);
        for PassKey { key, text, .. } in &all {
            assert!(text.ends_with("The pass key is") && text.matches(key).count() == 2, "{text}");
            assert_eq!(text.chars().filter(char::is_ascii_digit).count(), 8, "{text}");
        }
        let at = |one: &PassKey| one.text.find(one.key).unwrap() * 4 / one.text.len();
        assert!((0..4).all(|quarter| all.iter().any(|one| at(one) == quarter)));
    }
}
