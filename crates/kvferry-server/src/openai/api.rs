//! The endpoints, and what their requests share.

use std::sync::Arc;

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, State, rejection::BytesRejection},
    http::{Method, Uri},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use kvferry_engine::Voice;
use kvferry_plan::Blame;
use serde::Serialize;
use tokio::sync::Semaphore;

use super::{
    body::Body,
    choice::Delta,
    error::ApiError,
    request::{Kind, Wanted},
    run::Run,
    shape::{Shape, now},
    stream,
};
use crate::{Problem, Stage, backend::Backend};

/// Largest request body: a million token ids.
const BODY: usize = 8 << 20;
/// Continuations under way at once, over all requests.
const SLOTS: usize = 1024;

/// An API for one model, over whoever computes.
pub(crate) struct Api {
    voice: Voice,
    backend: Arc<dyn Backend>,
    slots: Arc<Semaphore>,
    created: u64,
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
        Arc::new(Self { voice, backend, slots: Arc::new(Semaphore::new(SLOTS)), created: now() })
    }

    /// Continuations under way.
    pub(crate) fn under_way(&self) -> usize {
        SLOTS.saturating_sub(self.slots.available_permits())
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
            .layer(DefaultBodyLimit::max(BODY))
    }

    fn info(&self) -> ModelInfo<'_> {
        ModelInfo { id: &self.voice.name, object: "model", created: self.created, owned_by: "kvferry" }
    }

    async fn answer(
        self: Arc<Self>,
        kind: Kind,
        body: Result<Bytes, BytesRejection>,
    ) -> Result<Response, ApiError> {
        let body = body?;
        let wanted = Arc::new(self.understand(kind, body).await?);
        let told = |problem| ApiError::computing(problem, kind.prompt_field());
        self.backend.ready().map_err(told)?;
        for prompt in &wanted.prompts {
            self.backend.check(prompt.len() as u64, wanted.max_tokens).map_err(told)?;
        }
        let count = u32::try_from(wanted.continuations()).unwrap_or(u32::MAX);
        let slots = Arc::clone(&self.slots).try_acquire_many_owned(count);
        let slots = slots.map_err(|_| ApiError::too_many(SLOTS))?;
        let mut run = Run::new(&wanted, &self.voice, &self.backend, slots);
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

async fn model(State(api): State<Arc<Api>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    if id == api.voice.name {
        return Ok(Json(api.info()).into_response());
    }
    Err(ApiError::unknown_model(&id, &api.voice.name))
}

async fn completions(
    State(api): State<Arc<Api>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    api.answer(Kind::Completion, body).await
}

async fn chat(
    State(api): State<Arc<Api>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    api.answer(Kind::Chat, body).await
}
