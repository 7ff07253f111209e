//! Admin endpoints: how the process is, what it holds, and what lies in its cache.

use std::sync::Arc;

use axum::{
    Json,
    extract::{
        Path, Query, State,
        rejection::{PathRejection, QueryRejection},
    },
    http::{Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use kvferry_engine::{Engine, EngineStats};
use kvferry_node::PeerTransport;
use kvferry_plan::{
    AdmissionPath, Attempt, Blame, Bytes, Footprint, Incarnation, InstanceId, LongestPrompt, RankId, RoomId,
    RoomKey,
};
use kvferry_registry::{Role, State as Registered};
use serde::{Deserialize, Serialize};

use crate::{KvDump, Problem, Stage, instance::Shared, port, process::ProcessCounts, ready::Ready};

/// How an instance is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// `ok`, or `draining` when it takes no new work.
    pub status: String,
    /// `prefill` or `decode`.
    pub role: Role,
    /// Its name.
    pub instance: InstanceId,
    /// This start of it.
    pub incarnation: Incarnation,
    /// Whether the registry knows it.
    pub registered: bool,
    /// Whether work would be done now, as `GET /ready` says.
    #[serde(default)]
    pub ready: bool,
    /// Why not.
    #[serde(default)]
    pub reason: Option<String>,
    /// The model.
    pub model: String,
    /// Its ranks.
    pub ranks: u32,
    /// Longest prompt that it serves, in tokens; [`CapacityReply`] has the limits of both paths.
    pub longest_prompt: u64,
    /// Its transports, in the order in which it wants them.
    #[serde(default)]
    pub transports: Vec<String>,
    /// The instances that it is connected to, and what moves the cache between the two.
    #[serde(default)]
    pub peers: Vec<PeerHealth>,
    /// How it has computed so far.
    #[serde(default)]
    pub compute: Compute,
}

/// What moves the cache between an instance and another one that it is connected to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerHealth {
    /// The other instance.
    pub instance: InstanceId,
    /// The transport of the last room that began; before the first one, what both want most.
    pub transport: String,
    /// Why that one, of those that both have.
    pub why: String,
}

impl PeerHealth {
    fn of(PeerTransport { peer, transport, why, .. }: PeerTransport) -> Self {
        Self { instance: peer, transport: transport.to_string(), why }
    }
}

/// How an engine has computed so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compute {
    /// Steps of a captured shape.
    pub steps_fixed: u64,
    /// All other steps.
    pub steps_eager: u64,
    /// Rows that padded steps to their captured shape.
    pub rows_padding: u64,
    /// Memory that all ranks compute in, beside pools and weights.
    pub workspace_bytes: u64,
}

impl Compute {
    pub(crate) fn of(engine: &EngineStats) -> Self {
        Self {
            steps_fixed: engine.steps_fixed,
            steps_eager: engine.steps_eager,
            rows_padding: engine.rows_padding,
            workspace_bytes: engine.workspace_bytes,
        }
    }
}

/// What an instance can hold, and what that takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapacityReply {
    /// Its name.
    pub instance: InstanceId,
    /// Longest sequence that it serves, in tokens of prompt and answer together.
    pub max_model_len: u64,
    /// Whether it has a prefix cache; only without one `ignore_eos` has a limit of its own.
    pub prefix_cache: bool,
    /// Memory of each rank, beside its pool, in which it puts the rows of all shard ranks together; 0 without KV sharding.
    pub scratch_bytes: Bytes,
    /// Its pools.
    #[serde(flatten)]
    pub footprint: Footprint,
}

impl CapacityReply {
    pub(crate) fn of(instance: &InstanceId, engine: &Engine, longest_prompt: LongestPrompt) -> Self {
        let capacity = engine.capacity();
        let longest_prompt = match longest_prompt {
            // No request comes to the other path.
            LongestPrompt::Prefill { normal, .. } if capacity.prefix_cache => {
                LongestPrompt::Prefill { normal, ignore_eos: normal }
            }
            other => other,
        };
        Self {
            instance: instance.clone(),
            max_model_len: capacity.max_model_len,
            prefix_cache: capacity.prefix_cache,
            scratch_bytes: Bytes(engine.stats().scratch_bytes),
            footprint: Footprint::new(capacity, longest_prompt, engine.pools()),
        }
    }
}

pub(crate) async fn capacity(State(shared): State<Arc<Shared>>) -> Json<CapacityReply> {
    Json(CapacityReply::of(&shared.instance, &shared.engine, shared.longest_prompt()))
}

pub(crate) async fn ready(State(shared): State<Arc<Shared>>) -> Ready {
    shared.ready().into()
}

pub(crate) async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let metrics = shared.telemetry.metrics();
    metrics.refresh(shared.ready().is_ok(), &shared.engine.stats(), Some(&shared.node.ledger()));
    metrics.catalogue().answer()
}

pub(crate) async fn health(State(shared): State<Arc<Shared>>) -> Json<Health> {
    let state = shared.ready();
    Json(Health {
        status: if shared.draining() { "draining" } else { "ok" }.into(),
        role: shared.role,
        instance: shared.instance.clone(),
        incarnation: shared.node.incarnation(),
        registered: shared.registration.state() == Registered::Registered,
        ready: state.is_ok(),
        reason: state.err(),
        model: shared.engine.model().name().to_owned(),
        ranks: shared.engine.placement().ranks(),
        longest_prompt: shared.longest_prompt().on(AdmissionPath::Normal),
        transports: shared.node.transports().into_iter().map(|(kind, _)| kind.to_string()).collect(),
        peers: shared.node.peers().into_iter().map(PeerHealth::of).collect(),
        compute: Compute::of(&shared.engine.stats()),
    })
}

#[derive(Serialize)]
pub(crate) struct Ledger {
    /// Pages and requests.
    engine: EngineStats,
    /// Rooms, leases, links.
    node: kvferry_node::Ledger,
    /// Requests whose task runs.
    tasks: usize,
    /// Rooms whose pages are kept for reading.
    held: usize,
    /// Sockets, descriptors, threads.
    process: ProcessCounts,
}

pub(crate) async fn ledger(State(shared): State<Arc<Shared>>) -> Json<Ledger> {
    Json(Ledger {
        engine: shared.engine.stats(),
        node: shared.node.ledger(),
        tasks: shared.tasks.len(),
        held: shared.held_rooms(),
        process: ProcessCounts::now(),
    })
}

/// A path that this instance does not have.
pub(crate) async fn nowhere(State(shared): State<Arc<Shared>>, uri: Uri) -> Response {
    let cause = format!(
        "{} is a {} instance and has no {}; it serves /health, /ready, /metrics, /capacity, /debug/ledger, /debug/kv/{{room}} and /internal/{}",
        shared.instance,
        shared.role,
        uri.path(),
        shared.role
    );
    (StatusCode::NOT_FOUND, Json(Problem::new(Blame::Caller, Stage::Request, cause))).into_response()
}

/// A path that this instance has, with another method.
pub(crate) async fn wrong_method(method: Method, uri: Uri) -> Response {
    port::refuse(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not take {method}", uri.path()))
}

#[derive(Deserialize)]
pub(crate) struct Which {
    #[serde(default)]
    attempt: u32,
    #[serde(default)]
    rank: u32,
}

pub(crate) fn key(room: Result<Path<String>, PathRejection>, which: &Which) -> Result<RoomKey, Problem> {
    let Path(room) = room?;
    let room = RoomId::parse(&room).ok_or_else(|| {
        Problem::new(Blame::Caller, Stage::Request, format!("{room:?} is not a room: 32 hexadecimal digits"))
    })?;
    Ok(RoomKey { room, attempt: Attempt(which.attempt) })
}

pub(crate) async fn kv(
    State(shared): State<Arc<Shared>>,
    room: Result<Path<String>, PathRejection>,
    which: Result<Query<Which>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(which) = which?;
    let (key, rank) = (key(room, &which)?, RankId(which.rank));
    let failed = |error: kvferry_engine::EngineError| Problem::engine(Stage::Request, &error);
    let rows = shared.engine.rows(key).map_err(failed)?.await.map_err(failed)?;
    let dump =
        tokio::task::spawn_blocking(move || rows.rank(rank).map(|rows| KvDump::new(key, rows).encode()))
            .await
            .map_err(|error| Problem::new(Blame::Us, Stage::Request, error))?
            .map_err(failed)?;
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], dump).into_response())
}

pub(crate) async fn release(
    State(shared): State<Arc<Shared>>,
    room: Result<Path<String>, PathRejection>,
    which: Result<Query<Which>, QueryRejection>,
) -> Result<StatusCode, Problem> {
    let Query(which) = which?;
    let key = key(room, &which)?;
    if shared.release(key) {
        return Ok(StatusCode::NO_CONTENT);
    }
    Err(Problem::new(Blame::Caller, Stage::Request, format!("room {key} is not held here")))
}
