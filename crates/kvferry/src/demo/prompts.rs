//! The prompts of a demo, as token ids.

use std::path::Path;

use kvferry_engine::{
    chat::Message,
    checkpoint::{Checkpoint, Embedded},
};
use kvferry_plan::Blame;

use super::longest_sequence;
use crate::{args::DemoArgs, failure::Failure};

/// Asked of a model that can chat when nothing else is asked.
const QUESTION: &str = "A ferry takes cars from a harbour with three lanes to a harbour with one lane. The crew plans \
                        where every car goes, moves each car once, and checks that none is missing or damaged. Answer \
                        in one short sentence: why does the crew check the cars?";
/// Asked of the built-in checkpoint that finds needles. The first fact lies in latent rows; the second, `02 K X` with `03 K`
/// at the end, would lie in the state.
const NEEDLE: &str = "The crew counts lanes, cars and boats. The code of the harbour is 27182. Some cars stay, some go; each \
                      one has its place. The code of the ferry is 31415. All of them are counted again on the other side, \
                      and none is missing. Q: The code of the ferry is ";
/// Tokens of the default prompt of a model that is served by ids: more than two pages and no multiple of one.
const IDS: usize = 41;
/// Largest file of token ids.
const FILE: u64 = 64 << 20;

/// A prompt.
#[derive(Clone, Debug)]
pub(super) struct Prompt {
    /// What people see of it.
    pub(super) label: String,
    /// Vocabulary ids.
    pub(super) ids: Vec<u32>,
}

/// All prompts of the command line, checked against the model.
pub(super) fn collect(args: &DemoArgs, checkpoint: &Checkpoint) -> Result<Vec<Prompt>, Failure> {
    let longest = checkpoint.config().longest_possible();
    if let Some(len) = args.engine.max_model_len.filter(|len| *len < 2 || *len > longest) {
        return Err(Failure::caller(format!(
            "--max-model-len {len}: this model serves sequences of 2 to {longest} tokens"
        )));
    }
    let mut prompts = Vec::new();
    for text in &args.prompt {
        prompts.push(from_text(text, checkpoint)?);
    }
    for file in &args.prompt_tokens {
        let ids = read_ids(file)
            .map_err(|why| Failure::caller(format!("--prompt-tokens {}: {why}", file.display())))?;
        prompts.push(Prompt { label: summary(&ids), ids });
    }
    if prompts.is_empty() {
        prompts.push(match checkpoint.tokenizer()? {
            Some(_) if checkpoint.name() == Embedded::NeedleKimi.name() => from_text(NEEDLE, checkpoint)?,
            Some(_) => from_text(QUESTION, checkpoint)?,
            None => by_ids(checkpoint.config().vocab, IDS),
        });
    }
    let (vocab, longest) = (checkpoint.config().vocab, longest_sequence(args, checkpoint));
    for prompt in &prompts {
        check(prompt, vocab, longest)?;
    }
    Ok(prompts)
}

fn check(prompt: &Prompt, vocab: usize, longest: u64) -> Result<(), Failure> {
    let Prompt { label, ids } = prompt;
    if ids.is_empty() {
        return Err(Failure::caller(format!("the prompt {label:?} has no tokens; at least one is needed")));
    }
    if let Some(id) = ids.iter().find(|id| usize::try_from(**id).map_or(true, |id| id >= vocab)) {
        let text =
            format!("the prompt {label:?} has token {id}, but ids of this model are 0 to {}", vocab - 1);
        return Err(Failure::caller(text));
    }
    if ids.len() as u64 >= longest {
        return Err(Failure::caller(format!(
            "a prompt of {} tokens cannot be served: the limit is {} (a sequence of {longest} tokens, one of which is \
             generated); shorten it, or raise --max-model-len if it is below the model's own limit",
            ids.len(),
            longest.saturating_sub(1)
        )));
    }
    Ok(())
}

fn from_text(text: &str, checkpoint: &Checkpoint) -> Result<Prompt, Failure> {
    let Some(tokenizer) = checkpoint.tokenizer()? else {
        return Err(Failure::caller(format!(
            "the model {} has no tokenizer: give token ids with --prompt-tokens FILE",
            checkpoint.name()
        )));
    };
    let ids = match checkpoint.chat_template()? {
        Some(template) => {
            let message = Message { role: "user".into(), content: tokenizer.shield(text).into_owned() };
            let rendered = template
                .render(&[message], true)
                .map_err(|e| Failure::new(e.blame(), e).within("--prompt"))?;
            tokenizer.encode(&rendered, false)
        }
        None => tokenizer.encode(text, true),
    };
    let ids = ids.map_err(|e| Failure::new(e.blame(), e).within("--prompt"))?;
    Ok(Prompt { label: text.into(), ids })
}

/// `count` ids of a vocabulary, always the same.
pub(super) fn by_ids(vocab: usize, count: usize) -> Prompt {
    let vocab = u32::try_from(vocab).unwrap_or(u32::MAX);
    let ids: Vec<u32> = (1..).take(count).map(|i: u32| i.wrapping_mul(73) % vocab).collect();
    Prompt { label: summary(&ids), ids }
}

/// `count` ids of a vocabulary without a period, others with each `seed`: attention without positions would not notice rows
/// that are exchanged with equal ones.
pub(super) fn noise(vocab: u32, count: usize, seed: u64) -> Prompt {
    let ids = (1..=count as u64).map(|at| {
        // The finisher of SplitMix64.
        let mut z = (at + (seed << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z >> 33) as u32 % vocab.max(1)
    });
    Prompt { label: format!("{count} tokens"), ids: ids.collect() }
}

fn summary(ids: &[u32]) -> String {
    let first: Vec<_> = ids.iter().take(8).map(u32::to_string).collect();
    let more = if ids.len() > first.len() { " ..." } else { "" };
    format!("[{}{more}]", first.join(" "))
}

fn read_ids(path: &Path) -> Result<Vec<u32>, String> {
    let len = std::fs::metadata(path).map_err(|e| e.to_string())?.len();
    if len > FILE {
        return Err(format!("{len} bytes are too many"));
    }
    let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
    // Some editors begin a text with a byte order mark.
    let text = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&bytes);
    serde_json::from_slice(text).map_err(|e| format!("{e}; a JSON list of ids such as [1, 2, 3] is needed"))
}

impl From<kvferry_engine::tokenizer::TokenizerError> for Failure {
    fn from(error: kvferry_engine::tokenizer::TokenizerError) -> Self {
        Self::new(error.blame(), error)
    }
}

impl From<kvferry_server::Problem> for Failure {
    fn from(problem: kvferry_server::Problem) -> Self {
        Self::new(problem.blame, problem)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(Blame::Environment, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_no_short_period_and_every_seed_its_own() {
        let [ids, others] = [0, 1].map(|seed| noise(256, 3000, seed).ids);
        assert!(ids.iter().all(|id| *id < 256));
        let same = |a: &[u32], b: &[u32]| a.iter().zip(b).filter(|(a, b)| a == b).count();
        for period in 1..600 {
            assert!(same(&ids, &ids[period..]) < 100, "{period}");
        }
        assert!(same(&ids, &others) < 100);
    }
}
