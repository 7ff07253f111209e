//! Steps of fixed shape beside eager ones: the same bits, nothing written that should not be, no memory taken.

use std::{env, process::Command};

use kvferry_arena::Memory;
use kvferry_plan::{Bytes, Dtype};

use super::{
    allocations,
    space::Account,
    tests::{Sequence, model, pages, prompt, run},
    *,
};
use crate::{Attention, math::Arith, pages::Pages};

/// GQA, MLA and hybrid models, on one rank and on many.
const CASES: [(&str, Attention, &str, Dtype); 10] = [
    ("llama_tiny", Attention::Gqa, "tp=1,page=8", Dtype::F32),
    ("llama_tiny", Attention::Gqa, "tp=4,dcp=4,page=8", Dtype::Bf16),
    ("llama_tiny", Attention::Gqa, "tp=2,pp=2,page=8", Dtype::Fp8E4m3),
    ("llama_tiny", Attention::Mla, "tp=1,page=8", Dtype::Bf16),
    ("llama_tiny", Attention::Mla, "tp=4,dcp=2,interleave=3,pp=2,page=5", Dtype::F32),
    ("deepseek_v3_tiny", Attention::Gqa, "tp=4,dcp=4,ep=4,page=8", Dtype::F32),
    ("deepseek_v3_tiny", Attention::Gqa, "tp=3,page=8", Dtype::Bf16),
    ("kimi_linear_tiny", Attention::Gqa, "tp=1,page=8", Dtype::F32),
    ("kimi_linear_tiny", Attention::Gqa, "tp=4,dcp=4,ep=4,page=8", Dtype::Fp8E4m3),
    ("kimi_linear_tiny", Attention::Gqa, "tp=4,dcp=2,layers=0-2/3-7,page=8", Dtype::Bf16),
];

/// Requests in a step, one step after the other: every number up to nine, and falling and rising ones.
const SIZES: [usize; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 8, 1, 9, 2, 5, 7];

const REQUESTS: usize = 9;

/// Nine requests whose prompts are computed, and which go on with tokens that are given.
struct Running {
    forward: Forward,
    sequences: Vec<Sequence>,
    _pages: Pages,
}

impl Running {
    fn start(model: &Arc<Model>, layout: &str, kv: Dtype, form: DecodeBatch, fault: Option<Fault>) -> Self {
        let config = EngineConfig {
            layout: layout.parse().unwrap(),
            kv,
            pool_tokens: 1024,
            decode_batch: form,
            fault,
            ..EngineConfig::default()
        };
        let mut forward = Forward::new(Arc::clone(model), &config).unwrap();
        let mut pages = pages(&forward);
        let mut sequences: Vec<Sequence> = (0..REQUESTS)
            .map(|at| Sequence::new(&forward, &mut pages, &prompt(3 + 5 * at, at as u64), 32, 7 + at))
            .collect();
        run(&mut forward, &mut sequences);
        Self { forward, sequences, _pages: pages }
    }

    /// The requests of a step: other ones each time.
    fn of(turn: usize, count: usize) -> impl Iterator<Item = usize> {
        (0..count).map(move |at| (2 * turn + at) % REQUESTS)
    }

    /// One token more for each of `count` requests; returns how often memory was taken.
    fn step(&mut self, turn: usize, count: usize) -> u64 {
        for at in Self::of(turn, count) {
            self.sequences[at].prompt.push((at * 31 + turn * 7) as u32 % 512);
        }
        let pieces: Vec<Piece<'_>> = Self::of(turn, count).map(|at| self.sequences[at].piece()).collect();
        let (outcomes, taken) = allocations::during(|| self.forward.step(&pieces).unwrap());
        drop(pieces);
        assert_eq!(outcomes.iter().count(), count, "padding has no outcome");
        for (at, outcome) in Self::of(turn, count).zip(outcomes.iter()) {
            self.sequences[at].take(outcome);
        }
        self.forward.reuse(outcomes);
        taken
    }

    /// All bytes of all pools.
    fn pools(&self) -> Vec<Vec<u8>> {
        let whole = |arena: &Arc<Arena>| {
            let mut bytes = vec![0; arena.layout().len().0 as usize];
            arena.read(Bytes(0), &mut bytes).unwrap();
            bytes
        };
        self.forward.arenas().iter().map(whole).collect()
    }

    fn logits(&self, turn: usize, count: usize) -> Vec<u32> {
        Self::of(turn, count).flat_map(|at| self.sequences[at].last()).map(|x| x.to_bits()).collect()
    }
}

/// Runs both forms side by side: whether logits and all bytes of all pools, pages of other requests included, are the
/// same after every step. An eager step has no padding, so it writes what it should.
fn same(model: &Arc<Model>, layout: &str, kv: Dtype, fault: Option<Fault>) -> bool {
    let [mut fixed, mut eager] =
        [DecodeBatch::Fixed, DecodeBatch::Eager].map(|form| Running::start(model, layout, kv, form, fault));
    assert_eq!(fixed.pools(), eager.pools(), "{layout}: before the first step");
    let before = (fixed.forward.steps(), eager.forward.steps());
    let mut same = true;
    for (turn, count) in SIZES.into_iter().enumerate() {
        fixed.step(turn, count);
        eager.step(turn, count);
        same &= fixed.logits(turn, count) == eager.logits(turn, count);
        same &= fixed.pools() == eager.pools();
    }
    let steps = fixed.forward.steps();
    assert_eq!(steps.fixed - before.0.fixed, SIZES.len() as u64);
    let padding = SIZES.iter().map(|count| count.next_power_of_two() - count).sum::<usize>() as u64;
    assert_eq!(steps.padding - before.0.padding, padding);
    assert_eq!(eager.forward.steps().eager - before.1.eager, SIZES.len() as u64);
    assert_eq!(eager.forward.steps().fixed, 0);
    same
}

#[test]
fn both_forms_have_the_same_bits_and_write_the_same_bytes() {
    for (name, attention, layout, kv) in CASES {
        for arith in [Arith::Canonical, Arith::Fast] {
            assert!(same(&model(name, attention, arith), layout, kv, None), "{name} {layout} {arith:?}");
        }
    }
}

#[test]
fn padding_that_writes_is_noticed() {
    for (name, attention, layout, kv) in CASES {
        let model = model(name, attention, Arith::Canonical);
        assert!(!same(&model, layout, kv, Some(Fault::PaddingWrites)), "{name} {layout}");
    }
}

/// Runs itself again, alone in a process, where what any thread takes counts.
#[test]
fn a_fixed_step_takes_no_memory_on_any_thread() {
    const ALONE: &str = "KVFERRY_TEST_ALONE";
    if env::var_os(ALONE).is_none() {
        let this = "forward::fixed::a_fixed_step_takes_no_memory_on_any_thread";
        let arguments = [this, "--exact", "--test-threads=1", "--nocapture"];
        let run = Command::new(env::current_exe().unwrap()).args(arguments).env(ALONE, "1").output().unwrap();
        let told = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success(), "{told}{}", String::from_utf8_lossy(&run.stderr));
        assert!(told.contains("1 passed"), "{told}");
        return;
    }
    assert!(allocations::during(|| vec![0_u8; 100]).1 > 0, "it is counted");
    for (name, attention, layout, kv) in CASES {
        for arith in [Arith::Canonical, Arith::Fast] {
            let model = model(name, attention, arith);
            let mut running = Running::start(&model, layout, kv, DecodeBatch::Fixed, None);
            running.forward.capture().unwrap();
            let captured = running.forward.workspace();
            // Nine tokens each at least: all contexts grow over a page's end.
            for (turn, count) in SIZES.into_iter().enumerate() {
                let taken = running.step(turn, count);
                assert_eq!(taken, 0, "{name} {layout} {arith:?}: step {turn} of {count}");
            }
            assert_eq!(running.forward.workspace(), captured);
        }
    }
}

/// The longest context that there can be, after the shapes were captured and no other step was run.
#[test]
fn the_longest_context_fits_what_was_captured() {
    for (name, attention, layout, kv) in CASES {
        for arith in [Arith::Canonical, Arith::Fast] {
            let model = model(name, attention, arith);
            let config = EngineConfig {
                layout: layout.parse().unwrap(),
                kv,
                pool_tokens: 256,
                state_slots: 2,
                decode_batch: DecodeBatch::Fixed,
                ..EngineConfig::default()
            };
            let mut forward = Forward::new(Arc::clone(&model), &config).unwrap();
            forward.capture().unwrap();
            let captured = forward.workspace();
            let mut pages = pages(&forward);
            let longest = forward.held.longest as usize;
            let mut sequence = Sequence::new(&forward, &mut pages, &prompt(longest, 3), 0, 1);
            run(&mut forward, std::slice::from_mut(&mut sequence));
            assert_eq!(forward.steps().fixed, longest as u64, "token by token");
            assert_eq!(forward.workspace(), captured, "{name} {layout} {arith:?}");
        }
    }
}

#[test]
fn memory_that_may_not_grow_does_not() {
    let account = Account::default();
    let mut list: Vec<f32> = Vec::new();
    account.zeroed(&mut list, 8).unwrap();
    assert_eq!(account.bytes(), 32);
    account.freeze(true);
    account.zeroed(&mut list, 5).unwrap();
    let error = account.zeroed(&mut list, 9).unwrap_err();
    assert_eq!(error, EngineError::Captured { wanted: 36, held: 32 });
    assert_eq!(list.capacity(), 8);
    account.freeze(false);
    account.zeroed(&mut list, 9).unwrap();
    assert!(account.bytes() >= 36);
}

#[test]
fn a_step_has_the_smallest_shape_that_holds_it() {
    let table = kvferry_plan::PageTable::default();
    let piece = |tokens, logits| Piece { tokens, start: 4, table: &table, slot: None, logits };
    let shapes = Shapes { most: 6, captured: true };
    let next = piece(&[1], true);
    let found: Vec<_> = (1..=7).map(|count| shapes.holding(&vec![next; count])).collect();
    assert_eq!(found, [Some(1), Some(2), Some(4), Some(4), Some(6), Some(6), None]);
    assert_eq!(shapes.holding(&[next, piece(&[1, 2], true)]), None, "a prompt's chunk");
    assert_eq!(shapes.holding(&[next, piece(&[1], false)]), None, "also a short one");
    assert_eq!(Shapes { most: 0, captured: false }.holding(&[next]), None);
}
