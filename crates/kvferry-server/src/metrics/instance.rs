//! Metrics of an instance: what its rooms went through, and what it holds.

use kvferry_engine::EngineStats;
use kvferry_node::Ledger;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Unit,
};

use super::{
    Bounded, BuildLabels, Catalogue, FailureLabels, KindLabels, LinkLabels, OutcomeLabels, PeerLabels,
    RefusalLabels, StageLabels, StateLabels, seconds,
};
use crate::{Problem, process::ProcessCounts, telemetry::Phase};

/// Peers that are told apart.
const PEERS: usize = 64;
/// The outcome of a request whose client has left, which is nobody's failure.
const ABORTED: &str = "aborted";
/// Fields of refusals that are told apart.
const FIELDS: usize = 32;

/// All of them. What rooms go through is counted as it happens; what is held is looked up when somebody asks.
#[derive(Debug)]
pub(crate) struct InstanceMetrics {
    catalogue: Catalogue,
    peers: Bounded,
    fields: Bounded,
    stage_seconds: Family<StageLabels, Histogram, fn() -> Histogram>,
    stage_rooms: Family<StageLabels, Gauge>,
    rooms: Family<OutcomeLabels, Counter>,
    failures: Family<FailureLabels, Counter>,
    refusals: Family<RefusalLabels, Counter>,
    transfer_bytes: Family<PeerLabels, Counter>,
    transfer_runs: Family<PeerLabels, Counter>,
    unlinked: Family<LinkLabels, Counter>,
    exposed: Histogram,
    tokens: Family<KindLabels, Counter>,
    cache_hits: Counter,
    cache_lookups: Counter,
    ready: Gauge,
    pool_pages: Family<StateLabels, Gauge>,
    state_slots: Family<StateLabels, Gauge>,
    requests: Family<StateLabels, Gauge>,
    holds: Family<KindLabels, Gauge>,
    process: Family<KindLabels, Gauge>,
}

/// How a room of an instance ended, as far as it is counted.
#[derive(Debug)]
pub(crate) struct Ended<'a> {
    pub(crate) outcome: &'static str,
    pub(crate) problem: Option<&'a Problem>,
    pub(crate) peer: &'a str,
    pub(crate) transport: &'static str,
    pub(crate) direction: &'static str,
    pub(crate) bytes: u64,
    pub(crate) runs: u64,
    pub(crate) exposed: Option<f64>,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) generated_tokens: u64,
}

impl InstanceMetrics {
    pub(crate) fn new(role: &str, instance: &str, model: &str) -> Self {
        let mut all = Catalogue::new();
        let build = all.add(
            "build_info",
            None,
            "version role instance model",
            "What runs here; always 1",
            Family::<BuildLabels, Gauge>::default(),
        );
        let (role, instance, model) = (role.to_owned(), instance.to_owned(), model.to_owned());
        build
            .get_or_create(&BuildLabels { version: env!("CARGO_PKG_VERSION"), role, instance, model })
            .set(1);
        let bytes = || Some(Unit::Bytes);
        let metrics = Self {
            peers: Bounded::new(PEERS),
            fields: Bounded::new(FIELDS),
            ready: all.add("ready", None, "", "1 when work would be done now, as /ready says", Gauge::default()),
            rooms: all.add(
                "rooms",
                None,
                "outcome",
                "Requests that have ended: completed, aborted (the client left before the answer was whole), refused (never begun), \
                 failed",
                Family::default(),
            ),
            stage_seconds: all.add(
                "stage",
                Some(Unit::Seconds),
                "stage",
                "Time that requests spent in a stage; the stages are described below",
                Family::new_with_constructor(seconds as fn() -> Histogram),
            ),
            stage_rooms: all.add("stage_requests", None, "stage", "Requests in a stage now", Family::default()),
            exposed: all.add(
                "transfer_exposed",
                Some(Unit::Seconds),
                "",
                "Prefill: from the end of the computation to decode's verdict, the part of a hand-off that computing did not hide",
                seconds(),
            ),
            transfer_bytes: all.add(
                "transfer",
                bytes(),
                "direction peer transport",
                "Payload of ended rooms, sent or received",
                Family::default(),
            ),
            transfer_runs: all.add(
                "transfer_runs",
                None,
                "direction peer transport",
                "Strided copies that moved it, counted on the side that executes the plan",
                Family::default(),
            ),
            unlinked: all.add(
                "links_failed",
                None,
                "transport peer",
                "Times that no link came about over a transport that both sides have, so that a room went on with another, or failed",
                Family::default(),
            ),
            failures: all.add(
                "failures",
                None,
                "blame stage cause peer",
                "Requests that were refused or have failed, not those that clients have left: whose fault, doing what, why, with which instance",
                Family::default(),
            ),
            refusals: all.add(
                "pairing_refusals",
                None,
                "field peer",
                "Requests refused because two instances do not fit, by the field in which they differ",
                Family::default(),
            ),
            tokens: all.add(
                "tokens",
                None,
                "kind",
                "Tokens of ended requests: prompt, cached (those of the prompt whose cache was here already), generated",
                Family::default(),
            ),
            cache_lookups: all.add(
                "prefix_cache_lookups",
                None,
                "",
                "Completed requests, each of which asks the prefix cache once",
                Counter::default(),
            ),
            cache_hits: all.add(
                "prefix_cache_hits",
                None,
                "",
                "Those of them that found a part of their prompt there",
                Counter::default(),
            ),
            pool_pages: all.add(
                "pool_pages",
                None,
                "state",
                "Pages of the pool, the same on every rank (with KV sharding logical pages, dealt over the ranks): free, held by requests, cached (kept by the prefix cache as well)",
                Family::default(),
            ),
            state_slots: all.add(
                "state_slots",
                None,
                "state",
                "State slots of one rank's pool, the same on every rank, in a model with state per request: free, held by requests, cached (free, with a state that later requests can go on from)",
                Family::default(),
            ),
            requests: all.add(
                "engine_requests",
                None,
                "state",
                "Requests in the engine: queued, prefilling, reserved, decoding, finished (their pages are still kept)",
                Family::default(),
            ),
            holds: all.add(
                "node_holds",
                None,
                "kind",
                "What the node holds: sending and receiving (rooms), waiting (opens of rooms not known yet), leases, grants, \
                 jobs, connections, links",
                Family::default(),
            ),
            process: ProcessCounts::gauges(&mut all),
            catalogue: all,
        };
        // A series that is there from the start, at 0, is one whose first count is seen.
        for phase in Phase::ALL {
            let stage = StageLabels { stage: phase.name() };
            drop(metrics.stage_rooms.get_or_create(&stage));
            drop(metrics.stage_seconds.get_or_create(&stage));
        }
        for outcome in ["completed", ABORTED, "refused", "failed"] {
            drop(metrics.rooms.get_or_create(&OutcomeLabels { outcome }));
        }
        for kind in ["prompt", "cached", "generated"] {
            drop(metrics.tokens.get_or_create(&KindLabels { kind }));
        }
        metrics
    }

    pub(crate) fn catalogue(&self) -> &Catalogue {
        &self.catalogue
    }

    /// A request enters a stage.
    pub(crate) fn entered(&self, phase: Phase) {
        self.stage_rooms.get_or_create(&StageLabels { stage: phase.name() }).inc();
    }

    /// A request leaves a stage after so many seconds.
    pub(crate) fn left(&self, phase: Phase, seconds: f64) {
        let stage = StageLabels { stage: phase.name() };
        self.stage_rooms.get_or_create(&stage).dec();
        self.stage_seconds.get_or_create(&stage).observe(seconds);
    }

    /// No link came about over a transport.
    pub(crate) fn unlinked(&self, transport: &'static str, peer: &str) {
        let labels = LinkLabels { transport, peer: self.peers.label(peer) };
        self.unlinked.get_or_create(&labels).inc();
    }

    /// A request is over.
    pub(crate) fn ended(&self, ended: &Ended<'_>) {
        let Ended { outcome, problem, direction, .. } = *ended;
        self.rooms.get_or_create(&OutcomeLabels { outcome }).inc();
        let peer = if ended.peer.is_empty() { "none".to_owned() } else { self.peers.label(ended.peer) };
        if let Some(problem) = problem.filter(|_| outcome != ABORTED) {
            let (blame, stage, cause) = problem.labels();
            let labels = FailureLabels { blame, stage, cause, peer: peer.clone() };
            self.failures.get_or_create(&labels).inc();
            if let Some(field) = &problem.field {
                let labels = RefusalLabels { field: self.fields.label(field), peer: peer.clone() };
                self.refusals.get_or_create(&labels).inc();
            }
        }
        if problem.is_none() {
            self.cache_lookups.inc();
            self.cache_hits.inc_by(u64::from(ended.cached_tokens > 0));
        }
        if ended.bytes > 0 {
            let labels = PeerLabels { direction, peer, transport: ended.transport };
            self.transfer_bytes.get_or_create(&labels).inc_by(ended.bytes);
            self.transfer_runs.get_or_create(&labels).inc_by(ended.runs);
        }
        if let Some(seconds) = ended.exposed {
            self.exposed.observe(seconds);
        }
        let tokens = [
            ("prompt", ended.prompt_tokens),
            ("cached", ended.cached_tokens),
            ("generated", ended.generated_tokens),
        ];
        for (kind, count) in tokens {
            self.tokens.get_or_create(&KindLabels { kind }).inc_by(count);
        }
    }

    /// Looks up what is held now.
    pub(crate) fn refresh(&self, ready: bool, engine: &EngineStats, node: Option<&Ledger>) {
        self.ready.set(i64::from(ready));
        let pages =
            [("free", engine.pages_free), ("held", engine.pages_held), ("cached", engine.pages_cached)];
        for (state, pages) in pages {
            self.pool_pages.get_or_create(&StateLabels { state }).set(pages.into());
        }
        let slots =
            [("free", engine.slots_free), ("held", engine.slots_held), ("cached", engine.slots_cached)];
        for (state, slots) in slots {
            self.state_slots.get_or_create(&StateLabels { state }).set(slots.into());
        }
        let requests = [
            ("queued", engine.queued),
            ("prefilling", engine.prefilling),
            ("reserved", engine.reserved),
            ("decoding", engine.decoding),
            ("finished", engine.finished),
        ];
        for (state, count) in requests {
            self.requests.get_or_create(&StateLabels { state }).set(count.into());
        }
        let held = node.map(|node| {
            [
                ("sending", node.sending),
                ("receiving", node.receiving),
                ("waiting", node.waiting),
                ("leases", node.leases),
                ("grants", node.grants),
                ("jobs", node.jobs),
                ("connections", node.connections),
                ("links", node.links),
            ]
        });
        for (kind, count) in held.into_iter().flatten() {
            self.holds.get_or_create(&KindLabels { kind }).set(whole(count));
        }
        ProcessCounts::now().show(&self.process);
    }
}

/// A count as a gauge holds it.
pub(crate) fn whole(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl ProcessCounts {
    /// The gauges of a process, which every kind of process has.
    pub(crate) fn gauges(all: &mut Catalogue) -> Family<KindLabels, Gauge> {
        let help = "What the process holds: descriptors, sockets (some of them), threads";
        all.add("process_holds", None, "kind", help, Family::default())
    }

    /// Sets the gauges of a process.
    pub(crate) fn show(self, process: &Family<KindLabels, Gauge>) {
        let counts =
            [("descriptors", self.descriptors), ("sockets", self.sockets), ("threads", self.threads)];
        for (kind, count) in counts {
            process.get_or_create(&KindLabels { kind }).set(whole(count as u64));
        }
    }
}
