//! Prefixes that requests share.

use super::*;

/// A prompt that begins with `alike` tokens of [`prompt`] and goes on otherwise.
fn branch(alike: u32, length: u32) -> Request {
    let tokens = prompt(alike).into_iter().chain((alike..length).map(|i| (i * 29 + 3) % 512)).collect();
    Request { ignore_eos: true, ..Request::greedy(tokens, 6) }
}

#[test]
fn a_cached_prefix_changes_no_bit() {
    for (attention, layout, block) in [
        (Attention::Gqa, "tp=1", 16),
        (Attention::Gqa, "tp=3,page=8", 8),
        (Attention::Gqa, "tp=2,dcp=2,page=5", 10),
        (Attention::Gqa, "tp=3,dcp=3,pp=3,page=4", 12),
        (Attention::Mla, "tp=4,dcp=4,interleave=3,page=4", 48),
        (Attention::Mla, "tp=2", 16),
        (Attention::Gqa, "tp=2,cp=2,page=8", 8),
        // Prefixes end in the middle of a rotation.
        (Attention::Gqa, "cp=4,shard=on,page=5", 5),
        (Attention::Mla, "tp=4,shard=on,page=8", 8),
        (Attention::Mla, "tp=3,shard=on", 16),
    ] {
        let model = model(attention, Arith::Canonical);
        let config = config(layout);
        let alone = EngineConfig { prefix_cache: false, ..config.clone() };
        let alone = Engine::start(Arc::clone(&model), &alone, Arc::new(NoHandOff)).unwrap();
        let engine = Engine::start(model, &config, Arc::new(NoHandOff)).unwrap();
        let first = branch(100, 100);
        let (answer, _) = outcome(alone.generate(first.clone()).unwrap());
        // The next turn of a conversation: what was said, and what was answered.
        let mut turn = first.clone();
        turn.prompt.extend(answer.iter().map(|(id, _)| *id));
        turn.prompt.extend([7, 8, 9]);
        let cases = [(first.clone(), 0), (first, 99), (branch(50, 100), 50), (branch(0, 40), 0), (turn, 105)];
        for (request, alike) in cases {
            let length = request.prompt.len() as u64;
            let (expected, last) = outcome(alone.generate(request.clone()).unwrap());
            assert_eq!(last, done(length, 0));
            let (found, last) = outcome(engine.generate(request).unwrap());
            assert_eq!(found, expected, "{layout}: {alike} tokens alike");
            let cached = alike / block * block;
            assert_eq!(last, done(length - cached, cached), "{layout}: {alike} tokens alike");
        }
        all_free(&engine);
        assert!(engine.stats().pages_cached > 0);
        assert_eq!(alone.stats().pages_cached, 0);
    }
}

#[test]
fn a_cached_prefix_is_handed_over_and_received_once() {
    // Blocks of 8 tokens at prefill, of 20 at decode.
    for prefill in ["tp=2,page=8", "tp=2,shard=on,page=8", "cp=3,shard=on,page=8", "cp=2,page=8"] {
        handed_over_and_received_once((prefill, "tp=4,dcp=4,page=5"));
    }
}

fn handed_over_and_received_once(layouts: (&str, &str)) {
    let model = model(Attention::Mla, Arith::Canonical);
    let both = Split::new(&model, layouts, Dtype::Bf16);
    let whole = EngineConfig { kv: Dtype::Bf16, prefix_cache: false, ..config("tp=1") };
    let whole = Engine::start(Arc::clone(&model), &whole, Arc::new(NoHandOff)).unwrap();
    for (room, request, cached) in [
        (1, branch(61, 61), (0, 0)),
        (2, branch(61, 61), (56, 60)),
        (3, branch(33, 61), (32, 20)),
        (4, branch(61, 67), (56, 60)),
    ] {
        let (expected, _) = outcome(whole.generate(request.clone()).unwrap());
        let run = both.run(key(room), &request);
        assert_eq!(run.tokens, expected, "{layouts:?}, room {room}");
        assert_eq!((run.cached, run.last), (cached, done(0, cached.1)), "room {room}");
        // Whatever was computed, the chunks cover the prompt in order.
        let ends: Vec<u64> = run.chunks.iter().map(|chunk| chunk.end.0).collect();
        let starts: Vec<u64> = run.chunks.iter().map(|chunk| chunk.start.0).collect();
        assert_eq!((starts[0], &starts[1..]), (0, &ends[..ends.len() - 1]));
        assert_eq!(ends.last(), Some(&(request.prompt.len() as u64)));
    }
}

#[test]
fn what_failed_or_was_given_up_is_never_cached() {
    let (recorder, calls) = Recorder::new();
    let slow = EngineConfig { chunk: 1, ..config("tp=1") };
    let engine = Engine::start(model(Attention::Gqa, Arith::Canonical), &slow, recorder).unwrap();
    let lease = engine.prefill(key(1), full(200, 1)).unwrap().wait().unwrap();
    // More than a page is computed, less than all.
    for _ in 0..40 {
        calls.recv_timeout(PATIENCE).unwrap();
    }
    drop(lease);
    all_free(&engine);
    // Pages that somebody else fills, and never says that they are right.
    drop(engine.reserve(key(2), full(100, 4)).unwrap().wait().unwrap());
    // Given up in the middle of the answer: the part that others wrote is not known to be right... until the end.
    let lease = engine.reserve(key(3), full(100, 300)).unwrap().wait().unwrap();
    let first = FirstToken { id: 1, logprob: -1.0, top: Vec::new() };
    drop(engine.decode(&lease, first).unwrap());
    wait_for(&engine, |s| s.finished == 1);
    drop(lease);
    all_free(&engine);
    assert_eq!(engine.stats().pages_cached, 0);
    let engine = Engine::start(broken_model(Arith::Canonical), &config("tp=2"), Arc::new(NoHandOff)).unwrap();
    let bad = Request::greedy((0..40).map(|i| if i == 38 { 5 } else { 1 }).collect(), 4);
    assert!(matches!(outcome(engine.generate(bad).unwrap()).1, Event::Failed(EngineError::Range { .. })));
    all_free(&engine);
    assert_eq!(engine.stats().pages_cached, 0);
}

#[test]
fn cached_pages_make_room_and_readers_keep_theirs() {
    for (attention, layout) in
        [(Attention::Gqa, "tp=2"), (Attention::Gqa, "cp=2,shard=on"), (Attention::Mla, "tp=4,shard=on")]
    {
        make_room(attention, layout);
    }
}

fn make_room(attention: Attention, layout: &str) {
    let (model, (recorder, calls)) = (model(attention, Arith::Canonical), Recorder::new());
    let small = EngineConfig { pool_tokens: 192, ..config(layout) };
    let engine = Engine::start(Arc::clone(&model), &small, recorder).unwrap();
    let alone = EngineConfig { prefix_cache: false, ..small };
    let alone = Engine::start(model, &alone, Arc::new(NoHandOff)).unwrap();
    // A finished prompt whose pages are still being read.
    let lease = engine.prefill(key(1), branch(64, 64)).unwrap().wait().unwrap();
    while !matches!(calls.recv_timeout(PATIENCE).unwrap(), Call::Finished(..)) {}
    let rows = engine.rows(key(1)).unwrap().wait().unwrap();
    let before = engine.rank_rows(key(1), RankId(0)).unwrap();
    wait_for(&engine, |s| s.pages_cached == 4 && s.pages_held == 4);
    // Different prompts, each of which takes what is left of the pool: 8 pages.
    for n in 0..6 {
        let request =
            Request { ignore_eos: true, ..Request::greedy((0..100).map(|i| i * 3 + n).collect(), 20) };
        let (expected, _) = outcome(alone.generate(request.clone()).unwrap());
        assert_eq!(outcome(engine.generate(request).unwrap()).0, expected);
        let after = rows.rank(RankId(0)).unwrap();
        assert_eq!(after.bytes, before.bytes, "a page that is read has changed");
    }
    drop(lease);
    all_free(&engine);
    // Nobody reads it now, and it is the oldest.
    for n in 0..6 {
        let request =
            Request { ignore_eos: true, ..Request::greedy((0..150).map(|i| i * 3 + n).collect(), 20) };
        outcome(engine.generate(request).unwrap());
    }
    assert_eq!(rows.rank(RankId(0)), Err(EngineError::UnknownRoom(key(1))));
    all_free(&engine);
}

/// Hand-offs hold pages, cached ones go, and who waits is let in as soon as every rank has its share.
#[test]
fn a_prompt_waits_for_the_fullest_rank_only() {
    let (recorder, calls) = Recorder::new();
    // Two ranks with 5 pages of 16 each.
    let small = EngineConfig { pool_tokens: 160, ..config("tp=2,shard=on") };
    let engine = Engine::start(model(Attention::Mla, Arith::Canonical), &small, recorder).unwrap();
    let hand_off = |room, length: u32| {
        let prompt = (0..length).map(|i| i * 3 + room as u32).collect();
        engine.prefill(key(room), Request::greedy(prompt, 1)).unwrap()
    };
    let finished = || while !matches!(calls.recv_timeout(PATIENCE).unwrap(), Call::Finished(..)) {};
    drop((hand_off(1, 48).wait().unwrap(), finished()));
    all_free(&engine);
    assert_eq!(engine.stats().pages_cached, 3);
    let [first, second] = [2, 3].map(|room| {
        let lease = hand_off(room, 48).wait().unwrap();
        finished();
        lease
    });
    let held = engine.rank_rows(key(2), RankId(0)).unwrap();
    // Two pages of each rank can be had, three of them cached; the next one wants three of one rank.
    wait_for(&engine, |s| s.pages_held == 6 && s.pages_free == 4 && s.pages_cached == 9);
    let waits = hand_off(4, 80);
    wait_for(&engine, |s| s.queued == 1);
    // Nothing is evicted for one that cannot be let in.
    assert_eq!(engine.stats().pages_cached, 9);
    drop(second);
    let third = waits.wait().unwrap();
    finished();
    assert_eq!(
        engine.rank_rows(key(2), RankId(0)).unwrap().bytes,
        held.bytes,
        "a page that is read has changed"
    );
    for lease in [&first, &third] {
        assert!(lease.table().0.windows(2).all(|two| two[1].0 % 2 != two[0].0 % 2), "{:?}", lease.table());
    }
    drop((first, third));
    all_free(&engine);
}

/// Where a shared prefix lies says which rank owns the page after it. When that rank is full a prompt is computed from its
/// beginning, and does not wait while others have pages.
#[test]
fn one_short_prefix_does_not_use_up_one_rank() {
    let (recorder, calls) = Recorder::new();
    // Four ranks with 8 pages of 4 each.
    let small = EngineConfig { pool_tokens: 128, ..config("tp=4,shard=on,page=4") };
    let engine = Engine::start(model(Attention::Mla, Arith::Canonical), &small, recorder).unwrap();
    let hand_off = |n: u32| {
        let prompt = (0..4).chain([100 + n, 200 + n]).collect();
        let lease = engine.prefill(key(n.into()), Request::greedy(prompt, 1)).unwrap().wait().unwrap();
        while !matches!(calls.recv_timeout(PATIENCE).unwrap(), Call::Finished(..)) {}
        lease
    };
    drop(hand_off(0));
    all_free(&engine);
    let leases: Vec<_> = (1..=12).map(hand_off).collect();
    let cached: Vec<u64> = leases.iter().map(kvferry_engine::RoomLease::cached).collect();
    assert_eq!(cached, [[4; 8].as_slice(), &[0; 4]].concat());
    drop(leases);
    all_free(&engine);
}

#[test]
fn requests_that_share_a_prefix_need_fewer_pages() {
    // 10 pages of 16.
    let engine = start(&EngineConfig { pool_tokens: 160, ..config("tp=1") });
    outcome(engine.generate(branch(96, 96)).unwrap());
    // 7 pages each, 6 of which they have in common.
    let leases = [1, 2, 3, 4].map(|n| engine.reserve(key(n), branch(96, 98)).unwrap().wait().unwrap());
    assert!(
        leases.iter().all(|lease| lease.cached() == 96 && lease.table().0[..6] == leases[0].table().0[..6])
    );
    let waits = engine.reserve(key(5), branch(96, 98)).unwrap();
    wait_for(&engine, |s| s.queued == 1 && s.pages_free == 0 && s.pages_held == 10);
    drop(leases);
    assert_eq!(waits.wait().unwrap().cached(), 96);
    all_free(&engine);
}
