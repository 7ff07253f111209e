//! Errors as OpenAI shapes them, with who is at fault and at which stage besides.

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use kvferry_plan::Blame;
use serde::Serialize;

use crate::{Problem, Stage};

/// Characters of an unknown model's name that are told back.
const NAME: usize = 100;

/// An error on its way to a client.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    detail: Detail,
}

#[derive(Debug, Serialize)]
struct Detail {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
    stage: Stage,
    blame: Blame,
}

/// The body, also of an error in the middle of a stream.
#[derive(Serialize)]
struct Body<'a> {
    error: &'a Detail,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let (stage, blame) = (Stage::Request, Blame::Caller);
        Self {
            status,
            detail: Detail { message: message.into(), kind, param: None, code: None, stage, blame },
        }
    }

    /// A field that cannot be served as it is.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message).param(param)
    }

    /// A body that is no request at all.
    pub(crate) fn body(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A model that is not served here.
    pub(crate) fn unknown_model(asked: &str, served: &str) -> Self {
        let short: String = asked.chars().take(NAME).collect();
        let cut = if short.len() < asked.len() { " and so on" } else { "" };
        let message = format!("the model {short:?}{cut} does not exist here; this server has {served:?}");
        Self::new(StatusCode::NOT_FOUND, message).param("model").code("model_not_found")
    }

    /// A path that does not exist.
    pub(crate) fn unknown_path(path: &str) -> Self {
        let message = format!(
            "there is no {path}; served are GET /v1/models, POST /v1/completions, POST /v1/chat/completions; /health, /ready, /metrics and /debug/ledger"
        );
        Self::new(StatusCode::NOT_FOUND, message).code("unknown_url")
    }

    /// A path that exists, with another method.
    pub(crate) fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, message).code("method_not_allowed")
    }

    /// More at once than this server takes.
    pub(crate) fn too_many(limit: usize) -> Self {
        let message =
            format!("{limit} continuations are under way, which is all that this server takes; retry later");
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, message).code("rate_limit_exceeded");
        Self { detail: Detail { stage: Stage::Admission, ..error.detail }, ..error }
    }

    /// A problem of whoever computes. What a caller can be blamed for once the request was understood is the length of
    /// the prompt, which is in the field `prompt`.
    pub(crate) fn computing(problem: Problem, prompt: &'static str) -> Self {
        let too_long = problem.blame == Blame::Caller && problem.stage == Stage::Admission;
        let error = Self::from(problem);
        if too_long { error.param(prompt).code("context_length_exceeded") } else { error }
    }

    fn param(mut self, param: impl Into<String>) -> Self {
        self.detail.param = Some(param.into());
        self
    }

    fn code(mut self, code: &'static str) -> Self {
        self.detail.code = Some(code);
        self
    }

    /// The body as JSON.
    pub(crate) fn json(&self) -> String {
        serde_json::to_string(&Body { error: &self.detail }).unwrap_or_default()
    }
}

impl From<Problem> for ApiError {
    fn from(problem: Problem) -> Self {
        let at = problem.instance.as_ref().map(|instance| format!("{instance}: ")).unwrap_or_default();
        let error = Self::new(problem.status(), at + &problem.cause);
        Self { detail: Detail { stage: problem.stage, blame: problem.blame, ..error.detail }, ..error }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(Body { error: &self.detail })).into_response()
    }
}
