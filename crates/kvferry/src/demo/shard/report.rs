//! What the suite found, for people and for machines.

use kvferry_plan::Dtype;
use serde::Serialize;

use super::cases::Section;
use crate::{
    args::{ArithArg, DemoArgs, name_of},
    demo::{
        report::Outcome,
        suite::report::{CaseReport, FAILED, Totals},
    },
    terminal::{self, Look, styled},
};

/// Columns of a case's name, of the sizes of its prompts, and of each decode's verdict.
const NAME: usize = 26;
const TOKENS: usize = 18;
const VERDICT: usize = 11;

/// The words of the verdicts.
const WORDS: &str = "Each line is what one prefill hands to each decode. equal: to one process with one rank, bit by bit; close: its \
                     answers, log-probabilities within 1e-4, in fast arithmetic; 8/8: so many answers are the right ones; 400: \
                     and a prompt one token past the limit was refused with it; limits of ignore-eos: without a prefix cache; \
                     caught: a fault was committed on purpose and found. Pages have 16 tokens (needles: 64); with shard=on \
                     each belongs to one rank, in rotation";

/// One case between one prefill and one decode instance.
#[derive(Debug, Serialize)]
pub(super) struct PairReport {
    prefill: &'static str,
    decode: &'static str,
    /// Answers that are known, and how many of them were given.
    #[serde(skip_serializing_if = "Option::is_none")]
    answers: Option<Right>,
    #[serde(flatten)]
    pub(super) case: CaseReport,
}

/// Answers that are the right ones.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Right {
    pub(super) right: usize,
    pub(super) of: usize,
}

impl PairReport {
    pub(super) fn new(
        (prefill, decode): (&'static str, &'static str),
        answers: Option<Right>,
        case: CaseReport,
    ) -> Self {
        Self { prefill, decode, answers, case }
    }

    fn verdict(&self, arith: &str) -> String {
        let case = &self.case;
        if case.injected.is_some() {
            return if case.good { "caught" } else { "NOT CAUGHT" }.into();
        }
        if !case.good {
            return "DIFFERENT".into();
        }
        let equal = if *arith == name_of(&ArithArg::Fast) { "close" } else { "equal" };
        match (self.answers, case.refused.is_empty()) {
            (Some(Right { right, of }), _) => format!("{equal} {right}/{of}"),
            (None, false) => format!("{equal}, 400"),
            (None, true) => equal.into(),
        }
    }
}

/// Cases on the same instances.
#[derive(Debug, Serialize)]
struct SectionReport {
    title: &'static str,
    model: &'static str,
    attention: &'static str,
    kv: String,
    arith: String,
    chunk: u32,
    prefix_cache: bool,
    prefills: Vec<&'static str>,
    decodes: Vec<&'static str>,
    cases: Vec<PairReport>,
}

impl SectionReport {
    fn heading(&self) -> String {
        let Self { title, model, attention, kv, arith, chunk, .. } = self;
        format!("{title}: {model} ({attention}), {kv}, {arith}, chunk {chunk}")
    }

    /// A block for each prefill, with a line for each case and a column for each decode.
    fn print(&self) {
        terminal::line(styled(Look::Strong, self.heading()));
        for prefill in &self.prefills {
            let columns: String = self.decodes.iter().map(|decode| format!("{decode:VERDICT$}")).collect();
            let head = format!("  {:NAME$}{:TOKENS$}{columns}", format!("{prefill} →"), "prompt tokens");
            terminal::line(styled(Look::Dim, head.trim_end()));
            let of = |decode: &'static str| {
                self.cases.iter().filter(move |pair| (pair.prefill, pair.decode) == (*prefill, decode))
            };
            let Some(first) = self.decodes.first() else { return };
            for (row, PairReport { case, .. }) in of(first).enumerate() {
                let pairs: Vec<_> = self.decodes.iter().filter_map(|decode| of(decode).nth(row)).collect();
                let verdicts: String = pairs
                    .iter()
                    .map(|pair| {
                        let look = if pair.case.good { Look::Good } else { Look::Bad };
                        let verdict = pair.verdict(&self.arith);
                        let rest = VERDICT.saturating_sub(verdict.len());
                        format!("{}{:rest$}", styled(look, verdict), "")
                    })
                    .collect();
                let tokens = sizes(&case.prompt_tokens);
                let line = format!("  {:NAME$}{tokens:TOKENS$}{verdicts}", case.name);
                terminal::line(line.trim_end());
                pairs.iter().for_each(|pair| pair.case.print_findings());
            }
        }
    }
}

/// The sizes of prompts, each where they have room.
fn sizes(tokens: &[usize]) -> String {
    let all = tokens.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    if all.len() < TOKENS {
        return all;
    }
    let [least, most] = [tokens.iter().min(), tokens.iter().max()].map(|size| *size.unwrap_or(&0));
    format!("{} of {least} to {most}", tokens.len())
}

/// The whole suite.
#[derive(Debug, Serialize)]
pub(super) struct Suite {
    suite: &'static str,
    quick: bool,
    transport: String,
    #[serde(flatten)]
    totals: Totals,
    sections: Vec<SectionReport>,
}

impl Suite {
    pub(super) fn new(args: &DemoArgs) -> Self {
        Self {
            suite: "kv-shard",
            quick: args.quick,
            transport: args.engine.transport.to_string(),
            totals: Totals::default(),
            sections: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, section: &Section, attention: &'static str, cases: Vec<PairReport>) {
        let Section { title, model, kv, arith, chunk, prefixes, prefills, decodes, .. } = section;
        self.sections.push(SectionReport {
            title,
            model: model.name(),
            attention,
            kv: Dtype::to_string(kv),
            arith: name_of(arith),
            chunk: *chunk,
            prefix_cache: *prefixes,
            prefills: prefills.clone(),
            decodes: decodes.clone(),
            cases,
        });
    }

    /// Counts; whether every case is as it has to be.
    pub(super) fn finish(&mut self) -> bool {
        let canonical = name_of(&ArithArg::Canonical);
        self.totals = Totals::of(self.sections.iter().flat_map(|section| {
            let exact = section.arith == canonical;
            section.cases.iter().map(move |pair| (&pair.case, exact))
        }));
        self.totals.proven
    }

    /// What is going to be run.
    pub(super) fn title(&self) {
        let text = format!("prefill with its pages dealt to ranks, to every decode, over {}", self.transport);
        terminal::paragraph(text, 0);
        terminal::paragraph(styled(Look::Dim, format_args!("{WORDS}; {FAILED}")), 0);
    }

    /// The section that ended last.
    pub(super) fn print_last(&self) {
        if let Some(section) = self.sections.last() {
            section.print();
        }
    }

    /// The last lines.
    pub(super) fn verdict(&self) {
        self.totals.print();
    }
}

/// How many of the answers that are known were given.
pub(super) fn right(known: usize, outcomes: &[Outcome]) -> Option<Right> {
    let findings = outcomes.iter().flat_map(|outcome| &outcome.findings);
    let wrong = findings.filter(|finding| finding.is_answer()).count();
    (known > 0).then(|| Right { right: known.saturating_sub(wrong), of: known })
}

#[cfg(test)]
mod tests {
    use super::{super::cases, *};

    #[test]
    fn columns_are_wide_enough_for_every_case() {
        for section in cases::all(None).unwrap() {
            for case in section.cases() {
                let tokens = sizes(&case.lengths().collect::<Vec<_>>());
                assert!(case.name.len() < NAME && tokens.len() < TOKENS, "{} {tokens}", case.name);
            }
            assert!(section.decodes.iter().all(|decode| decode.len() < VERDICT), "{section:?}");
            assert!(2 + NAME + TOKENS + section.decodes.len() * VERDICT <= terminal::WIDTH);
        }
    }
}
