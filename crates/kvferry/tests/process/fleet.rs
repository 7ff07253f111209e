//! Processes that a test starts, stops, kills and starts again; the requests that run across them; and what both
//! must leave behind.

use std::{
    collections::BTreeMap,
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kvferry::{
    engine::{Engine, EngineConfig, Event, LoadOptions, Model, NoHandOff, Request, checkpoint},
    plan::{Attempt, Blame, InstanceId, RoomId, RoomKey},
    server::{
        DecodeDone, DecodeRecord, DecodeRequest, InstanceClient, PrefillReply, PrefillRequest, Problem,
        SamplingSpec, Stage,
    },
};
use serde_json::Value;
use tokio::{
    runtime::{Handle, Runtime},
    sync::oneshot,
    task::JoinHandle,
};

use crate::common::{Server, wait_until};

/// For a process to notice that another one died or stopped: three heartbeats of 200 ms, and some time for whatever
/// else the machine does. One that has far more to do than it can gets as much more time as it needs.
pub(crate) fn notice() -> Duration {
    let load = std::fs::read_to_string("/proc/loadavg").ok();
    let load = load.and_then(|text| text.split(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0);
    let cores = thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
    Duration::from_millis(1500).mul_f64((load / cores / 3.0).max(1.0))
}

/// A registry and the runtime of the clients.
pub(crate) struct Fleet {
    pub(crate) runtime: Runtime,
    pub(crate) registry: Server,
}

impl Fleet {
    pub(crate) fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        Self { runtime: runtime.unwrap(), registry: Server::start(&["--role", "registry"]) }
    }

    /// Starts an instance with the built-in model, and waits until whoever asks finds it.
    pub(crate) fn peer(&self, role: &str, name: &str, more: &[&str]) -> Peer {
        self.peer_of("embedded:llama_tiny", role, name, more)
    }

    /// The same with another model.
    pub(crate) fn peer_of(&self, model: &str, role: &str, name: &str, more: &[&str]) -> Peer {
        let base = ["--role", role, "--instance", name, "--model", model, "--registry"];
        let args = base.into_iter().chain([self.registry.url.as_str()]).chain(more.iter().copied());
        let args = args.map(str::to_owned).collect();
        Peer::start(self.runtime.handle().clone(), args)
    }

    /// The names that the registry knows.
    pub(crate) fn members(&self) -> Vec<String> {
        let client = kvferry::registry::Client::new(&self.registry.url).unwrap();
        let members = self.runtime.block_on(client.members()).unwrap();
        members.into_iter().map(|member| member.instance.0).collect()
    }
}

/// An instance that can be started again under the same name.
pub(crate) struct Peer {
    pub(crate) server: Server,
    runtime: Handle,
    args: Vec<String>,
}

impl Peer {
    fn start(runtime: Handle, args: Vec<String>) -> Self {
        let server = Server::start(&args.iter().map(String::as_str).collect::<Vec<_>>());
        let peer = Self { server, runtime, args };
        wait_until("it is registered", || peer.health().registered);
        peer
    }

    pub(crate) fn restart(&mut self) {
        // Dropping the old one waits for its end.
        let _ = self.server.child.kill();
        let _ = self.server.child.wait();
        *self = Self::start(self.runtime.clone(), std::mem::take(&mut self.args));
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.server.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }

    pub(crate) fn client(&self) -> InstanceClient {
        InstanceClient::new(&self.server.url).unwrap()
    }

    pub(crate) fn health(&self) -> kvferry::server::Health {
        self.runtime.block_on(self.client().health()).unwrap()
    }

    pub(crate) fn ledger(&self) -> Ledger {
        // A client of its own, so that no connection of it stays open.
        Ledger(self.runtime.block_on(self.client().ledger()).unwrap())
    }

    pub(crate) fn name(&self) -> InstanceId {
        InstanceId(self.server.instance.clone())
    }

    /// Resident memory in KiB.
    pub(crate) fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.server.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

/// An answer of `GET /debug/ledger`.
#[derive(Debug)]
pub(crate) struct Ledger(Value);

impl Ledger {
    pub(crate) fn count(&self, path: &str) -> u64 {
        self.0.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path} in {:#}", self.0))
    }

    /// How often a pair was refused for a field.
    pub(crate) fn refused(&self, field: &str) -> u64 {
        self.0["node"]["refused"][field].as_u64().unwrap_or(0)
    }

    /// Connections that ended because the other end broke the protocol, by how.
    pub(crate) fn broken(&self) -> Value {
        self.0["node"]["broken"].clone()
    }

    /// True when no request holds anything.
    pub(crate) fn is_quiet(&self) -> bool {
        let engine = ["pages_held", "slots_held", "queued", "prefilling", "reserved", "decoding", "finished"];
        let node = ["sending", "receiving", "waiting", "leases", "grants", "jobs"];
        engine.iter().all(|n| self.count(&format!("/engine/{n}")) == 0)
            && node.iter().all(|n| self.count(&format!("/node/{n}")) == 0)
            && self.count("/tasks") == 0
            && self.count("/held") == 0
    }

    /// Everything that is held, without what only grows.
    pub(crate) fn held(&self) -> Value {
        let mut held = self.0.clone();
        let grow = ["broken", "completed", "failed", "faults", "landed", "refused", "tombstones"];
        held["node"].as_object_mut().unwrap().retain(|name, _| !grow.contains(&name.as_str()));
        // Cached pages and states are free for whoever needs them.
        held["engine"].as_object_mut().unwrap().retain(|name, _| !name.ends_with("_cached"));
        held
    }
}

/// Waits until a process holds exactly what it held `before`, threads, descriptors and sockets included.
pub(crate) fn wait_for_same(what: &str, peer: &Peer, before: &Value) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let now = peer.ledger().held();
        if now == *before {
            return;
        }
        let name = &peer.server.instance;
        assert!(Instant::now() < deadline, "{what}: {name} holds {now:#}\ninstead of {before:#}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// What processes hold once they are settled.
pub(crate) fn settled<'a>(peers: impl IntoIterator<Item = &'a Peer>) -> Vec<Value> {
    thread::scope(|scope| {
        let all: Vec<_> = peers.into_iter().map(|peer| scope.spawn(|| settle(peer))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

/// Until threads that were needed for a moment only have gone.
fn settle(peer: &Peer) -> Value {
    wait_for_quiet("settled", peer);
    let (mut held, mut since) = (peer.ledger().held(), Instant::now());
    while since.elapsed() < Duration::from_millis(600) {
        thread::sleep(Duration::from_millis(50));
        let now = peer.ledger().held();
        if now != held {
            (held, since) = (now, Instant::now());
        }
    }
    held
}

/// Waits until no request holds anything.
pub(crate) fn wait_for_quiet(what: &str, peer: &Peer) {
    wait_until(&format!("{what}: {} is quiet", peer.server.instance), || peer.ledger().is_quiet());
}

/// One request as a router would run it.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) room: u128,
    pub(crate) attempt: u32,
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_tokens: u32,
}

impl Ask {
    /// A room with a prompt of `tokens` tokens.
    pub(crate) fn new(room: u128, tokens: u32, max_tokens: u32) -> Self {
        let prompt = (0..tokens).map(|i| (i * 37 + tokens) % 509 + 3).collect();
        Self { room, attempt: 0, prompt, max_tokens }
    }

    pub(crate) fn key(&self) -> RoomKey {
        RoomKey { room: RoomId(self.room), attempt: Attempt(self.attempt) }
    }

    pub(crate) fn to_prefill(&self) -> PrefillRequest {
        PrefillRequest {
            key: self.key(),
            prompt: self.prompt.clone(),
            sampling: SamplingSpec::default(),
            top_logprobs: 0,
            ignore_eos: true,
        }
    }

    pub(crate) fn to_decode(&self, prefill: &Peer) -> DecodeRequest {
        DecodeRequest {
            key: self.key(),
            prefill: prefill.name(),
            prompt: self.prompt.clone(),
            max_tokens: self.max_tokens,
            sampling: SamplingSpec::default(),
            ignore_eos: true,
            top_logprobs: 0,
            hold: false,
        }
    }
}

/// Ids and bits of log-probabilities.
pub(crate) type Tokens = Vec<(u32, u32)>;

/// How a request ended, and when.
pub(crate) type Ended<T> = (Result<T, Problem>, Instant);

/// A client's two requests for one room, each of which ends by itself.
pub(crate) struct Flight {
    pub(crate) prefill: JoinHandle<Ended<PrefillReply>>,
    pub(crate) decode: JoinHandle<Ended<(Tokens, DecodeDone)>>,
    /// Told when the first token is here.
    pub(crate) first: oneshot::Receiver<()>,
}

impl Flight {
    pub(crate) fn start(runtime: &Runtime, ask: &Ask, prefill: &Peer, decode: &Peer) -> Self {
        let ((granted, reserved), (said, first)) = (oneshot::channel(), oneshot::channel());
        let (client, request) = (decode.client(), ask.to_decode(prefill));
        let decode =
            async move { (collect(&client, &request, Some(granted), Some(said)).await, Instant::now()) };
        let (client, request) = (prefill.client(), ask.to_prefill());
        let prefill = async move {
            let asked = match reserved.await {
                Ok(()) => client.prefill(&request).await,
                Err(_) => Err(Problem::new(Blame::Caller, Stage::Admission, "decode has no pages")),
            };
            (asked, Instant::now())
        };
        Self { prefill: runtime.spawn(prefill), decode: runtime.spawn(decode), first }
    }

    /// Both ends of a room; a room that failed at one end is given up at the other.
    pub(crate) fn end(self, runtime: &Runtime) -> Result<Tokens, Problem> {
        let Self { prefill, decode, .. } = self;
        let stop = prefill.abort_handle();
        let (decoded, _) = runtime.block_on(decode).unwrap();
        if decoded.is_err() {
            stop.abort();
        }
        let (tokens, done) = decoded?;
        assert_eq!(done.prompt_tokens_computed, 0);
        assert_eq!(done.transfer.bytes, done.transfer.planned_bytes);
        runtime.block_on(prefill).unwrap().0?;
        Ok(tokens)
    }
}

pub(crate) fn start_prefill(runtime: &Runtime, ask: &Ask, prefill: &Peer) -> JoinHandle<Ended<PrefillReply>> {
    let (client, request) = (prefill.client(), ask.to_prefill());
    runtime.spawn(async move { (client.prefill(&request).await, Instant::now()) })
}

pub(crate) fn start_decode(
    runtime: &Runtime,
    ask: &Ask,
    prefill: &Peer,
    decode: &Peer,
    first: oneshot::Sender<()>,
) -> JoinHandle<Ended<(Tokens, DecodeDone)>> {
    let (client, request) = (decode.client(), ask.to_decode(prefill));
    runtime.spawn(async move { (collect(&client, &request, None, Some(first)).await, Instant::now()) })
}

/// A decode request to its end; tells when it has its pages, and when the first token is here.
pub(crate) async fn collect(
    client: &InstanceClient,
    request: &DecodeRequest,
    mut reserved: Option<oneshot::Sender<()>>,
    mut first: Option<oneshot::Sender<()>>,
) -> Result<(Tokens, DecodeDone), Problem> {
    let mut stream = client.decode(request).await?;
    let mut tokens = Tokens::new();
    while let Some(record) = stream.next().await? {
        let told = match record {
            DecodeRecord::Reserved { .. } => &mut reserved,
            DecodeRecord::Token(token) => {
                tokens.push((token.id, token.logprob.to_bits()));
                &mut first
            }
            DecodeRecord::Done(done) => return Ok((tokens, done)),
            DecodeRecord::Error(problem) => return Err(problem),
        };
        told.take().map(|told| told.send(()));
    }
    panic!("the stream of {} ended without an end", request.key)
}

/// Runs a room to its end.
pub(crate) fn run(fleet: &Fleet, ask: &Ask, prefill: &Peer, decode: &Peer) -> Result<Tokens, Problem> {
    Flight::start(&fleet.runtime, ask, prefill, decode).end(&fleet.runtime)
}

/// One engine in this process that answers the same prompts alone.
pub(crate) struct Alone {
    engine: Engine,
    known: BTreeMap<(usize, u32), Tokens>,
}

impl Alone {
    pub(crate) fn start() -> Self {
        let options = LoadOptions::default();
        let model = Model::from_checkpoint(&checkpoint::embedded().unwrap(), options).unwrap();
        let engine = Engine::start(model, &EngineConfig::default(), Arc::new(NoHandOff)).unwrap();
        Self { engine, known: BTreeMap::new() }
    }

    pub(crate) fn answer(&mut self, ask: &Ask) -> Tokens {
        let known = self.known.entry((ask.prompt.len(), ask.max_tokens));
        let answer = || {
            let request = Request { ignore_eos: true, ..Request::greedy(ask.prompt.clone(), ask.max_tokens) };
            let mut events = self.engine.generate(request).unwrap();
            let mut tokens = Tokens::new();
            while let Some(event) = events.recv() {
                if let Event::Token { id, logprob, .. } = event {
                    tokens.push((id, logprob.to_bits()));
                }
            }
            assert_eq!(tokens.len(), ask.max_tokens as usize);
            tokens
        };
        known.or_insert_with(answer).clone()
    }
}
