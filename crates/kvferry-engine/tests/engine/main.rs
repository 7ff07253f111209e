//! The engine through its public interface: whole requests, split requests, pages, aborts.

#![allow(clippy::panic, clippy::unwrap_used)]

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use kvferry_engine::{
    Attention, Coordinate, Engine, EngineConfig, EngineError, EngineStats, Event, FirstToken, HandOff,
    LoadOptions, Model, NoHandOff, Request, Sampling, StopReason, checkpoint, math::Arith,
};
use kvferry_plan::{Attempt, Blame, Dtype, Dtypes, HeadId, RankId, RoomId, RoomKey, TokenRange};
use safetensors::SafeTensors;

mod forms;
mod prefix;

fn model(attention: Attention, arith: Arith) -> Arc<Model> {
    Model::from_checkpoint(
        &checkpoint::embedded().unwrap(),
        LoadOptions { attention, arith, ..LoadOptions::default() },
    )
    .unwrap()
}

fn config(layout: &str) -> EngineConfig {
    EngineConfig { layout: layout.parse().unwrap(), pool_tokens: 512, chunk: 16, ..EngineConfig::default() }
}

fn engine(layout: &str) -> Engine {
    start(&config(layout))
}

fn start(config: &EngineConfig) -> Engine {
    Engine::start(model(Attention::Gqa, Arith::Canonical), config, Arc::new(NoHandOff)).unwrap()
}

fn key(room: u128) -> RoomKey {
    RoomKey { room: RoomId(room), attempt: Attempt(0) }
}

fn prompt(length: u32) -> Vec<u32> {
    (0..length).map(|i| (i * 37 + 11) % 512).collect()
}

/// A greedy request that runs to its full length.
fn full(length: u32, max_tokens: u32) -> Request {
    Request { ignore_eos: true, ..Request::greedy(prompt(length), max_tokens) }
}

/// Ids and the bits of logprobs, and the last event.
fn outcome(events: impl Iterator<Item = Event>) -> (Vec<(u32, u32)>, Event) {
    let mut tokens = Vec::new();
    for event in events {
        match event {
            Event::Token { id, logprob, .. } => tokens.push((id, logprob.to_bits())),
            last => return (tokens, last),
        }
    }
    panic!("the events end without an end")
}

/// The last event of a request that ran to its full length.
fn done(prompt_tokens_computed: u64, prompt_tokens_cached: u64) -> Event {
    Event::Done { reason: StopReason::Length, prompt_tokens_computed, prompt_tokens_cached }
}

/// Waits until the engine is in the wanted state; the scheduler acts on its own clock.
fn wait_for(engine: &Engine, what: impl Fn(&EngineStats) -> bool) {
    for _ in 0..4_000 {
        if what(&engine.stats()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("it never came to that: {:?}", engine.stats());
}

fn all_free(engine: &Engine) {
    wait_for(engine, |s| {
        s.pages_free == s.pages_total && s.queued + s.prefilling + s.decoding + s.reserved + s.finished == 0
    });
}

/// Everything a hand-off hears.
#[derive(Debug, PartialEq)]
enum Call {
    Chunk(RoomKey, TokenRange),
    Finished(RoomKey, FirstToken),
    Failed(RoomKey, EngineError),
}

struct Recorder(Mutex<mpsc::Sender<Call>>);

impl Recorder {
    fn new() -> (Arc<Self>, mpsc::Receiver<Call>) {
        let (sender, receiver) = mpsc::channel();
        (Arc::new(Self(Mutex::new(sender))), receiver)
    }

    fn tell(&self, call: Call) {
        // A test that has seen enough hangs up.
        let _ = self.0.lock().unwrap().send(call);
    }
}

impl HandOff for Recorder {
    fn chunk(&self, key: RoomKey, tokens: TokenRange) {
        self.tell(Call::Chunk(key, tokens));
    }
    fn finished(&self, key: RoomKey, first: FirstToken) {
        self.tell(Call::Finished(key, first));
    }
    fn failed(&self, key: RoomKey, cause: &EngineError) {
        self.tell(Call::Failed(key, cause.clone()));
    }
}

const PATIENCE: Duration = Duration::from_secs(60);

/// Prefill in one layout, the cache copied in coordinates, decode in another.
struct Split {
    prefill: Engine,
    calls: mpsc::Receiver<Call>,
    decode: Engine,
}

/// What came of a split request.
struct SplitRun {
    tokens: Vec<(u32, u32)>,
    last: Event,
    chunks: Vec<TokenRange>,
    /// Prompt tokens that prefill and decode had.
    cached: (u64, u64),
}

impl Split {
    fn new(model: &Arc<Model>, (from, to): (&str, &str), kv: Dtype) -> Self {
        let (recorder, calls) = Recorder::new();
        let start = |layout, handoff| {
            Engine::start(Arc::clone(model), &EngineConfig { kv, ..config(layout) }, handoff).unwrap()
        };
        Self { prefill: start(from, recorder), calls, decode: start(to, Arc::new(NoHandOff)) }
    }

    fn run(&self, room: RoomKey, request: &Request) -> SplitRun {
        let Self { prefill, calls, decode } = self;
        let computed = prefill.prefill(room, request.clone()).unwrap().wait().unwrap();
        let reserved = decode.reserve(room, request.clone()).unwrap().wait().unwrap();
        let cached = (computed.cached(), reserved.cached());
        let mut chunks = Vec::new();
        let first = loop {
            match calls.recv_timeout(PATIENCE).unwrap() {
                Call::Chunk(of, range) => {
                    assert_eq!(of, room);
                    chunks.push(range);
                }
                Call::Finished(of, first) => {
                    assert_eq!(of, room);
                    break first;
                }
                Call::Failed(_, error) => panic!("{error}"),
            }
        };
        decode.adopt(&reserved, &prefill.rows(room).unwrap().wait().unwrap()).unwrap();
        drop(computed);
        all_free(prefill);
        let (tokens, last) = outcome(decode.decode(&reserved, first).unwrap());
        wait_for(decode, |s| s.finished == 1 && s.pages_held > 0);
        drop(reserved);
        all_free(decode);
        SplitRun { tokens, last, chunks, cached }
    }
}

fn split(model: &Arc<Model>, layouts: (&str, &str), kv: Dtype, request: &Request) -> SplitRun {
    Split::new(model, layouts, kv).run(key(7), request)
}

#[test]
fn a_split_request_gives_the_bits_of_a_whole_one_and_computes_no_prompt_token_twice() {
    for (attention, kv) in
        [(Attention::Gqa, Dtype::F32), (Attention::Mla, Dtype::Bf16), (Attention::Gqa, Dtype::Fp8E4m3)]
    {
        let model = model(attention, Arith::Canonical);
        let request = full(41, 12);
        let whole = EngineConfig { kv, ..config("tp=1") };
        let whole = Engine::start(Arc::clone(&model), &whole, Arc::new(NoHandOff)).unwrap();
        let (expected, last) = outcome(whole.generate(request.clone()).unwrap());
        assert_eq!(expected.len(), 12);
        assert_eq!(last, done(41, 0));
        all_free(&whole);
        for layouts in [
            ("tp=3,page=8", "tp=1,page=24"),
            ("tp=2", "tp=4,dcp=4,page=5"),
            ("tp=2,pp=2", "tp=3,dcp=3,layers=0/1-3"),
            ("cp=2,page=8", "tp=2"),
            ("cp=4,shard=on,page=5", "tp=4,dcp=4,page=5"),
        ] {
            let SplitRun { tokens, last, chunks, .. } = split(&model, layouts, kv, &request);
            assert_eq!(tokens, expected, "{layouts:?}");
            assert_eq!(last, done(0, 0));
            let expected: Vec<_> = [(0, 16), (16, 32), (32, 41)].map(|(a, b)| TokenRange::new(a, b)).into();
            assert_eq!(chunks, expected);
        }
    }
}

#[test]
fn a_prompt_of_one_token_can_be_split() {
    let model = model(Attention::Mla, Arith::Canonical);
    let request = full(1, 5);
    let whole = Engine::start(Arc::clone(&model), &config("tp=1"), Arc::new(NoHandOff)).unwrap();
    let (expected, _) = outcome(whole.generate(request.clone()).unwrap());
    let SplitRun { tokens, chunks, .. } = split(&model, ("tp=1", "tp=4,dcp=4"), Dtype::F32, &request);
    assert_eq!(tokens, expected);
    assert_eq!(chunks, [TokenRange::new(0, 1)]);
}

#[test]
fn what_runs_next_to_a_request_does_not_change_its_tokens() {
    let request = |length, seed| Request {
        sampling: Sampling { temperature: 0.9, top_p: 0.95, seed },
        ..full(length, 20)
    };
    let engine = engine("tp=2");
    let lengths = [5, 40, 33];
    let alone = lengths.map(|length| outcome(engine.generate(request(length, 4)).unwrap()).0);
    let running = lengths.map(|length| engine.generate(request(length, 4)).unwrap());
    let together = running.map(|events| outcome(events).0);
    assert_eq!(alone, together);
    let other = outcome(engine.generate(request(5, 5)).unwrap()).0;
    assert_ne!(alone[0], other, "another seed draws other tokens");
}

#[test]
fn requests_wait_for_pages_in_order_and_all_come_through() {
    // 10 pages of 16: each request takes 4.
    let engine = start(&EngineConfig { pool_tokens: 160, prefix_cache: false, ..config("tp=1") });
    let running: Vec<_> = (0..7).map(|_| engine.generate(full(40, 20)).unwrap()).collect();
    let all: Vec<_> = running.into_iter().map(outcome).collect();
    assert!(all.iter().all(|one| *one == all[0] && one.0.len() == 20));
    all_free(&engine);
    // While the pages are taken a small request does not overtake a large one.
    let first = engine.reserve(key(1), full(100, 10)).unwrap().wait().unwrap();
    let large = engine.reserve(key(2), full(60, 10)).unwrap();
    let small = engine.reserve(key(3), full(1, 1)).unwrap();
    wait_for(&engine, |s| s.queued == 2);
    drop(first);
    large.wait().unwrap();
    small.wait().unwrap();
}

#[test]
fn a_prompt_that_can_never_fit_is_refused_with_the_limit_that_it_meets() {
    let refusal = |config: &EngineConfig, length: u32| {
        let engine = start(config);
        let error = engine.generate(Request::greedy(prompt(length), 1)).unwrap_err();
        assert_eq!(engine.stats().pages_free, engine.stats().pages_total);
        let reserve = engine.reserve(key(1), full(length, 1)).unwrap_err();
        assert_eq!(error, reserve);
        error.to_string()
    };
    let pool = EngineConfig { pool_tokens: 64, ..config("tp=1") };
    let text = refusal(&pool, 64);
    assert!(text.contains("the limit is 63") && text.contains("--pool-tokens"), "{text}");
    let short = EngineConfig { max_model_len: Some(32), ..config("tp=1") };
    let text = refusal(&short, 32);
    assert!(text.contains("the limit is 31") && text.contains("--max-model-len"), "{text}");
    // What just fits is served. Prefill keeps a page and two tokens of its pool back.
    assert_eq!(outcome(start(&pool).generate(full(63, 9)).unwrap()).0.len(), 1);
    assert!(start(&pool).prefill(key(1), full(46, 1)).unwrap().wait().is_ok());
    let text = start(&pool).prefill(key(1), full(47, 1)).unwrap_err().to_string();
    assert!(text.contains("the limit is 46") && text.contains("--pool-tokens to 65"), "{text}");
    assert!(start(&short).prefill(key(1), full(32, 1)).is_err());
}

#[test]
fn what_intake_lets_in_is_admitted_and_nothing_else() {
    for ((layout, pool_tokens, max_model_len), prefix_cache) in
        [("tp=1,page=5", 23, None), ("tp=2,dcp=2,interleave=3,page=4", 20, None), ("tp=3", 64, Some(21))]
            .into_iter()
            .flat_map(|case| [(case, true), (case, false)])
    {
        let config = EngineConfig { pool_tokens, max_model_len, prefix_cache, ..config(layout) };
        let engine = start(&config);
        let mut refused = 0;
        for length in 1..40 {
            // With every page free: what is not admitted now never will be.
            for prefill in [false, true] {
                let request = full(length, 7);
                let answer =
                    if prefill { engine.prefill(key(1), request) } else { engine.reserve(key(1), request) };
                match answer {
                    Ok(answer) => drop(answer.wait().unwrap()),
                    Err(EngineError::NeverFits(limit)) => {
                        assert!(limit.limit < u64::from(length), "{limit}");
                        refused += 1;
                    }
                    Err(error) => panic!("{error}"),
                }
                all_free(&engine);
            }
        }
        assert!(refused > 10, "{layout}");
    }
}

#[test]
fn a_full_queue_refuses_at_once_and_forgets_who_left() {
    let config = EngineConfig { pool_tokens: 64, max_queued: 3, ..config("tp=1") };
    let engine = start(&config);
    let held = engine.reserve(key(0), full(40, 24)).unwrap().wait().unwrap();
    let mut waiting: Vec<_> = (1..4).map(|n| engine.reserve(key(n), full(40, 24)).unwrap()).collect();
    let error = engine.generate(full(1, 1)).unwrap_err();
    assert_eq!(error, EngineError::QueueFull { limit: 3 });
    assert_eq!(error.blame(), Blame::Environment);
    // A refusal for good comes first, and a duplicate leaves no trace.
    assert!(matches!(engine.generate(full(64, 1)), Err(EngineError::NeverFits(_))));
    drop(waiting.pop());
    wait_for(&engine, |s| s.queued == 2);
    waiting.push(engine.reserve(key(9), full(40, 24)).unwrap());
    assert!(engine.generate(full(1, 1)).is_err());
    drop(held);
    for answer in waiting {
        drop(answer.wait().unwrap());
    }
    all_free(&engine);
    assert_eq!(outcome(engine.generate(full(1, 2)).unwrap()).0.len(), 2);
}

#[test]
fn an_absurd_context_length_takes_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir("models/llama_tiny").unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let config = folder.path().join("config.json");
    let honest = std::fs::read_to_string(&config).unwrap();
    let absurd =
        honest.replace("\"max_position_embeddings\": 4096", "\"max_position_embeddings\": 4294967295");
    assert_ne!(absurd, honest);
    std::fs::write(&config, absurd).unwrap();
    // A table of every position that this checkpoint claims would take more than 100 GB.
    let model = Model::load(folder.path(), LoadOptions::default()).unwrap();
    let small = EngineConfig { pool_tokens: 64, ..self::config("tp=2") };
    let engine = Engine::start(model, &small, Arc::new(NoHandOff)).unwrap();
    assert_eq!(engine.longest_prompt(), 63);
    // The last position that it has a page for is computed as the honest model does.
    let whole = outcome(engine.generate(full(40, 24)).unwrap());
    assert_eq!(whole.0.len(), 24);
    assert_eq!(whole.0, outcome(start(&small).generate(full(40, 24)).unwrap()).0);
}

#[test]
fn bad_requests_and_layouts_are_refused_by_name() {
    let engine = engine("tp=1");
    let say = |request: Request| engine.generate(request).unwrap_err().to_string();
    assert!(say(Request::greedy(vec![], 1)).contains("at least 1 token"));
    assert!(say(Request::greedy(vec![1], 0)).contains("at least 1 token"));
    assert!(say(Request::greedy(vec![512], 1)).contains("ids are 0 to 511"));
    let hot = Sampling { temperature: f32::NAN, ..Sampling::GREEDY };
    assert!(say(Request { sampling: hot, ..full(1, 1) }).contains("temperature"));
    let model = model(Attention::Gqa, Arith::Fast);
    for (layout, word) in [
        ("pp=5", "pp may be 1 to 4"),
        ("layers=0-1/3-3", "layer 2 is in no stage"),
        ("layers=2-3/0-1", "in the order of their layers"),
        ("tp=2,shard=on", "needs latent rows"),
        ("ep=2", "no experts"),
    ] {
        let error = Engine::start(Arc::clone(&model), &config(layout), Arc::new(NoHandOff)).unwrap_err();
        assert!(error.to_string().contains(word), "{layout}: {error}");
    }
    let long = EngineConfig { max_model_len: Some(5000), ..config("tp=1") };
    let error = Engine::start(model, &long, Arc::new(NoHandOff)).unwrap_err();
    assert!(error.to_string().contains("4096"), "{error}");
}

#[test]
fn generation_stops_at_the_end_of_sequence_unless_told_otherwise() {
    let engine = engine("tp=1");
    let eos = engine.eos()[0];
    // So hot that the end comes by chance.
    for seed in 0..20 {
        let sampling = Sampling { temperature: 50.0, top_p: 1.0, seed };
        let request = Request { sampling, ignore_eos: false, ..full(3, 450) };
        let (tokens, last) = outcome(engine.generate(request.clone()).unwrap());
        let at = tokens.iter().position(|(id, _)| *id == eos);
        let Event::Done { reason: StopReason::Eos, .. } = last else {
            assert_eq!(at, None);
            continue;
        };
        assert_eq!(at, Some(tokens.len() - 1));
        let request = Request { ignore_eos: true, max_tokens: tokens.len() as u32 + 3, ..request };
        let (all, last) = outcome(engine.generate(request).unwrap());
        assert_eq!(all[..tokens.len()], tokens);
        assert_eq!(all.len(), tokens.len() + 3);
        assert!(matches!(last, Event::Done { reason: StopReason::Length, .. }));
        return;
    }
    panic!("twenty times 450 draws of 512 tokens never gave the end");
}

#[test]
fn a_request_is_aborted_in_any_state_and_twice() {
    let (recorder, calls) = Recorder::new();
    let small = EngineConfig { pool_tokens: 128, chunk: 1, ..config("tp=2") };
    let engine = Engine::start(model(Attention::Gqa, Arith::Canonical), &small, recorder).unwrap();
    engine.release(key(0));
    // Half done.
    let half = engine.prefill(key(1), full(100, 1)).unwrap().wait().unwrap();
    assert_eq!(calls.recv_timeout(PATIENCE).unwrap(), Call::Chunk(key(1), TokenRange::new(0, 1)));
    // Queued behind it.
    let queued = engine.reserve(key(2), full(100, 5)).unwrap();
    wait_for(&engine, |s| s.queued == 1);
    drop(queued);
    wait_for(&engine, |s| s.queued == 0);
    // A key is in use until it is released.
    let again = engine.prefill(key(1), full(3, 1)).unwrap().wait();
    assert_eq!(again.unwrap_err(), EngineError::RoomInUse(key(1)));
    drop(half);
    all_free(&engine);
    // Reserved, then given up.
    let reserved = engine.reserve(key(3), full(10, 5)).unwrap().wait().unwrap();
    wait_for(&engine, |s| s.reserved == 1);
    drop(reserved);
    all_free(&engine);
    // Generating when the reader leaves.
    let mut events = engine.generate(full(3, 100)).unwrap();
    assert!(matches!(events.recv(), Some(Event::Token { .. })));
    drop(events);
    all_free(&engine);
    // Decoding when the reader leaves: the pages wait for whoever may still be writing them.
    let reserved = engine.reserve(key(4), full(10, 90)).unwrap().wait().unwrap();
    drop(engine.decode(&reserved, FirstToken { id: 1, logprob: -1.0, top: Vec::new() }).unwrap());
    wait_for(&engine, |s| s.finished == 1);
    drop(reserved);
    all_free(&engine);
}

#[test]
fn a_reader_who_has_enough_ends_the_request_well_and_leaves_its_prefix() {
    let engine = start(&EngineConfig { pool_tokens: 4096, ..config("tp=1") });
    let mut events = engine.generate(full(100, 3000)).unwrap();
    assert!(matches!(events.recv(), Some(Event::Token { .. })));
    events.enough();
    let enough =
        Event::Done { reason: StopReason::Enough, prompt_tokens_computed: 100, prompt_tokens_cached: 0 };
    assert_eq!(outcome(&mut events).1, enough);
    // Said before the first token, it counts after it.
    let events = engine.generate(full(100, 3000)).unwrap();
    events.enough();
    let (tokens, last) = outcome(events);
    assert!(!tokens.is_empty());
    assert!(
        matches!(last, Event::Done { reason: StopReason::Enough, prompt_tokens_cached: 1.., .. }),
        "{last:?}"
    );
    // At decode, for the owner of the pages.
    let lease = engine.reserve(key(1), full(10, 3000)).unwrap().wait().unwrap();
    let first = FirstToken { id: 1, logprob: -1.0, top: Vec::new() };
    let mut events = engine.decode(&lease, first).unwrap();
    events.enough();
    assert!(matches!(outcome(&mut events).1, Event::Done { reason: StopReason::Enough, .. }));
    engine.rows(key(1)).unwrap().wait().unwrap();
    drop(lease);
}

#[test]
fn a_reservation_is_checked_whole_and_continued_once() {
    let engine = engine("tp=1");
    let first = FirstToken { id: 1, logprob: -1.0, top: Vec::new() };
    let hot = Request { sampling: Sampling { temperature: -1.0, ..Sampling::GREEDY }, ..full(10, 4) };
    assert!(engine.reserve(key(1), hot).unwrap_err().to_string().contains("temperature -1"));
    let error = engine.reserve(key(1), Request::greedy(vec![1, 512], 4)).unwrap_err();
    assert!(error.to_string().contains("token 512 is not in the vocabulary"), "{error}");
    let lease = engine.reserve(key(1), full(10, 4)).unwrap().wait().unwrap();
    assert_eq!(outcome(engine.decode(&lease, first.clone()).unwrap()).0.len(), 4);
    let (tokens, last) = outcome(engine.decode(&lease, first.clone()).unwrap());
    assert!(tokens.is_empty() && matches!(last, Event::Failed(EngineError::RoomState { .. })), "{last:?}");
}

#[test]
fn a_duplicate_of_a_live_room_cannot_free_its_pages() {
    let engine = engine("tp=1");
    let lease = engine.reserve(key(1), full(10, 90)).unwrap().wait().unwrap();
    // Counts follow the answer by a moment.
    wait_for(&engine, |s| s.reserved == 1);
    let held = engine.stats().pages_held;
    assert!(held > 0);
    // A duplicate is refused, and neither its end nor the key alone does anything to the owner's pages.
    let duplicate = engine.reserve(key(1), full(1, 1)).unwrap();
    assert_eq!(duplicate.wait().unwrap_err(), EngineError::RoomInUse(key(1)));
    drop(engine.reserve(key(1), full(1, 1)).unwrap());
    engine.release(key(1));
    engine.rows(key(1)).unwrap().wait().unwrap();
    assert_eq!(engine.stats().pages_held, held);
    let first = FirstToken { id: 1, logprob: -1.0, top: Vec::new() };
    let (tokens, last) = outcome(engine.decode(&lease, first.clone()).unwrap());
    assert!(tokens.len() == 90 && matches!(last, Event::Done { .. }), "{last:?}");
    engine.release(key(1));
    engine.rows(key(1)).unwrap().wait().unwrap();
    // A lease that nobody waits for comes back by itself.
    drop(lease);
    drop(engine.reserve(key(2), full(10, 90)).unwrap());
    all_free(&engine);
}

#[test]
fn rows_are_read_by_rank_and_by_coordinate_until_the_release() {
    let engine = engine("tp=4,dcp=2,page=4");
    outcome(engine.generate(Request { hold: Some(key(5)), ..full(21, 3) }).unwrap());
    let rows = engine.rows(key(5)).unwrap().wait().unwrap();
    let mut seen = BTreeMap::new();
    for rank in (0..4).map(RankId) {
        let of_rank = engine.rank_rows(key(5), rank).unwrap();
        let mut bytes = of_rank.bytes.chunks_exact(16 * 4);
        for layer in &of_rank.layers {
            for part in &of_rank.parts {
                for token in &part.tokens {
                    for head in part.heads.iter().flat_map(Clone::clone).map(HeadId) {
                        let at = Coordinate { layer: *layer, part: part.part, head, token: *token };
                        assert_eq!(rows.bytes_on(rank, at).unwrap().unwrap(), bytes.next().unwrap());
                        assert!(seen.insert(at, rank).is_none(), "two ranks hold {at:?}");
                    }
                }
            }
        }
        assert_eq!(bytes.len(), 0);
    }
    assert_eq!(seen.len(), rows.coordinates().count());
    assert!(engine.rank_rows(key(5), RankId(4)).is_err());
    engine.release(key(5));
    all_free(&engine);
    let at = *seen.keys().next().unwrap();
    assert_eq!(rows.bytes(at), Err(EngineError::UnknownRoom(key(5))));
    assert_eq!(engine.rows(key(5)).unwrap().wait().unwrap_err(), EngineError::UnknownRoom(key(5)));
}

#[test]
fn other_models_other_attention_and_other_arithmetic_are_told_apart() {
    let of = |attention, arith| {
        let model = model(attention, arith);
        Engine::start(model, &config("tp=1"), Arc::new(NoHandOff)).unwrap().descriptor()
    };
    let ours = of(Attention::Gqa, Arith::Canonical);
    assert_eq!(ours.compare(&ours, Dtypes::Equal), Ok(()));
    let theirs = of(Attention::Gqa, Arith::Fast);
    assert_eq!(ours.compare(&theirs, Dtypes::Equal).unwrap_err().field, "model");
    assert!(ours.compare(&of(Attention::Mla, Arith::Canonical), Dtypes::Equal).is_err());
    assert_eq!(
        engine("tp=4,page=3").descriptor().compare(&ours, Dtypes::Equal),
        Ok(()),
        "layouts may differ"
    );
}

/// The embedded model with an infinite embedding of token 5.
fn broken_model(arith: Arith) -> Arc<Model> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/llama_tiny");
    let config = std::fs::read(folder.join("config.json")).unwrap();
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let embedding = tensors.tensor("model.embed_tokens.weight").unwrap();
    let start = embedding.data().as_ptr().addr() - bytes.as_ptr().addr();
    let row = 2 * embedding.shape()[1];
    let mut bytes = bytes.clone();
    // bf16 infinity.
    bytes[start + 5 * row..start + 6 * row]
        .chunks_exact_mut(2)
        .for_each(|e| e.copy_from_slice(&[0x80, 0x7f]));
    let checkpoint = checkpoint::Checkpoint::from_safetensors("broken", &config, bytes.into()).unwrap();
    Model::from_checkpoint(&checkpoint, LoadOptions { arith, ..LoadOptions::default() }).unwrap()
}

#[test]
fn a_value_out_of_range_fails_its_request_and_no_other() {
    for arith in [Arith::Canonical, Arith::Fast] {
        let (recorder, calls) = Recorder::new();
        let engine = Engine::start(broken_model(arith), &config("tp=2"), recorder).unwrap();
        let good = engine.generate(full(3, 30)).unwrap();
        let bad = engine.generate(Request::greedy(vec![1, 5, 3], 4)).unwrap();
        assert!(matches!(outcome(bad).1, Event::Failed(EngineError::Range { .. })), "{arith:?}");
        let room = engine.prefill(key(1), Request::greedy(vec![5], 1)).unwrap().wait().unwrap();
        let call = calls.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(call, Call::Failed(of, EngineError::Range { .. }) if of == key(1)), "{call:?}");
        let (tokens, last) = outcome(good);
        assert_eq!(tokens.len(), 30);
        assert!(matches!(last, Event::Done { .. }));
        drop(room);
        all_free(&engine);
    }
}

#[test]
fn a_short_request_does_not_wait_for_a_long_prompt() {
    let (recorder, calls) = Recorder::new();
    let slow = EngineConfig { chunk: 1, ..config("tp=1") };
    let engine = Engine::start(model(Attention::Gqa, Arith::Canonical), &slow, recorder).unwrap();
    let _long = engine.prefill(key(1), full(400, 1)).unwrap().wait().unwrap();
    assert_eq!(outcome(engine.generate(full(3, 5)).unwrap()).0.len(), 5);
    let sofar: Vec<Call> = calls.try_iter().collect();
    assert!(sofar.len() < 400 && sofar.iter().all(|call| matches!(call, Call::Chunk(..))), "{}", sofar.len());
}

#[test]
fn an_engine_that_goes_ends_its_requests() {
    let engine = engine("tp=2");
    let events = engine.generate(full(3, 400)).unwrap();
    let queued = engine.reserve(key(1), full(500, 1)).unwrap();
    wait_for(&engine, |s| s.queued == 1 && s.decoding == 1);
    drop(engine);
    assert_eq!(outcome(events).1, Event::Failed(EngineError::Stopped));
    assert_eq!(queued.wait().unwrap_err(), EngineError::Stopped);
}

#[test]
fn the_composition_of_a_step_changes_no_bit() {
    for (attention, layout) in [(Attention::Gqa, "tp=2"), (Attention::Mla, "tp=4,dcp=4,page=5")] {
        let model = model(attention, Arith::Canonical);
        let config = EngineConfig { prefix_cache: false, ..config(layout) };
        let alone = Engine::start(Arc::clone(&model), &config, Arc::new(NoHandOff)).unwrap();
        let requests = [3, 40, 17, 65, 9].map(|length| full(length, 7));
        let expected = requests.clone().map(|request| outcome(alone.generate(request).unwrap()).0);
        for (chunk, prefix_cache) in [(7, false), (64, false), (64, true), (300, true)] {
            let config = EngineConfig { chunk, prefix_cache, ..config.clone() };
            let engine = Engine::start(Arc::clone(&model), &config, Arc::new(NoHandOff)).unwrap();
            let running = requests.clone().map(|request| engine.generate(request).unwrap());
            assert_eq!(running.map(|events| outcome(events).0), expected, "{layout}, {chunk}");
            all_free(&engine);
        }
    }
}

/// Stops the engine in the middle of its first chunk until it is told to go on.
struct Gate {
    recorder: Arc<Recorder>,
    open: Mutex<Option<mpsc::Receiver<()>>>,
}

impl HandOff for Gate {
    fn chunk(&self, key: RoomKey, tokens: TokenRange) {
        self.recorder.chunk(key, tokens);
        if let Some(open) = self.open.lock().unwrap().take() {
            open.recv_timeout(PATIENCE).unwrap();
        }
    }
    fn finished(&self, key: RoomKey, first: FirstToken) {
        self.recorder.finished(key, first);
    }
    fn failed(&self, key: RoomKey, cause: &EngineError) {
        self.recorder.failed(key, cause);
    }
}

#[test]
fn short_prompts_share_a_step_and_come_before_the_rest_of_a_long_one() {
    let (recorder, calls) = Recorder::new();
    let (go_on, open) = mpsc::channel();
    let gate = Gate { recorder, open: Mutex::new(Some(open)) };
    let config = EngineConfig { chunk: 64, prefix_cache: false, ..config("tp=2") };
    let engine = Engine::start(model(Attention::Gqa, Arith::Canonical), &config, Arc::new(gate)).unwrap();
    let _long = engine.prefill(key(1), full(130, 1)).unwrap().wait().unwrap();
    assert_eq!(calls.recv_timeout(PATIENCE).unwrap(), Call::Chunk(key(1), TokenRange::new(0, 64)));
    let short = [(2, 10), (3, 20)].map(|(n, length)| engine.prefill(key(n), full(length, 1)).unwrap());
    go_on.send(()).unwrap();
    let _leases = short.map(|answer| answer.wait().unwrap());
    let mut chunks = Vec::new();
    while chunks.len() < 4 {
        if let Call::Chunk(of, tokens) = calls.recv_timeout(PATIENCE).unwrap() {
            chunks.push((of, tokens.start.0, tokens.end.0));
        }
    }
    assert_eq!(chunks, [(key(2), 0, 10), (key(3), 0, 20), (key(1), 64, 98), (key(1), 98, 130)]);
}
