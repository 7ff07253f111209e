//! The planner against the naive copier, on whatever geometry the bytes say.

#![no_main]

#[path = "../../crates/kvferry-plan/tests/fuzzed/mod.rs"]
mod fuzzed;
#[path = "../../crates/kvferry-plan/tests/naive/mod.rs"]
mod naive;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzzed::check(data));
