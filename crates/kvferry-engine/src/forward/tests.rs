//! The forward pass against other people's logits, and against itself in other layouts.

mod memory;
mod scratch;

use std::{path::PathBuf, sync::Arc};

use kvferry_plan::{Dtype, RankId, RoomId, RoomKey};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde::Deserialize;

use super::*;
use crate::{
    Attention, LoadOptions, Rows,
    math::Arith,
    owners::ShardRanks,
    pages::{Lease, Pages},
    prefix::Found,
};

/// What `logits.safetensors` and `tokens.json` say of one prompt.
#[derive(Deserialize)]
struct Reference {
    prompt: Vec<u32>,
    logit_rows: Vec<u64>,
    generated: Vec<u32>,
}

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

pub(super) fn model(name: &str, attention: Attention, arith: Arith) -> Arc<Model> {
    Model::load(&folder(name), LoadOptions { attention, arith, ..LoadOptions::default() }).unwrap()
}

fn floats(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let bytes = tensors.tensor(name).unwrap().data().chunks_exact(4);
    bytes.map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// One request in a bare forward pass.
pub(super) struct Sequence {
    lease: Lease,
    pub(super) prompt: Vec<u32>,
    chunk: usize,
    filled: usize,
    /// Logits after each chunk's last position.
    logits: Vec<(u64, Vec<f32>)>,
}

impl Sequence {
    pub(super) fn new(
        forward: &Forward,
        pages: &mut Pages,
        prompt: &[u32],
        extra: usize,
        chunk: usize,
    ) -> Self {
        let tokens = (prompt.len() + extra) as u64;
        let count = forward.placement().pages_for(tokens).unwrap();
        let lease = pages.take(count, Found::default(), |_| ()).unwrap();
        Self { lease, prompt: prompt.to_vec(), chunk, filled: 0, logits: Vec::new() }
    }

    pub(super) fn piece(&self) -> Piece<'_> {
        let end = self.prompt.len().min(self.filled + self.chunk);
        Piece {
            tokens: &self.prompt[self.filled..end],
            start: self.filled as u64,
            table: self.lease.table(),
            slot: self.lease.slot(),
            logits: true,
        }
    }

    pub(super) fn take(&mut self, outcome: Outcome<'_>) {
        assert!(outcome.in_range);
        assert_eq!(outcome.computed.start.0, self.filled as u64);
        self.filled = outcome.computed.end.0 as usize;
        self.logits.push((outcome.computed.end.0 - 1, outcome.logits.unwrap().to_vec()));
    }

    pub(super) fn last(&self) -> &[f32] {
        &self.logits.last().unwrap().1
    }
}

fn build(model: &Arc<Model>, layout: &str, kv: Dtype, pool_tokens: u64) -> Forward {
    let layout = layout.parse().unwrap();
    let config = EngineConfig { layout, kv, pool_tokens, ..EngineConfig::default() };
    Forward::new(Arc::clone(model), &config).unwrap()
}

pub(super) fn pages(forward: &Forward) -> Pages {
    let ranks = ShardRanks::new(forward.placement().shard_ranks());
    let pages = Pages::new(forward.pages(), ranks, None);
    if forward.slots() > 0 { pages.with_slots(forward.slots()) } else { pages }
}

/// Runs sequences side by side until all prompts are computed.
pub(super) fn run(forward: &mut Forward, sequences: &mut [Sequence]) {
    while sequences.iter().any(|s| s.filled < s.prompt.len()) {
        let mut open: Vec<&mut Sequence> =
            sequences.iter_mut().filter(|s| s.filled < s.prompt.len()).collect();
        let pieces: Vec<Piece<'_>> = open.iter().map(|s| s.piece()).collect();
        let outcomes = forward.step(&pieces).unwrap();
        drop(pieces);
        open.iter_mut().zip(outcomes.iter()).for_each(|(s, outcome)| s.take(outcome));
        forward.reuse(outcomes);
    }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn agrees_with_the_reference(name: &str, attention: Attention, arith: Arith, layout: &str) {
    let references: Vec<Reference> =
        serde_json::from_slice(&std::fs::read(folder(name).join("tokens.json")).unwrap()).unwrap();
    let bytes = std::fs::read(folder(name).join("logits.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut forward = build(&model(name, attention, arith), layout, Dtype::F32, 2048);
    let vocab = forward.held.model.config().vocab;
    for (i, reference) in references.iter().enumerate() {
        let expected = floats(&tensors, &format!("logits.{i}"));
        let generated = floats(&tensors, &format!("gen_logits.{i}"));
        for chunk in [1, 7, 64, usize::MAX] {
            let mut pages = pages(&forward);
            let extra = reference.generated.len();
            let mut sequence =
                Sequence::new(&forward, &mut pages, &reference.prompt, extra, chunk.min(1 << 20));
            run(&mut forward, std::slice::from_mut(&mut sequence));
            let mut compared = 0;
            for (row, expected) in reference.logit_rows.iter().zip(expected.chunks_exact(vocab)) {
                for (_, logits) in sequence.logits.iter().filter(|(position, _)| position == row) {
                    let difference = largest_difference(logits, expected);
                    assert!(difference < 1e-4, "{name} prompt {i} chunk {chunk} row {row}: {difference}");
                    compared += 1;
                }
            }
            assert!(compared >= if chunk == 1 { reference.logit_rows.len() } else { 1 });
            // The references run past the end-of-sequence id.
            sequence.chunk = 1;
            for (token, expected) in reference.generated.iter().zip(generated.chunks_exact(vocab)) {
                let difference = largest_difference(sequence.last(), expected);
                assert!(difference < 1e-4, "{name} prompt {i} chunk {chunk} generating: {difference}");
                let choice = crate::sampler::sample(sequence.last(), &crate::Sampling::GREEDY, 0).unwrap();
                assert_eq!(choice.id, *token, "{name} prompt {i} chunk {chunk}");
                sequence.prompt.push(*token);
                run(&mut forward, std::slice::from_mut(&mut sequence));
            }
        }
    }
}

#[test]
fn llama_agrees_with_transformers() {
    agrees_with_the_reference("llama_tiny", Attention::Gqa, Arith::Canonical, "tp=1");
    agrees_with_the_reference("llama_tiny", Attention::Gqa, Arith::Fast, "tp=1");
    agrees_with_the_reference("llama_tiny", Attention::Gqa, Arith::Fast, "tp=3,page=5");
    agrees_with_the_reference("llama_tiny", Attention::Mla, Arith::Canonical, "tp=2,dcp=2,page=8");
    agrees_with_the_reference("llama_tiny", Attention::Mla, Arith::Fast, "tp=4,dcp=2,interleave=3");
}

#[test]
fn qwen_agrees_with_transformers() {
    agrees_with_the_reference("qwen2_tiny", Attention::Gqa, Arith::Canonical, "tp=2,dcp=2");
    agrees_with_the_reference("qwen2_tiny", Attention::Gqa, Arith::Fast, "tp=4,dcp=2");
    agrees_with_the_reference("qwen2_tiny", Attention::Mla, Arith::Canonical, "tp=1");
    agrees_with_the_reference("qwen2_tiny", Attention::Mla, Arith::Fast, "tp=3,layers=0/1-3");
}

#[test]
fn deepseek_agrees_with_transformers() {
    agrees_with_the_reference("deepseek_v3_tiny", Attention::Gqa, Arith::Canonical, "tp=1");
    agrees_with_the_reference("deepseek_v3_tiny", Attention::Gqa, Arith::Canonical, "tp=4,dcp=2,ep=4,page=8");
    agrees_with_the_reference("deepseek_v3_tiny", Attention::Gqa, Arith::Fast, "tp=1");
    agrees_with_the_reference("deepseek_v3_tiny", Attention::Gqa, Arith::Fast, "tp=3,page=5");
    agrees_with_the_reference("deepseek_v3_tiny", Attention::Gqa, Arith::Fast, "tp=4,dcp=4,ep=2");
}

#[test]
fn kimi_agrees_with_transformers() {
    agrees_with_the_reference("kimi_linear_tiny", Attention::Gqa, Arith::Canonical, "tp=1");
    agrees_with_the_reference("kimi_linear_tiny", Attention::Gqa, Arith::Canonical, "tp=4,dcp=4,ep=4,page=8");
    agrees_with_the_reference("kimi_linear_tiny", Attention::Gqa, Arith::Fast, "tp=1");
    agrees_with_the_reference("kimi_linear_tiny", Attention::Gqa, Arith::Fast, "tp=3,layers=0-2/3-7,page=5");
}

/// What one way of running a prompt leaves behind.
struct Trace {
    /// Logits after the last position of each chunk.
    logits: Vec<(u64, Vec<u32>)>,
    rows: Rows,
    /// Keeps the pool of `rows` alive and unchanged.
    _forward: Forward,
}

pub(super) fn prompt(length: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 % 512
        })
        .collect()
}

/// Runs the first prompt in `layout` and `chunk`s, next to the others (in chunks of other sizes).
fn trace(
    model: &Arc<Model>,
    layout: &str,
    kv: Dtype,
    chunk: usize,
    first: &[u32],
    others: &[Vec<u32>],
) -> Trace {
    let total = first.len() + others.iter().map(Vec::len).sum::<usize>();
    let mut forward = build(model, layout, kv, total as u64 + 512);
    let mut pages = pages(&forward);
    // Other requests' pages lie in front and between.
    let mut sequences: Vec<Sequence> = others
        .iter()
        .enumerate()
        .map(|(i, prompt)| Sequence::new(&forward, &mut pages, prompt, 0, 3 + 2 * i))
        .collect();
    sequences.push(Sequence::new(&forward, &mut pages, first, 0, chunk));
    run(&mut forward, &mut sequences);
    let sequence = sequences.pop().unwrap();
    let key = RoomKey { room: RoomId(1), attempt: kvferry_plan::Attempt(0) };
    let length = first.len() as u64;
    let rows = forward.rows(key, &sequence.lease, length, length).unwrap();
    let logits = sequence
        .logits
        .iter()
        .map(|(position, logits)| (*position, logits.iter().map(|l| l.to_bits()).collect()))
        .collect();
    Trace { logits, rows, _forward: forward }
}

/// Every coordinate on every rank that holds it has the reference's bits, and every rank holds what it should.
fn same_cache(reference: &Rows, other: &Trace, context: &str) {
    let ranks = other._forward.placement().ranks();
    for at in reference.coordinates() {
        let expected = reference.bytes(at).unwrap().unwrap();
        let mut holders = 0;
        for rank in (0..ranks).map(RankId) {
            if let Some(bytes) = other.rows.bytes_on(rank, at).unwrap() {
                assert_eq!(bytes, expected, "{context}: {at:?} on rank {rank}");
                holders += 1;
            }
        }
        assert!(holders > 0, "{context}: nobody holds {at:?}");
    }
}

fn same_bits(reference: &Trace, other: &Trace, context: &str) {
    let (_, last) = reference.logits.last().unwrap();
    assert_eq!(&other.logits.last().unwrap().1, last, "{context}: logits after the prompt");
    for (position, logits) in &other.logits {
        for (_, expected) in reference.logits.iter().filter(|(p, _)| p == position) {
            assert_eq!(logits, expected, "{context}: logits after position {position}");
        }
    }
    same_cache(&reference.rows, other, context);
}

/// A prompt in chunks and beside `others`, on one rank and in a layout.
fn same_as_one_rank(
    model: &Arc<Model>,
    (layout, kv): (&str, Dtype),
    (length, chunk): (usize, usize),
    others: &[usize],
    seed: u64,
) {
    let first = prompt(length, seed);
    let others: Vec<Vec<u32>> =
        others.iter().enumerate().map(|(i, l)| prompt(*l, seed ^ (i as u64 + 1))).collect();
    let reference = trace(model, "tp=1,page=16", kv, length, &first, &[]);
    let other = trace(model, layout, kv, chunk, &first, &others);
    same_bits(&reference, &other, layout);
}

/// The models of the layout tests; those made with grouped queries also in their rewritten form.
const MODELS: [(&str, Attention); 6] = [
    ("llama_tiny", Attention::Gqa),
    ("llama_tiny", Attention::Mla),
    ("qwen2_tiny", Attention::Gqa),
    ("qwen2_tiny", Attention::Mla),
    ("deepseek_v3_tiny", Attention::Gqa),
    ("kimi_linear_tiny", Attention::Gqa),
];

/// Of a model of four layers or more, whose last one is written LAST.
fn any_layout() -> impl Strategy<Value = String> {
    let page = prop_oneof![Just(1_u32), Just(5), Just(16), Just(24), Just(64)];
    let stages = prop_oneof![
        Just(""),
        Just(",pp=2"),
        Just(",pp=3"),
        Just(",layers=0/1-LAST"),
        Just(",layers=0-1/2/3-LAST")
    ];
    (1_u32..4, 1_u32..4, 1_u32..4, stages, page).prop_map(|(groups, dcp, interleave, stages, page)| {
        let dealt = if dcp > 1 { format!(",dcp={dcp},interleave={interleave}") } else { String::new() };
        format!("tp={}{dealt}{stages},page={page}", groups * dcp)
    })
}

/// Of context-parallel prefill, or with dealt pages, or both.
fn any_prefill_layout(latent: bool) -> impl Strategy<Value = String> {
    let page = prop_oneof![Just(1_u32), Just(5), Just(16), Just(24), Just(64)];
    let stages = prop_oneof![3 => Just(""), 1 => Just(",pp=2"), 1 => Just(",layers=0/1-LAST")];
    let cp = prop_oneof![1 => Just(1_u32), 2 => Just(2), 1 => Just(3), 1 => Just(4)];
    (cp, 1_u32..4, any::<bool>(), 1_u32..3, stages, page).prop_map(
        move |(cp, tp, shard, dcp, stages, page)| {
            let dealt = match (shard && (latent || cp > 1), dcp) {
                (true, _) => ",shard=on".to_owned(),
                (false, 1) => String::new(),
                (false, _) => format!(",dcp={dcp},interleave=3"),
            };
            let tp = if dealt.contains("dcp") { tp * dcp } else { tp };
            format!("tp={tp},cp={cp}{dealt}{stages},page={page}")
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// As below, whoever computes which token, and whoever keeps which page.
    #[test]
    fn canonical_bits_do_not_depend_on_who_computes_and_keeps_a_page(
        (which, layout) in proptest::sample::select((0..MODELS.len()).collect::<Vec<_>>())
            .prop_flat_map(|which| {
                let latent = MODELS[which].1 == Attention::Mla || which >= 4;
                (Just(which), any_prefill_layout(latent))
            }),
        kv in prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::Fp8E4m3)],
        length in 1_usize..150, chunk in 1_usize..100,
        others in proptest::collection::vec(1_usize..30, 0..3), seed: u64,
    ) {
        let (name, attention) = MODELS[which];
        let model = model(name, attention, Arith::Canonical);
        let layout = layout.replace("LAST", &(model.config().layers - 1).to_string());
        same_as_one_rank(&model, (&layout, kv), (length, chunk), &others, seed);
    }

    /// Logits and cache have the bits of one rank, one chunk and no neighbours.
    #[test]
    fn canonical_bits_do_not_depend_on_the_layout(
        (name, attention) in proptest::sample::select(MODELS.to_vec()), spread_experts: bool,
        kv in prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::Fp8E4m3)],
        layout in any_layout(), length in 1_usize..90, chunk in 1_usize..70,
        others in proptest::collection::vec(1_usize..30, 0..3), seed: u64,
    ) {
        let model = model(name, attention, Arith::Canonical);
        let layout = layout.replace("LAST", &(model.config().layers - 1).to_string());
        let layout = match layout.split_once(',') {
            Some((tp, rest)) if spread_experts && model.config().moe.is_some() => {
                format!("{tp},{},{rest}", tp.replace("tp", "ep"))
            }
            _ => layout,
        };
        same_as_one_rank(&model, (&layout, kv), (length, chunk), &others, seed);
    }
}

/// Ties in sums of thousands of terms show only in long sequences.
#[test]
fn canonical_bits_do_not_depend_on_the_layout_at_length_2100() {
    let long = prompt(2100, 7);
    for (name, attention, kv, layout, chunk) in [
        ("llama_tiny", Attention::Gqa, Dtype::F32, "tp=4,dcp=2,interleave=3,page=24", 700),
        ("llama_tiny", Attention::Mla, Dtype::Bf16, "tp=3,dcp=3,page=64", 511),
        ("deepseek_v3_tiny", Attention::Gqa, Dtype::F32, "tp=4,dcp=2,interleave=3,page=24", 700),
        ("kimi_linear_tiny", Attention::Gqa, Dtype::Bf16, "tp=6,dcp=3,ep=2,page=64", 511),
        ("llama_tiny", Attention::Mla, Dtype::Fp8E4m3, "tp=2,layers=0-2/3,page=64", 640),
        ("kimi_linear_tiny", Attention::Gqa, Dtype::Fp8E4m3, "tp=4,dcp=4,ep=4,layers=0-3/4-7,page=64", 700),
        ("llama_tiny", Attention::Gqa, Dtype::F32, "cp=4,shard=on,page=24", 700),
        ("llama_tiny", Attention::Mla, Dtype::Bf16, "tp=4,shard=on,page=64", 511),
        ("deepseek_v3_tiny", Attention::Gqa, Dtype::F32, "tp=2,cp=2,page=64", 700),
        ("kimi_linear_tiny", Attention::Gqa, Dtype::Fp8E4m3, "tp=2,ep=2,shard=on,page=64", 640),
        ("kimi_linear_tiny", Attention::Gqa, Dtype::Bf16, "tp=2,cp=2,shard=on,layers=0-3/4-7,page=64", 700),
    ] {
        let model = model(name, attention, Arith::Canonical);
        let reference = trace(&model, "tp=1,page=16", kv, long.len(), &long, &[]);
        let other = trace(&model, layout, kv, chunk, &long, &[prompt(9, 1)]);
        same_bits(&reference, &other, layout);
    }
}

/// GQA and its rewriting as MLA are the same arithmetic with added zeros.
#[test]
fn the_rewriting_as_mla_has_the_bits_of_gqa() {
    let tokens = prompt(50, 3);
    for name in ["llama_tiny", "qwen2_tiny"] {
        let run = |attention| {
            let model = model(name, attention, Arith::Canonical);
            trace(&model, "tp=1", Dtype::F32, 64, &tokens, &[]).logits
        };
        assert_eq!(run(Attention::Gqa), run(Attention::Mla));
    }
}

#[test]
fn fast_logprobs_agree_over_layouts() {
    let tokens = prompt(200, 5);
    for (name, attention) in MODELS {
        let model = model(name, attention, Arith::Fast);
        let logprobs = |layout: &str, chunk: usize| {
            let trace = trace(&model, layout, Dtype::F32, chunk, &tokens, &[prompt(8, 2)]);
            let logits: Vec<f32> =
                trace.logits.last().unwrap().1.iter().map(|bits| f32::from_bits(*bits)).collect();
            let mut logprobs = vec![0.0; logits.len()];
            assert!(crate::math::log_softmax(&logits, &mut logprobs));
            logprobs
        };
        let reference = logprobs("tp=1", 200);
        let mut largest = 0.0_f32;
        for (layout, chunk) in [
            ("tp=2", 64),
            ("tp=5,pp=3,page=7", 200),
            ("tp=4,dcp=4", 33),
            ("tp=6,dcp=2,page=24", 64),
            ("cp=3,page=7", 200),
            ("tp=2,cp=2,shard=on,page=16", 64),
        ] {
            let difference = largest_difference(&logprobs(layout, chunk), &reference);
            assert!(difference < 1e-4, "{layout}: {difference}");
            largest = largest.max(difference);
        }
        // These layouts do add in other orders: what canonical arithmetic is for.
        assert!(largest > 0.0);
    }
}
