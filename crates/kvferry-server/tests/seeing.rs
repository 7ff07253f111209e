//! What is seen from outside: metrics, readiness, one log line and one span tree for each request. A registry and two
//! instances live in this process.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
    sync::{Arc, Mutex, Once},
    time::Duration,
};

use kvferry_engine::{EngineConfig, LoadOptions, Model, checkpoint};
use kvferry_node::TransportKind;
use kvferry_plan::{Attempt, InstanceId, RoomId, RoomKey};
use kvferry_registry::{Role, bind_loopback, loopback_http};
use kvferry_server::{
    DecodeRecord, DecodeRequest, Instance, InstanceClient, InstanceConfig, InstancePair, Leg, PairEvent,
    PrefillRequest, Problem, SamplingSpec, Span, SpanValue, TraceContext, TraceSink, metrics_page,
    serve_registry,
};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

/// Spans as they come.
#[derive(Debug, Default)]
struct Collected(Mutex<Vec<Span>>);

impl TraceSink for Collected {
    fn collect(&self, spans: Vec<Span>) {
        self.0.lock().unwrap().extend(spans);
    }
}

impl Collected {
    /// The spans of one trace.
    fn of(&self, trace: u128) -> Vec<Span> {
        self.0.lock().unwrap().iter().filter(|span| span.context.trace == trace).cloned().collect()
    }
}

struct Cluster {
    stop: CancellationToken,
    registry: String,
    prefill: String,
    decode: String,
    names: [InstanceId; 2],
    spans: Arc<Collected>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Cluster {
    async fn start(decode: &str) -> Self {
        // Names differ from test to test, because all of them log into one place.
        let names = [InstanceId(format!("{decode}-prefill")), InstanceId(decode.into())];
        let stop = CancellationToken::new();
        let any = "127.0.0.1:0".parse().unwrap();
        let listener = bind_loopback(any).await.unwrap();
        let registry = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(serve_registry(listener, stop.clone()));
        let model = Model::from_checkpoint(&checkpoint::embedded().unwrap(), LoadOptions::default()).unwrap();
        let spans = Arc::new(Collected::default());
        let mut urls = Vec::new();
        for (name, role, layout) in
            [(&names[0], Role::Prefill, "tp=2"), (&names[1], Role::Decode, "tp=4,dcp=2,page=8")]
        {
            let config = InstanceConfig {
                instance: name.clone(),
                role,
                listen: any,
                registry: registry.clone(),
                engine: EngineConfig { layout: layout.parse().unwrap(), chunk: 8, ..EngineConfig::default() },
                transports: vec![TransportKind::Tcp],
                rate: None,
                digest: true,
                convert_kv: false,
                inject: None,
                fault: None,
                queue: InstanceConfig::QUEUE,
                traces: Some(spans.clone()),
            };
            let instance = Instance::start(Arc::clone(&model), config).await.unwrap();
            urls.push(instance.url());
            tokio::spawn(instance.serve(stop.clone()));
        }
        let [prefill, decode] = urls.try_into().unwrap();
        let cluster = Self { stop, registry, prefill, decode, names, spans };
        for url in [&cluster.prefill, &cluster.decode] {
            until("it is ready", async || get(&format!("{url}/ready")).await.0 == 200).await;
        }
        cluster
    }

    fn ask(&self, room: u128, tokens: u32) -> (PrefillRequest, DecodeRequest) {
        let key = RoomKey { room: RoomId(room), attempt: Attempt(0) };
        // Prompts of different rooms begin differently: none finds another one in a prefix cache.
        let first = 5 + (room % 16) as u32;
        let prompt: Vec<u32> = (first..first + tokens).collect();
        let sampling = SamplingSpec::default();
        let decode = DecodeRequest {
            key,
            prefill: self.names[0].clone(),
            prompt: prompt.clone(),
            max_tokens: 4,
            sampling,
            top_logprobs: 0,
            ignore_eos: true,
            hold: false,
        };
        (PrefillRequest { key, prompt, sampling, top_logprobs: 0, ignore_eos: true }, decode)
    }

    /// One request across both; decode's end.
    async fn run(
        &self,
        (to_prefill, to_decode): (PrefillRequest, DecodeRequest),
        trace: Option<TraceContext>,
    ) -> Result<(), Problem> {
        let client = |url: &str| {
            let client = InstanceClient::new(url).unwrap();
            trace.map_or(client.clone(), |trace| client.traced(trace))
        };
        let (prefill, decode) = (client(&self.prefill), client(&self.decode));
        let decoded = async {
            let mut stream = decode.decode(&to_decode).await?;
            while let Some(record) = stream.next().await? {
                match record {
                    DecodeRecord::Done(_) => return Ok(()),
                    DecodeRecord::Error(problem) => return Err(problem),
                    _ => {}
                }
            }
            panic!("the stream ended without an end")
        };
        let (_, decoded) = tokio::join!(prefill.prefill(&to_prefill), decoded);
        decoded
    }

    async fn metrics(&self, url: &str) -> Samples {
        let (status, text) = get(&format!("{url}/metrics")).await;
        assert_eq!(status, 200);
        parse(&text)
    }
}

async fn get(url: &str) -> (u16, String) {
    let answer = loopback_http().unwrap().build().unwrap().get(url).send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

async fn until(what: &str, is: impl AsyncFn() -> bool) {
    let waited = async {
        while !is().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waited).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// Samples by name and labels, as they are written.
type Samples = BTreeMap<String, f64>;

/// Reads the Prometheus text format, strictly: every sample belongs to the metric that was announced last, and is a number.
fn parse(text: &str) -> Samples {
    let (mut samples, mut announced, mut seen) = (Samples::new(), None, BTreeSet::new());
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').expect("a help text");
            assert!(name.starts_with("kvferry_") && help.len() > 10, "{line}");
            assert!(seen.insert(name.to_owned()), "announced twice: {name}");
            announced = Some((name.to_owned(), String::new()));
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            let at = announced.as_mut().expect("help comes first");
            assert_eq!(at.0, name);
            kind.clone_into(&mut at.1);
        } else {
            let (name, value) = line.rsplit_once(' ').expect("name and value");
            let (of, kind) = announced.as_ref().expect("no sample before its metric");
            let bare = name.split_once('{').map_or(name, |(bare, _)| bare);
            let rest = bare.strip_prefix(of.as_str()).unwrap_or_else(|| panic!("{line} after {of}"));
            let fits = match kind.as_str() {
                "histogram" => ["_bucket", "_sum", "_count"].contains(&rest),
                "counter" => rest.is_empty() && of.ends_with("_total"),
                _ => rest.is_empty(),
            };
            assert!(fits, "{line} in a {kind}");
            let value = value.parse().unwrap_or_else(|_| panic!("not a number: {line}"));
            assert_eq!(samples.insert(name.to_owned(), value), None, "twice: {line}");
        }
    }
    samples
}

/// The sum of all series of `name` whose labels contain all of these.
fn sum(samples: &Samples, name: &str, labels: &[&str]) -> f64 {
    let fits = |series: &str| {
        let (bare, given) = series.split_once('{').unwrap_or((series, ""));
        bare == name && labels.iter().all(|label| given.contains(label))
    };
    samples.iter().filter(|(series, _)| fits(series)).map(|(_, value)| value).sum()
}

/// Everything that is logged in this process, as lines.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lines about a room, on one side, of the target for rooms.
fn logged(room: u128, side: &str) -> Vec<Value> {
    let bytes = log().0.lock().unwrap().clone();
    String::from_utf8(bytes)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| {
            line["target"] == "kvferry::room"
                && line["room"] == RoomId(room).to_string()
                && line["side"] == side
        })
        .collect()
}

fn log() -> Lines {
    static LINES: Mutex<Option<Lines>> = Mutex::new(None);
    static START: Once = Once::new();
    let lines = LINES.lock().unwrap().get_or_insert_default().clone();
    let writer = lines.clone();
    START.call_once(|| {
        tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .with_env_filter("kvferry::room=info")
            .with_writer(move || writer.clone())
            .init();
    });
    lines
}

#[test]
fn the_page_says_what_there_is() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let page = metrics_page();
    if std::env::var_os("KVFERRY_BLESS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    assert!(
        std::fs::read_to_string(&path).is_ok_and(|shown| shown == page),
        "docs/metrics.md is stale; run: KVFERRY_BLESS=1 cargo test -p kvferry-server --test seeing"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn counters_move_with_a_room_that_is_handed_over_and_with_one_that_fails() {
    log();
    let cluster = Cluster::start("counts").await;
    let before = cluster.metrics(&cluster.decode).await;
    assert_eq!(sum(&before, "kvferry_rooms_total", &[]), 0.0);
    assert_eq!(sum(&before, "kvferry_ready", &[]), 1.0);

    cluster.run(cluster.ask(0xc1, 90), None).await.unwrap();
    for (url, direction, peer) in
        [(&cluster.prefill, "sent", &cluster.names[1]), (&cluster.decode, "received", &cluster.names[0])]
    {
        let after = cluster.metrics(url).await;
        let whom = format!("peer=\"{peer}\"");
        let labels = [whom.as_str(), direction, "transport=\"tcp\""];
        let (runs, bytes) = (
            sum(&after, "kvferry_transfer_runs_total", &labels),
            sum(&after, "kvferry_transfer_bytes_total", &labels),
        );
        assert!(
            bytes > 0.0 && runs > 0.0 && bytes == sum(&after, "kvferry_transfer_bytes_total", &[]),
            "{after:#?}"
        );
        assert_eq!(sum(&after, "kvferry_rooms_total", &["completed"]), 1.0);
        assert_eq!(sum(&after, "kvferry_failures_total", &[]), 0.0);
        assert_eq!(sum(&after, "kvferry_tokens_total", &["prompt"]), 90.0);
        assert_eq!(sum(&after, "kvferry_stage_requests", &[]), 0.0, "nobody is in a stage any more");
        for stage in ["queue", "pair", "transfer", "verify", "compute"] {
            let stage = format!("stage=\"{stage}\"");
            assert_eq!(sum(&after, "kvferry_stage_seconds_count", &[&stage]), 1.0, "{stage}");
        }
        let pages = |state| sum(&after, "kvferry_pool_pages", &[state]);
        assert!(pages("free") > 0.0 && pages("held") >= 0.0);
        assert!(sum(&after, "kvferry_process_holds", &["threads"]) >= 1.0);
    }
    let (prefill, decode) = (cluster.metrics(&cluster.prefill).await, cluster.metrics(&cluster.decode).await);
    assert_eq!(sum(&prefill, "kvferry_transfer_exposed_seconds_count", &[]), 1.0);
    assert_eq!(sum(&decode, "kvferry_tokens_total", &["generated"]), 4.0);
    assert_eq!(sum(&decode, "kvferry_stage_seconds_count", &["first_token"]), 1.0);
    let bytes = |samples| sum(samples, "kvferry_transfer_bytes_total", &[]);
    assert_eq!(bytes(&prefill), bytes(&decode));

    // The same prompt again.
    let (mut to_prefill, mut to_decode) = cluster.ask(0xc1, 90);
    (to_prefill.key.room, to_decode.key.room) = (RoomId(0xc5), RoomId(0xc5));
    cluster.run((to_prefill, to_decode), None).await.unwrap();
    let after = cluster.metrics(&cluster.prefill).await;
    assert_eq!(sum(&after, "kvferry_prefix_cache_lookups_total", &[]), 2.0);
    assert_eq!(sum(&after, "kvferry_prefix_cache_hits_total", &[]), 1.0);
    assert!(sum(&after, "kvferry_tokens_total", &["cached"]) > 0.0, "{after:#?}");

    // Decode is told another prompt than prefill: refused before anything moves, counted on both sides.
    let (mut to_prefill, to_decode) = cluster.ask(0xc2, 20);
    to_prefill.prompt[3] += 1;
    cluster.run((to_prefill, to_decode), None).await.unwrap_err();
    for url in [&cluster.prefill, &cluster.decode] {
        let after = cluster.metrics(url).await;
        assert_eq!(sum(&after, "kvferry_rooms_total", &["failed"]), 1.0);
        let why = ["cause=\"mismatch\"", "stage=\"hand-off\"", "blame=\"caller\"", "counts"];
        assert_eq!(sum(&after, "kvferry_failures_total", &why), 1.0, "{after:#?}");
    }
    // One that can never fit, and one whose prefill nobody knows.
    let (mut never, mut unknown) = (cluster.ask(0xc3, 5000).1, cluster.ask(0xc4, 20).1);
    never.prompt = vec![7; 5000];
    unknown.prefill = InstanceId("nobody".into());
    let decode = InstanceClient::new(&cluster.decode).unwrap();
    decode.decode(&never).await.unwrap_err();
    if let Ok(mut stream) = decode.decode(&unknown).await {
        while let Ok(Some(_)) = stream.next().await {}
    }
    let after = cluster.metrics(&cluster.decode).await;
    assert_eq!(sum(&after, "kvferry_rooms_total", &["refused"]), 2.0);
    assert_eq!(sum(&after, "kvferry_failures_total", &["never_fits", "admission"]), 1.0);
    assert_eq!(sum(&after, "kvferry_failures_total", &["lookup", "nobody"]), 1.0);

    let registry = cluster.metrics(&cluster.registry).await;
    assert_eq!(sum(&registry, "kvferry_registry_members", &["prefill"]), 1.0);
    assert_eq!(sum(&registry, "kvferry_registry_instances", &["whole"]), 2.0);
    assert_eq!(get(&format!("{}/ready", cluster.registry)).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_is_no_failure_and_who_has_enough_is_a_success() {
    log();
    let cluster = Cluster::start("leavers").await;
    let pair = |name: usize, url: &str| Leg {
        instance: cluster.names[name].clone(),
        client: InstanceClient::new(url).unwrap(),
    };
    let pair = InstancePair { prefill: pair(0, &cluster.prefill), decode: pair(1, &cluster.decode) };
    let long = |room| DecodeRequest { max_tokens: 3000, ..cluster.ask(room, 40).1 };
    // One reads two tokens and has enough of it, the other goes without a word.
    for (room, outcome) in [(0xd1, "completed"), (0xd2, "aborted")] {
        let mut answer = pair.open(long(room)).await.unwrap();
        for _ in 0..2 {
            assert!(matches!(answer.next().await.unwrap(), Some(PairEvent::Token(_))));
        }
        if outcome == "completed" {
            let done = answer.enough().await.unwrap();
            assert_eq!((done.decode.reason.as_str(), done.prefill.unwrap().prompt_tokens), ("enough", 40));
            assert_eq!(answer.next().await.unwrap(), None);
        }
        drop(answer);
        until("decode has said how it ended", async || !logged(room, "decode").is_empty()).await;
        let line = &logged(room, "decode")[0];
        assert_eq!(line["outcome"], outcome, "{line:#}");
        assert_eq!(line["cause"].is_string(), outcome == "aborted", "{line:#}");
        assert!(line["generated"].as_u64().unwrap() < 3000, "it ended before its time: {line:#}");
    }
    let decode = cluster.metrics(&cluster.decode).await;
    for outcome in ["completed", "aborted"] {
        assert_eq!(sum(&decode, "kvferry_rooms_total", &[outcome]), 1.0, "{decode:#?}");
    }
    assert_eq!(sum(&decode, "kvferry_failures_total", &[]), 0.0, "{decode:#?}");
    // Nothing is generated there any more.
    let key = RoomKey { room: RoomId(0xd1), attempt: Attempt(0) };
    let late = pair.decode.client.enough(key).await.unwrap_err();
    assert!(late.to_string().contains("nothing is being generated"), "{late}");
    let prompt = vec![7; 3];
    let again = DecodeRequest { prompt, ..long(0xd3) };
    assert!(matches!(pair.open(again).await.unwrap().next().await.unwrap(), Some(PairEvent::Token(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_request_is_one_line_with_its_outcome_on_each_side() {
    log();
    let cluster = Cluster::start("lines").await;
    cluster.run(cluster.ask(0xa1, 40), None).await.unwrap();
    let (mut to_prefill, to_decode) = cluster.ask(0xa2, 20);
    to_prefill.prompt[3] += 1;
    cluster.run((to_prefill, to_decode), None).await.unwrap_err();
    // Nobody asks prefill, and the client loses patience.
    let (_, lonely) = cluster.ask(0xa3, 20);
    let decode = InstanceClient::new(&cluster.decode).unwrap();
    let all = async {
        if let Ok(mut stream) = decode.decode(&lonely).await {
            while let Ok(Some(_)) = stream.next().await {}
        }
    };
    assert!(tokio::time::timeout(Duration::from_millis(300), all).await.is_err());
    until("that room has ended", async || !logged(0xa3, "decode").is_empty()).await;

    for (room, outcome, sides) in [
        (0xa1, "completed", &["prefill", "decode"][..]),
        (0xa2, "failed", &["prefill", "decode"]),
        (0xa3, "aborted", &["decode"]),
    ] {
        for side in sides {
            until("the line is there", async || !logged(room, side).is_empty()).await;
            let lines = logged(room, side);
            assert_eq!(lines.len(), 1, "{lines:#?}");
            let line = &lines[0];
            assert_eq!((&line["outcome"], &line["attempt"]), (&outcome.into(), &0.into()), "{line:#}");
            assert!(line["peer"].as_str().unwrap().starts_with("lines"), "{line:#}");
            let failed = outcome != "completed";
            assert_eq!(line["cause"].is_string(), failed, "{line:#}");
            assert_eq!(line["stage"].as_str(), failed.then_some("hand-off"), "{line:#}");
            assert!(line["queue_seconds"].is_number() && line["seconds"].is_number(), "{line:#}");
            if !failed {
                assert_eq!(line["tokens"], 40);
                assert!(
                    line["bytes"].as_u64().unwrap() > 0 && line["transfer_seconds"].is_number(),
                    "{line:#}"
                );
                assert_eq!(line["exposed_seconds"].is_number(), *side == "prefill", "{line:#}");
            }
        }
    }
    let refused = cluster.ask(0xa4, 5000).1;
    decode.decode(&refused).await.unwrap_err();
    assert_eq!(logged(0xa4, "decode").len(), 1);
    assert_eq!(logged(0xa4, "decode")[0]["outcome"], "refused");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_request_is_one_tree_of_spans_and_both_sides_are_one_trace() {
    log();
    let cluster = Cluster::start("spans").await;
    cluster.run(cluster.ask(0xb1, 40), None).await.unwrap();
    let caller: TraceContext = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().unwrap();
    cluster.run(cluster.ask(0xb2, 40), Some(caller)).await.unwrap();
    let unsampled = TraceContext { trace: 77, sampled: false, ..caller };
    cluster.run(cluster.ask(0xb3, 40), Some(unsampled)).await.unwrap();

    for (trace, parent) in [(0xb1, None), (caller.trace, Some(caller.span))] {
        let spans = || cluster.spans.of(trace);
        until("both sides have told", async || spans().iter().filter(|s| s.name == "room").count() == 2)
            .await;
        let spans = spans();
        let rooms: Vec<&Span> = spans.iter().filter(|span| span.name == "room").collect();
        for room in &rooms {
            assert_eq!((room.parent, room.remote_parent), (parent, parent.is_some()));
            let children: Vec<&Span> =
                spans.iter().filter(|span| span.parent == Some(room.context.span)).collect();
            let names: BTreeSet<_> = children.iter().map(|span| span.name).collect();
            let side = text(room, "kvferry.side");
            let wanted = match side.as_str() {
                "prefill" => &["queue", "pair", "compute", "transfer", "verify"][..],
                _ => &["queue", "pair", "reserve", "wait", "transfer", "verify", "first_token", "compute"],
            };
            assert_eq!(names, wanted.iter().copied().collect(), "{side}");
            let transfer = children.iter().find(|span| span.name == "transfer").unwrap();
            let chunks: Vec<&Span> =
                spans.iter().filter(|span| span.parent == Some(transfer.context.span)).collect();
            // 40 tokens in chunks of 8, from two ranks.
            assert!(chunks.len() >= 10 && chunks.iter().all(|span| span.name == "chunk"), "{chunks:#?}");
            let bytes: u64 = chunks.iter().map(|span| count(span, "kvferry.bytes")).sum();
            assert_eq!(bytes, count(room, "kvferry.bytes"));
            for span in children.iter().chain(&chunks) {
                assert!(room.began <= span.began && span.began <= span.ended, "{span:#?}");
                assert_eq!(text(span, "kvferry.side"), side);
                assert!(text(span, "kvferry.peer").starts_with("spans"));
            }
        }
        let ids: BTreeSet<u64> = spans.iter().map(|span| span.context.span).collect();
        assert_eq!(ids.len(), spans.len(), "every span has a number of its own");
    }
    assert_eq!(cluster.spans.of(77), []);
}

fn text(span: &Span, name: &str) -> String {
    match span.attributes.iter().find(|(n, _)| *n == name) {
        Some((_, SpanValue::Text(text))) => text.clone(),
        other => panic!("{name}: {other:?} in {span:#?}"),
    }
}

fn count(span: &Span, name: &str) -> u64 {
    match span.attributes.iter().find(|(n, _)| *n == name) {
        Some((_, SpanValue::Count(count))) => *count,
        other => panic!("{name}: {other:?} in {span:#?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_is_ready_only_when_it_would_be_found() {
    log();
    let cluster = Cluster::start("ready").await;
    let (status, body) = get(&format!("{}/ready", cluster.prefill)).await;
    assert_eq!((status, body.as_str()), (200, r#"{"ready":true,"reason":null}"#));

    // One whose registry is not there: alive, and not ready.
    let model = Model::from_checkpoint(&checkpoint::embedded().unwrap(), LoadOptions::default()).unwrap();
    let nobody = "http://127.0.0.1:1".to_owned();
    let config = InstanceConfig {
        instance: InstanceId("lost".into()),
        role: Role::Decode,
        listen: "127.0.0.1:0".parse().unwrap(),
        registry: nobody.clone(),
        engine: EngineConfig::default(),
        transports: vec![TransportKind::Tcp],
        rate: None,
        digest: true,
        convert_kv: false,
        inject: None,
        fault: None,
        queue: InstanceConfig::QUEUE,
        traces: None,
    };
    let instance = Instance::start(model, config).await.unwrap();
    let url = instance.url();
    tokio::spawn(instance.serve(cluster.stop.clone()));
    let (status, body) = get(&format!("{url}/ready")).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &body["ready"]), (503, &false.into()));
    assert!(body["reason"].as_str().unwrap().contains(&nobody), "{body}");
    let (status, body) = get(&format!("{url}/health")).await;
    let health: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &health["ready"], &health["status"]), (200, &false.into(), &"ok".into()));
    let metrics = cluster.metrics(&url).await;
    assert_eq!(sum(&metrics, "kvferry_ready", &[]), 0.0);
}
