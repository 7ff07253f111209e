//! What came of a case, for people and for machines.

use kvferry_plan::Bytes;
use serde::Serialize;

use crate::{
    args::{InjectArg, name_of},
    demo::{
        report::{CacheReport, Finding, Outcome},
        table::bytes,
    },
    terminal::{self, Look, styled},
};

/// The words for what is not as it has to be.
pub(in crate::demo) const FAILED: &str =
    "DIFFERENT, NOT CAUGHT: it is not so, and the findings below it say what is";

/// Findings of a case that are shown.
const SHOWN: usize = 3;

/// Something that has to be refused, and was.
#[derive(Clone, Debug, Serialize)]
pub(in crate::demo) struct Refused {
    pub(in crate::demo) what: String,
    /// From the request until all that were asked had said so.
    pub(in crate::demo) seconds: f64,
}

/// One case.
#[derive(Debug, Serialize)]
pub(in crate::demo) struct CaseReport {
    pub(in crate::demo) name: String,
    pub(in crate::demo) prompt_tokens: Vec<usize>,
    /// Tokens of prompts that prefill computed, and those that it had from earlier prompts.
    pub(in crate::demo) prompt_tokens_computed: u64,
    pub(in crate::demo) prompt_tokens_cached: u64,
    /// What was moved.
    bytes: Bytes,
    /// State as it arrived, where it was compared.
    state: Option<CacheReport>,
    /// `null` when there was nothing to compare.
    max_abs_logprob_diff: Option<f32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(in crate::demo) refused: Vec<Refused>,
    /// A fault was committed, which has to be found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::demo) injected: Option<String>,
    /// As it has to be: equal, or with a fault different.
    pub(in crate::demo) good: bool,
    findings: Vec<Finding>,
}

impl CaseReport {
    /// What came of prompts of so many tokens each. With a `fault` each must have findings, and only such as find it: a
    /// hand-off that failed for another reason, or a fault that was not committed, is none.
    pub(in crate::demo) fn new(
        name: &str,
        prompt_tokens: Vec<usize>,
        fault: Option<InjectArg>,
        outcomes: &[Outcome],
        refused: Vec<Refused>,
    ) -> Self {
        let sum = |of: fn(&Outcome) -> Option<u64>| outcomes.iter().filter_map(of).sum();
        let findings: Vec<Finding> = outcomes.iter().flat_map(|o| o.findings.iter().cloned()).collect();
        let good = match fault {
            None => findings.is_empty(),
            Some(fault) => {
                outcomes.iter().all(|outcome| !outcome.findings.is_empty())
                    && findings.iter().all(|finding| finding.finds(fault))
            }
        };
        Self {
            name: name.to_owned(),
            prompt_tokens,
            prompt_tokens_computed: sum(|o| o.prefill_prompt_tokens_computed),
            prompt_tokens_cached: sum(|o| o.prefill_prompt_tokens_cached),
            bytes: Bytes(sum(|o| o.transfer.map(|transfer| transfer.bytes.0))),
            state: CacheReport::sum(outcomes.iter().map(|o| o.state)),
            max_abs_logprob_diff: outcomes.iter().filter_map(|o| o.max_abs_logprob_diff).reduce(f32::max),
            refused,
            injected: fault.map(|fault| name_of(&fault)),
            good,
            findings,
        }
    }

    /// Adds what is not as it has to be.
    pub(in crate::demo) fn find(&mut self, finding: Finding) {
        self.findings.push(finding);
        self.good = false;
    }

    /// Says what is wrong with a case that is not as it has to be.
    pub(in crate::demo) fn print_findings(&self) {
        let shown = if self.good { 0 } else { SHOWN };
        for finding in self.findings.iter().take(shown) {
            terminal::paragraph(format!("{}: {}", styled(Look::Bad, "finding"), finding.text), 4);
        }
    }
}

/// All cases together.
#[derive(Debug, Default, Serialize)]
pub(in crate::demo) struct Totals {
    /// Number of cases.
    cases: usize,
    /// State as it arrived, over all cases in canonical arithmetic without a fault.
    state: Option<CacheReport>,
    /// The exit status: true is 0.
    pub(in crate::demo) proven: bool,
    #[serde(skip)]
    bad: usize,
}

impl Totals {
    /// Of every case, and whether it ran in arithmetic of which bits are compared.
    pub(in crate::demo) fn of<'a>(all: impl Iterator<Item = (&'a CaseReport, bool)>) -> Self {
        let mut totals = Self::default();
        for (case, exact) in all {
            totals.cases += 1;
            totals.bad += usize::from(!case.good);
            let state = case.state.filter(|_| exact && case.injected.is_none());
            totals.state = CacheReport::sum([totals.state, state]);
        }
        totals.proven = totals.cases > 0 && totals.bad == 0;
        totals
    }

    /// The last lines.
    pub(in crate::demo) fn print(&self) {
        let Self { cases, state, proven, bad } = self;
        if let Some(CacheReport { bytes: compared, equal: true }) = state {
            terminal::line(format_args!("state at hand-off: {} compared, all equal", bytes(*compared)));
        }
        if *proven {
            terminal::line(styled(Look::Good, format_args!("proven: all {cases} cases")));
        } else {
            terminal::line(styled(Look::Bad, format_args!("NOT proven: {bad} of {cases} cases failed")));
        }
    }
}
