//! How much memory a step of a prompt takes, by an allocator that counts: that of attention may grow with the context, and
//! with nothing times the context.

use std::fs;

use super::{super::allocations::peak, *};
use crate::checkpoint::Embedded;

#[test]
fn the_peak_is_what_was_held_at_once() {
    let one = || drop(std::hint::black_box(vec![1_u8; 1 << 20]));
    assert!((1 << 20..2 << 20).contains(&peak(|| (one(), one()).1)));
    assert!(peak(|| drop(std::hint::black_box((vec![1_u8; 1 << 20], vec![1_u8; 1 << 20])))) >= 2 << 20);
}

/// Bytes of the last step of a prompt of `context` tokens, the one of the last `chunk`. One rank alone works on this thread.
/// What came before is zeros in the pool, which attention reads like anything else.
fn step(model: &Arc<Model>, context: usize, chunk: usize) -> usize {
    let mut forward = build(model, "tp=1,page=64", Dtype::F32, context as u64);
    let mut pages = pages(&forward);
    let tokens: Vec<u32> = prompt(context, 3).iter().map(|token| token % 256).collect();
    let mut sequence = Sequence::new(&forward, &mut pages, &tokens, 0, chunk);
    sequence.filled = context - chunk;
    peak(|| {
        let outcomes = forward.step(&[sequence.piece()]).unwrap();
        assert_eq!(outcomes.iter().next().unwrap().computed.end.0, context as u64);
    })
}

/// A GQA model that may be as long as the hybrid one.
fn llama(arith: Arith) -> Arc<Model> {
    let at = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder("llama_tiny")).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), at.path().join(entry.file_name())).unwrap();
    }
    let config = at.path().join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    json["max_position_embeddings"] = 65_536.into();
    fs::write(&config, json.to_string()).unwrap();
    Model::load(at.path(), LoadOptions { arith, ..LoadOptions::default() }).unwrap()
}

#[test]
fn memory_of_a_step_grows_at_most_linearly_with_the_context() {
    let needle = |arith| {
        Model::from_checkpoint(
            &Embedded::NeedleKimi.open().unwrap(),
            LoadOptions { arith, ..LoadOptions::default() },
        )
    };
    for arith in [Arith::Fast, Arith::Canonical] {
        for (name, model) in [("MLA", needle(arith).unwrap()), ("GQA", llama(arith))] {
            // The other model's attention is slower: it has four layers of small heads.
            let long = match name {
                "MLA" => (8192, &[8192, 16_384, 32_768][..]),
                _ => (2048, &[4096, 8192, 16_384][..]),
            };
            for (chunk, contexts) in [(512, &[4096, 8192, 16_384, 32_768][..]), long] {
                let bytes: Vec<usize> =
                    contexts.iter().map(|context| step(&model, *context, chunk)).collect();
                let context = format!("{name}, {arith:?}, steps of {chunk} at {contexts:?}: {bytes:?} bytes");
                println!("{context}");
                // Twice the context takes at most twice as much, and not what would hold a score for each pair.
                assert!(bytes.windows(2).all(|pair| pair[1] <= 2 * pair[0]), "{context}");
                let tokens = contexts.last().unwrap() - contexts[0];
                let per_token = bytes.last().unwrap().saturating_sub(bytes[0]) / tokens;
                assert!(per_token < 4096, "{context}: {per_token} for each token");
            }
        }
    }
}
