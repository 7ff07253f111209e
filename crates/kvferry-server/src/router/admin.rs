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
use serde::Serialize;
use serde_json::json;

use super::{backend::Pairs, seat::Load};
use crate::{backend::Backend, openai::Api, process::ProcessCounts, ready::Ready};

pub(super) struct Admin {
    pub(super) instance: InstanceId,
    pub(super) pairs: Arc<Pairs>,
    pub(super) api: Arc<Api>,
}

pub(super) async fn health(State(admin): State<Arc<Admin>>) -> Response {
    let draining = admin.pairs.draining.load(std::sync::atomic::Ordering::Relaxed);
    let status = if draining { "draining" } else { "ok" };
    let state = admin.pairs.ready().map_err(|problem| problem.to_string());
    Json(json!({
        "status": status, "role": "router", "instance": admin.instance, "ready": state.is_ok(), "reason": state.err()
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
