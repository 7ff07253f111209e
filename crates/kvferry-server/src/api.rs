//! Bodies of the internal API. Numbers of type f32 keep their bits: JSON carries the shortest text that reads back
//! as the same number.

use std::fmt;

use axum::http::StatusCode;
use kvferry_engine::{Alternative, FirstToken, Sampling, StopReason};
use kvferry_plan::{Blame, Bytes, InstanceId, RoomKey};
use serde::{Deserialize, Serialize};

/// How tokens are chosen; greedy when left out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingSpec {
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 keeps all tokens.
    pub top_p: f32,
    /// Of the draws.
    pub seed: u64,
}

impl Default for SamplingSpec {
    fn default() -> Self {
        let Sampling { temperature, top_p, seed } = Sampling::GREEDY;
        Self { temperature, top_p, seed }
    }
}

impl From<SamplingSpec> for Sampling {
    fn from(spec: SamplingSpec) -> Self {
        Self { temperature: spec.temperature, top_p: spec.top_p, seed: spec.seed }
    }
}

/// A token that was chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Chosen {
    /// Vocabulary id.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The most probable tokens, most probable first, if they were asked for. The first token of a decode stream has
    /// none: its alternatives are in the [`PrefillReply`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<Alternative>,
}

impl From<FirstToken> for Chosen {
    fn from(first: FirstToken) -> Self {
        Self { id: first.id, logprob: first.logprob, top: first.top }
    }
}

/// Asks a prefill instance to compute a prompt and hand its cache to whoever opens the room.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillRequest {
    /// The room and attempt, minted by the caller.
    #[serde(flatten)]
    pub key: RoomKey,
    /// Vocabulary ids.
    pub prompt: Vec<u32>,
    /// Of the first token.
    #[serde(default)]
    pub sampling: SamplingSpec,
    /// How many of the most probable tokens are told with the first one.
    #[serde(default)]
    pub top_logprobs: u32,
    /// Whether decode will continue past the model's end-of-sequence ids. Without a prefix cache such a prompt has a limit
    /// of its own.
    #[serde(default)]
    pub ignore_eos: bool,
}

/// A room that was handed over whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillReply {
    /// The token after the prompt.
    pub first: Chosen,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// How many of them were not computed because their cache was here already.
    #[serde(default)]
    pub prompt_tokens_cached: u64,
    /// From the end of the computation until decode had everything: the part of the hand-off that computing did
    /// not hide.
    pub exposed_seconds: f64,
    /// From the request to the end of the room.
    pub seconds: f64,
}

/// Asks a decode instance to take over a prompt from a prefill instance and to continue it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecodeRequest {
    /// The room and attempt, as told to the prefill instance.
    #[serde(flatten)]
    pub key: RoomKey,
    /// The prefill instance, by its name in the registry.
    pub prefill: InstanceId,
    /// Vocabulary ids, as told to the prefill instance.
    pub prompt: Vec<u32>,
    /// Most tokens to generate, the first one included.
    pub max_tokens: u32,
    /// How tokens are chosen.
    #[serde(default)]
    pub sampling: SamplingSpec,
    /// How many of the most probable tokens are told with each one.
    #[serde(default)]
    pub top_logprobs: u32,
    /// Continue past the model's end-of-sequence ids.
    #[serde(default)]
    pub ignore_eos: bool,
    /// Keep the cache after the last token, to be read with `GET /debug/kv`, until it is released; at most a minute.
    #[serde(default)]
    pub hold: bool,
}

/// One line of a decode stream: `reserved`, tokens, then `done` or `error`. What goes wrong before `reserved` is the HTTP
/// status, not a line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecodeRecord {
    /// The last line of a request that ended well.
    Done(DecodeDone),
    /// The last line of a request that did not.
    Error(Problem),
    /// The first line: the pages are there, and prefill can be asked. Who asks prefill earlier holds pages there for a
    /// request that may wait here for long, and two such requests can wait for each other.
    Reserved {
        /// Tokens of the prompt that need not be moved, because their cache is here already.
        cached_tokens: u64,
    },
    /// A generated token.
    Token(Chosen),
}

/// What a request took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecodeDone {
    /// `eos`, `length`, or `enough` when the asker had enough.
    pub reason: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// How many of them went through the model *here*, counted by the engine.
    pub prompt_tokens_computed: u64,
    /// How many of them were not moved because their cache was here already.
    #[serde(default)]
    pub prompt_tokens_cached: u64,
    /// The hand-off.
    pub transfer: Transfer,
}

/// The hand-off of one room, as its receiver saw it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// The transport's name.
    pub transport: String,
    /// Why that one, of those that both sides have.
    #[serde(default)]
    pub transport_why: String,
    /// Bytes that landed.
    pub bytes: Bytes,
    /// Bytes that the planner says are due.
    pub planned_bytes: Bytes,
    /// Strided copies.
    pub runs: u64,
    /// From the first offer to the verdict.
    pub seconds: f64,
}

/// Name of a [`StopReason`] in JSON.
pub(crate) fn reason(reason: StopReason) -> &'static str {
    match reason {
        StopReason::Eos => "eos",
        StopReason::Enough => "enough",
        _ => "length",
    }
}

/// What a request was doing when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Stage {
    /// Being understood.
    Request,
    /// Finding its place: capacity, pages.
    Admission,
    /// Looking up the other instance.
    Lookup,
    /// Pairing with the other instance, or moving the cache.
    HandOff,
    /// Running the model.
    Compute,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Admission => "admission",
            Self::Lookup => "lookup",
            Self::HandOff => "hand-off",
            Self::Compute => "compute",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a client came by a problem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The instance said so, or it is our own.
    #[default]
    Answered,
    /// No connection: nothing was begun there.
    Refused,
    /// The connection broke off, or nobody answered.
    Silent,
}

/// Why a request was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{stage}{}: {cause}", .instance.as_ref().map(|i| format!(" at {i}")).unwrap_or_default())]
pub struct Problem {
    /// Who can do something about it.
    pub blame: Blame,
    /// What was being done.
    pub stage: Stage,
    /// What happened and what would work.
    pub cause: String,
    /// Where it happened, if somebody who speaks to several instances tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<InstanceId>,
    /// Whether it was said by an instance, or by nobody.
    #[serde(skip)]
    pub(crate) reach: Reach,
    /// The instance that tells it has lost the other one of its room: it happened there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub peer_lost: bool,
    /// The field in which two instances differ, where that is why they do not serve each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// What it is counted under; empty where nobody has said.
    #[serde(skip)]
    pub(crate) cause_kind: &'static str,
    /// The HTTP status, where it does not follow from blame and stage. Travels as the status alone.
    #[serde(skip)]
    pub(crate) status: Option<StatusCode>,
}

impl Problem {
    /// A problem.
    #[must_use]
    pub fn new(blame: Blame, stage: Stage, cause: impl fmt::Display) -> Self {
        let cause = cause.to_string();
        Self {
            blame,
            stage,
            cause,
            instance: None,
            reach: Reach::Answered,
            peer_lost: false,
            field: None,
            cause_kind: "",
            status: None,
        }
    }

    /// The same, told with the instance where it happened; one that names another already keeps it.
    #[must_use]
    pub fn at(mut self, instance: &InstanceId) -> Self {
        self.instance.get_or_insert_with(|| instance.clone());
        self
    }
}

impl Problem {
    /// Blame, stage and cause as values of labels: few, and none from outside.
    pub(crate) fn labels(&self) -> (&'static str, &'static str, &'static str) {
        let blame = match self.blame {
            Blame::Caller => "caller",
            Blame::PeerIncompatible => "peer_incompatible",
            Blame::PeerMisbehaved => "peer_misbehaved",
            Blame::Environment => "environment",
            Blame::Us => "internal",
        };
        let cause = if self.cause_kind.is_empty() { "other" } else { self.cause_kind };
        (blame, self.stage.name(), cause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_keep_their_bits_through_json() {
        for bits in (0..u32::MAX).step_by(9_999_991) {
            let logprob = f32::from_bits(bits);
            if logprob.is_finite() {
                let text = serde_json::to_string(&Chosen { id: 1, logprob, top: Vec::new() }).unwrap();
                let back: Chosen = serde_json::from_str(&text).unwrap();
                assert_eq!(back.logprob.to_bits(), bits, "{text}");
            }
        }
    }

    #[test]
    fn a_request_needs_its_key_and_little_else() {
        let text = r#"{"room":"000000000000000000000000000000ab","attempt":2,"prefill":"p","prompt":[1],"max_tokens":3}"#;
        let request: DecodeRequest = serde_json::from_str(text).unwrap();
        assert_eq!((request.key.room.0, request.key.attempt.0), (0xab, 2));
        assert_eq!(request.sampling, SamplingSpec::default());
        assert!(serde_json::from_str::<DecodeRequest>(&text.replace("00ab", "xxab")).is_err());
    }
}
