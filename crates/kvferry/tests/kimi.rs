//! The suite of Kimi Linear: its quick part proves its cases, and faults make it fail.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;

use common::kvferry;
use serde_json::{Value, json};

const QUICK: [&str; 5] = ["demo", "--suite", "kimi-dcp", "--quick", "--json"];

fn cases(report: &Value) -> impl Iterator<Item = (&Value, &Value)> {
    let sections = report["sections"].as_array().unwrap().iter();
    sections.flat_map(|section| section["cases"].as_array().unwrap().iter().map(move |case| (section, case)))
}

#[test]
fn the_quick_part_proves_every_case_and_catches_every_fault() {
    let run = kvferry(&[&QUICK[..], &["--transport", "shm"]].concat());
    assert_eq!(run.code, Some(0), "{}", run.all());
    let report = run.json();
    assert_eq!(report["proven"], true);
    let kinds: Vec<_> = report["sections"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|section| section["cases"].as_array().unwrap().len() > 1)
        .map(|s| ["model", "arith", "kv", "decode_batch"].map(|key| s[key].as_str().unwrap()))
        .collect();
    let of = |model| [[model, "canonical", "bf16"], [model, "canonical", "fp8"], [model, "fast", "f32"]];
    let forms =
        |[model, arith, kv]: [&'static str; 3]| ["fixed", "eager"].map(|form| [model, arith, kv, form]);
    let mut expected: Vec<_> =
        [of("kimi_linear_tiny"), of("needle_kimi")].concat().into_iter().flat_map(forms).collect();
    let needles = |kv| ["needle_kimi", "canonical", kv, "fixed"];
    expected.extend([needles("bf16"), needles("fp8")]);
    assert_eq!(kinds, expected);
    for section in report["sections"].as_array().unwrap() {
        let steps = &section["compute"];
        assert_eq!(steps["steps_fixed"].as_u64() > Some(0), section["decode_batch"] == "fixed", "{steps}");
    }

    let (controls, cases): (Vec<_>, Vec<_>) =
        cases(&report).partition(|(_, case)| case.get("injected").is_some());
    assert_eq!(report["cases"], json!(controls.len() + cases.len()));
    assert_eq!(report["state"]["equal"], true);
    let mut needles = BTreeMap::<_, [u64; 3]>::new();
    for (section, case) in cases {
        let computed = case["prompt_tokens_computed"].as_u64().unwrap();
        let cached = case["prompt_tokens_cached"].as_u64().unwrap();
        if section["kv"] != "f32" && section["chunk"] == 48 && (cached > 0 || case["name"] == "the text") {
            let sums = needles.entry(section["kv"].as_str().unwrap()).or_default();
            *sums = [sums[0] + 1, sums[1] + computed, sums[2] + cached];
        } else {
            assert_eq!(cached, 0, "{case:#}");
        }
        assert_eq!((&case["good"], &case["findings"]), (&json!(true), &json!([])), "{section:#}");
        assert!(case["bytes"].as_u64().unwrap() > 0, "{case:#}");
        // The state that came, before decode went on with it.
        let exact = section["arith"] == "canonical";
        assert!(case["state"]["bytes"].as_u64().unwrap() > 0, "{case:#}");
        assert!(!exact || case["state"]["equal"] == true, "{case:#}");
        if case["name"] == "served beside misfits" {
            let refused: Vec<_> =
                case["refused"].as_array().unwrap().iter().map(|one| &one["what"]).collect();
            let other = |what| json!(format!("a decode with {what}"));
            let kinds = ["another element type", "another model", "context parallel 2"].map(other);
            assert!(refused.into_iter().eq(&kinds), "{case:#}");
        } else {
            assert!(case.get("refused").is_none(), "{case:#}");
        }
        let limit = if exact { 0.0 } else { 1e-4 };
        assert!(case["max_abs_logprob_diff"].as_f64().unwrap() <= limit, "{case:#}");
    }
    // The text of 896 tokens was computed once, the ten questions about it alone.
    let questions = 6 * 25 + 54 + 2 * 6 + 9;
    let once = [11, 896 + questions, 10 * 896];
    assert_eq!(needles, BTreeMap::from([("bf16", once), ("fp8", once)]));
    let mut caught: Vec<_> = controls
        .iter()
        .map(|(section, case)| {
            assert!(case["good"] == true && !case["findings"].as_array().unwrap().is_empty(), "{case:#}");
            // By comparison of the bytes, and where; faults of arithmetic leave bytes as they are.
            let kinds = match case["injected"].as_str().unwrap() {
                "swap-rank" | "misroute-row" => &["cache"][..],
                "swap-state" => &["state"],
                _ => &["tokens", "logprobs"],
            };
            let first = &case["findings"][0];
            assert!(kinds.contains(&first["kind"].as_str().unwrap()), "{case:#}");
            let places = ["first: decode rank ", ", layer ", ", head "];
            let text = first["text"].as_str().unwrap();
            assert!(kinds.len() > 1 || places.iter().all(|place| text.contains(place)), "{text}");
            (case["injected"].as_str().unwrap(), section["arith"].as_str().unwrap())
        })
        .collect();
    caught.sort_unstable();
    assert_eq!(
        caught,
        [
            ("blind-merge", "canonical"),
            ("blind-merge", "fast"),
            ("drop-rope", "canonical"),
            ("misroute-row", "canonical"),
            ("misroute-row", "fast"),
            ("swap-rank", "canonical"),
            ("swap-state", "canonical"),
            ("swap-state", "fast"),
        ]
    );
}

#[test]
fn a_wrong_byte_makes_it_fail() {
    let run = kvferry(&[&QUICK[..], &["--no-digest", "--inject", "flip-byte"]].concat());
    assert_eq!(run.code, Some(1), "{}", run.all());
    let report = run.json();
    assert_eq!(report["proven"], false);
    // The constructed weights leave zeros, whose sign is a difference of bits but not of numbers.
    let random = |section: &Value| section["model"] == "kimi_linear_tiny";
    let ran: Vec<_> =
        cases(&report).filter(|(section, case)| random(section) && case.get("injected").is_none()).collect();
    assert_eq!(ran.len(), 30);
    for (_, case) in ran {
        assert_eq!(
            (&case["good"], &case["findings"][0]["kind"]),
            (&json!(false), &json!("cache")),
            "{case:#}"
        );
    }
}

/// Its attention knows no positions, so that no sequence is too long for what the model was made for.
#[test]
fn only_a_model_without_positions_may_be_asked_for_longer_sequences() {
    let run = |model| {
        kvferry(&["demo", "--json", "--model", model, "--max-model-len", "100000", "--max-tokens", "2"])
    };
    let longer = run("embedded:kimi_linear_tiny");
    assert_eq!((longer.code, &longer.json()["proven"]), (Some(0), &json!(true)), "{}", longer.all());
    let refused = run("embedded:llama_tiny");
    assert_eq!(refused.code, Some(2), "{}", refused.all());
    assert!(refused.stderr.contains("--max-model-len 100000"), "{}", refused.all());
}

/// The cases count what prefill finds in its cache: these are the suite's own.
#[test]
fn options_that_change_what_the_cases_find_are_refused() {
    common::assert_suite_keeps_its_own_options(&QUICK);
}
