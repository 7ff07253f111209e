//! What the suite found, for people and for machines.

use kvferry_server::Compute;
use serde::Serialize;

use super::cases::Section;
use crate::{
    args::{ArithArg, DecodeBatchArg, DemoArgs, name_of},
    demo::{
        report::Finding,
        suite::report::{CaseReport, FAILED, Totals},
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

/// What is wrong when decode did not run in the form that was asked for.
pub(super) fn wrong_form(form: DecodeBatchArg, compute: Compute) -> Option<Finding> {
    let right = match form {
        DecodeBatchArg::Fixed => compute.steps_fixed > 0,
        DecodeBatchArg::Eager => compute.steps_fixed == 0 && compute.steps_eager > 0,
    };
    (!right).then(|| Finding::form(&name_of(&form), compute.steps_fixed, compute.steps_eager))
}

fn verdict(case: &CaseReport, section: &SectionReport) -> String {
    let SectionReport { kv, arith, .. } = section;
    let equal = if *arith == name_of(&ArithArg::Fast) { "within 1e-4" } else { "equal" };
    let slowest = case.refused.iter().map(|refused| refused.seconds).reduce(f64::max);
    match (&case.injected, case.good, slowest) {
        (None, true, Some(slowest)) => {
            format!("{equal}; {} refused in {:.0} ms", case.refused.len(), slowest * 1e3)
        }
        (None, true, None) => equal.into(),
        (None, false, _) => "DIFFERENT".into(),
        (Some(_), true, _) => format!("caught in {kv}, {arith}"),
        (Some(_), false, _) => format!("NOT CAUGHT in {kv}, {arith}"),
    }
}

fn print(case: &CaseReport, section: &SectionReport) {
    let tokens: Vec<_> = case.prompt_tokens.iter().map(ToString::to_string).collect();
    let look = if case.good { Look::Good } else { Look::Bad };
    let verdict = styled(look, verdict(case, section));
    let computed = match case.prompt_tokens_cached {
        0 => String::new(),
        _ => format!(", {} computed by prefill", case.prompt_tokens_computed),
    };
    terminal::line(format_args!("  {:NAME$}{:TOKENS$}{verdict}{computed}", case.name, tokens.join(" ")));
    case.print_findings();
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
    #[serde(flatten)]
    totals: Totals,
    sections: Vec<SectionReport>,
}

impl Suite {
    pub(super) fn new(args: &DemoArgs, prefill: &'static str, decode: &'static str) -> Self {
        Self {
            suite: "kimi-dcp",
            quick: args.quick,
            prefill,
            decode,
            transport: args.engine.transport.to_string(),
            totals: Totals::default(),
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
        let canonical = name_of(&ArithArg::Canonical);
        self.totals = Totals::of(self.sections.iter().flat_map(|section| {
            let exact = section.arith == canonical;
            section.cases.iter().map(move |case| (case, exact))
        }));
        self.totals.proven
    }

    /// What is going to be run.
    pub(super) fn title(&self) {
        let Self { prefill, decode, transport, .. } = self;
        terminal::paragraph(format!("Kimi Linear, {prefill} → {decode}, over {transport}"), 0);
        terminal::paragraph(styled(Look::Dim, format_args!("{WORDS}; {FAILED}")), 0);
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
        section.cases.iter().for_each(|case| print(case, section));
    }

    /// The last lines.
    pub(super) fn verdict(&self) {
        self.totals.print();
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
