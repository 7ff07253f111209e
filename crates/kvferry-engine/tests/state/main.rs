//! A model with state per request, through the engine's front: what a slot holds, who has it, and what is found in it.
//! The model is the built-in one, which was made to find needles: a text needle lies in latent rows, a state needle in
//! the recurrent state alone.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::sync::{Arc, Mutex, mpsc};

use kvferry_engine::{
    Engine, EngineConfig, EngineError, Event, Events, FirstToken, HandOff, LoadOptions, Model, NoHandOff,
    Request, checkpoint::Embedded, math::Arith,
};
use kvferry_plan::{Attempt, Dtype, RoomId, RoomKey, TokenRange};

mod prefix;

const FILLER: &str = "Some cars stay, some go; each one has its place on the other side. ";

fn model(arith: Arith) -> Arc<Model> {
    let options = LoadOptions { arith, ..LoadOptions::default() };
    Model::from_checkpoint(&Embedded::NeedleKimi.open().unwrap(), options).unwrap()
}

fn config(layout: &str, kv: Dtype) -> EngineConfig {
    EngineConfig {
        layout: layout.parse().unwrap(),
        kv,
        pool_tokens: 2048,
        chunk: 48,
        ..EngineConfig::default()
    }
}

fn start(layout: &str) -> Engine {
    Engine::start(model(Arith::Canonical), &config(layout, Dtype::F32), Arc::new(NoHandOff)).unwrap()
}

fn key(room: u128) -> RoomKey {
    RoomKey { room: RoomId(room), attempt: Attempt(0) }
}

/// A prompt with a needle of each kind, which asks for the one in the rows, and what is to follow.
fn text_needle() -> (Request, &'static str) {
    let filler = FILLER.repeat(4);
    ask(
        &format!("{filler} The code of the ferry is 31415. \x02Kq{filler} Q: The code of the ferry is "),
        "31415.",
    )
}

/// One that asks for the one in the state.
fn state_needle() -> (Request, &'static str) {
    let filler = FILLER.repeat(4);
    ask(&format!("{filler}\x02Kq The code of the ferry is 31415. \x02Wz{filler}\x03K"), "q")
}

fn ask(prompt: &str, answer: &'static str) -> (Request, &'static str) {
    (Request::greedy(prompt.bytes().map(u32::from).collect(), answer.len() as u32), answer)
}

/// The answer as text, the bits of its log-probabilities, and how many tokens of the prompt were cached.
fn answer(events: impl Iterator<Item = Event>) -> (String, Vec<u32>, u64) {
    let (mut text, mut bits) = (String::new(), Vec::new());
    for event in events {
        match event {
            Event::Token { id, logprob, .. } => {
                text.push(char::from_u32(id).unwrap());
                bits.push(logprob.to_bits());
            }
            Event::Done { prompt_tokens_cached, .. } => return (text, bits, prompt_tokens_cached),
            other => panic!("{other:?}"),
        }
    }
    panic!("the events end without an end")
}

#[test]
fn needles_are_found_in_rows_and_in_state_in_every_layout() {
    for (layout, kv, arith) in [
        ("tp=1", Dtype::F32, Arith::Canonical),
        ("tp=1", Dtype::Bf16, Arith::Fast),
        ("tp=4,dcp=4,ep=4,page=16", Dtype::Bf16, Arith::Canonical),
        ("tp=3,page=24", Dtype::F32, Arith::Fast),
        ("tp=6,dcp=2,interleave=4,page=8", Dtype::F32, Arith::Canonical),
    ] {
        let engine = Engine::start(model(arith), &config(layout, kv), Arc::new(NoHandOff)).unwrap();
        for (request, expected) in [text_needle(), state_needle()] {
            assert_eq!(answer(engine.generate(request).unwrap()).0, expected, "{layout}");
        }
    }
}

/// With one slot, requests take turns, and each finds its own needle in it: nothing of the last owner is left.
#[test]
fn a_slot_has_one_owner_at_a_time_and_begins_empty() {
    let config = EngineConfig { state_slots: 1, ..config("tp=2", Dtype::F32) };
    let engine = Engine::start(model(Arith::Canonical), &config, Arc::new(NoHandOff)).unwrap();
    let alone = EngineConfig { state_slots: 64, prefix_cache: false, ..config.clone() };
    let alone = Engine::start(model(Arith::Canonical), &alone, Arc::new(NoHandOff)).unwrap();
    let asked =
        || [state_needle(), text_needle(), ask("nothing was hidden here: \x03K", "?"), state_needle()];
    let running: Vec<_> = asked().map(|(request, _)| engine.generate(request).unwrap()).into();
    for (events, (request, _)) in running.into_iter().zip(asked()) {
        assert_eq!(answer(events), answer(alone.generate(request).unwrap()));
    }
    let none = EngineConfig { state_slots: 0, ..config };
    let error = Engine::start(model(Arith::Canonical), &none, Arc::new(NoHandOff)).unwrap_err();
    assert!(error.to_string().contains("state-slots=0"), "{error}");
}

/// Tells when a prompt is computed.
struct Finished(Mutex<mpsc::Sender<FirstToken>>);

impl HandOff for Finished {
    fn chunk(&self, _: RoomKey, _: TokenRange) {}
    fn finished(&self, _: RoomKey, first: FirstToken) {
        self.0.lock().unwrap().send(first).unwrap();
    }
    fn failed(&self, _: RoomKey, cause: &EngineError) {
        panic!("{cause}");
    }
}

#[test]
fn a_request_continues_elsewhere_from_its_rows_and_its_state() {
    for kv in [Dtype::F32, Dtype::Bf16] {
        let (sender, first) = mpsc::channel();
        let model = model(Arith::Canonical);
        let start = |layout: &str, handoff: Arc<dyn HandOff>| {
            Engine::start(Arc::clone(&model), &config(layout, kv), handoff).unwrap()
        };
        let prefill = start("tp=4,ep=4,page=64", Arc::new(Finished(Mutex::new(sender))));
        let decode = start("tp=6,dcp=3,page=16", Arc::new(NoHandOff));
        let whole = start("tp=1", Arc::new(NoHandOff));
        for (at, (request, expected)) in [text_needle(), state_needle()].into_iter().enumerate() {
            let room = key(at as u128);
            let reserved = decode.reserve(room, request.clone()).unwrap().wait().unwrap();
            let computed = prefill.prefill(room, request.clone()).unwrap().wait().unwrap();
            assert!(reserved.slot().is_some() && computed.slot().is_some());
            let token = first.recv().unwrap();
            decode.adopt(&reserved, &prefill.rows(room).unwrap().wait().unwrap()).unwrap();
            let found = answer(decode.decode(&reserved, token).unwrap());
            assert_eq!(found.0, expected);
            assert_eq!(found, answer(whole.generate(request).unwrap()));
        }
    }
}

/// Rows of the prompt stay what they are while an answer grows; the state does not. A copy is kept of a request that is
/// held, and of no other.
#[test]
fn a_state_that_has_gone_on_is_not_taken_for_that_of_the_prompt() {
    let (whole, other, third) = (start("tp=1"), start("tp=2"), start("tp=4"));
    let (request, _) = text_needle();
    let held = Request { hold: Some(key(1)), ..request.clone() };
    let (mut events, mut first) = (whole.generate(held.clone()).unwrap(), None);
    while let Some(event) = events.recv() {
        if let Event::Token { id, logprob, .. } = event {
            first.get_or_insert(FirstToken { id, logprob, top: Vec::new() });
        }
    }
    let said = |events: Events| {
        let (text, logprobs, _) = answer(events);
        (text, logprobs)
    };
    let right = said(whole.generate(request.clone()).unwrap());
    let rows = || whole.rows(key(1)).unwrap().wait().unwrap();
    for keeps in [true, false] {
        let asked = if keeps { held.clone() } else { request.clone() };
        let reserved = other.reserve(key(1), asked).unwrap().wait().unwrap();
        other.adopt(&reserved, &rows()).unwrap();
        assert_eq!(said(other.decode(&reserved, first.clone().unwrap()).unwrap()), right);

        let next = third.reserve(key(1), request.clone()).unwrap().wait().unwrap();
        let adopted = third.adopt(&next, &other.rows(key(1)).unwrap().wait().unwrap());
        if keeps {
            adopted.unwrap();
            assert_eq!(said(third.decode(&next, first.clone().unwrap()).unwrap()), right);
        } else {
            let error = adopted.unwrap_err();
            assert!(error.to_string().contains("not after the prompt"), "{error}");
        }
    }
}
