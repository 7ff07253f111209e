//! The registry behind HTTP.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    extract::{Path, State, rejection::JsonRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use kvferry_plan::{Blame, InstanceId};
use tokio::net::TcpListener;

use crate::{Granted, Heartbeat, Member, Members, Problem, Refusal, Store};

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
    #[error("{0} is not a loopback address; only 127.0.0.1 and [::1] may be bound")]
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

type Shared = Arc<Mutex<Store>>;

/// The HTTP routes of a registry over `store`.
pub fn router(store: Store) -> Router {
    Router::new()
        .route("/v1/members", get(list))
        .route("/v1/members/{instance}", put(register).delete(deregister))
        .route("/v1/members/{instance}/heartbeat", post(heartbeat))
        .with_state(Arc::new(Mutex::new(store)))
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

async fn register(
    State(store): State<Shared>,
    Path(instance): Path<String>,
    body: Result<Json<Member>, JsonRejection>,
) -> Result<Json<Granted>, Refused> {
    let Json(member) = body?;
    if member.instance.0 != instance {
        let text = format!("the path names {instance:?}, the record {:?}", member.instance.0);
        return Err(Refusal::Malformed(text).into());
    }
    Ok(Json(locked(&store, |s| s.register(member, Instant::now(), clock_ms()))?))
}

async fn heartbeat(
    State(store): State<Shared>,
    Path(instance): Path<String>,
    body: Result<Json<Heartbeat>, JsonRejection>,
) -> Result<Json<Granted>, Refused> {
    let Json(beat) = body?;
    Ok(Json(locked(&store, |s| s.heartbeat(&InstanceId(instance), beat.incarnation, Instant::now()))?))
}

async fn deregister(
    State(store): State<Shared>,
    Path(instance): Path<String>,
    body: Result<Json<Heartbeat>, JsonRejection>,
) -> Result<StatusCode, Refused> {
    let Json(beat) = body?;
    locked(&store, |s| s.deregister(&InstanceId(instance), beat.incarnation));
    Ok(StatusCode::NO_CONTENT)
}

/// A refusal on its way out.
struct Refused(StatusCode, Refusal);

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        let status = match refusal {
            Refusal::Changed { .. } | Refusal::Role { .. } | Refusal::Stale { .. } => StatusCode::CONFLICT,
            Refusal::Full => StatusCode::SERVICE_UNAVAILABLE,
            Refusal::Future { .. } | Refusal::Malformed(_) => StatusCode::BAD_REQUEST,
            Refusal::Unknown(_) => StatusCode::NOT_FOUND,
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
