//! The registry behind HTTP.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, FromRequestParts, Path, State, rejection::JsonRejection},
    http::{StatusCode, request::Parts},
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use kvferry_plan::{Blame, InstanceId};
use tokio::net::TcpListener;

use crate::{Bounds, Granted, Group, Groups, Heartbeat, Member, Members, Problem, Refusal, Store};

/// Why a port could not be opened; the environment's fault, or the caller's for a wider bind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The operating system said no.
    #[error("cannot listen on {at}: {source}; choose another port, or 0 for a free one")]
    Io {
        /// The address.
        at: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// The address can be reached from other machines.
    #[error(
        "will not listen on {0}: connections are not authenticated yet, so only loopback (127.0.0.1, [::1]) is \
         allowed"
    )]
    NotLoopback(SocketAddr),
}

impl BindError {
    /// Who can do something about it.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Io { .. } => Blame::Environment,
            Self::NotLoopback(_) => Blame::Caller,
        }
    }
}

/// Opens a port on a loopback address.
///
/// # Errors
/// [`BindError::NotLoopback`] for any other address, [`BindError::Io`] when it cannot be bound.
pub async fn bind_loopback(at: SocketAddr) -> Result<TcpListener, BindError> {
    if !at.ip().is_loopback() {
        return Err(BindError::NotLoopback(at));
    }
    TcpListener::bind(at).await.map_err(|source| BindError::Io { at, source })
}

impl Bounds {
    /// Of a registry's port: the largest body is the record of an instance with thousands of layers, and members say
    /// something more often than they have to.
    pub const REGISTRY: Self = Self {
        connections: 512,
        asking: Duration::from_secs(5),
        unread: Duration::from_secs(60),
        body: 1 << 20,
    };
}

/// What the registry refuses to be asked, as it words its refusals.
pub fn refuse(status: StatusCode, error: String) -> Response {
    let blame = if status.is_server_error() { Blame::Environment } else { Blame::Caller };
    (status, Json(Problem { error, blame })).into_response()
}

type Shared = Arc<Mutex<Store>>;

/// The HTTP routes of a registry over `store`.
pub fn router(store: Store) -> Router {
    router_over(Arc::new(Mutex::new(store)))
}

/// The same over a store that somebody else looks at as well.
pub fn router_over(store: Arc<Mutex<Store>>) -> Router {
    Router::new()
        .route("/v1/instances", get(groups))
        .route("/v1/instances/{instance}", get(lookup))
        .route("/v1/members", get(list))
        .route("/v1/members/{instance}", put(register).delete(deregister))
        .route("/v1/members/{instance}/heartbeat", post(heartbeat))
        // The port bounds bodies.
        .layer(DefaultBodyLimit::disable())
        .with_state(store)
}

fn locked<T>(store: &Shared, act: impl FnOnce(&mut Store) -> T) -> T {
    // A poisoned lock cannot leave a half-made entry: every change is one insert or one assignment.
    act(&mut store.lock().unwrap_or_else(PoisonError::into_inner))
}

/// This machine's clock, in milliseconds since 1970.
fn clock_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

async fn list(State(store): State<Shared>) -> Json<Members> {
    Json(Members { members: locked(&store, |s| s.members(Instant::now())) })
}

async fn groups(State(store): State<Shared>) -> Json<Groups> {
    Json(Groups { instances: locked(&store, |s| s.groups(Instant::now())) })
}

async fn lookup(State(store): State<Shared>, Named(instance): Named) -> Result<Json<Group>, Refused> {
    Ok(Json(locked(&store, |s| s.lookup(&instance, Instant::now()))?))
}

async fn register(
    State(store): State<Shared>,
    Named(instance): Named,
    body: Result<Json<Member>, JsonRejection>,
) -> Result<Json<Granted>, Refused> {
    let Json(member) = body?;
    if member.instance != instance {
        let text = format!("the path names {:?}, the record {:?}", instance.0, member.instance.0);
        return Err(Refusal::Malformed(text).into());
    }
    Ok(Json(locked(&store, |s| s.register(member, Instant::now(), clock_ms()))?))
}

async fn heartbeat(
    State(store): State<Shared>,
    Named(instance): Named,
    body: Result<Json<Heartbeat>, JsonRejection>,
) -> Result<Json<Granted>, Refused> {
    let Json(beat) = body?;
    Ok(Json(locked(&store, |s| s.heartbeat(&instance, beat.incarnation, Instant::now()))?))
}

async fn deregister(
    State(store): State<Shared>,
    Named(instance): Named,
    body: Result<Json<Heartbeat>, JsonRejection>,
) -> Result<StatusCode, Refused> {
    let Json(beat) = body?;
    locked(&store, |s| s.deregister(&instance, beat.incarnation));
    Ok(StatusCode::NO_CONTENT)
}

/// The instance that a path names.
struct Named(InstanceId);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refused> {
        let named = Path::<String>::from_request_parts(parts, state).await;
        let Path(name) = named.map_err(|rejection| Refusal::Malformed(rejection.body_text()))?;
        Ok(Self(InstanceId(name)))
    }
}

/// A refusal on its way out.
struct Refused(StatusCode, Refusal);

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        let status = match refusal {
            Refusal::Changed { .. } | Refusal::Role { .. } | Refusal::Stale { .. } => StatusCode::CONFLICT,
            Refusal::Full | Refusal::Incomplete { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Refusal::Future { .. } | Refusal::Malformed(_) => StatusCode::BAD_REQUEST,
            Refusal::Absent { .. } | Refusal::Unknown(_) => StatusCode::NOT_FOUND,
        };
        Self(status, refusal)
    }
}

impl From<JsonRejection> for Refused {
    fn from(rejection: JsonRejection) -> Self {
        let status = match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => StatusCode::PAYLOAD_TOO_LARGE,
            _ => StatusCode::BAD_REQUEST,
        };
        Self(status, Refusal::Malformed(rejection.body_text()))
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let Self(status, refusal) = self;
        (status, Json(Problem { error: refusal.to_string(), blame: refusal.blame() })).into_response()
    }
}
