//! How a router is, and what it has under way.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use kvferry_engine::EngineStats;
use kvferry_plan::InstanceId;
use kvferry_registry::Role;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{backend::Pairs, seat::Load, view::Match};
use crate::{backend::Backend, openai::Api, process::ProcessCounts, ready::Ready};

pub(super) struct Admin {
    pub(super) instance: InstanceId,
    pub(super) pairs: Arc<Pairs>,
    pub(super) api: Arc<Api>,
}

/// A pair that can serve, and what moves the cache between the two unless no link comes about over it: what then does
/// is told by the health of both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairHealth {
    /// The prefill instance.
    pub prefill: InstanceId,
    /// The decode instance.
    pub decode: InstanceId,
    /// The transport.
    pub transport: String,
    /// Why that one, of those that both have.
    pub why: String,
}

impl PairHealth {
    fn of(found: &Match) -> Self {
        let Match { prefill, decode, fitting } = found;
        let (prefill, decode) = (prefill.instance.clone(), decode.instance.clone());
        let (transport, why) = (fitting.transport.transport.to_owned(), fitting.transport.why.clone());
        Self { prefill, decode, transport, why }
    }
}

pub(super) async fn health(State(admin): State<Arc<Admin>>) -> Response {
    let draining = admin.pairs.draining.load(std::sync::atomic::Ordering::Relaxed);
    let status = if draining { "draining" } else { "ok" };
    let state = admin.pairs.ready().map_err(|problem| problem.to_string());
    let snapshot = admin.pairs.view.snapshot().ok();
    let matches = snapshot.as_ref().and_then(|snapshot| snapshot.matches().ok()).unwrap_or_default();
    let instances = snapshot.as_ref().map_or(0, |snapshot| snapshot.seats.len());
    let pairs: Vec<PairHealth> = matches.into_iter().map(PairHealth::of).collect();
    let refusals = snapshot.iter().flat_map(|snapshot| snapshot.refusals());
    let refused: Vec<_> = refusals.map(ToString::to_string).collect();
    Json(json!({
        "status": status, "role": "router", "instance": admin.instance, "ready": state.is_ok(), "reason": state.err(),
        "instances": instances, "pairs": pairs, "refused": refused
    }))
    .into_response()
}

/// 200 once a pair of instances can serve; before that 503 with the reason.
pub(super) async fn ready(State(admin): State<Arc<Admin>>) -> Response {
    Ready::from(admin.pairs.ready().map_err(|problem| problem.to_string())).into_response()
}

pub(super) async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    let metrics = admin.pairs.telemetry.metrics();
    metrics.refresh(admin.pairs.ready().is_ok(), &EngineStats::default(), None);
    metrics.catalogue().answer()
}

#[derive(Serialize)]
struct Ledger {
    /// By instance.
    instances: BTreeMap<InstanceId, Entry>,
    /// Rooms under way.
    rooms: usize,
    /// Continuations under way at the API.
    tasks: usize,
    /// Sockets, descriptors, threads.
    process: ProcessCounts,
}

#[derive(Serialize)]
struct Entry {
    role: Role,
    /// Whether it is left out because nobody listens there.
    left_out: bool,
    /// What this router has there.
    load: Load,
}

pub(super) async fn ledger(State(admin): State<Arc<Admin>>) -> Response {
    let snapshot = admin.pairs.view.snapshot();
    let entry = |seat: &Arc<super::seat::Seat>| {
        (seat.instance.clone(), Entry { role: seat.role, left_out: seat.is_gone(), load: seat.load() })
    };
    Json(Ledger {
        instances: snapshot.map(|s| s.seats.iter().map(entry).collect()).unwrap_or_default(),
        rooms: admin.pairs.rooms(),
        tasks: admin.api.under_way(),
        process: ProcessCounts::now(),
    })
    .into_response()
}
