//! What the suite found, for people and for machines.

use kvferry_plan::Bytes;
use kvferry_server::Compute;
use serde::Serialize;

use super::{
    cases::{Case, Section},
    misfits::Refused,
};
use crate::{
    args::{ArithArg, DecodeBatchArg, DemoArgs, InjectArg, name_of},
    demo::{
        report::{CacheReport, Finding, Outcome},
        table::bytes,
    },
    terminal::{self, Look, styled},
};

/// Columns of a case's name, and of the sizes of its prompts.
const NAME: usize = 27;
const TOKENS: usize = 18;

/// The words of the verdicts.
const WORDS: &str = "equal: to one process, bit by bit; within 1e-4: its answers, in fast arithmetic; computed by prefill: \
                     the rest is there from earlier prompts; misfits: decodes with another element type, model or context \
                     parallel size, which have to be refused; padding: rows that fill up a step of fixed shape; caught: a fault \
                     was committed on purpose, and the comparison found it";

/// One case.
#[derive(Debug, Serialize)]
pub(super) struct CaseReport {
    name: String,
    prompt_tokens: Vec<usize>,
    /// Tokens of prompts that prefill computed, and those that it had from earlier prompts.
    prompt_tokens_computed: u64,
    prompt_tokens_cached: u64,
    /// What was moved.
    bytes: Bytes,
    /// State as it arrived, where it was compared.
    state: Option<CacheReport>,
    /// `null` when there was nothing to compare.
    max_abs_logprob_diff: Option<f32>,
    /// Decodes that cannot be served, and were not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refused: Vec<Refused>,
    /// A fault was committed, which has to be found.
    #[serde(skip_serializing_if = "Option::is_none")]
    injected: Option<String>,
    /// As it has to be: equal, or with a fault different.
    good: bool,
    findings: Vec<Finding>,
}

impl CaseReport {
    pub(super) fn new(
        case: &Case,
        fault: Option<InjectArg>,
        outcomes: Vec<Outcome>,
        refused: Vec<Refused>,
    ) -> Self {
        let bytes = outcomes.iter().filter_map(|o| o.transfer.as_ref()).map(|t| t.bytes.0).sum();
        let computed = outcomes.iter().filter_map(|o| o.prefill_prompt_tokens_computed).sum();
        let cached = outcomes.iter().filter_map(|o| o.prefill_prompt_tokens_cached).sum();
        let diff = outcomes.iter().filter_map(|o| o.max_abs_logprob_diff).reduce(f32::max);
        let state = CacheReport::sum(outcomes.iter().map(|o| o.state));
        let findings: Vec<Finding> = outcomes.into_iter().flat_map(|o| o.findings).collect();
        let good = match fault {
            None => findings.is_empty(),
            // A hand-off that failed, or a fault that was not committed, is none that a comparison has found.
            Some(_) => !findings.is_empty() && findings.iter().all(Finding::by_comparison),
        };
        Self {
            name: case.name.clone(),
            prompt_tokens: case.lengths().collect(),
            prompt_tokens_computed: computed,
            prompt_tokens_cached: cached,
            bytes: Bytes(bytes),
            state,
            refused,
            max_abs_logprob_diff: diff,
            injected: fault.map(|fault| name_of(&fault)),
            good,
            findings,
        }
    }

    /// Finds out whether decode ran in the form that was asked for.
    pub(super) fn form(&mut self, form: DecodeBatchArg, compute: Compute) {
        let right = match form {
            DecodeBatchArg::Fixed => compute.steps_fixed > 0,
            DecodeBatchArg::Eager => compute.steps_fixed == 0 && compute.steps_eager > 0,
        };
        if !right {
            self.findings.push(Finding::form(&name_of(&form), compute.steps_fixed, compute.steps_eager));
            self.good = false;
        }
    }

    fn verdict(&self, section: &SectionReport) -> String {
        let SectionReport { kv, arith, .. } = section;
        let equal = if *arith == name_of(&ArithArg::Fast) { "within 1e-4" } else { "equal" };
        let slowest = self.refused.iter().map(|refused| refused.seconds).reduce(f64::max);
        match (&self.injected, self.good, slowest) {
            (None, true, Some(slowest)) => {
                format!("{equal}; {} refused in {:.0} ms", self.refused.len(), slowest * 1e3)
            }
            (None, true, None) => equal.into(),
            (None, false, _) => "DIFFERENT".into(),
            (Some(_), true, _) => format!("caught in {kv}, {arith}"),
            (Some(_), false, _) => format!("NOT CAUGHT in {kv}, {arith}"),
        }
    }

    fn print(&self, section: &SectionReport) {
        let tokens: Vec<_> = self.prompt_tokens.iter().map(ToString::to_string).collect();
        let look = if self.good { Look::Good } else { Look::Bad };
        let verdict = styled(look, self.verdict(section));
        let computed = match self.prompt_tokens_cached {
            0 => String::new(),
            _ => format!(", {} computed by prefill", self.prompt_tokens_computed),
        };
        terminal::line(format_args!("  {:NAME$}{:TOKENS$}{verdict}{computed}", self.name, tokens.join(" ")));
        let shown = if self.good { 0 } else { 3 };
        for finding in self.findings.iter().take(shown) {
            terminal::paragraph(format!("{}: {}", styled(Look::Bad, "finding"), finding.text), 4);
        }
    }
}

/// Cases on the same instances.
#[derive(Debug, Serialize)]
struct SectionReport {
    model: &'static str,
    kv: String,
    arith: String,
    chunk: u32,
    /// Form of decode's steps.
    decode_batch: String,
    /// What its first instance has run.
    compute: Compute,
    cases: Vec<CaseReport>,
}

impl SectionReport {
    /// Whether faults are committed in it.
    fn has_faults(&self) -> bool {
        self.cases.iter().any(|case| case.injected.is_some())
    }

    /// What its cases have in common.
    fn heading(&self) -> String {
        let Self { model, kv, arith, chunk, decode_batch, compute, .. } = self;
        if self.has_faults() {
            return format!("{model}  faults committed on purpose, chunk {chunk}, decode {decode_batch}");
        }
        let padding = match compute.rows_padding {
            0 => String::new(),
            rows => format!(" ({rows} rows of padding)"),
        };
        format!("{model}  {kv}, {arith}, chunk {chunk}, decode {decode_batch}{padding}")
    }
}

/// The whole suite.
#[derive(Debug, Serialize)]
pub(super) struct Suite {
    suite: &'static str,
    quick: bool,
    prefill: &'static str,
    decode: &'static str,
    transport: String,
    /// Number of cases.
    cases: usize,
    /// State as it arrived, over all cases in canonical arithmetic without a fault.
    state: Option<CacheReport>,
    /// The exit status: true is 0.
    proven: bool,
    sections: Vec<SectionReport>,
}

impl Suite {
    pub(super) fn new(args: &DemoArgs, prefill: &'static str, decode: &'static str) -> Self {
        Self {
            suite: "kimi-dcp",
            quick: args.quick,
            prefill,
            decode,
            transport: name_of(&args.engine.transport),
            cases: 0,
            state: None,
            proven: false,
            sections: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, section: &Section, cases: Vec<CaseReport>, compute: Compute) {
        self.sections.push(SectionReport {
            model: section.model.name(),
            kv: section.kv.to_string(),
            arith: name_of(&section.arith),
            chunk: section.chunk,
            decode_batch: name_of(&section.form),
            compute,
            cases,
        });
    }

    /// Counts; whether every case is as it has to be.
    pub(super) fn finish(&mut self) -> bool {
        let cases = || self.sections.iter().flat_map(|section| &section.cases);
        let (count, good) = (cases().count(), cases().filter(|case| case.good).count());
        let canonical = name_of(&ArithArg::Canonical);
        let exact = self.sections.iter().filter(|section| section.arith == canonical);
        let exact = exact.flat_map(|section| &section.cases).filter(|case| case.injected.is_none());
        let state = CacheReport::sum(exact.map(|case| case.state));
        (self.cases, self.state, self.proven) = (count, state, count > 0 && good == count);
        self.proven
    }

    /// What is going to be run.
    pub(super) fn title(&self) {
        let Self { prefill, decode, transport, .. } = self;
        terminal::paragraph(format!("Kimi Linear, {prefill} → {decode}, over {transport}"), 0);
        terminal::paragraph(styled(Look::Dim, WORDS), 0);
        terminal::line(styled(
            Look::Dim,
            format_args!("  {:NAME$}{:TOKENS$}verdict", "case", "prompt tokens"),
        ));
    }

    /// The section that ended last.
    pub(super) fn print_last(&self) {
        let mut from_last = self.sections.iter().rev();
        let Some(section) = from_last.next() else { return };
        // The faults have a section each, under one heading.
        if !section.has_faults() || !from_last.next().is_some_and(SectionReport::has_faults) {
            terminal::line(styled(Look::Strong, section.heading()));
        }
        section.cases.iter().for_each(|case| case.print(section));
    }

    /// The last line.
    pub(super) fn verdict(&self) {
        let all = self.cases;
        if let Some(CacheReport { bytes: compared, equal: true }) = self.state {
            terminal::line(format_args!("state at hand-off: {} compared, all equal", bytes(compared)));
        }
        if self.proven {
            terminal::line(styled(Look::Good, format_args!("proven: all {all} cases")));
        } else {
            let bad = self.sections.iter().flat_map(|s| &s.cases).filter(|case| !case.good).count();
            terminal::line(styled(Look::Bad, format_args!("NOT proven: {bad} of {all} cases")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::cases, *};

    #[test]
    fn columns_are_wide_enough_for_every_case() {
        for case in [true, false].into_iter().flat_map(cases::all).flat_map(|section| section.cases) {
            let tokens: Vec<_> = case.lengths().map(|length| length.to_string()).collect();
            assert!(case.name.len() < NAME && tokens.join(" ").len() < TOKENS, "{case:?}");
        }
    }
}
