//! One instance: an engine and a node behind one HTTP port, registered under a name.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    extract::DefaultBodyLimit,
    routing::{delete, get, post},
};
use kvferry_engine::{Engine, EngineConfig, EngineError, HandOff, Model, RoomLease};
use kvferry_node::{Node, NodeConfig, Observer, SourceFault, TransportKind};
use kvferry_plan::{
    AdmissionPath, Blame, Bytes, Descriptor, Hold, Incarnation, InstanceId, LongestPrompt, RoomKey,
};
use kvferry_registry::{Client, Guarded, Member, Registration, Role, State, bind_loopback};
use kvferry_transport::Inject;
use tokio::net::TcpListener;
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};

use crate::{
    NodeHandOff, Problem, ServerError, Stage, TraceSink, admin, decode, port, prefill,
    ready::{self, Watch},
    telemetry::Telemetry,
};

/// How long a draining instance waits for the rooms that it has.
const DRAIN: Duration = Duration::from_secs(10);
/// How long a finished room may be held for somebody to read its cache.
const HOLD: Duration = Duration::from_secs(60);

/// What an instance is started with, besides its model.
#[derive(Clone, Debug)]
pub struct InstanceConfig {
    /// Its name, the same over restarts.
    pub instance: InstanceId,
    /// What it does.
    pub role: Role,
    /// Where its HTTP port is opened; loopback only, port 0 takes a free one.
    pub listen: SocketAddr,
    /// URL of the registry, which may start later.
    pub registry: String,
    /// Layout and capacity.
    pub engine: EngineConfig,
    /// Transports, each once, most wanted first.
    pub transports: Vec<TransportKind>,
    /// Bytes per second that are moved at most to or from one peer, where this side moves them.
    pub rate: Option<Bytes>,
    /// Whether payload digests are compared.
    pub digest: bool,
    /// Whether a prefill instance converts what a decode instance keeps in another element type; else they do not pair.
    pub convert_kv: bool,
    /// A fault to commit on what lands here.
    pub inject: Option<Inject>,
    /// A fault to commit in what a prefill instance sends.
    pub fault: Option<SourceFault>,
    /// How long a request may wait for pages.
    pub queue: Duration,
    /// Who collects the spans of its rooms.
    pub traces: Option<Arc<dyn TraceSink>>,
}

impl InstanceConfig {
    /// A generous [`InstanceConfig::queue`].
    pub const QUEUE: Duration = Duration::from_secs(300);
}

/// What all requests share.
pub(crate) struct Shared {
    pub(crate) instance: InstanceId,
    pub(crate) role: Role,
    pub(crate) engine: Engine,
    pub(crate) node: Arc<Node>,
    pub(crate) handoff: Arc<NodeHandOff>,
    pub(crate) registry: Client,
    /// Rooms that are over but whose pages are kept for reading, and since when.
    held: Mutex<HashMap<RoomKey, (RoomLease, Instant)>>,
    pub(crate) registration: Registration,
    draining: AtomicBool,
    /// How long a request may wait for pages.
    queue: Duration,
    pub(crate) telemetry: Arc<Telemetry>,
    watch: Watch,
    /// Work that outlives its HTTP request.
    pub(crate) tasks: TaskTracker,
    /// What is being generated.
    pub(crate) answers: decode::Answers,
    /// Ends what is still under way when draining took too long.
    pub(crate) stop: CancellationToken,
}

impl Shared {
    /// Refuses new work once the instance drains.
    pub(crate) fn admit(&self) -> Result<(), Problem> {
        if !self.draining() {
            return Ok(());
        }
        let cause = format!("{} is shutting down; ask another instance", self.instance);
        Err(Problem::new(Blame::Environment, Stage::Admission, cause))
    }

    /// Longest prompt that is served.
    pub(crate) fn longest_prompt(&self) -> LongestPrompt {
        match self.role {
            Role::Decode => LongestPrompt::decode(self.engine.capacity()),
            _ => LongestPrompt::prefill(self.engine.capacity()),
        }
    }

    /// Comes true when a request has waited for pages for as long as it may.
    pub(crate) async fn waited(&self, prompt_tokens: usize) -> Problem {
        tokio::time::sleep(self.queue).await;
        let cause = format!(
            "{} had no pages for {prompt_tokens} prompt tokens for {} s; try again later, or give it a larger \
             --pool-tokens",
            self.instance,
            self.queue.as_secs()
        );
        Problem::new(Blame::Environment, Stage::Admission, cause)
    }

    /// Whether work would be done now; if not, why.
    pub(crate) fn ready(&self) -> Result<(), String> {
        self.admit().map_err(|problem| problem.cause)?;
        match self.registration.state() {
            State::Registered => self.watch.check(),
            State::Refused(reason) => Err(reason),
            State::Trying => Err(format!(
                "{} is not registered at {}, so nobody finds it; is `kvferry serve --role registry` running there?",
                self.instance,
                self.registry.url()
            )),
        }
    }

    /// Keeps asking the scheduler and the node whether they get to their work.
    fn keep_watch(self: &Arc<Self>) {
        let shared = Arc::downgrade(self);
        self.watch.keep("the scheduler", move || {
            let asked = shared.upgrade().map(|shared| ready::ask_engine(&shared.engine));
            async move {
                if let Some(asked) = asked {
                    asked.await;
                }
            }
        });
        let shared = Arc::downgrade(self);
        self.watch.keep("the hand-off node", move || {
            let asked = shared.upgrade().map(|shared| ready::ask_node(&shared.node));
            async move {
                if let Some(asked) = asked {
                    asked.await;
                }
            }
        });
    }

    pub(crate) fn draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    fn held(&self) -> MutexGuard<'_, HashMap<RoomKey, (RoomLease, Instant)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the pages of a finished room until somebody releases it, or its time is up.
    pub(crate) fn hold(self: &Arc<Self>, lease: RoomLease) {
        let (key, since) = (lease.key(), Instant::now());
        self.held().insert(key, (lease, since));
        // Not a tracked task: draining does not wait for readers, the engine's end frees the pages.
        let shared = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(HOLD).await;
            if let Some(shared) = shared.upgrade()
                && shared.held().get(&key).is_some_and(|(_, held)| *held == since)
            {
                tracing::warn!(%key, "a held room was never released");
                shared.release(key);
            }
        });
    }

    /// Releases a held room; false when none of that key is held.
    pub(crate) fn release(&self, key: RoomKey) -> bool {
        self.held().remove(&key).is_some()
    }

    pub(crate) fn held_rooms(&self) -> usize {
        self.held().len()
    }
}

/// A running instance.
pub struct Instance {
    shared: Arc<Shared>,
    listener: TcpListener,
    http: SocketAddr,
}

impl std::fmt::Debug for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Instance").field("instance", &self.shared.instance).field("http", &self.http).finish()
    }
}

impl Instance {
    /// Builds the pools, opens the ports and begins to register. Building takes a moment and blocks; must be called
    /// within a tokio runtime.
    ///
    /// # Errors
    /// [`ServerError`] names what cannot work.
    pub async fn start(model: Arc<Model>, config: InstanceConfig) -> Result<Self, ServerError> {
        let registry = Client::new(&config.registry)?;
        let listener = bind_loopback(config.listen).await?;
        let http = listener.local_addr()?;
        let handoff = Arc::new(NodeHandOff::default());
        let engine = Engine::start(model, &config.engine, Arc::clone(&handoff) as Arc<dyn HandOff>)?;
        let keeps_back = Hold::Prompt(AdmissionPath::Normal);
        if config.role == Role::Prefill && engine.capacity().longest(keeps_back) == 0 {
            return Err(EngineError::Config(format!(
                "pool-tokens={}: prefill keeps a part of the pool back, and no prompt would fit; use at least {}",
                config.engine.pool_tokens,
                config.engine.layout.pool_for_prompt(1)
            ))
            .into());
        }
        let descriptor = Descriptor { converts: config.convert_kv, ..engine.descriptor() };
        let mut limits = kvferry_node::Limits::default();
        limits.transport.rate = config.rate;
        let node = Node::start(NodeConfig {
            instance: config.instance.clone(),
            incarnation: None,
            bind: (config.listen.ip(), 0).into(),
            descriptor: descriptor.clone(),
            hosts: None,
            arenas: engine.arenas().to_vec(),
            transports: config.transports,
            digest: config.digest,
            inject: config.inject,
            fault: config.fault,
            limits,
        })?;
        let member = Member {
            instance: config.instance.clone(),
            incarnation: node.incarnation(),
            role: config.role,
            http: format!("http://{http}"),
            control: node.endpoint(),
            ranks: engine.placement().ranks(),
            hosts: None,
            descriptor,
            transports: node.transports().into_iter().map(|(_, endpoint)| endpoint).collect(),
            capacity: Some(engine.capacity().clone()),
        };
        let registration = registry.keep(member);
        let role = match config.role {
            Role::Decode => "decode",
            _ => "prefill",
        };
        let (name, model) = (config.instance.clone(), engine.model().name().to_owned());
        let telemetry = Arc::new(Telemetry::new(role, name, &model, config.traces));
        node.observe(Arc::clone(&telemetry) as Arc<dyn Observer>);
        let shared = Arc::new(Shared {
            instance: config.instance,
            role: config.role,
            engine,
            node,
            handoff,
            registry,
            held: Mutex::default(),
            registration,
            draining: AtomicBool::new(false),
            queue: config.queue,
            telemetry,
            watch: Watch::new(ready::PATIENCE),
            tasks: TaskTracker::new(),
            answers: decode::Answers::default(),
            stop: CancellationToken::new(),
        });
        shared.keep_watch();
        Ok(Self { shared, listener, http })
    }

    /// Base URL of the HTTP port.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.http)
    }

    /// This start of the instance.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.shared.node.incarnation()
    }

    /// Serves until `drain` is cancelled, then finishes what is under way (for a bounded time), leaves the registry
    /// and closes everything.
    ///
    /// # Errors
    /// [`ServerError::Refused`] when the registry refuses this instance for good, [`ServerError::Http`].
    pub async fn serve(self, drain: CancellationToken) -> Result<(), ServerError> {
        let shared = Arc::clone(&self.shared);
        let closing = CancellationToken::new();
        let server = Guarded::new(self.listener, port::BOUNDS, port::refuse)
            .serve(routes(Arc::clone(&self.shared)), closing.clone().cancelled_owned());
        let server = AbortOnDropHandle::new(tokio::spawn(server));
        let refused = async {
            loop {
                match shared.registration.registered().await {
                    Err(reason) => return reason,
                    Ok(()) => tokio::time::sleep(kvferry_registry::HEARTBEAT).await,
                }
            }
        };
        let result = tokio::select! {
            () = drain.cancelled() => Ok(()),
            reason = refused => Err(ServerError::Refused(reason)),
        };
        shared.draining.store(true, Ordering::Relaxed);
        tracing::info!(instance = %shared.instance, rooms = shared.tasks.len(), "draining");
        if let Err(error) = shared.registration.leave().await {
            tracing::info!(%error, "the registry was not told");
        }
        shared.tasks.close();
        if tokio::time::timeout(DRAIN, shared.tasks.wait()).await.is_err() {
            tracing::warn!(rooms = shared.tasks.len(), "draining took too long: aborting what is left");
            shared.stop.cancel();
            shared.tasks.wait().await;
        }
        closing.cancel();
        // What a client does not read any more does not keep the instance.
        let _ = tokio::time::timeout(Duration::from_secs(1), server).await;
        shared.node.shutdown().await;
        result
    }
}

fn routes(shared: Arc<Shared>) -> Router {
    let admin = Router::new()
        .route("/health", get(admin::health))
        .route("/ready", get(admin::ready))
        .route("/metrics", get(admin::metrics))
        .route("/capacity", get(admin::capacity))
        .route("/debug/ledger", get(admin::ledger))
        .route("/debug/kv/{room}", get(admin::kv).delete(admin::release));
    match shared.role {
        Role::Decode => admin
            .route("/internal/decode", post(decode::handle))
            .route("/internal/decode/{room}", delete(decode::enough)),
        _ => admin.route("/internal/prefill", post(prefill::handle)),
    }
    .fallback(admin::nowhere)
    .method_not_allowed_fallback(admin::wrong_method)
    // The port bounds bodies.
    .layer(DefaultBodyLimit::disable())
    .with_state(shared)
}
