//! Hand-offs between layouts that have nothing in common, across processes: what decode holds and answers has the bits of
//! one process with one rank.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{assert_proven, ids_file, kvferry};
use serde_json::Value;

const DEMO: [&str; 4] = ["demo", "--json", "--max-tokens", "3"];
const TINY: [&str; 2] = ["--model", "embedded:llama_tiny"];

/// Prompts of so many tokens from one layout to another, on a transport.
fn hand_over((from, to): (&str, &str), lengths: &[usize], more: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<_> = lengths.iter().map(|length| ids_file(folder.path(), *length, 512, 3)).collect();
    let model = if more.contains(&"--model") { &[][..] } else { &TINY };
    let mut args = [&DEMO[..], model, &["--ignore-eos", "--prefill", from, "--decode", to], more].concat();
    args.extend(files.iter().flat_map(|file| ["--prompt-tokens", file.to_str().unwrap()]));
    let report = assert_proven(&kvferry(&args));
    assert_eq!(report["bit_equal"], true, "{from} to {to}: {report:#}");
    let found: Vec<u64> =
        report["prompts"].as_array().unwrap().iter().map(|p| p["prompt_tokens"].as_u64().unwrap()).collect();
    assert_eq!(found, lengths.iter().map(|l| *l as u64).collect::<Vec<_>>());
    report
}

/// Each pair over one transport, with keys and values and with latent rows.
fn bit_equal(pairs: &[(&str, &str)], lengths: &[usize], more: &[&str]) {
    for (number, pair) in pairs.iter().enumerate() {
        for attention in ["gqa", "mla"] {
            let transport = ["tcp", "shm"][(number + usize::from(attention == "mla")) % 2];
            let more = [&["--attention", attention, "--transport", transport], more].concat();
            hand_over(*pair, lengths, &more);
        }
    }
}

#[test]
fn pipeline_stages_of_any_split_on_both_sides() {
    bit_equal(
        &[
            ("pp=2", "pp=2"),
            ("tp=2,pp=4", "tp=1"),
            ("tp=1", "tp=2,pp=3"),
            ("tp=2,pp=2", "tp=3,pp=3"),
            ("layers=0/1-3", "layers=0-2/3"),
            ("tp=3,layers=0/1-2/3,page=24", "tp=4,dcp=4,pp=2"),
            ("tp=4,dcp=2,pp=3,page=5", "tp=6,dcp=3,layers=0-2/3,interleave=4,page=7"),
        ],
        &[1, 70],
        &[],
    );
}

#[test]
fn decode_context_parallel_sizes_that_do_not_divide_each_other() {
    bit_equal(
        &[
            ("tp=2,dcp=2", "tp=3,dcp=3"),
            ("tp=4,dcp=4,page=24", "tp=6,dcp=6,page=16"),
            ("tp=6,dcp=3,interleave=4", "tp=4,dcp=4,page=7"),
            ("tp=4,dcp=4,interleave=3,page=5", "tp=2,dcp=2,interleave=4,page=24"),
            ("tp=3,dcp=3", "tp=1,page=64"),
            ("tp=6,dcp=2", "tp=5"),
        ],
        &[2, 130],
        &[],
    );
}

/// The last key/value heads of six ranks are held twice; four ranks of one head group hold all of them.
#[test]
fn replicated_heads_meet_dealt_tokens() {
    bit_equal(&[("tp=6", "tp=4,dcp=4"), ("tp=4,dcp=4", "tp=6"), ("tp=7,page=3", "tp=6,dcp=2")], &[100], &[]);
}

#[test]
fn element_types_go_over_as_they_are() {
    for kv in ["f32", "bf16", "fp8"] {
        let report = hand_over(("tp=3,pp=2", "tp=2,dcp=2,page=24"), &[9, 90], &["--kv-dtype", kv]);
        let size = [("f32", 4), ("bf16", 2), ("fp8", 1)].iter().find(|(name, _)| *name == kv).unwrap().1;
        // 4 layers, keys and values, 4 heads of 16: two decode ranks hold all heads of every second token.
        assert_eq!(report["transfer"]["bytes"], 99 * 4 * 2 * 4 * 16 * size, "{kv}");
    }
    // Where bits depend on the layout, what prefill rounded is what decode goes on with.
    let fast = ["--arith", "fast", "--kv-dtype", "fp8", "--attention", "mla"];
    let report = hand_over(("tp=3", "tp=4,dcp=4"), &[90], &[]);
    assert_eq!(report["claim"], "bits");
    let folder = tempfile::tempdir().unwrap();
    let file = ids_file(folder.path(), 90, 512, 3);
    let pair = ["--prefill", "tp=3", "--decode", "tp=4,dcp=4", "--prompt-tokens", file.to_str().unwrap()];
    let report = assert_proven(&kvferry(&[&DEMO[..], &TINY, &pair, &fast].concat()));
    assert_eq!(report["claim"], "close_from_same_prefill");
    assert!(report["reference"].as_str().unwrap().contains("fp8"), "{report:#}");
}

/// Whole virtual pages of an earlier turn stay at decode; only the rest crosses, whatever the layouts.
#[test]
fn a_later_turn_moves_only_what_decode_lacks() {
    for (pair, cached) in [
        (("tp=2,pp=2", "tp=4,dcp=4,page=8"), [112, 96]),
        (("tp=3,dcp=3,page=8", "tp=2,layers=0/1-3"), [120, 112]),
        (("tp=1,page=24", "tp=6,dcp=2,interleave=4,page=8"), [120, 112]),
    ] {
        for transport in ["tcp", "shm"] {
            let more = ["--attention", "mla", "--transport", transport];
            // The same ids, in a second turn all of them and more.
            let report = hand_over(pair, &[120, 150], &more);
            let second = &report["prompts"][1];
            let found =
                ["prefill", "decode"].map(|side| second[format!("{side}_prompt_tokens_cached")].clone());
            assert_eq!(found, cached.map(Value::from), "{pair:?}");
            let bytes = |n: usize| report["prompts"][n]["transfer"]["bytes"].as_u64().unwrap();
            assert_eq!(bytes(1) * 120, bytes(0) * (150 - cached[1]), "{pair:?}");
        }
    }
}

/// Latent rows and state, over stages that hold only one of the two.
#[test]
fn hybrid_models_between_any_two_layouts() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvferry-engine/tests/data/kimi_linear_tiny");
    for (number, (pair, kv)) in [
        (("tp=2,pp=4", "tp=4,dcp=4"), "fp8"),
        (("tp=1", "tp=2,layers=0/1-7,page=24"), "bf16"),
        (("tp=4,layers=0-2/3/4-7", "tp=6,dcp=3,pp=3,interleave=4,page=7"), "f32"),
    ]
    .into_iter()
    .enumerate()
    {
        let transport = ["tcp", "shm"][number % 2];
        hand_over(pair, &[1, 70], &["--model", model, "--kv-dtype", kv, "--transport", transport]);
    }
}

/// The quick part of the matrix, on the transport that the gate does not use; and that it fails when a byte is wrong.
#[test]
fn the_matrix_proves_its_cells_and_finds_faults() {
    let quick = ["demo", "--suite", "matrix", "--quick", "--json", "--transport", "shm"];
    let run = kvferry(&quick);
    assert_eq!(run.code, Some(0), "{}", run.all());
    let report = run.json();
    assert_eq!((&report["proven"], &report["cells"]), (&true.into(), &1140.into()));
    let sheets = report["sheets"].as_array().unwrap();
    let kinds: Vec<_> =
        sheets.iter().map(|s| (s["attention"].as_str().unwrap(), s["kv"].as_str().unwrap())).collect();
    let types = ["f32", "bf16", "fp8"];
    assert_eq!(
        kinds,
        ["gqa", "mla", "hybrid"].iter().flat_map(|form| types.map(|kv| (*form, kv))).collect::<Vec<_>>()
    );
    for sheet in sheets {
        let mut pairs: Vec<_> = sheet["cells"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| (c["prefill"].as_u64(), c["decode"].as_u64()))
            .collect();
        pairs.sort_unstable();
        pairs.dedup();
        // 10 layouts of both sides, and 3 of prefill: one deals latent rows over TP.
        let prefills = if sheet["attention"] == "gqa" { 10 + 2 } else { 10 + 3 };
        assert_eq!(pairs.len(), prefills * 10, "{sheet:#}");
        let (state, hybrid) = (&sheet["state"], sheet["attention"] == "hybrid");
        assert_eq!((state["equal"] == true, state["bytes"].as_u64() > Some(0)), (hybrid, hybrid), "{state}");
    }
    let conversions = report["conversions"].as_array().unwrap();
    assert_eq!(conversions.len(), 9);
    for pair in conversions {
        let of = &pair["conversion"];
        assert_eq!(of["exact"], of["largest_row_error"] == 0.0, "{pair:#}");
        assert!(
            of["rows"].as_u64().unwrap() > 0 && pair["findings"].as_array().unwrap().is_empty(),
            "{pair:#}"
        );
    }
    let broken = kvferry(&[&quick[..], &["--no-digest", "--inject", "flip-byte"]].concat());
    assert_eq!(broken.code, Some(1), "{}", broken.all());
    let report = broken.json();
    assert_eq!(report["proven"], false);
    let cells = report["sheets"].as_array().unwrap().iter().flat_map(|s| s["cells"].as_array().unwrap());
    for cell in cells.chain(report["conversions"].as_array().unwrap()) {
        // In a hybrid model state may be the first that lands.
        let kind = &cell["findings"][0]["kind"];
        assert!(kind == "cache" || kind == "state", "{cell:#}");
    }
}
