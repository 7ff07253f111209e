//! The demo on SmolLM2. Without the model these tests are named in the summary as left out; with
//! `KVFERRY_REQUIRE=smollm2` they fail.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
#[path = "../../../tests/component.rs"]
mod component;

use std::process::ExitCode;

use common::{assert_proven, ids_file, kvferry};
use component::{Component, tests};
use libtest_mimic::Arguments;
use serde_json::Value;

/// Of SmolLM2.
const VOCABULARY: u32 = 49_152;

const TESTS: [(&str, fn()); 5] = [
    ("the_default_demo_proves_equal_on_both_transports", default_demo),
    ("mla_to_dcp4_is_bit_equal_on_both_transports", mla_dcp4),
    ("page_sizes_that_do_not_divide_are_bit_equal_on_both_transports", pages),
    ("prompts_around_page_and_cycle_edges_on_dcp4", lengths),
    ("fast_arithmetic_is_close", fast),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Each demo keeps every core busy and holds the model three times.
    arguments.test_threads = Some(1);
    let path = kvferry(&["model", "path", "smollm2"]);
    let there = match path.code {
        Some(0) => Ok(path.stdout.trim().to_owned()),
        _ => Err(format!("{}; get it with `kvferry model pull`", path.stderr.trim())),
    };
    let model = Component { name: "smollm2", there, tests: tests(&TESTS) };
    component::run(&arguments, vec![model], Vec::new())
}

fn demo(args: &[&str]) -> Value {
    let report = assert_proven(&kvferry(&[&["demo", "--json"], args].concat()));
    assert_eq!(report["model"]["name"], "SmolLM2-135M-Instruct.Q4_1");
    assert_eq!(report["model"]["sha256"], "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53");
    report
}

fn bit_equal_on_both_transports(args: &[&str]) {
    let answers = ["tcp", "shm"].map(|transport| {
        let report = demo(&[args, &["--transport", transport]].concat());
        assert_eq!(report["bit_equal"], true, "{report:#}");
        assert_eq!(report["max_abs_logprob_diff"], 0.0);
        report["generated"].clone()
    });
    assert_eq!(answers[0], answers[1]);
}

fn default_demo() {
    bit_equal_on_both_transports(&[]);
}

fn mla_dcp4() {
    bit_equal_on_both_transports(&["--attention", "mla", "--prefill", "tp=2", "--decode", "tp=4,dcp=4"]);
}

fn pages() {
    bit_equal_on_both_transports(&["--prefill", "tp=1,page=64", "--decode", "tp=2,page=24"]);
}

fn lengths() {
    let folder = tempfile::tempdir().unwrap();
    let lengths = [1, 15, 16, 17, 63, 64, 65, 255, 256, 257];
    let files: Vec<_> = lengths.iter().map(|n| ids_file(folder.path(), *n, VOCABULARY, 2)).collect();
    let mut args =
        vec!["--attention", "mla", "--prefill", "tp=2", "--decode", "tp=4,dcp=4", "--max-tokens", "2"];
    args.extend(files.iter().flat_map(|f| ["--prompt-tokens", f.to_str().unwrap()]));
    let report = demo(&args);
    assert_eq!(report["bit_equal"], true, "{report:#}");
    let found: Vec<u64> =
        report["prompts"].as_array().unwrap().iter().map(|p| p["prompt_tokens"].as_u64().unwrap()).collect();
    assert_eq!(found, lengths.map(|n| n as u64));
}

fn fast() {
    let f32 = demo(&["--arith", "fast"]);
    assert!(f32["max_abs_logprob_diff"].as_f64().unwrap() <= 1e-4, "{f32:#}");
    let bf16 = demo(&["--arith", "fast", "--kv-dtype", "bf16"]);
    assert_eq!(bf16["claim"], "close_from_same_prefill");
    assert!(bf16["max_abs_logprob_diff"].as_f64().unwrap() <= 1e-4, "{bf16:#}");
}
