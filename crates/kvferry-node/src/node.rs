//! The node: a control plane, transports and rooms of one process.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use kvferry_arena::Memory;
use kvferry_plan::{Incarnation, InstanceId, PoolLayout, PoolSize, RankId, RoomKey};
use kvferry_session::{Capabilities, Cause, Endpoint, Hello};
use kvferry_transport::{Registration, Setup};
use tokio::sync::{mpsc, oneshot};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    Ledger, NodeConfig, NodeError, Observer, PeerAddr, PeerTransport, Receive, ReceiveHandle, SourceHandle,
    SourceRoom, TransportKind,
    connection::Listener,
    core::{Core, Event, Shared, Started},
};

/// One process's end of hand-offs, as source and as target.
///
/// One task owns all rooms and drives their machines; connections, links and transports have tasks and threads of
/// their own and only ever send it events, so nothing slow runs where rooms are decided. Dropping the node ends its
/// rooms and connections; [`Node::shutdown`] also waits for that.
#[derive(Debug)]
pub struct Node {
    shared: Arc<Shared>,
    endpoint: SocketAddr,
    events: mpsc::UnboundedSender<Event>,
    serial: AtomicU64,
}

impl Node {
    /// Starts a node on the current tokio runtime.
    ///
    /// # Errors
    /// [`NodeError`] when the address is not a loopback one or taken, the pools do not fit the descriptor, or a
    /// transport does not start.
    pub fn start(config: NodeConfig) -> Result<Arc<Self>, NodeError> {
        let bind = config.bind;
        if !bind.ip().is_loopback() {
            return Err(NodeError::NotLoopback(bind));
        }
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(NodeError::Config("a node is started on a tokio runtime".into()));
        }
        let (pages, slots) = check(&config)?;
        let incarnation = config.incarnation.map_or_else(draw, Ok)?;
        let transports = start_transports(&config, incarnation)?;

        let listener = std::net::TcpListener::bind(bind)
            .and_then(|l| l.set_nonblocking(true).map(|()| l))
            .and_then(tokio::net::TcpListener::from_std)
            .map_err(|source| NodeError::Bind { bind, source })?;
        let endpoint = listener.local_addr().map_err(|source| NodeError::Bind { bind, source })?;

        let mut capabilities = Capabilities::PUSH.with(Capabilities::PULL);
        if config.digest {
            capabilities = capabilities.with(Capabilities::DIGEST);
        }
        let hello = Hello {
            capabilities,
            instance: config.instance,
            incarnation,
            descriptor: config.descriptor,
            pages,
            hosts: config.hosts,
            slots: Some(slots).filter(|slots| *slots > 0),
            transports: transports
                .iter()
                .map(|t| Endpoint { name: t.transport.name().into(), address: t.transport.endpoint() })
                .collect(),
        };
        let (events, local) = mpsc::unbounded_channel();
        let (inbox, remote) = mpsc::channel(1024);
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            fault: config.fault,
            hosted: hello.ranks().into(),
            hello,
            arenas: config.arenas,
            transports,
            limits: config.limits,
            epoch: Instant::now(),
            events: events.clone(),
            inbox,
            ledger: Mutex::default(),
            peers: Mutex::default(),
            observer: OnceLock::new(),
            connection: AtomicU64::new(1),
            listen: stop.child_token(),
            stop,
            tracker: TaskTracker::new(),
        });
        shared.tracker.spawn(Core::new(shared.clone()).run(local, remote));
        shared.tracker.spawn(Listener::new(shared.clone(), listener).run());
        Ok(Arc::new(Self { shared, endpoint, events, serial: AtomicU64::new(1) }))
    }

    /// Where peers reach the control plane.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.endpoint.to_string()
    }

    /// This start of the instance.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.shared.hello.incarnation
    }

    /// The instance's name.
    #[must_use]
    pub fn instance(&self) -> &InstanceId {
        &self.shared.hello.instance
    }

    /// How a peer addresses this node.
    #[must_use]
    pub fn addr(&self) -> PeerAddr {
        PeerAddr {
            instance: self.instance().clone(),
            incarnation: self.incarnation(),
            endpoint: self.endpoint(),
        }
    }

    /// The peers that this node is connected to, and what moves the bytes.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerTransport> {
        self.shared.peers().values().cloned().collect()
    }

    /// The transports, in the order in which they are wanted, with the addresses that peers are told.
    #[must_use]
    pub fn transports(&self) -> Vec<(TransportKind, String)> {
        self.shared.transports.iter().map(|t| (t.kind, t.transport.endpoint())).collect()
    }

    /// Source: a request's cache will be computed here and may be opened by a target, before or after this call.
    #[must_use]
    pub fn send(&self, room: SourceRoom) -> SourceHandle {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let (handle, slot) = SourceHandle::new(room.key, serial, self.shared.epoch, self.events.clone());
        self.events.send(Event::Send { room, serial, slot }).ok();
        handle
    }

    /// Target: asks a peer for a request's cache.
    #[must_use]
    pub fn receive(&self, room: Receive) -> ReceiveHandle {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let (handle, slot) = ReceiveHandle::new(room.key, serial, self.events.clone());
        self.events.send(Event::Receive { room, serial, slot }).ok();
        handle
    }

    /// Target: this node will not ask for a room that a peer may be computing, and never again under this key. The
    /// peer's processes are told at once, or as soon as they are connected, so that the room ends there with this
    /// `cause` and does not wait for a reader. Best effort: a peer that cannot be reached within
    /// [`crate::Limits::handshake`] is not told and has its own limit. Does not wait. Without effect on a room that is
    /// or was received here.
    pub fn decline(&self, key: RoomKey, peers: Vec<PeerAddr>, cause: Cause) {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        self.events.send(Event::Decline { key, serial, peers, cause }).ok();
    }

    /// Source: this node will not compute a room that a peer may have opened already. Whoever waits for it is told the
    /// `cause`, now and later. Without effect on a room that is or was sent here.
    pub fn withhold(&self, key: RoomKey, cause: Cause) {
        self.events.send(Event::Withhold { key, cause }).ok();
    }

    /// Lets somebody watch the rooms from now on. Only the first caller's observer is told.
    pub fn observe(&self, observer: Arc<dyn Observer>) {
        self.shared.observer.set(observer).ok();
    }

    /// Comes true when the task that decides rooms has looked at everything that was sent to it before; false when it
    /// has ended. A node that does not answer serves nobody.
    pub fn answers(&self) -> impl Future<Output = bool> + Send + use<> {
        let (reply, answer) = oneshot::channel();
        self.events.send(Event::Ping(reply)).ok();
        async { answer.await.is_ok() }
    }

    /// What the node holds.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        let mut ledger = self.shared.ledger.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for Started { transport, .. } in &self.shared.transports {
            let stats = transport.stats();
            ledger.grants += stats.grants;
            ledger.jobs += stats.jobs;
            ledger.links += stats.links;
            ledger.accepted += stats.connections;
            ledger.faults += stats.faults;
            ledger.slots += stats.slots;
            ledger.fenced_slots += stats.fenced;
            ledger.blocks += stats.staged;
            ledger.renewed += stats.renewed;
            ledger.landed.0 += stats.landed.0;
            for (how, n) in stats.ended() {
                *ledger.broken.entry(format!("{}.{how}", transport.name())).or_default() += n;
            }
        }
        ledger
    }

    /// Drains and closes the node. New rooms are refused from now on, and the peers are told so; open rooms may end by
    /// themselves for [`crate::Limits::drain`]; what is left then is ended with a cause. Comes back when no page is in
    /// use, the transports are closed and every task has ended.
    pub async fn shutdown(&self) {
        self.events.send(Event::Shutdown).ok();
        self.shared.tracker.close();
        self.shared.tracker.wait().await;
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

/// Checks that there is one pool for each rank that lives here, of the layout that the descriptor says; their number of pages,
/// and of state slots.
fn check(config: &NodeConfig) -> Result<(u32, u32), NodeError> {
    let (shape, placement) = (&config.descriptor.shape, &config.descriptor.placement);
    placement.check(shape).map_err(|e| NodeError::Config(e.to_string()))?;
    let hosted = hosted(config);
    if config.arenas.len() != hosted.len() {
        let (pools, ranks) = (config.arenas.len(), hosted.len());
        return Err(NodeError::Config(format!("{pools} pools for {ranks} ranks")));
    }
    let ascending = hosted.windows(2).all(|pair| matches!(pair, [a, b] if a < b));
    if !ascending || hosted.last().is_none_or(|last| last.0 >= placement.ranks()) {
        let text = format!("hosts: name each rank of this process once, ascending, of {}", placement.ranks());
        return Err(NodeError::Config(text));
    }
    if config.transports.is_empty() {
        return Err(NodeError::Config(
            "no transport; name at least one of mem, shm, tcp, nixl, mooncake and mooncake-tcp".into(),
        ));
    }
    let mut kinds = config.transports.clone();
    kinds.sort_unstable();
    if let Some([twice, ..]) = kinds.windows(2).find(|pair| matches!(pair, [a, b] if a == b)) {
        return Err(NodeError::Config(format!("the transport {twice} is named twice; name each once")));
    }
    let (pages, slots) = config.arenas.first().map_or((0, 0), |a| (a.layout().pages(), a.layout().slots()));
    // What a rank has of the pages of all.
    let pages = pages.saturating_mul(placement.shard_ranks());
    for (rank, arena) in hosted.into_iter().zip(&config.arenas) {
        let layout = PoolLayout::with_slots(shape, placement, rank, PoolSize { pages, slots })
            .map_err(|e| NodeError::Config(e.to_string()))?;
        if layout != *arena.layout() {
            let text = format!("the pool of rank {rank} is not laid out as the descriptor says");
            return Err(NodeError::Config(text));
        }
    }
    Ok((pages, slots))
}

/// The ranks that live here.
fn hosted(config: &NodeConfig) -> Vec<RankId> {
    let all = || (0..config.descriptor.placement.ranks()).map(RankId).collect();
    config.hosts.clone().unwrap_or_else(all)
}

fn start_transports(config: &NodeConfig, incarnation: Incarnation) -> Result<Vec<Started>, NodeError> {
    let setup = Setup {
        incarnation,
        bind: config.bind.ip(),
        inject: config.inject,
        limits: config.limits.transport.clone(),
    };
    let mut started = Vec::new();
    for &kind in &config.transports {
        let start = || {
            let transport = kind.start(setup.clone())?;
            for (rank, arena) in hosted(config).into_iter().zip(&config.arenas) {
                transport.register(rank, Registration::host(arena.clone()))?;
            }
            Ok(transport)
        };
        let transport = start().map_err(|source| NodeError::Transport { kind, source })?;
        started.push(Started { kind, transport });
    }
    Ok(started)
}

/// A new start: its time orders restarts, its nonce tells two of one millisecond apart and cannot be guessed.
fn draw() -> Result<Incarnation, NodeError> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let nonce = getrandom::u64().map_err(|error| NodeError::Nonce(error.to_string()))?;
    Ok(Incarnation { started_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX), nonce })
}
