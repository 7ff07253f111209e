//! Errors of the process, and problems of single requests on their way out.

use axum::{
    Json,
    extract::rejection::{JsonRejection, PathRejection, QueryRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use kvferry_engine::EngineError;
use kvferry_node::{CauseKind, NodeError, RoomError};
use kvferry_plan::Blame;
use kvferry_registry::{BindError, ClientError};

use crate::{Problem, Stage};

/// Why an instance could not start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The HTTP port cannot be had.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The engine cannot be built like this.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The HTTP server failed.
    #[error("HTTP server: {0}")]
    Http(#[from] std::io::Error),
    /// The hand-off node cannot start.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// The registry refused this instance for good.
    #[error("{0}")]
    Refused(String),
    /// The registry cannot be asked.
    #[error(transparent)]
    Registry(#[from] ClientError),
}

impl ServerError {
    /// Who can do something about it.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Bind(e) => e.blame(),
            Self::Engine(e) => e.blame(),
            Self::Http(_) => Blame::Environment,
            Self::Node(e) => e.blame(),
            Self::Refused(_) => Blame::Caller,
            Self::Registry(e) => e.blame(),
        }
    }
}

impl Problem {
    /// An engine's refusal or failure.
    pub(crate) fn engine(stage: Stage, error: &EngineError) -> Self {
        let cause_kind = match error {
            EngineError::NeverFits { .. } => "never_fits",
            EngineError::QueueFull { .. } => "queue_full",
            EngineError::Request(_) => "request",
            EngineError::RoomInUse(_) => "duplicate",
            EngineError::Aborted => "aborted",
            EngineError::Stopped => "stopped",
            _ => "engine",
        };
        let problem = Self { cause_kind, ..Self::new(error.blame(), stage, error) };
        match error {
            EngineError::RoomInUse(_) => Self { status: Some(StatusCode::CONFLICT), ..problem },
            _ => problem,
        }
    }

    /// How a room failed at the node.
    pub(crate) fn room(error: &RoomError) -> Self {
        let cause_kind = match error {
            RoomError::Incompatible { .. } => "incompatible",
            RoomError::Unreachable { .. } => "unreachable",
            RoomError::Rejected { .. } => "duplicate",
            RoomError::ShutDown => "stopped",
            RoomError::Ended { cause, .. } => match cause.kind {
                CauseKind::Aborted => "aborted",
                CauseKind::Lost => "lost",
                CauseKind::Stalled => "stalled",
                CauseKind::Corrupt => "corrupt",
                CauseKind::Transport => "transport",
                CauseKind::Protocol => "protocol",
                CauseKind::Unknown => "unknown_room",
                CauseKind::Unavailable => "unavailable",
                CauseKind::Mismatch => "mismatch",
                CauseKind::Incompatible => "incompatible",
                CauseKind::Link => "link",
                _ => "other",
            },
            _ => "other",
        };
        let field = error.field().map(ToOwned::to_owned);
        let peer_lost = cause_kind == "lost";
        let problem =
            Self { cause_kind, peer_lost, field, ..Self::new(error.blame(), Stage::HandOff, error) };
        match error {
            // A retry under the same attempt.
            RoomError::Rejected { .. } => Self { status: Some(StatusCode::CONFLICT), ..problem },
            _ => problem,
        }
    }

    /// The HTTP status that it is answered with.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        if let Some(status) = self.status {
            return status;
        }
        match (self.blame, self.stage) {
            (Blame::Caller, Stage::Lookup) => StatusCode::NOT_FOUND,
            (Blame::Caller, _) => StatusCode::BAD_REQUEST,
            (Blame::Environment, _) => StatusCode::SERVICE_UNAVAILABLE,
            (Blame::PeerIncompatible | Blame::PeerMisbehaved, _) => StatusCode::BAD_GATEWAY,
            (Blame::Us, _) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        (self.status(), Json(self)).into_response()
    }
}

impl From<JsonRejection> for Problem {
    fn from(rejection: JsonRejection) -> Self {
        let problem = Self::new(Blame::Caller, Stage::Request, rejection.body_text());
        match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => Self { status: Some(StatusCode::PAYLOAD_TOO_LARGE), ..problem },
            _ => problem,
        }
    }
}

impl From<QueryRejection> for Problem {
    fn from(rejection: QueryRejection) -> Self {
        Self::new(Blame::Caller, Stage::Request, rejection.body_text())
    }
}

impl From<PathRejection> for Problem {
    fn from(rejection: PathRejection) -> Self {
        Self::new(Blame::Caller, Stage::Request, rejection.body_text())
    }
}
