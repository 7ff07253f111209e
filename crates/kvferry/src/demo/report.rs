//! What a demo found, as `--json` prints it.

use kvferry_plan::{Blame, Bytes, InstanceId};
use kvferry_server::{Chosen, Problem};
use serde::Serialize;

use super::{
    cluster::Over,
    compare::CacheDiff,
    conversion::Conversion,
    disaggregated::Run,
    prompts::Prompt,
    reference::{Answer, Plan},
};
use crate::args::{DemoArgs, InjectArg, name_of};

/// Largest difference of log-probabilities that another order of f32 sums explains.
const LOGPROB: f32 = 1e-4;

/// What is claimed to be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Claim {
    /// Tokens, all bits of log-probabilities, all bytes of the cache.
    Bits,
    /// Tokens; log-probabilities within 1e-4.
    Close,
    /// As [`Claim::Close`], and the bytes of the cache, against a reference that computes the prompt in the prefill
    /// layout.
    CloseFromSamePrefill,
}

/// The kind of [`Finding::missed`].
const NOT_COMMITTED: &str = "fault_not_committed";
/// The kind of [`Finding::hand_off`].
const HAND_OFF: &str = "hand_off";
/// The kind of what [`Outcome::knowing`] finds.
const WRONG_ANSWER: &str = "answer";

/// Something that is not as claimed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// A word for machines.
    pub(super) kind: &'static str,
    /// Who can do something about it, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) blame: Option<Blame>,
    /// What was found.
    pub(super) text: String,
}

impl Finding {
    fn new(kind: &'static str, text: String) -> Self {
        Self { kind, blame: None, text }
    }

    /// The hand-off itself failed.
    pub(super) fn hand_off(problem: &Problem) -> Self {
        Self { kind: HAND_OFF, blame: Some(problem.blame), text: problem.to_string() }
    }

    /// A fault was asked for that nothing was changed by: what it needs.
    fn missed(fault: InjectArg) -> Self {
        let why = match fault {
            InjectArg::SwapRank => {
                "the bytes of this hand-off go from one rank to one rank, or those of any two ranks are equal; use more \
                 ranks on one side, or a longer prompt"
            }
            InjectArg::MisrouteRow => {
                "decode has one rank, or its ranks hold the same rows; use more ranks that share rows out, such as \
                 tp=2,dcp=2, or a longer prompt"
            }
            InjectArg::SwapState => {
                "the model has no state per request, or it goes from one rank to one rank; use a hybrid model, such as \
                 embedded:needle_kimi, and more ranks on one side"
            }
            InjectArg::BlindMerge => {
                "no answer has changed; use a --decode with dcp=2 or more, a prompt that gives several of its ranks rows, \
                 and more than one --max-tokens"
            }
            InjectArg::DropRope => {
                "no answer has changed; use a model with latent rows or --attention mla, and more than one --max-tokens"
            }
            InjectArg::WrongOwner => {
                "prefill's pages are not sharded, or each rank has as many under the same numbers, as in an unused pool; use \
                 --prefill with shard=on, and a prompt of one page before"
            }
            InjectArg::FilterByPosition => {
                "prefill's pages are not sharded, or the first one is shard rank 0's: then position and owner are the \
                 same; use --prefill with shard=on, and a prompt of one page before"
            }
            InjectArg::DropEmptyFinal => {
                "every prefill rank sent something of the last chunk; use a model without state, --prefill with shard=on, \
                 and a prompt of fewer pages than ranks"
            }
            InjectArg::DropRow | InjectArg::FlipByte | InjectArg::SkipSend => {
                "no byte that landed would have been changed by it"
            }
        };
        let text = format!("the fault could not be committed: {}: {why}", name_of(&fault));
        Self { blame: Some(Blame::Caller), ..Self::new(NOT_COMMITTED, text) }
    }

    /// A hand-off that cannot be served was.
    pub(super) fn not_refused(what: &str) -> Self {
        Self::new("not_refused", format!("{what} was served instead of refused"))
    }

    /// A hand-off was refused, but not for what is wrong with it, or one side waited for the other.
    pub(super) fn refused_otherwise(what: &str, how: &impl std::fmt::Display) -> Self {
        Self::new("refused_otherwise", format!("{what}: {how}"))
    }

    /// Decode's steps did not have the form that was asked for.
    pub(super) fn form(asked: &str, fixed: u64, eager: u64) -> Self {
        Self::new(
            "form",
            format!("decode ran {fixed} steps of fixed shape and {eager} others, asked for {asked}"),
        )
    }

    /// Something is held that nobody needs any more.
    pub(super) fn held(instance: &InstanceId, pages: u64, slots: u64) -> Self {
        let text =
            format!("{instance} still holds {pages} pages and {slots} state slots after its last request");
        Self::new("held", text)
    }

    /// Whether an answer is not the one that is known to be right.
    pub(super) fn is_answer(&self) -> bool {
        self.kind == WRONG_ANSWER
    }

    /// Whether it is what finds a fault: two results that were compared and differ; of a manifest that never comes, that the
    /// hand-off has missed it.
    pub(super) fn finds(&self, fault: InjectArg) -> bool {
        match fault {
            InjectArg::DropEmptyFinal => {
                self.kind == HAND_OFF && self.text.contains("no manifest from source rank")
            }
            _ => matches!(self.kind, "cache" | "state" | "tokens" | "logprobs"),
        }
    }

    /// A prompt that was handed over but not computed here.
    pub(super) fn no_reference() -> Self {
        Self::new("no_reference", "there is no reference run to compare with".into())
    }
}

/// The model.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ModelInfo {
    pub(super) name: String,
    /// Of the weights file.
    pub(super) sha256: String,
}

/// What was moved.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct TransferReport {
    pub(super) bytes: Bytes,
    /// What the planner says is due.
    pub(super) planned_bytes: Bytes,
    /// Strided copies.
    pub(super) runs: u64,
    /// From the first offer to the verdict.
    pub(super) seconds: f64,
    /// From the end of the computation until prefill is told that decode has everything, on prefill's clock. Not a
    /// part of `seconds`, which is on decode's.
    pub(super) exposed_seconds: f64,
}

/// Seconds from the request to the first and to the last token.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Times {
    pub(super) first_token: f64,
    pub(super) last_token: f64,
}

/// How the prompt's cache on the decode ranks compares.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct CacheReport {
    /// Bytes compared, over all decode ranks.
    pub(super) bytes: Bytes,
    pub(super) equal: bool,
}

impl CacheReport {
    fn new(diff: &CacheDiff) -> Self {
        Self { bytes: Bytes(diff.bytes), equal: diff.is_equal() }
    }

    /// All that were compared, together.
    pub(super) fn sum(all: impl IntoIterator<Item = Option<Self>>) -> Option<Self> {
        all.into_iter().flatten().reduce(|a, b| Self {
            bytes: Bytes(a.bytes.0.saturating_add(b.bytes.0)),
            equal: a.equal && b.equal,
        })
    }
}

/// One prompt.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PromptReport {
    pub(super) prompt_tokens: u64,
    #[serde(flatten)]
    pub(super) outcome: Outcome,
}

impl PromptReport {
    pub(super) fn new(prompt: &Prompt, outcome: Outcome) -> Self {
        Self { prompt_tokens: prompt.ids.len() as u64, outcome }
    }
}

/// What came of one prompt, or of all together.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Outcome {
    pub(super) tokens_equal: bool,
    /// All bytes of the prompt's cache on every decode rank and all bits of the log-probabilities are equal.
    pub(super) bit_equal: bool,
    /// `null` when there was nothing to compare.
    pub(super) max_abs_logprob_diff: Option<f32>,
    /// Ids, by the two processes.
    pub(super) generated: Vec<u32>,
    /// Of these ids.
    pub(super) logprobs: Vec<f32>,
    pub(super) decode_prompt_tokens_computed: Option<u64>,
    pub(super) prefill_prompt_tokens_computed: Option<u64>,
    /// Prompt tokens that were not computed by prefill, because their cache was there from an earlier prompt.
    pub(super) prefill_prompt_tokens_cached: Option<u64>,
    /// Prompt tokens that were not moved, because decode had their cache from an earlier prompt.
    pub(super) decode_prompt_tokens_cached: Option<u64>,
    pub(super) transfer: Option<TransferReport>,
    /// Rows of the prompt's tokens.
    pub(super) cache: CacheReport,
    /// State of the request as it arrived; `null` in a model without, and when it was not compared.
    pub(super) state: Option<CacheReport>,
    /// Where the element types of the two sides differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) conversion: Option<Conversion>,
    pub(super) two_processes: Option<Times>,
    pub(super) one_process: Option<Times>,
    pub(super) findings: Vec<Finding>,
}

impl Outcome {
    /// Nothing could be compared.
    pub(super) fn failed(finding: Finding) -> Self {
        Self { findings: vec![finding], ..Self::default() }
    }

    /// Compares two processes with the reference.
    pub(super) fn compare(plan: &Plan, run: &Run, answer: &Answer) -> Self {
        let cache = CacheDiff::rows(&answer.cache, &run.cache);
        let state = CacheDiff::state(&answer.cache, &run.cache);
        let ids = |tokens: &[Chosen]| tokens.iter().map(|t| t.id).collect::<Vec<_>>();
        let generated = ids(&run.tokens);
        let tokens_equal = generated == ids(&answer.tokens);
        let pairs = || run.tokens.iter().zip(&answer.tokens).map(|(a, b)| (a.logprob, b.logprob));
        let logprob_bits = tokens_equal && pairs().all(|(a, b)| a.to_bits() == b.to_bits());
        let diff = pairs().map(|(a, b)| (a - b).abs()).reduce(f32::max);
        let transfer = TransferReport {
            bytes: run.decode.transfer.bytes,
            planned_bytes: run.decode.transfer.planned_bytes,
            runs: run.decode.transfer.runs,
            seconds: run.decode.transfer.seconds,
            exposed_seconds: run.prefill.exposed_seconds,
        };
        let computed = run.decode.prompt_tokens_computed;
        let conversion = plan
            .cast
            .zip(answer.unconverted.as_ref())
            .map(|(cast, before)| Conversion::new(cast, before, &run.cache, &run.tokens));
        let mut findings = Vec::new();
        findings.extend(run.missed.map(Finding::missed));
        let mut find = |wrong: bool, kind, text: &dyn Fn() -> String| {
            if wrong {
                findings.push(Finding::new(kind, text()));
            }
        };
        let as_claimed = |diff: &CacheDiff| match plan.claim {
            Claim::Bits | Claim::CloseFromSamePrefill => diff.is_equal(),
            Claim::Close => diff.is_close(),
        };
        find(!as_claimed(&cache), "cache", &|| cache_text("prompt KV", plan.claim, &cache));
        if let Some(state) = &state {
            find(!as_claimed(state), "state", &|| cache_text("state at hand-off", plan.claim, state));
        }
        let equal = cache.is_equal() && state.as_ref().is_none_or(CacheDiff::is_equal);
        find(!tokens_equal, "tokens", &|| tokens_text("one process has", &generated, &ids(&answer.tokens)));
        let logprobs_ok = match plan.claim {
            Claim::Bits => logprob_bits || !tokens_equal,
            // A difference that is not a number is none that is small.
            _ => diff.is_some_and(|d| d <= LOGPROB) || !tokens_equal,
        };
        find(!logprobs_ok, "logprobs", &|| {
            format!("log-probabilities differ by up to {:.3e}", diff.unwrap_or(f32::NAN))
        });
        find(conversion.as_ref().is_some_and(Conversion::lossy), "cache", &|| {
            "rows have changed in a conversion that is exact".into()
        });
        find(computed != 0, "recomputed", &|| {
            format!("decode computed {computed} tokens of the prompt itself")
        });
        find(transfer.bytes != transfer.planned_bytes, "planned_bytes", &|| {
            format!("{} bytes were moved, {} were planned", transfer.bytes, transfer.planned_bytes)
        });
        if findings.is_empty() {
            findings.extend(plan.fault.map(Finding::missed));
        }
        let times = |first: std::time::Duration, last: std::time::Duration| {
            Some(Times { first_token: first.as_secs_f64(), last_token: last.as_secs_f64() })
        };
        Self {
            tokens_equal,
            bit_equal: logprob_bits && equal,
            max_abs_logprob_diff: diff,
            logprobs: run.tokens.iter().map(|t| t.logprob).collect(),
            generated,
            decode_prompt_tokens_computed: Some(computed),
            prefill_prompt_tokens_computed: Some(
                run.prefill.prompt_tokens.saturating_sub(run.prefill.prompt_tokens_cached),
            ),
            prefill_prompt_tokens_cached: Some(run.prefill.prompt_tokens_cached),
            decode_prompt_tokens_cached: Some(run.decode.prompt_tokens_cached),
            transfer: Some(transfer),
            cache: CacheReport::new(&cache),
            state: state.as_ref().map(CacheReport::new),
            conversion,
            two_processes: times(run.first, run.last),
            one_process: times(answer.first, answer.last),
            findings,
        }
    }

    /// Also says what is wrong when the answer does not begin with what is known to be right.
    pub(super) fn knowing(mut self, answer: &[u32]) -> Self {
        if !self.generated.starts_with(answer) {
            let text = tokens_text("the text says", &self.generated, answer);
            self.findings.push(Finding::new(WRONG_ANSWER, text));
        }
        self
    }

    /// Also says what is wrong when prefill had not exactly `expected` tokens of the prompt from earlier ones.
    pub(super) fn cached(mut self, expected: u64) -> Self {
        let found = self.prefill_prompt_tokens_cached.unwrap_or(0);
        if found != expected {
            let text = format!("prefill had {found} tokens of the prompt from earlier ones, not {expected}");
            self.findings.push(Finding::new("cached", text));
        }
        self
    }

    /// All prompts together: equal when all are, sums, and the largest difference.
    fn all(prompts: &[PromptReport]) -> Self {
        let outcomes = || prompts.iter().map(|p| &p.outcome);
        let sum = |get: fn(&TransferReport) -> u64| {
            outcomes().filter_map(|o| o.transfer.as_ref()).map(get).fold(0, u64::saturating_add)
        };
        let total = |get: fn(&Self) -> Option<u64>| outcomes().filter_map(get).reduce(u64::saturating_add);
        let seconds = |get: fn(&TransferReport) -> f64| {
            outcomes().filter_map(|o| o.transfer.as_ref()).map(get).sum::<f64>()
        };
        let times = |get: fn(&Self) -> Option<Times>| {
            outcomes().filter_map(get).reduce(|a, b| Times {
                first_token: a.first_token + b.first_token,
                last_token: a.last_token + b.last_token,
            })
        };
        Self {
            tokens_equal: outcomes().all(|o| o.tokens_equal),
            bit_equal: outcomes().all(|o| o.bit_equal),
            max_abs_logprob_diff: outcomes().filter_map(|o| o.max_abs_logprob_diff).reduce(f32::max),
            generated: outcomes().flat_map(|o| o.generated.clone()).collect(),
            logprobs: outcomes().flat_map(|o| o.logprobs.clone()).collect(),
            decode_prompt_tokens_computed: total(|o| o.decode_prompt_tokens_computed),
            prefill_prompt_tokens_computed: total(|o| o.prefill_prompt_tokens_computed),
            prefill_prompt_tokens_cached: total(|o| o.prefill_prompt_tokens_cached),
            decode_prompt_tokens_cached: total(|o| o.decode_prompt_tokens_cached),
            transfer: outcomes().any(|o| o.transfer.is_some()).then(|| TransferReport {
                bytes: Bytes(sum(|t| t.bytes.0)),
                planned_bytes: Bytes(sum(|t| t.planned_bytes.0)),
                runs: sum(|t| t.runs),
                seconds: seconds(|t| t.seconds),
                exposed_seconds: seconds(|t| t.exposed_seconds),
            }),
            cache: CacheReport {
                bytes: Bytes(outcomes().map(|o| o.cache.bytes.0).sum()),
                equal: outcomes().all(|o| o.cache.equal),
            },
            state: CacheReport::sum(outcomes().map(|o| o.state)),
            conversion: Conversion::all(outcomes()),
            two_processes: times(|o| o.two_processes),
            one_process: times(|o| o.one_process),
            findings: outcomes().flat_map(|o| o.findings.clone()).collect(),
        }
    }
}

/// The whole demo. Numbers at the top are sums over the prompts.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) model: ModelInfo,
    pub(super) attention: String,
    pub(super) arith: String,
    pub(super) prefill: String,
    pub(super) decode: String,
    /// What moved the cache, and why that one.
    pub(super) transport: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) transport_why: String,
    /// The fault that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) injected: Option<InjectArg>,
    /// What must be equal for `proven`.
    pub(super) claim: Claim,
    /// What it is compared with.
    pub(super) reference: String,
    /// The exit status: true is 0.
    pub(super) proven: bool,
    #[serde(flatten)]
    pub(super) total: Outcome,
    pub(super) prompts: Vec<PromptReport>,
}

impl Report {
    pub(super) fn new(
        model: ModelInfo,
        attention: &str,
        args: &DemoArgs,
        reference: String,
        over: Option<Over>,
        prompts: Vec<PromptReport>,
    ) -> Self {
        let total = Outcome::all(&prompts);
        // When nothing was moved, what was offered.
        let none = || Over { transport: args.engine.transport.to_string(), why: String::new() };
        let Over { transport, why: transport_why } = over.unwrap_or_else(none);
        Self {
            model,
            attention: attention.to_owned(),
            arith: name_of(&args.engine.arith),
            prefill: args.prefill.to_string(),
            decode: args.decode.to_string(),
            transport,
            transport_why,
            injected: args.engine.inject,
            claim: super::tolerance(args),
            reference,
            proven: total.findings.is_empty() && total.tokens_equal,
            total,
            prompts,
        }
    }

    /// Whether all that was found is that the fault could not be committed: the command has to be changed.
    pub(super) fn missed(&self) -> bool {
        let findings = &self.total.findings;
        !findings.is_empty() && findings.iter().all(|finding| finding.kind == NOT_COMMITTED)
    }
}

fn cache_text(what: &str, claim: Claim, cache: &CacheDiff) -> String {
    let (count, first) = match claim {
        Claim::Close => (cache.far, &cache.first_far),
        _ => (cache.different, &cache.first),
    };
    match first {
        Some(first) => {
            format!("{what} differs in {count} of {} coordinates; first: {first}", cache.pieces)
        }
        None => format!("{what}: {} coordinates are on one side only", cache.missing),
    }
}

fn tokens_text(who: &str, found: &[u32], expected: &[u32]) -> String {
    let at = found.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(found.len().min(expected.len()));
    let show = |list: &[u32]| list.get(at).map_or("the end".into(), u32::to_string);
    format!("generated token {at} is {}, {who} {}", show(found), show(expected))
}
