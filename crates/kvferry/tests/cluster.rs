//! Processes that are started one by one: pairing, limits, clients that leave, what is left behind.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::{
    io::{BufRead, BufReader},
    process::Stdio,
    time::Duration,
};

use common::{Server, command, wait_until};
use kvferry::{
    plan::{AdmissionPath, Attempt, Blame, InstanceId, LongestPrompt, RankId, RoomId, RoomKey},
    server::{
        Chosen, DecodeDone, DecodeRecord, DecodeRequest, InstanceClient, InstancePair, Leg, PairEvent,
        PrefillReply, PrefillRequest, Problem, SamplingSpec, Stage,
    },
};
use serde_json::Value;
use tokio::runtime::Runtime;

struct Cluster {
    runtime: Runtime,
    registry: Server,
    prefill: Server,
    decode: Server,
}

fn instance(registry: &Server, role: &str, more: &[&str]) -> Server {
    instance_of("embedded:llama_tiny", registry, role, more)
}

fn instance_of(model: &str, registry: &Server, role: &str, more: &[&str]) -> Server {
    let base = ["--role", role, "--model", model, "--registry", &registry.url];
    let server = Server::start(&[&base[..], more].concat());
    // Whoever asks next finds it.
    let runtime = runtime();
    wait_until("it is registered", || runtime.block_on(client(&server).health()).unwrap().registered);
    server
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn client(server: &Server) -> InstanceClient {
    InstanceClient::new(&server.url).unwrap()
}

/// How a decode request fails that has its pages.
async fn failure(decode: &InstanceClient, request: &DecodeRequest) -> Problem {
    let mut stream = decode.decode(request).await.unwrap();
    let reserved = stream.next().await.unwrap();
    assert!(matches!(reserved, Some(DecodeRecord::Reserved { .. })), "{reserved:?}");
    match stream.next().await.unwrap() {
        Some(DecodeRecord::Error(problem)) => problem,
        other => panic!("no failure but {other:?}"),
    }
}

fn key(room: u128) -> RoomKey {
    RoomKey { room: RoomId(room), attempt: Attempt(0) }
}

/// Ids and the end.
type Decoded = Result<(Vec<u32>, DecodeDone), Problem>;

impl Cluster {
    fn start(prefill: &[&str], decode: &[&str]) -> Self {
        Self::of("embedded:llama_tiny", prefill, decode)
    }

    fn of(model: &str, prefill: &[&str], decode: &[&str]) -> Self {
        let registry = Server::start(&["--role", "registry"]);
        let prefill = instance_of(model, &registry, "prefill", prefill);
        let decode = instance_of(model, &registry, "decode", decode);
        Self { runtime: runtime(), registry, prefill, decode }
    }

    fn ask(&self, room: u128, prompt: &[u32]) -> (PrefillRequest, DecodeRequest) {
        let (key, prompt) = (key(room), prompt.to_vec());
        let decode = DecodeRequest {
            key,
            prefill: InstanceId(self.prefill.instance.clone()),
            prompt: prompt.clone(),
            max_tokens: 4,
            sampling: SamplingSpec::default(),
            ignore_eos: true,
            top_logprobs: 0,
            hold: false,
        };
        (
            PrefillRequest {
                key,
                prompt,
                sampling: SamplingSpec::default(),
                top_logprobs: 0,
                ignore_eos: true,
            },
            decode,
        )
    }

    /// One request across both: the ids and the end.
    fn run(&self, room: u128, prompt: &[u32]) -> Decoded {
        self.answer(self.ask(room, prompt).1)
    }

    fn answer(&self, request: DecodeRequest) -> Decoded {
        self.both(request).map(|(ids, _, done)| (ids, done))
    }

    /// The ids, and what each side says of the request.
    fn both(&self, request: DecodeRequest) -> Result<(Vec<u32>, PrefillReply, DecodeDone), Problem> {
        let (tokens, reply, done) = self.chosen(request)?;
        Ok((tokens.into_iter().map(|token| token.id).collect(), reply, done))
    }

    /// The same with log-probabilities.
    fn chosen(&self, request: DecodeRequest) -> Result<(Vec<Chosen>, PrefillReply, DecodeDone), Problem> {
        let length = request.prompt.len() as u64;
        self.runtime.block_on(async {
            let (mut answer, mut tokens) = (self.pair().open(request).await?, Vec::new());
            while let Some(event) = answer.next().await? {
                match event {
                    PairEvent::Token(token) => tokens.push(token),
                    PairEvent::Done(done) => {
                        let reply = done.prefill.unwrap();
                        assert_eq!(reply.prompt_tokens, length);
                        return Ok((tokens, reply, done.decode));
                    }
                }
            }
            panic!("the answer ended without an end")
        })
    }

    fn pair(&self) -> InstancePair {
        let leg =
            |server: &Server| Leg { instance: InstanceId(server.instance.clone()), client: client(server) };
        InstancePair { prefill: leg(&self.prefill), decode: leg(&self.decode) }
    }

    fn ledger(&self, server: &Server) -> Value {
        // A client of its own, so that no connection of it stays open.
        self.runtime.block_on(client(server).ledger()).unwrap()
    }

    /// Both ledgers, without counters that only grow and without what the operating system counts.
    fn held(&self) -> [Value; 2] {
        [&self.prefill, &self.decode].map(|server| {
            let mut ledger = self.ledger(server);
            let node = ledger["node"].as_object_mut().unwrap();
            node.retain(|name, _| {
                !["completed", "failed", "landed", "refused", "tombstones"].contains(&name.as_str())
            });
            ledger.as_object_mut().unwrap().remove("process");
            ledger
        })
    }

    /// Descriptors and sockets of both processes. Connections to the registry and of whoever asks come and go, so
    /// this is exact only up to a few.
    fn open(&self) -> Vec<u64> {
        [&self.prefill, &self.decode]
            .into_iter()
            .flat_map(|server| {
                let process = self.ledger(server)["process"].clone();
                ["descriptors", "sockets"].map(|name| process[name].as_u64().unwrap())
            })
            .collect()
    }

    fn is_quiet(&self) -> bool {
        self.held().iter().all(|l| {
            let zero = |group: &str, name: &str| l[group][name] == 0;
            zero("engine", "pages_held")
                && ["sending", "receiving", "waiting", "leases", "grants", "jobs"]
                    .iter()
                    .all(|n| zero("node", n))
                && l["tasks"] == 0
                && l["held"] == 0
        })
    }
}

#[test]
fn after_many_rooms_nothing_is_left() {
    let cluster = Cluster::start(&["--layout", "tp=2"], &["--layout", "tp=4,dcp=2,page=8"]);
    let prompt: Vec<u32> = (5..95).collect();
    // The first room opens the connection and the link that later ones share.
    let first = cluster.run(1, &prompt).unwrap();
    wait_until("quiet", || cluster.is_quiet());
    let (before, open) = (cluster.held(), cluster.open());
    for room in 2..14 {
        let (ids, done) = cluster.run(room, &prompt).unwrap();
        assert_eq!(ids, first.0);
        assert_eq!((done.prompt_tokens, done.prompt_tokens_computed), (90, 0));
        assert_eq!(done.transfer.bytes, done.transfer.planned_bytes);
    }
    wait_until("quiet again", || cluster.is_quiet());
    assert_eq!(cluster.held(), before);
    for (before, after) in open.iter().zip(cluster.open()) {
        assert!(after <= before + 4, "12 rooms left descriptors open: {before} before, {after} after");
    }
    let ledger = cluster.ledger(&cluster.decode);
    assert_eq!(ledger["node"]["completed"], 13);
    assert!(ledger["process"]["threads"].as_u64().unwrap() < 60, "{ledger:#}");
}

#[test]
fn a_prompt_that_begins_like_an_earlier_one_is_neither_computed_nor_moved_twice() {
    // Blocks of 24 tokens at prefill, of 16 at decode.
    let layouts = [["--layout", "tp=2,page=24"], ["--layout", "tp=4,dcp=2,page=8"]];
    for transport in ["tcp", "shm"] {
        let [to, from] = layouts.map(|layout| [&layout[..], &["--transport", transport]].concat());
        let cluster = Cluster::start(&to, &from);
        let prompt: Vec<u32> = (5..95).collect();
        let other: Vec<u32> = (5..45).chain(200..250).collect();
        let run = |cluster: &Cluster, room, prompt: &[u32]| {
            let (ids, reply, done) = cluster.both(cluster.ask(room, prompt).1).unwrap();
            assert_eq!(done.transfer.bytes, done.transfer.planned_bytes);
            assert_eq!(done.prompt_tokens_computed, 0);
            let cached = (reply.prompt_tokens_cached, done.prompt_tokens_cached);
            (ids, done.transfer.bytes.0, cached)
        };
        let (ids, whole, cached) = run(&cluster, 1, &prompt);
        assert_eq!(cached, (0, 0));
        // At least the last token is always computed and moved.
        let (again, rest, cached) = run(&cluster, 2, &prompt);
        assert_eq!((&again, cached), (&ids, (72, 80)), "{transport}");
        assert_eq!(rest * 90, whole * 10, "{transport}");
        let (others, rest, cached) = run(&cluster, 3, &other);
        assert_eq!(cached, (24, 32), "{transport}");
        assert_eq!(rest * 90, whole * 58, "{transport}");
        wait_until("quiet", || cluster.is_quiet());
        let ledger = cluster.ledger(&cluster.decode);
        assert_eq!(ledger["engine"]["pages_free"], ledger["engine"]["pages_total"]);
        assert!(ledger["engine"]["pages_cached"].as_u64().unwrap() >= 8, "{ledger:#}");

        let [to, from] = [to, from].map(|args| [&args[..], &["--no-prefix-cache"]].concat());
        let without = Cluster::start(&to, &from);
        for (room, prompt, expected) in [(1, &prompt, &ids), (2, &prompt, &ids), (3, &other, &others)] {
            let (ids, bytes, cached) = run(&without, room, prompt);
            assert_eq!((&ids, bytes, cached), (expected, whole, (0, 0)), "{transport}");
        }
        assert_eq!(without.ledger(&without.decode)["engine"]["pages_cached"], 0);
    }
}

/// The next turn of a conversation, whose rows decode has from the hand-off and from its own steps.
#[test]
fn a_later_turn_goes_on_from_rows_that_decode_wrote() {
    let layouts = [["--layout", "tp=2,page=24"], ["--layout", "tp=4,dcp=4,page=4"]];
    let base = ["--kv-dtype", "bf16", "--transport"];
    for (model, more) in [
        ("embedded:llama_tiny", ["tcp", "--attention", "gqa"]),
        ("embedded:llama_tiny", ["shm", "--attention", "mla"]),
        ("embedded:kimi_linear_tiny", ["tcp", "--attention", "gqa"]),
        ("embedded:needle_kimi", ["shm", "--attention", "gqa"]),
    ] {
        let sides = layouts.map(|layout| [&layout[..], &base, &more].concat());
        let without = sides.each_ref().map(|side| [&side[..], &["--no-prefix-cache"]].concat());
        let [with, without] = [sides, without].map(|[to, from]| Cluster::of(model, &to, &from));
        // Tokens, the prompt's cache on every rank, and what was moved and was not.
        let run = |cluster: &Cluster, room, prompt: &[u32]| {
            let mut request = cluster.ask(room, prompt).1;
            (request.max_tokens, request.hold) = (40, true);
            let (tokens, reply, done) = cluster.chosen(request).unwrap();
            assert_eq!(done.transfer.bytes, done.transfer.planned_bytes);
            assert_eq!(done.prompt_tokens_computed, 0);
            let decode = client(&cluster.decode);
            let cache =
                (0..4).map(|rank| cluster.runtime.block_on(decode.kv(key(room), RankId(rank))).unwrap());
            let cache: Vec<_> = cache.collect();
            cluster.runtime.block_on(decode.release(key(room))).unwrap();
            let answer: Vec<_> = tokens.iter().map(|t| (t.id, t.logprob.to_bits())).collect();
            let cached = (reply.prompt_tokens_cached, done.prompt_tokens_cached);
            ((answer, cache), done.transfer.bytes.0, cached)
        };
        let prompt: Vec<u32> = (5..95).collect();
        let (first, of_first, cached) = run(&with, 1, &prompt);
        assert_eq!(cached, (0, 0));
        let (expected, _, _) = run(&without, 1, &prompt);
        assert!(first == expected, "{model}");
        // 129 of these 133 tokens have rows at decode, 128 of them in whole blocks.
        let answer = first.0.iter().map(|(id, _)| *id);
        let turn: Vec<u32> = prompt.into_iter().chain(answer).chain([7, 8, 9]).collect();
        let (second, rest, cached) = run(&with, 2, &turn);
        assert_eq!(cached, (72, 128), "{model}");
        let (expected, whole, cached) = run(&without, 2, &turn);
        assert_eq!(cached, (0, 0), "{model}");
        assert!(second == expected, "{model}: the second turn differs");
        // Apart from what a request has once, bytes go with tokens.
        assert_eq!((whole - rest) * 43, (whole - of_first) * 128, "{model}");
    }
}

/// Rows that were cast are not those of a prefill that has decode's own element type, and the other way round.
#[test]
fn rows_that_came_converted_are_not_a_prefix_for_others() {
    let decode = ["--layout", "tp=1,page=4,kv=fp8"];
    let converting = ["--layout", "tp=2,page=4,kv=f32", "--convert-kv"];
    let plain = ["--layout", "tp=2,page=4,kv=fp8"];
    for model in ["embedded:llama_tiny", "embedded:kimi_linear_tiny"] {
        let prompt: Vec<u32> = (5..46).collect();
        let run = |cluster: &Cluster, room| {
            let mut request = cluster.ask(room, &prompt).1;
            request.max_tokens = 20;
            let (tokens, _, done) = cluster.chosen(request).unwrap();
            let answer: Vec<_> = tokens.iter().map(|t| (t.id, t.logprob.to_bits())).collect();
            (answer, done.prompt_tokens_cached)
        };
        let [expected, converted] = [&plain[..], &converting].map(|prefill| {
            let alone = Cluster::of(model, prefill, &decode);
            run(&alone, 1).0
        });
        let mut cluster = Cluster::of(model, &converting, &decode);
        let named = [&plain[..], &["--instance", "plain"]].concat();
        let mut other = instance_of(model, &cluster.registry, "prefill", &named);
        // Nothing is left by a hand-off that converts.
        assert_eq!(run(&cluster, 1), (converted.clone(), 0), "{model}");
        std::mem::swap(&mut cluster.prefill, &mut other);
        assert_eq!(run(&cluster, 2), (expected.clone(), 0), "{model}");
        assert_eq!(run(&cluster, 3), (expected.clone(), 40), "{model}");
        // Nor does one go on from what another left.
        std::mem::swap(&mut cluster.prefill, &mut other);
        assert_eq!(run(&cluster, 4), (converted, 0), "{model}");
        std::mem::swap(&mut cluster.prefill, &mut other);
        assert_eq!(run(&cluster, 5), (expected, 40), "{model}");
        wait_until("quiet", || cluster.is_quiet());
    }
}

#[test]
fn seeded_sampling_goes_on_where_prefill_left_off() {
    use kvferry::engine::{Engine, EngineConfig, Event, LoadOptions, Model, NoHandOff, Request, checkpoint};
    let cluster = Cluster::start(&["--layout", "tp=3"], &["--layout", "tp=2,dcp=2"]);
    let prompt: Vec<u32> = (100..150).collect();
    let model = Model::from_checkpoint(&checkpoint::embedded().unwrap(), LoadOptions::default()).unwrap();
    let alone = Engine::start(model, &EngineConfig::default(), std::sync::Arc::new(NoHandOff)).unwrap();
    let mut answers = Vec::new();
    for seed in 1..5 {
        let sampling = SamplingSpec { temperature: 1.5, top_p: 0.9, seed };
        let mut to_decode = cluster.ask(u128::from(seed), &prompt).1;
        (to_decode.sampling, to_decode.max_tokens) = (sampling, 12);
        let (ids, _) = cluster.answer(to_decode).unwrap();
        let request =
            Request { sampling: sampling.into(), ignore_eos: true, ..Request::greedy(prompt.clone(), 12) };
        let expected: Vec<u32> = alone
            .generate(request)
            .unwrap()
            .filter_map(|event| match event {
                Event::Token { id, .. } => Some(id),
                _ => None,
            })
            .collect();
        assert_eq!((ids.len(), &ids), (12, &expected));
        answers.push(ids);
    }
    answers.sort();
    answers.dedup();
    assert!(answers.len() > 1, "the seed changes nothing: {answers:?}");
}

#[test]
fn a_client_that_leaves_ends_its_room_on_both_sides() {
    // Slow enough that a long prompt is under way for seconds.
    let slow = ["--throttle", "1048576"];
    let cluster = Cluster::start(&slow, &slow);
    let prompt: Vec<u32> = (1..40).collect();
    // Decode waits for a prefill that nobody has asked for; prefill for a decode that nobody has asked for.
    let (_, to_decode) = cluster.ask(1, &prompt);
    let other = cluster.ask(2, &prompt).0;
    cluster.runtime.block_on(async {
        let patience = Duration::from_millis(300);
        let (decode, prefill) = (client(&cluster.decode), client(&cluster.prefill));
        let (waiting, lonely) = tokio::join!(
            tokio::time::timeout(patience, failure(&decode, &to_decode)),
            tokio::time::timeout(patience, prefill.prefill(&other)),
        );
        assert!(waiting.is_err(), "nobody has computed the prompt: {waiting:?}");
        assert!(lonely.is_err(), "nobody has opened the room: {lonely:?}");
    });
    wait_until("both rooms are gone", || cluster.is_quiet());
    // The client of prefill goes away in the middle of a long prompt: decode hears of it.
    let (to_prefill, to_decode) = cluster.ask(3, &[7; 3000]);
    let told = cluster.runtime.block_on(async {
        let (decode, prefill) = (client(&cluster.decode), client(&cluster.prefill));
        // Both sides have begun with it.
        let under_way = async {
            let count = |ledger: &Value, at: &str| ledger.pointer(at).and_then(Value::as_u64);
            loop {
                let (here, there) = (prefill.ledger().await.unwrap(), decode.ledger().await.unwrap());
                if (count(&here, "/node/sending"), count(&there, "/node/grants")) == (Some(1), Some(1)) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let leaves = async {
            tokio::select! {
                answer = prefill.prefill(&to_prefill) => panic!("it did not wait for the bytes: {answer:?}"),
                () = under_way => {}
            }
        };
        tokio::time::timeout(Duration::from_secs(60), async {
            tokio::join!(failure(&decode, &to_decode), leaves).0
        })
        .await
        .unwrap()
    });
    assert_eq!(told.stage, Stage::HandOff, "{told}");
    wait_until("that room is gone too", || cluster.is_quiet());
    cluster.run(4, &prompt).unwrap();
}

#[test]
fn a_held_room_can_be_read_and_released_once() {
    let cluster = Cluster::start(&[], &["--layout", "tp=2"]);
    let (to_prefill, mut to_decode) = cluster.ask(1, &[3, 1, 4, 1, 5]);
    to_decode.hold = true;
    cluster.runtime.block_on(async {
        let (prefill, decode) = (client(&cluster.prefill), client(&cluster.decode));
        let drain = async {
            let mut stream = decode.decode(&to_decode).await.unwrap();
            while stream.next().await.unwrap().is_some() {}
        };
        let (reply, ()) = tokio::join!(prefill.prefill(&to_prefill), drain);
        reply.unwrap();
        for rank in 0..2 {
            let dump = decode.kv(key(1), RankId(rank)).await.unwrap();
            // 4 layers, K and V, 5 tokens, 2 of 4 heads.
            assert_eq!(dump.pieces().count(), 4 * 2 * 5 * 2);
        }
        assert_eq!(decode.kv(key(1), RankId(2)).await.unwrap_err().blame, Blame::Caller);
        assert_eq!(decode.kv(key(9), RankId(0)).await.unwrap_err().blame, Blame::Caller);
        decode.release(key(1)).await.unwrap();
        assert_eq!(decode.release(key(1)).await.unwrap_err().blame, Blame::Caller);
        assert!(decode.kv(key(1), RankId(0)).await.is_err());
    });
    assert!(cluster.is_quiet());
}

#[test]
fn instances_say_what_they_can_hold_and_what_it_takes() {
    let pool = ["--pool-tokens", "1000", "--max-model-len", "900"];
    let cluster = Cluster::start(&[&pool[..], &["--layout", "tp=2,page=16"]].concat(), &pool);
    let [prefill, decode] = [&cluster.prefill, &cluster.decode]
        .map(|server| cluster.runtime.block_on(client(server).capacity()).unwrap());
    let longest = |normal, ignore_eos| LongestPrompt::Prefill { normal, ignore_eos };
    assert_eq!(prefill.footprint.longest_prompt, longest(899, 899));
    assert_eq!(decode.footprint.longest_prompt, LongestPrompt::Decode { answered: 899 });
    let pool = prefill.footprint;
    assert_eq!((pool.pool_tokens, pool.page_tokens, pool.pages, pool.shard_ranks), (1008, 16, 63, 1));
    assert!(pool.ranks.iter().map(|rank| rank.rank).eq([0, 1].map(RankId)));
    for rank in &pool.ranks {
        let parts = rank.parts.iter().map(|held| held.bytes.0).sum::<u64>();
        assert!(rank.total_bytes.0 >= parts + rank.generation_bytes.0, "{rank:?}");
        assert_eq!((rank.pages, rank.generation_bytes.0), (63, 63 * 8));
    }
    // Each of the two ranks has half of what one has.
    for (half, whole) in pool.ranks[1].parts.iter().zip(&decode.footprint.ranks[0].parts) {
        assert_eq!((half.part, 2 * half.bytes.0), (whole.part, whole.bytes.0));
    }
    assert_eq!(prefill.scratch_bytes.0, 0);
    // And so it is with pages that are dealt, of rows that both had: 63 pages and one, so that there are as many on both.
    // Only without a prefix cache has `ignore_eos` a limit of its own.
    let sharded = ["--layout", "tp=2,shard=on,page=16", "--pool-tokens", "1000", "--max-model-len", "2000"];
    let server = instance_of(
        "embedded:kimi_linear_tiny",
        &cluster.registry,
        "prefill",
        &[&sharded[..], &["--instance", "sharded", "--no-prefix-cache"]].concat(),
    );
    let told = cluster.runtime.block_on(client(&server).capacity()).unwrap();
    let pool = told.footprint;
    assert_eq!((pool.pool_tokens, pool.pages, pool.shard_ranks), (1024, 64, 2));
    assert_eq!(pool.longest_prompt, longest(1024 - 32 - 2, 1024 - 32 - 16));
    assert!(pool.ranks.iter().all(|rank| rank.pages == 32 && told.scratch_bytes.0 > 0));
    wait_until("quiet", || cluster.is_quiet());
}

#[test]
fn what_prefill_can_never_hold_decode_refuses_before_it_takes_a_page() {
    // 3 pages of 16: with `ignore_eos` and no prefix cache, what is left beside a page and 3 tokens is one whole page.
    for (more, limit) in [(&[][..], 30), (&["--no-prefix-cache"], 16)] {
        let cluster = Cluster::start(&[&["--pool-tokens", "48"], more].concat(), &[]);
        let (to_prefill, to_decode) = cluster.ask(1, &vec![7; limit + 1]);
        let told = cluster.runtime.block_on(async {
            let decode = client(&cluster.decode).decode(&to_decode).await.unwrap_err();
            [decode, client(&cluster.prefill).prefill(&to_prefill).await.unwrap_err()]
        });
        for refused in &told {
            assert_eq!((refused.blame, refused.stage), (Blame::Caller, Stage::Admission));
            for part in [&format!("limit is {limit}"), "pool of 3 pages holds 48 tokens", "--pool-tokens to"]
            {
                assert!(refused.cause.contains(part), "{part}: {refused}");
            }
        }
        assert!(told[0].cause.starts_with("prefill instance "), "{}", told[0]);
        // As it says itself.
        let told = cluster.runtime.block_on(client(&cluster.prefill).capacity()).unwrap();
        let path = if told.prefix_cache { AdmissionPath::Normal } else { AdmissionPath::IgnoreEos };
        assert_eq!(told.footprint.longest_prompt.on(path), limit as u64);
        assert!(cluster.held().iter().all(|ledger| ledger["engine"]["pages_held"] == 0));
        // Whoever comes after it, as long as may be.
        assert_eq!(cluster.run(2, &vec![7; limit]).unwrap().0.len(), 4);
        wait_until("quiet", || cluster.is_quiet());
    }
}

#[test]
fn a_prompt_that_cannot_fit_is_a_400_with_the_limit_before_any_work() {
    let cluster = Cluster::start(&["--max-model-len", "64"], &["--pool-tokens", "48"]);
    cluster.runtime.block_on(async {
        let (to_prefill, to_decode) = cluster.ask(1, &[7; 64]);
        let refused = client(&cluster.prefill).prefill(&to_prefill).await.unwrap_err();
        assert_eq!((refused.blame, refused.stage), (Blame::Caller, Stage::Admission));
        assert!(refused.cause.contains("limit is 63"), "{refused}");
        let refused = client(&cluster.decode).decode(&to_decode).await.unwrap_err();
        assert_eq!((refused.blame, refused.stage), (Blame::Caller, Stage::Admission));
        assert!(
            refused.cause.contains("limit is 47") && refused.cause.contains("--pool-tokens"),
            "{refused}"
        );

        let http = kvferry::registry::loopback_http().unwrap().build().unwrap();
        let post = |server: &Server, path: &str, body: &str| {
            http.post(format!("{}{path}", server.url))
                .header("content-type", "application/json")
                .body(body.to_owned())
                .send()
        };
        let body = serde_json::to_string(&to_prefill).unwrap();
        for (server, path, body, status) in [
            (&cluster.prefill, "/internal/prefill", body.as_str(), 400),
            (&cluster.prefill, "/internal/prefill", "{", 400),
            (&cluster.prefill, "/internal/decode", "{}", 404),
            (&cluster.decode, "/internal/decode", "[]", 400),
        ] {
            assert_eq!(post(server, path, body).await.unwrap().status(), status, "{path} {body}");
        }
    });
    // One side may still be hearing of the other.
    wait_until("quiet", || cluster.is_quiet());
}

#[test]
fn instances_that_do_not_fit_are_refused_by_field_and_live_on() {
    let cluster = Cluster::start(&["--kv-dtype", "bf16", "--transport", "tcp"], &[]);
    let cases = [
        (vec!["--kv-dtype", "bf16", "--attention", "mla"], "parts"),
        (vec!["--kv-dtype", "bf16", "--arith", "fast"], "model"),
        (vec!["--kv-dtype", "bf16", "--transport", "shm"], "transports"),
    ];
    let refused = |problem: Problem, field: &str| {
        assert_eq!((problem.blame, problem.stage), (Blame::PeerIncompatible, Stage::HandOff), "{problem}");
        assert!(problem.cause.contains(&format!("`{field}`")), "{field}: {problem}");
    };
    let prompt = [1, 2, 3];
    let ask = |cluster: &Cluster, decode: &Server, room| {
        let (_, to_decode) = cluster.ask(room, &prompt);
        cluster.runtime.block_on(failure(&client(decode), &to_decode))
    };
    refused(ask(&cluster, &cluster.decode, 1), "key.dtype");
    for (i, (more, field)) in cases.into_iter().enumerate() {
        let name = format!("decode-{}", i + 1);
        let other = instance(&cluster.registry, "decode", &[&more[..], &["--instance", &name]].concat());
        refused(ask(&cluster, &other, 10 + i as u128), field);
    }
    // Prefill serves whoever fits.
    let fits = instance(&cluster.registry, "decode", &["--kv-dtype", "bf16", "--instance", "decode-9"]);
    let cluster = Cluster { decode: fits, ..cluster };
    cluster.run(20, &prompt).unwrap();
}

#[test]
fn an_unknown_prefill_is_named_with_those_that_are_there() {
    let cluster = Cluster::start(&[], &[]);
    let (_, mut to_decode) = cluster.ask(1, &[1, 2]);
    to_decode.prefill = InstanceId("prefill-7".into());
    let problem = cluster.runtime.block_on(client(&cluster.decode).decode(&to_decode)).unwrap_err();
    assert_eq!((problem.blame, problem.stage), (Blame::Caller, Stage::Lookup));
    assert!(problem.cause.contains("prefill-7") && problem.cause.contains("prefill-0"), "{problem}");
    wait_until("quiet", || cluster.is_quiet());
}

#[test]
fn sigterm_drains_and_leaves_the_registry() {
    let Cluster { runtime, registry, prefill, decode } = Cluster::start(&[], &[]);
    let members =
        || runtime.block_on(kvferry::registry::Client::new(&registry.url).unwrap().members()).unwrap().len();
    assert_eq!(members(), 2);
    assert_eq!(prefill.terminate(), Some(0));
    // Not by the end of a lease: it said goodbye.
    assert_eq!(members(), 1);
    assert_eq!(decode.terminate(), Some(0));
    assert_eq!(members(), 0);
    assert_eq!(registry.terminate(), Some(0));
}

#[test]
fn a_second_start_of_the_same_name_takes_over_and_the_first_one_ends() {
    let registry = Server::start(&["--role", "registry"]);
    let mut first = instance(&registry, "prefill", &[]);
    let second = instance(&registry, "prefill", &[]);
    wait_until("the older process ends", || first.child.try_wait().unwrap().is_some());
    assert_eq!(first.child.wait().unwrap().code(), Some(2));
    let runtime = runtime();
    let members = runtime.block_on(kvferry::registry::Client::new(&registry.url).unwrap().members()).unwrap();
    assert_eq!(members.len(), 1);
    assert_eq!(members[0].http, second.url);
}

#[test]
fn a_killed_demo_leaves_no_process() {
    let mut demo =
        command(&["demo", "--model", "embedded:llama_tiny", "--max-tokens", "4000", "--ignore-eos"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
    let lines = BufReader::new(demo.stdout.take().unwrap()).lines();
    let pids: Vec<String> = lines
        .map_while(Result::ok)
        .filter_map(|line| line.split_once("pid ").map(|(_, pid)| pid.trim().to_owned()))
        .take(2)
        .collect();
    let alive = |pid: &String| {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
    };
    let registry_too = children(demo.id());
    assert!(pids.len() == 2 && pids.iter().all(alive), "{pids:?}");
    assert_eq!(registry_too.len(), 3, "{registry_too:?}");
    demo.kill().unwrap();
    demo.wait().unwrap();
    wait_until("the children end", || !registry_too.iter().any(alive));
}

/// The processes whose parent is `pid`.
fn children(pid: u32) -> Vec<String> {
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| {
            let stat = std::fs::read_to_string(entry.ok()?.path().join("stat")).ok()?;
            let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse::<u32>().ok()?;
            (parent == pid).then(|| stat.split(' ').next().unwrap_or_default().to_owned())
        })
        .collect()
}

#[test]
fn a_prefill_that_is_none_is_refused_at_once_and_is_the_callers_mistake() {
    let cluster = Cluster::start(&[], &[]);
    let decode = client(&cluster.decode);
    for (name, said) in [
        (cluster.decode.instance.clone(), "is a decode instance"),
        (String::new(), "is not a name"),
        ("x".repeat(100_000), "is not a name"),
        ("../members".into(), "is not a name"),
    ] {
        let (_, mut request) = cluster.ask(1, &[5, 6, 7]);
        request.prefill = InstanceId(name);
        let problem = cluster.runtime.block_on(decode.decode(&request)).map(drop).unwrap_err();
        assert_eq!((problem.blame, problem.stage), (Blame::Caller, Stage::Request), "{problem}");
        assert!(problem.cause.contains("field `prefill`") && problem.cause.contains(said), "{problem}");
    }
    wait_until("quiet", || cluster.is_quiet());
}

#[test]
fn prompts_of_different_lengths_are_the_callers_mistake_on_both_sides() {
    let cluster = Cluster::start(&[], &[]);
    let prompt: Vec<u32> = (5..45).collect();
    for (room, here, there) in [(1, 30, 40), (2, 40, 30)] {
        let (to_prefill, _) = cluster.ask(room, &prompt[..here]);
        let (_, to_decode) = cluster.ask(room, &prompt[..there]);
        let (prefill, decode) = (client(&cluster.prefill), client(&cluster.decode));
        let (replied, failed) = cluster
            .runtime
            .block_on(async { tokio::join!(prefill.prefill(&to_prefill), failure(&decode, &to_decode)) });
        for problem in [replied.unwrap_err(), failed] {
            assert_eq!(problem.blame, Blame::Caller, "{problem}");
            assert!(problem.cause.contains("field `prompt`"), "{problem}");
        }
    }
    wait_until("quiet", || cluster.is_quiet());
}
