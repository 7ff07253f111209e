//! Replays the inputs that the fuzzer found interesting (`fuzz/corpus/plan`, docs/fuzzing.md).

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod fuzzed;
mod naive;

use std::path::Path;

#[test]
fn every_input_of_the_corpus_passes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/plan");
    let mut replayed = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        fuzzed::check(&std::fs::read(entry.unwrap().path()).unwrap());
        replayed += 1;
    }
    assert!(replayed >= 50, "{replayed} inputs");
}
