//! The HTTP face of an instance: prefill and decode roles over an engine and a node, the registry role, admin
//! endpoints, and the client that speaks to them.
//!
//! | request | of | answer |
//! |---|---|---|
//! | `GET /health` | all | [`Health`] |
//! | `GET /ready` | all | 200 when work would be done now, else 503 and the reason |
//! | `GET /metrics` | all | Prometheus text; `docs/metrics.md` describes it |
//! | `GET /capacity` | prefill, decode, mono | [`CapacityReply`]: which prompts are let in, and what the pool takes on each rank |
//! | `GET /debug/ledger` | all | what the process holds: pages, rooms, links, sockets, descriptors, threads |
//! | `GET /debug/kv/{room}?attempt=A&rank=R` | prefill, decode | [`KvDump`]: the prompt's cache on one rank, by coordinate |
//! | `DELETE /debug/kv/{room}?attempt=A` | prefill, decode | 204; releases a room that was held for such reading |
//! | `POST /internal/prefill` | prefill | [`PrefillRequest`] to [`PrefillReply`], when the room has ended |
//! | `POST /internal/decode` | decode | [`DecodeRequest`] to a stream of [`DecodeRecord`], one JSON object a line |
//! | `DELETE /internal/decode/{room}?attempt=A` | decode | 204; the tokens so far are enough: the stream ends with `done` |
//! | `GET /v1/models`, `POST /v1/completions`, `POST /v1/chat/completions` | mono, router | as OpenAI has them; `docs/api.md` |
//!
//! A client that goes away ends its room, on both sides. Every refusal and failure is a [`Problem`]; `/v1` tells it in
//! OpenAI's shape. The crate is
//! *not* for computing (`kvferry-engine`) nor for moving bytes (`kvferry-node`); it introduces them to each other
//! ([`NodeHandOff`]).

#![forbid(unsafe_code)]

mod admin;
mod api;
mod backend;
mod client;
mod decline;
mod decode;
mod dump;
mod error;
mod handoff;
mod instance;
mod metrics;
mod mono;
mod openai;
mod pair;
mod port;
mod prefill;
mod process;
mod ready;
mod registry;
mod router;
mod telemetry;

pub use admin::{CapacityReply, Compute, Health, PeerHealth};
pub use api::{
    Chosen, DecodeDone, DecodeRecord, DecodeRequest, PrefillReply, PrefillRequest, Problem, SamplingSpec,
    Stage, Transfer,
};
pub use client::{DecodeStream, InstanceClient};
pub use dump::{DumpError, DumpPart, KvDump};
pub use error::ServerError;
pub use handoff::NodeHandOff;
pub use instance::{Instance, InstanceConfig};
pub use metrics::metrics_page;
pub use mono::{Mono, MonoConfig};
pub use pair::{InstancePair, Leg, PairAnswer, PairDone, PairEvent, mint_room};
pub use registry::serve_registry;
pub use router::{PairHealth, Router, RouterConfig};
pub use telemetry::{Span, SpanValue, TraceContext, TraceSink};
