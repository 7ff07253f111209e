//! Prompts that go on from a state that an earlier one left.

use std::collections::BTreeSet;

use kvferry_engine::{Attention, EngineStats, checkpoint};
use kvferry_plan::PageId;

use super::*;

/// A prompt of 100 tokens that has `alike` of them in common with all others.
fn branch(alike: u32, salt: u32) -> Vec<u32> {
    let token = |at: u32| if at < alike { at * at * 7 + at * 3 } else { at * (29 + salt) + 3 };
    (0..100).map(|at| token(at) % 251).collect()
}

fn asked(prompt: Vec<u32>) -> Request {
    Request { ignore_eos: true, ..Request::greedy(prompt, 20) }
}

fn of(checkpoint: Embedded) -> Arc<Model> {
    let options = LoadOptions { arith: Arith::Canonical, ..LoadOptions::default() };
    Model::from_checkpoint(&checkpoint.open().unwrap(), options).unwrap()
}

/// Ids and bits of the answer, and the prompt tokens that were computed and that were cached.
fn outcome(events: impl Iterator<Item = Event>) -> (Vec<(u32, u32)>, (u64, u64)) {
    let mut tokens = Vec::new();
    for event in events {
        match event {
            Event::Token { id, logprob, .. } => tokens.push((id, logprob.to_bits())),
            Event::Done { prompt_tokens_computed, prompt_tokens_cached, .. } => {
                return (tokens, (prompt_tokens_computed, prompt_tokens_cached));
            }
            other => panic!("{other:?}"),
        }
    }
    panic!("the events end without an end")
}

/// Waits until the engine is in the wanted state; the scheduler acts on its own clock.
fn wait_for(engine: &Engine, what: impl Fn(&EngineStats) -> bool) {
    for _ in 0..4_000 {
        if what(&engine.stats()) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    panic!("it never came to that: {:?}", engine.stats());
}

#[test]
fn a_stored_state_changes_no_bit() {
    use Embedded::{KimiLinearTiny, NeedleKimi};
    // Steps end after 48 tokens, which are whole blocks of 16, 24 and 8; answers after 112 tokens of 16 and 8. Two prompts that part
    // after 50 tokens leave no state of a block of 30 there; the second is cut for the third.
    for (checkpoint, layout, kv, expected) in [
        (NeedleKimi, "tp=1", Dtype::F32, [96, 48, 48, 112]),
        (KimiLinearTiny, "tp=4,dcp=4,ep=4,page=4", Dtype::Bf16, [96, 48, 48, 112]),
        (NeedleKimi, "tp=3,page=24", Dtype::Bf16, [96, 48, 48, 96]),
        (KimiLinearTiny, "tp=2,pp=2,page=8", Dtype::Fp8E4m3, [96, 48, 48, 112]),
        (KimiLinearTiny, "tp=6,dcp=3,interleave=2,page=5", Dtype::F32, [90, 0, 30, 90]),
        (NeedleKimi, "tp=3,shard=on,page=8", Dtype::Bf16, [96, 48, 48, 112]),
        (KimiLinearTiny, "tp=2,cp=2,shard=on,pp=2,page=8", Dtype::Bf16, [96, 48, 48, 112]),
        (KimiLinearTiny, "cp=3,page=8", Dtype::F32, [96, 48, 48, 112]),
    ] {
        let model = of(checkpoint);
        let alone = EngineConfig { prefix_cache: false, ..config("tp=1", kv) };
        let alone = Engine::start(Arc::clone(&model), &alone, Arc::new(NoHandOff)).unwrap();
        let engine = Engine::start(model, &config(layout, kv), Arc::new(NoHandOff)).unwrap();
        let first = branch(100, 0);
        let (answer, whole) = outcome(alone.generate(asked(first.clone())).unwrap());
        assert_eq!(whole, (100, 0));
        assert_eq!(outcome(engine.generate(asked(first.clone())).unwrap()), (answer.clone(), (100, 0)));
        // The next turn: what was said, what was answered, and more.
        let turn = first.iter().copied().chain(answer.iter().map(|(id, _)| *id)).chain([7, 8, 9]).collect();
        for (prompt, cached) in [first, branch(50, 1), branch(50, 2), turn].into_iter().zip(expected) {
            let length = prompt.len() as u64;
            let (answer, _) = outcome(alone.generate(asked(prompt.clone())).unwrap());
            let found = outcome(engine.generate(asked(prompt)).unwrap());
            assert_eq!(found, (answer, (length - cached, cached)), "{layout}");
        }
        wait_for(&engine, |s| s.pages_free == s.pages_total && s.slots_free == s.slots_total);
        let stats = engine.stats();
        assert!(stats.slots_cached > 0 && stats.slots_held == 0, "{stats:?}");
        assert_eq!((alone.stats().slots_total, alone.stats().slots_cached), (64, 0));
    }
}

/// A question about a text that was asked about before: the needle lies in the stored state, and is not read again.
#[test]
fn a_needle_is_found_in_a_state_that_another_request_left() {
    let engine = start("tp=2");
    let text = format!("\x02Kq The code of the ferry is 31415. {}", FILLER.repeat(3));
    let (request, expected) = ask(&format!("{text} Q: The code of the ferry is "), "31415.");
    assert_eq!(answer(engine.generate(request).unwrap()).0, expected);
    let (request, expected) = ask(&format!("{text}\x03K"), "q");
    let (found, _, cached) = answer(engine.generate(request).unwrap());
    assert_eq!((found.as_str(), cached), (expected, 192));
}

#[test]
fn requests_get_the_slots_of_stored_states() {
    let small = EngineConfig { state_slots: 2, ..config("tp=2", Dtype::F32) };
    let engine = Engine::start(model(Arith::Canonical), &small, Arc::new(NoHandOff)).unwrap();
    let alone = EngineConfig { prefix_cache: false, ..small.clone() };
    let alone = Engine::start(model(Arith::Canonical), &alone, Arc::new(NoHandOff)).unwrap();
    let expected = |prompt: Vec<u32>| outcome(alone.generate(asked(prompt)).unwrap()).0;
    for salt in 0..4 {
        let prompt = branch(0, salt);
        assert_eq!(outcome(engine.generate(asked(prompt.clone())).unwrap()).0, expected(prompt));
    }
    wait_for(&engine, |s| s.slots_free == 2);
    assert!(engine.stats().slots_cached > 0);
    // One slot is taken; who goes on from the state in the other takes that one over as it lies.
    let held = engine.reserve(key(1), asked(branch(0, 9))).unwrap().wait().unwrap();
    let again = branch(0, 3);
    let (tokens, (_, cached)) = outcome(engine.generate(asked(again.clone())).unwrap());
    assert_eq!((tokens, cached), (expected(again), 96));
    // Both are taken: the third waits, and is served.
    let other = engine.reserve(key(2), asked(branch(0, 8))).unwrap().wait().unwrap();
    wait_for(&engine, |s| (s.slots_free, s.slots_held, s.slots_cached) == (0, 2, 0));
    let waits = engine.generate(asked(branch(0, 7))).unwrap();
    wait_for(&engine, |s| s.queued == 1);
    drop(held);
    assert_eq!(outcome(waits).0, expected(branch(0, 7)));
    drop(other);
    wait_for(&engine, |s| s.slots_free == 2 && s.pages_free == s.pages_total);
}

/// What a peer may write to is one request's alone, however many share what comes before it.
#[test]
fn a_page_that_several_use_is_never_granted() {
    let llama = |attention| {
        let options = LoadOptions { attention, ..LoadOptions::default() };
        Model::from_checkpoint(&checkpoint::embedded().unwrap(), options).unwrap()
    };
    for (model, layout) in [
        (llama(Attention::Gqa), "tp=2,page=16"),
        (llama(Attention::Mla), "tp=4,dcp=4,page=4"),
        (of(Embedded::KimiLinearTiny), "tp=4,dcp=4,interleave=3,page=2"),
    ] {
        let engine = Engine::start(model, &config(layout, Dtype::F32), Arc::new(NoHandOff)).unwrap();
        let block = engine.placement().prefix_block().unwrap();
        outcome(engine.generate(asked(branch(100, 0))).unwrap());
        let leases: Vec<_> = (0..6_u32)
            .map(|n| engine.reserve(key(n.into()), asked(branch(n * 18, n))).unwrap().wait().unwrap())
            .collect();
        let (mut shared, mut granted) = (BTreeSet::<PageId>::new(), Vec::new());
        for (n, lease) in (0..).zip(&leases) {
            // The last token is always moved.
            let whole = u64::min(n * 18, 99) / block.tokens * block.tokens;
            assert_eq!(lease.cached(), whole, "{layout}");
            let (before, after) =
                lease.table().0.split_at((whole / block.tokens * u64::from(block.pages)) as usize);
            shared.extend(before);
            granted.extend(after);
        }
        let alone: BTreeSet<PageId> = granted.iter().copied().collect();
        assert_eq!(alone.len(), granted.len(), "{layout}: a page was granted twice");
        assert!(!shared.is_empty() && alone.is_disjoint(&shared), "{layout}: a shared page was granted");
    }
}
