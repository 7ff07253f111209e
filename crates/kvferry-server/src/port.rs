//! The HTTP ports of instances, mono and router: within which bounds they serve. Not for the registry's, which has its own.

use std::time::Duration;

use axum::{
    http::StatusCode,
    response::{IntoResponse, Response},
};
use kvferry_plan::Blame;
use kvferry_registry::Bounds;

use crate::{Problem, Stage};

/// What clients of these ports may do. The largest body holds a million token ids.
pub(crate) const BOUNDS: Bounds = Bounds {
    connections: 2048,
    asking: Duration::from_secs(30),
    unread: Duration::from_secs(60),
    body: 8 << 20,
};

/// What a port refuses to be asked.
pub(crate) fn problem(status: StatusCode, cause: String) -> Problem {
    let blame = if status.is_server_error() { Blame::Environment } else { Blame::Caller };
    Problem { status: Some(status), ..Problem::new(blame, Stage::Request, cause) }
}

/// The same as an answer.
pub(crate) fn refuse(status: StatusCode, cause: String) -> Response {
    problem(status, cause).into_response()
}
