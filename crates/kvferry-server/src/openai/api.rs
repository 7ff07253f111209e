//! The endpoints, and what their requests share.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, State, rejection::PathRejection},
    http::{HeaderMap, Method, Uri},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use kvferry_engine::Voice;
use kvferry_plan::Blame;
use kvferry_registry::Guarded;
use serde::Serialize;
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::sync::CancellationToken;

use super::{
    body::Body,
    choice::Delta,
    error::ApiError,
    request::{Kind, Wanted},
    run::Run,
    shape::{Shape, now},
    stream,
};
use crate::{Problem, Stage, TraceContext, backend::Backend, port};

/// How long a process that was told to end waits for the answers that it gives.
const DRAIN: Duration = Duration::from_secs(10);
/// For those that are ended then, to say so.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Continuations under way at once, over all requests.
const SLOTS: usize = 1024;

/// An API for one model, over whoever computes.
pub(crate) struct Api {
    voice: Voice,
    backend: Arc<dyn Backend>,
    slots: Arc<Semaphore>,
    created: u64,
    /// Answers that are not over by now end with an error.
    late: CancellationToken,
}

#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    data: [ModelInfo<'a>; 1],
}

#[derive(Serialize)]
struct ModelInfo<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
}

impl Api {
    /// Speaks for a model with what `backend` computes.
    pub(crate) fn new(voice: Voice, backend: Arc<dyn Backend>) -> Arc<Self> {
        Arc::new(Self {
            voice,
            backend,
            slots: Arc::new(Semaphore::new(SLOTS)),
            created: now(),
            late: CancellationToken::new(),
        })
    }

    /// Continuations under way.
    pub(crate) fn under_way(&self) -> usize {
        SLOTS.saturating_sub(self.slots.available_permits())
    }

    /// Waits until `drain` is cancelled and for [`DRAIN`] more, then ends the answers that are left with an error, which takes
    /// them a moment.
    pub(crate) async fn drained(&self, drain: &CancellationToken, begins: impl FnOnce()) {
        drain.cancelled().await;
        begins();
        tokio::time::sleep(DRAIN).await;
        tracing::warn!(under_way = self.under_way(), "draining took too long: what is left is ended");
        self.late.cancel();
        tokio::time::sleep(LAST_WORDS).await;
    }

    /// The whole HTTP face: `/v1/*`, besides the routes of `admin`. Errors have OpenAI's shape on every path.
    pub(crate) fn app(self: &Arc<Self>, admin: Router) -> Router {
        Router::new()
            .route("/v1/models", get(models))
            .route("/v1/models/{*id}", get(model))
            .route("/v1/completions", post(completions))
            .route("/v1/chat/completions", post(chat))
            .with_state(Arc::clone(self))
            .merge(admin)
            .fallback(async |uri: Uri| ApiError::unknown_path(uri.path()))
            .method_not_allowed_fallback(async |method: Method, uri: Uri| {
                ApiError::wrong_method(method.as_str(), uri.path())
            })
            // The port bounds bodies.
            .layer(DefaultBodyLimit::disable())
    }

    /// Where it is served: what the port itself refuses has OpenAI's shape too.
    pub(crate) fn port(&self, listener: TcpListener) -> Guarded {
        Guarded::new(listener, port::BOUNDS, |status, cause| {
            ApiError::from(port::problem(status, cause)).into_response()
        })
    }

    fn info(&self) -> ModelInfo<'_> {
        ModelInfo { id: &self.voice.name, object: "model", created: self.created, owned_by: "kvferry" }
    }

    async fn answer(
        self: Arc<Self>,
        kind: Kind,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<Response, ApiError> {
        let mut wanted = self.understand(kind, body).await?;
        wanted.trace = TraceContext::from_headers(headers);
        let wanted = Arc::new(wanted);
        let told = |problem| ApiError::computing(problem, kind.prompt_field());
        self.backend.ready().map_err(told)?;
        for prompt in &wanted.prompts {
            self.backend.check(wanted.extent(prompt)).map_err(told)?;
        }
        let count = u32::try_from(wanted.continuations()).unwrap_or(u32::MAX);
        let slots = Arc::clone(&self.slots).try_acquire_many_owned(count);
        let slots = slots.map_err(|_| ApiError::too_many(SLOTS))?;
        let mut run = Run::new(&wanted, &self.voice, &self.backend, slots, self.late.clone());
        let shape = Shape::new(Arc::clone(&wanted), self.voice.clone(), random()?);
        if wanted.stream {
            return stream::respond(run, shape).await;
        }
        let mut choices: Vec<Delta> = (0..wanted.continuations()).map(Delta::nothing).collect();
        while let Some(delta) = run.next().await.map_err(told)? {
            if let Some(choice) = choices.get_mut(delta.index) {
                choice.append(delta);
            }
        }
        Ok(Json(shape.whole(choices, run.usage())).into_response())
    }

    /// Reads a body off the threads that answer: a long text takes a moment.
    async fn understand(self: &Arc<Self>, kind: Kind, body: Bytes) -> Result<Wanted, ApiError> {
        let (api, seed) = (Arc::clone(self), random()?);
        tokio::task::spawn_blocking(move || Wanted::new(kind, Body::read(&body)?, &api.voice, seed))
            .await
            .map_err(|error| Problem::new(Blame::Us, Stage::Request, error))?
    }
}

fn random() -> Result<u64, ApiError> {
    let failed =
        |error| Problem::new(Blame::Environment, Stage::Request, format!("no random numbers: {error}"));
    Ok(getrandom::u64().map_err(failed)?)
}

async fn models(State(api): State<Arc<Api>>) -> Response {
    Json(ModelList { object: "list", data: [api.info()] }).into_response()
}

async fn model(
    State(api): State<Arc<Api>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::field("model", rejection.body_text()))?;
    if id == api.voice.name {
        return Ok(Json(api.info()).into_response());
    }
    Err(ApiError::unknown_model(&id, &api.voice.name))
}

async fn completions(
    State(api): State<Arc<Api>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    api.answer(Kind::Completion, &headers, body).await
}

async fn chat(State(api): State<Arc<Api>>, headers: HeaderMap, body: Bytes) -> Result<Response, ApiError> {
    api.answer(Kind::Chat, &headers, body).await
}
