//! The `mono` role: one engine that reads prompts and continues them, behind the OpenAI-compatible API. Not for hand-offs:
//! it needs no registry and has no peers.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::{Json, Router, extract::State, response::Response, routing::get};
use futures_util::future::BoxFuture;
use kvferry_engine::{
    Engine, EngineConfig, EngineStats, Event, Events, Model, NoHandOff, Request, StopReason, Voice,
};
use kvferry_plan::{Attempt, Blame, InstanceId, LongestPrompt, RoomKey};
use kvferry_registry::bind_loopback;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{
    CapacityReply, Chosen, Compute, Problem, ServerError, Stage, TraceSink,
    backend::{Answer, Backend, Extent, Finish, Job, Piece},
    openai::Api,
    pair::mint_room,
    process::ProcessCounts,
    ready::{self, Ready, Watch},
    telemetry::{RoomTelemetry, Telemetry, Totals},
};

/// What a `mono` process is started with, besides its model.
#[derive(Clone, Debug)]
pub struct MonoConfig {
    /// Its name.
    pub instance: InstanceId,
    /// What clients call the model; the checkpoint's own name when left out.
    pub model_name: Option<String>,
    /// Where its HTTP port is opened; loopback only, port 0 takes a free one.
    pub listen: SocketAddr,
    /// Layout and capacity.
    pub engine: EngineConfig,
    /// Who collects the spans of its requests.
    pub traces: Option<Arc<dyn TraceSink>>,
}

/// One engine as a backend.
struct Alone {
    instance: InstanceId,
    engine: Engine,
    draining: AtomicBool,
    telemetry: Arc<Telemetry>,
    watch: Watch,
}

/// A process that serves a model alone.
pub struct Mono {
    alone: Arc<Alone>,
    api: Arc<Api>,
    listener: TcpListener,
    http: SocketAddr,
}

impl std::fmt::Debug for Mono {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mono").field("instance", &self.alone.instance).field("http", &self.http).finish()
    }
}

impl Mono {
    /// Builds the pools and opens the port. Building takes a moment and blocks; must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`ServerError::Bind`] and [`ServerError::Engine`].
    pub async fn start(model: Arc<Model>, config: MonoConfig) -> Result<Self, ServerError> {
        let listener = bind_loopback(config.listen).await?;
        let http = listener.local_addr()?;
        let mut voice = Voice::from(&*model);
        if let Some(name) = config.model_name {
            voice.name = name;
        }
        let (name, model_name) = (config.instance.clone(), model.name().to_owned());
        let engine = Engine::start(model, &config.engine, Arc::new(NoHandOff))?;
        let alone = Arc::new(Alone {
            instance: config.instance,
            engine,
            draining: AtomicBool::new(false),
            telemetry: Arc::new(Telemetry::new("mono", name, &model_name, config.traces)),
            watch: Watch::new(ready::PATIENCE),
        });
        let asked = Arc::downgrade(&alone);
        alone.watch.keep("the scheduler", move || {
            let asked = asked.upgrade().map(|alone| ready::ask_engine(&alone.engine));
            async move {
                if let Some(asked) = asked {
                    asked.await;
                }
            }
        });
        let api = Api::new(voice, Arc::clone(&alone) as Arc<dyn Backend>);
        Ok(Self { alone, api, listener, http })
    }

    /// Base URL of the HTTP port.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.http)
    }

    /// Serves until `drain` is cancelled, then finishes what is under way, for a bounded time.
    ///
    /// # Errors
    /// [`ServerError::Http`].
    pub async fn serve(self, drain: CancellationToken) -> Result<(), ServerError> {
        let admin = Admin { alone: Arc::clone(&self.alone), api: Arc::clone(&self.api) };
        let admin = Router::new()
            .route("/health", get(health))
            .route("/ready", get(ready))
            .route("/metrics", get(metrics))
            .route("/capacity", get(capacity))
            .route("/debug/ledger", get(ledger))
            .with_state(Arc::new(admin));
        let app = self.api.app(admin);
        let late = self.api.drained(&drain, || {
            self.alone.draining.store(true, Ordering::Relaxed);
            tracing::info!(instance = %self.alone.instance, under_way = self.api.under_way(), "draining");
        });
        tokio::select! {
            () = self.api.port(self.listener).serve(app, drain.cancelled()) => {}
            () = late => {}
        }
        Ok(())
    }
}

/// An answer under way.
struct Running {
    events: Events,
    seen: RoomTelemetry,
    /// A piece that was waited for and not told yet.
    first: Option<Piece>,
}

impl Backend for Alone {
    fn start(&self, job: Job) -> BoxFuture<'_, Result<Box<dyn Answer>, Problem>> {
        Box::pin(async move {
            let request = Request {
                prompt: job.prompt.to_vec(),
                max_tokens: job.max_tokens,
                sampling: job.sampling.into(),
                ignore_eos: job.ignore_eos,
                top_logprobs: job.top_logprobs,
                hold: None,
            };
            let key = RoomKey { room: mint_room()?, attempt: Attempt(0) };
            let seen = self.telemetry.begin(key, job.prompt.len(), job.trace);
            let events = self.engine.generate(request).map_err(|error| {
                let problem = Problem::engine(Stage::Admission, &error);
                seen.failed(&problem, false);
                problem
            })?;
            let mut running = Running { events, seen, first: None };
            running.first = Some(running.piece().await?);
            Ok(Box::new(running) as Box<dyn Answer>)
        })
    }

    fn check(&self, extent: Extent) -> Result<(), Problem> {
        self.engine
            .check(extent.prompt_tokens, extent.max_tokens)
            .map_err(|error| Problem::engine(Stage::Admission, &error))
    }

    fn ready(&self) -> Result<(), Problem> {
        if !self.draining.load(Ordering::Relaxed) {
            return Ok(());
        }
        let cause = format!("{} is shutting down; ask another one", self.instance);
        Err(Problem::new(Blame::Environment, Stage::Admission, cause))
    }
}

impl Running {
    async fn piece(&mut self) -> Result<Piece, Problem> {
        let piece = read(&mut self.events).await;
        match &piece {
            Ok(Piece::Token(_)) => self.seen.token(),
            Ok(Piece::Finish(finish)) => {
                self.seen.completed(Totals { cached: finish.cached_tokens, exposed: None });
            }
            Err(problem) => self.seen.failed(problem, false),
        }
        piece
    }
}

impl Answer for Running {
    fn next(&mut self) -> BoxFuture<'_, Result<Piece, Problem>> {
        Box::pin(async move {
            match self.first.take() {
                Some(first) => Ok(first),
                None => self.piece().await,
            }
        })
    }

    fn enough(&mut self) -> BoxFuture<'_, Finish> {
        self.events.enough();
        Box::pin(async move {
            loop {
                match self.piece().await {
                    Ok(Piece::Token(_)) => {}
                    Ok(Piece::Finish(finish)) => return finish,
                    // What came before it failed was all that was wanted.
                    Err(_) => return Finish::default(),
                }
            }
        })
    }
}

async fn read(events: &mut Events) -> Result<Piece, Problem> {
    loop {
        return match events.next().await {
            Some(Event::Token { id, logprob, top }) => Ok(Piece::Token(Chosen { id, logprob, top })),
            Some(Event::Done { reason, prompt_tokens_cached: cached_tokens, .. }) => {
                Ok(Piece::Finish(Finish { eos: reason == StopReason::Eos, cached_tokens }))
            }
            Some(Event::Failed(error)) => Err(Problem::engine(Stage::Compute, &error)),
            Some(_) => continue,
            None => Err(Problem::new(Blame::Environment, Stage::Compute, "the engine has stopped")),
        };
    }
}

struct Admin {
    alone: Arc<Alone>,
    api: Arc<Api>,
}

#[derive(Serialize)]
struct Health {
    status: &'static str,
    role: &'static str,
    instance: InstanceId,
    model: String,
    ranks: u32,
    longest_prompt: u64,
    ready: bool,
    reason: Option<String>,
    compute: Compute,
}

impl Alone {
    /// Whether work would be done now; if not, why.
    fn state(&self) -> Result<(), String> {
        self.ready().map_err(|problem| problem.cause)?;
        self.watch.check()
    }
}

async fn ready(State(admin): State<Arc<Admin>>) -> Ready {
    admin.alone.state().into()
}

async fn capacity(State(admin): State<Arc<Admin>>) -> Json<CapacityReply> {
    let Alone { instance, engine, .. } = &*admin.alone;
    Json(CapacityReply::of(instance, engine, LongestPrompt::decode(engine.capacity())))
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    let metrics = admin.alone.telemetry.metrics();
    metrics.refresh(admin.alone.state().is_ok(), &admin.alone.engine.stats(), None);
    metrics.catalogue().answer()
}

async fn health(State(admin): State<Arc<Admin>>) -> Json<Health> {
    let engine = &admin.alone.engine;
    let state = admin.alone.state();
    Json(Health {
        status: if admin.alone.draining.load(Ordering::Relaxed) { "draining" } else { "ok" },
        role: "mono",
        instance: admin.alone.instance.clone(),
        model: engine.model().name().to_owned(),
        ranks: engine.placement().ranks(),
        longest_prompt: engine.longest_prompt(),
        ready: state.is_ok(),
        reason: state.err(),
        compute: Compute::of(&engine.stats()),
    })
}

#[derive(Serialize)]
struct Ledger {
    /// Pages and requests.
    engine: EngineStats,
    /// Continuations under way.
    tasks: usize,
    /// Sockets, descriptors, threads.
    process: ProcessCounts,
}

async fn ledger(State(admin): State<Arc<Admin>>) -> Json<Ledger> {
    Json(Ledger {
        engine: admin.alone.engine.stats(),
        tasks: admin.api.under_way(),
        process: ProcessCounts::now(),
    })
}
