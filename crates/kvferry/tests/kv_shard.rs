//! The suite of prefill whose ranks keep only their own pages: its quick part proves its cases, and faults make it fail.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::BTreeSet;

use common::kvferry;
use serde_json::{Value, json};

const QUICK: [&str; 5] = ["demo", "--suite", "kv-shard", "--quick", "--json"];
const DECODES: [&str; 3] = ["tp=1", "tp=2", "tp=4,dcp=4"];

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap()
}

fn cases(report: &Value) -> impl Iterator<Item = (&Value, &Value)> {
    let sections = report["sections"].as_array().unwrap().iter();
    sections.flat_map(|section| section["cases"].as_array().unwrap().iter().map(move |case| (section, case)))
}

#[test]
fn the_quick_part_proves_every_case_and_catches_every_fault() {
    let run = kvferry(&[&QUICK[..], &["--transport", "shm"]].concat());
    assert_eq!(run.code, Some(0), "{}", run.all());
    let report = run.json();
    assert_eq!((&report["suite"], &report["proven"]), (&json!("kv-shard"), &json!(true)));
    let (controls, cases): (Vec<_>, Vec<_>) =
        cases(&report).partition(|(_, case)| case.get("injected").is_some());
    assert_eq!(report["cases"], json!(controls.len() + cases.len()));
    assert_eq!(report["state"]["equal"], true);

    let mut met = BTreeSet::new();
    for (section, case) in &cases {
        assert_eq!((&case["good"], &case["findings"]), (&json!(true), &json!([])), "{case:#}");
        assert!(case["bytes"].as_u64().unwrap() > 0, "{case:#}");
        let arith = text(section, "arith");
        let limit = if arith == "canonical" { 0.0 } else { 1e-4 };
        assert!(case["max_abs_logprob_diff"].as_f64().unwrap() <= limit, "{case:#}");
        let title = text(section, "title");
        if ["edges", "needles"].contains(&title) {
            let form = [section, section, case, case];
            let form: Vec<_> = form
                .iter()
                .zip(["model", "arith", "prefill", "decode"])
                .map(|(of, key)| text(of, key))
                .collect();
            met.insert(form.join(" "));
        }
        // Where the pages that are there end in the middle of a rotation.
        if let Some(pages) = text(case, "name").strip_prefix("goes on after ") {
            let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
            assert_eq!(case["prompt_tokens_cached"], 16 * pages, "{case:#}");
        }
        // Needles are in the text, and all are found.
        if title == "needles" && case["name"] != "the text" {
            assert_eq!(case["answers"], json!({"right": 1, "of": 1}), "{case:#}");
        }
        let past = text(case, "name").starts_with("past it");
        assert_eq!(case.get("refused").is_some(), past, "{case:#}");
    }
    let mut expected = BTreeSet::new();
    for (model, prefills) in [
        ("deepseek_v3_tiny", &["tp=2,shard=on", "tp=4,shard=on"][..]),
        ("kimi_linear_tiny", &["tp=2,shard=on", "tp=4,shard=on"]),
        ("llama_tiny", &["cp=2", "cp=2,shard=on", "cp=4,shard=on"]),
        ("needle_kimi", &["tp=2,shard=on", "tp=4,shard=on"]),
    ] {
        for arith in ["canonical", "fast"] {
            for prefill in prefills {
                expected.extend(DECODES.map(|decode| format!("{model} {arith} {prefill} {decode}")));
            }
        }
    }
    assert_eq!(met, expected);
    let titles: BTreeSet<_> = cases.iter().map(|(section, _)| text(section, "title")).collect();
    let all = ["edges", "limits", "limits of decode", "limits of ignore-eos", "needles", "pressure"];
    assert_eq!(titles, all.into());

    for (_, case) in &controls {
        assert!(case["good"] == true && !case["findings"].as_array().unwrap().is_empty(), "{case:#}");
    }
    // Rows that are not the right ones are found by comparison, a rank that says nothing by the hand-off.
    let found: BTreeSet<_> = controls
        .iter()
        .map(|(_, case)| (text(case, "injected"), text(&case["findings"][0], "kind")))
        .collect();
    let kinds = [("drop-empty-final", "hand_off"), ("filter-by-position", "cache"), ("wrong-owner", "cache")];
    assert_eq!(found, kinds.into());
}

/// As a person reads it: a line for each case, a column for each decode.
#[test]
fn a_wrong_byte_makes_it_fail() {
    let run = kvferry(&[&QUICK[..4], &["--no-digest", "--inject", "flip-byte"]].concat());
    assert_eq!(run.code, Some(1), "{}", run.all());
    common::assert_narrow(&run.stdout);
    for part in [
        "\nedges: kimi_linear_tiny (hybrid), bf16, canonical, chunk 40\n",
        "\n  tp=4,shard=on →           prompt tokens     tp=1       tp=2       tp=4,dcp=4\n",
        "\n  one token                 1                 DIFFERENT  DIFFERENT  DIFFERENT\n",
        "\nfinding: prompt KV differs in ",
        "\n  wrong-owner               128               caught\n",
    ] {
        assert!(run.stdout.contains(part), "{part}\n{}", run.stdout);
    }
    // The constructed weights leave zeros, whose sign is a difference of bits but not of numbers.
    let sections = run.stdout.split("\nedges: ").skip(1).map(|rest| rest.split("\nlimits: ").next().unwrap());
    let wrong: usize = sections.map(|section| section.matches("DIFFERENT").count()).sum();
    assert!(wrong >= 2 * (2 + 2 + 3) * 3 * 8, "{wrong}\n{}", run.stdout);
    assert!(run.stdout.lines().last().unwrap().starts_with("NOT proven: "), "{}", run.stdout);
}

/// The cases count what prefill finds in its cache, and what its pool holds: these are the suite's own.
#[test]
fn options_that_change_what_the_cases_find_are_refused() {
    common::assert_suite_keeps_its_own_options(&QUICK);
}
