//! Both forms of steps that only generate.

use kvferry_engine::DecodeBatch;

use super::*;

/// Prompts and answers of unequal lengths, so that requests come and go while others run: chunks and next tokens share
/// steps, batches grow and shrink.
const REQUESTS: [(u32, u32); 7] = [(1, 40), (3, 31), (70, 12), (2, 36), (33, 25), (17, 5), (64, 18)];

fn answers(engine: &Engine) -> Vec<Vec<(u32, u32)>> {
    let events: Vec<_> =
        REQUESTS.iter().map(|(length, tokens)| engine.generate(full(*length, *tokens)).unwrap()).collect();
    events.into_iter().map(|events| outcome(events).0).collect()
}

#[test]
fn batches_of_both_forms_have_the_bits_of_requests_alone() {
    for layout in ["tp=1", "tp=4,dcp=2,page=8", "tp=2,pp=2,page=24"] {
        for arith in [Arith::Canonical, Arith::Fast] {
            let start = |decode_batch| {
                let config = EngineConfig { decode_batch, prefix_cache: false, ..config(layout) };
                Engine::start(model(Attention::Gqa, arith), &config, Arc::new(NoHandOff)).unwrap()
            };
            let (fixed, eager) = (start(DecodeBatch::Fixed), start(DecodeBatch::Eager));
            let alone: Vec<_> = REQUESTS
                .iter()
                .map(|(length, tokens)| outcome(eager.generate(full(*length, *tokens)).unwrap()).0)
                .collect();
            assert_eq!(answers(&fixed), alone, "{layout} {arith:?}");
            assert_eq!(answers(&eager), alone, "{layout} {arith:?}");
            let (of_fixed, of_eager) = (fixed.stats(), eager.stats());
            assert!(of_fixed.steps_fixed > 0 && of_fixed.rows_padding > 0, "{of_fixed:?}");
            assert!(of_fixed.steps_eager > 0, "chunks of prompts are eager: {of_fixed:?}");
            assert_eq!((of_eager.steps_fixed, of_eager.rows_padding), (0, 0));
            assert!(of_fixed.workspace_bytes > 0);
            all_free(&fixed);
        }
    }
}

/// A pool of four pages captures no shape of more rows than four, and more requests than that wait.
#[test]
fn no_more_rows_are_captured_than_requests_can_run() {
    let small = |decode_batch| {
        start(&EngineConfig { pool_tokens: 64, prefix_cache: false, decode_batch, ..config("tp=1") })
    };
    let (fixed, eager) = (small(DecodeBatch::Fixed), small(DecodeBatch::Eager));
    let run = |engine: &Engine| -> Vec<_> {
        let events: Vec<_> = (1..9).map(|length| engine.generate(full(length, 7)).unwrap()).collect();
        events.into_iter().map(|events| outcome(events).0).collect()
    };
    assert_eq!(run(&fixed), run(&eager));
    assert!(fixed.stats().steps_fixed > 0);
}
