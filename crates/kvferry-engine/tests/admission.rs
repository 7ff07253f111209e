//! Which prompts a real scheduler lets in, against what was recorded from SGLang's (`admission_limits.json`): the longest one
//! at once, one token more never, and nobody waits behind the latter.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::{
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use kvferry_engine::{
    Engine, EngineConfig, EngineError, FirstToken, HandOff, LoadOptions, Model, Request,
    checkpoint::Embedded, math::Arith,
};
use kvferry_plan::{Attempt, RoomId, RoomKey, TokenRange};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

/// Hears which prompts were computed.
struct Finished(Mutex<mpsc::Sender<RoomKey>>);

impl HandOff for Finished {
    fn chunk(&self, _: RoomKey, _: TokenRange) {}
    fn finished(&self, key: RoomKey, _: FirstToken) {
        let _ = self.0.lock().unwrap().send(key);
    }
    fn failed(&self, _: RoomKey, _: &EngineError) {}
}

fn key(room: u128) -> RoomKey {
    RoomKey { room: RoomId(room), attempt: Attempt(0) }
}

/// Prompts of another `kind` begin otherwise.
fn request(tokens: u64, ignore_eos: bool, kind: u32) -> Request {
    let prompt = (0..tokens as u32).map(|i| (i * 7 + kind) % 97).collect();
    Request { ignore_eos, ..Request::greedy(prompt, 1) }
}

/// Rows of a recorded list with so many shard ranks.
fn recorded(file: &str, list: &str, shard_ranks: u64) -> Vec<Value> {
    let path = format!("{}/../kvferry-plan/tests/vectors/{file}.json", env!("CARGO_MANIFEST_DIR"));
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let rows = file[list].as_array().unwrap();
    rows.iter().filter(|row| row["shard_size"] == shard_ranks).cloned().collect()
}

/// A model whose sequences may be as long as a pool.
fn model() -> Arc<Model> {
    let options = LoadOptions { arith: Arith::Fast, ..LoadOptions::default() };
    Model::from_checkpoint(&Embedded::KimiLinearTiny.open().unwrap(), options).unwrap()
}

/// A prefill engine with the pool of a recorded row.
struct Prefill {
    engine: Engine,
    finished: mpsc::Receiver<RoomKey>,
    next: u128,
}

impl Prefill {
    fn start(model: &Arc<Model>, layout: &str, pool_tokens: u64, prefix_cache: bool) -> Self {
        let (sender, finished) = mpsc::channel();
        let config = EngineConfig {
            layout: layout.parse().unwrap(),
            pool_tokens,
            // Only the pool limits; and a lease that is dropped ends a long prompt soon.
            max_model_len: Some(pool_tokens as u32 + 2),
            chunk: 1,
            state_slots: 8,
            prefix_cache,
            ..EngineConfig::default()
        };
        let engine =
            Engine::start(Arc::clone(model), &config, Arc::new(Finished(Mutex::new(sender)))).unwrap();
        assert_eq!(engine.capacity().pool_tokens(), pool_tokens);
        Self { engine, finished, next: 1 }
    }

    /// Lets a prompt in, which others hold nothing against; the pages that it had. `None` when it never can be.
    fn lets_in(&mut self, tokens: u64, ignore_eos: bool) -> Option<usize> {
        self.next += 1;
        match self.engine.prefill(key(self.next), request(tokens, ignore_eos, self.next as u32)) {
            Ok(granted) => Some(granted.wait().unwrap().table().0.len()),
            Err(EngineError::NeverFits(limit)) => {
                assert!(limit.tokens == tokens && limit.limit < tokens, "{limit}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Computes a prompt to its end.
    fn serves(&mut self, request: Request) {
        self.next += 1;
        let lease = self.engine.prefill(key(self.next), request).unwrap().wait().unwrap();
        // Very short ones before it may have come to their end too.
        while self.finished.recv_timeout(PATIENCE).unwrap() != lease.key() {}
    }
}

fn layout(shard_ranks: u64, page: u64) -> String {
    if shard_ranks > 1 {
        format!("tp={shard_ranks},shard=on,page={page}")
    } else {
        format!("tp=1,page={page}")
    }
}

fn sweep(shard_ranks: u64) {
    let (model, rows) = (model(), recorded("admission_limits", "rows", shard_ranks));
    assert!(rows.len() > 13);
    for row in rows {
        let number = |key: &str| row[key].as_u64().unwrap();
        let (page, pool) = (number("page_size"), number("capacity"));
        for prefix_cache in [true, false] {
            let mut prefill = Prefill::start(&model, &layout(shard_ranks, page), pool, prefix_cache);
            for (ignore_eos, column) in [
                (false, if prefix_cache { "normal_chunked" } else { "normal_radix_disabled_no_ignore_eos" }),
                (
                    true,
                    if prefix_cache {
                        "ignore_eos_radix_enabled"
                    } else {
                        "ignore_eos_radix_disabled_chunked"
                    },
                ),
            ] {
                let limit = number(column);
                let pages = limit.div_ceil(page) as usize;
                assert_eq!(prefill.lets_in(limit, ignore_eos), Some(pages), "{column}: {row}");
                assert_eq!(prefill.lets_in(limit + 1, ignore_eos), None, "{column}: {row}");
                // Whoever is refused does not stand in the way.
                prefill.serves(request(2, false, 1));
                assert_eq!(prefill.lets_in(limit, ignore_eos), Some(pages), "{column}, once more: {row}");
                // No length between the two: what is not refused is let in.
                let lengths = if pool <= 80 { 1..pool + 2 } else { limit - 2..limit + 3 };
                for tokens in lengths {
                    assert_eq!(
                        prefill.lets_in(tokens, ignore_eos).is_some(),
                        tokens <= limit,
                        "{tokens}: {row}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_longest_prompts_are_the_recorded_ones() {
    sweep(1);
}

#[test]
fn the_longest_prompts_over_two_shard_ranks_are_the_recorded_ones() {
    sweep(2);
}

#[test]
fn the_longest_prompts_over_four_shard_ranks_are_the_recorded_ones() {
    sweep(4);
}

/// What SGLang's scheduler takes in one go, this one does.
fn together(shard_ranks: u64) {
    let (model, mut several) = (model(), 0);
    for row in recorded("chunks_and_scratch", "multi", shard_ranks) {
        let number = |value: &Value| value.as_u64().unwrap();
        let layout = layout(shard_ranks, number(&row["page_size"]));
        let pool = number(&row["tokens_per_rank"]) * shard_ranks;
        let prefix_cache = !row["radix_disabled"].as_bool().unwrap();
        let prefill = Prefill::start(&model, &layout, pool, prefix_cache);
        let steps = row["steps"].as_array().unwrap();
        let admitted = number(&steps.last().unwrap()["admitted"]) as usize;
        let leases: Vec<_> = (0..)
            .zip(&steps[..admitted])
            .map(|(room, step)| {
                let ignore_eos = step["ignore_eos"].as_bool().unwrap();
                let asked = request(number(&step["prompt_len"]), ignore_eos, room as u32);
                prefill.engine.prefill(key(room), asked).unwrap().wait().unwrap()
            })
            .collect();
        several += usize::from(leases.len() > 1);
    }
    assert!(several > 2);
}

#[test]
fn as_many_prompts_are_let_in_together_as_recorded() {
    for shard_ranks in [1, 2, 4] {
        together(shard_ranks);
    }
}

/// What earlier prompts left lies unevenly, and the longest prompt begins on an owner that it cannot choose.
#[test]
fn the_longest_prompt_goes_on_from_what_an_earlier_one_left() {
    let model = model();
    for shard_ranks in [1, 2, 4] {
        let pool = shard_ranks * 256;
        let mut prefill = Prefill::start(&model, &layout(shard_ranks, 16), pool, true);
        let limit = pool - shard_ranks * 16 - 2;
        let mut rotations = Vec::new();
        for kind in 0..6 {
            let tokens = 40 + 16 * u64::from(kind);
            prefill.serves(request(tokens, false, kind));
            let granted = prefill.engine.prefill(key(0), request(limit, false, kind)).unwrap();
            let lease = granted.wait().unwrap();
            assert_eq!(lease.cached(), tokens / 16 * 16);
            let pages = lease.table().0.iter().map(|page| u64::from(page.0));
            assert_eq!(pages.len() as u64, limit.div_ceil(16));
            let owners: Vec<u64> = pages.map(|page| page % shard_ranks).collect();
            assert!((0..).zip(&owners).all(|(k, owner)| *owner == (owners[0] + k) % shard_ranks));
            rotations.push(owners[0]);
        }
        rotations.sort_unstable();
        rotations.dedup();
        assert!(shard_ranks == 1 || rotations.len() > 1, "all begin on one owner");
    }
}
