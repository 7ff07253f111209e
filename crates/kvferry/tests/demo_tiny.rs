//! The demo on the built-in checkpoint: it proves what it claims, and finds what is wrong.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{assert_proven, command, finish, ids_file, kvferry};
use serde_json::Value;

const TINY: [&str; 4] = ["demo", "--json", "--model", "embedded:llama_tiny"];
const MLA_DCP4: [&str; 6] = ["--attention", "mla", "--prefill", "tp=2", "--decode", "tp=4,dcp=4"];
const PAGES: [&str; 4] = ["--prefill", "tp=1,page=64", "--decode", "tp=2,page=24"];

fn demo(more: &[&[&str]]) -> common::Run {
    kvferry(&[&TINY[..], &more.concat()].concat())
}

#[test]
fn every_layout_is_bit_equal_on_every_transport() {
    for transport in ["tcp", "shm", "mooncake-tcp"] {
        for layout in [&[][..], &MLA_DCP4, &PAGES, &["--prefill", "tp=5", "--decode", "tp=7,page=3,kv=f32"]] {
            let report = assert_proven(&demo(&[layout, &["--transport", transport]]));
            assert_eq!(report["bit_equal"], true, "{layout:?} {report:#}");
            assert_eq!(report["max_abs_logprob_diff"], 0.0);
            assert_eq!(report["transport"], transport);
        }
    }
}

/// Sides that offer several use the best that both have, and the report says which and why.
#[test]
fn two_lists_of_transports_become_one_transport_with_its_reason() {
    for (prefill, decode, chosen, why) in [
        ("shm,tcp", "shm,tcp", "shm", "both have shm and tcp, and want shm first"),
        ("tcp,shm", "tcp,shm,mooncake-tcp", "tcp", "both have shm and tcp, and want tcp first"),
        (
            "mooncake-tcp,tcp",
            "tcp,mooncake-tcp",
            "tcp",
            "both have tcp and mooncake-tcp; prefill wants mooncake-tcp first and decode tcp, so kvferry's order decides",
        ),
        ("auto", "mooncake-tcp,tcp", "tcp", "the only one that both have"),
    ] {
        let lists = ["--prefill-transport", prefill, "--decode-transport", decode];
        let report = assert_proven(&demo(&[&lists]));
        assert_eq!((&report["transport"], &report["transport_why"]), (&chosen.into(), &why.into()));
    }
}

/// The models of the source pull request, small: latent rows, experts, and in one of them state per request, which goes
/// between any two TP sizes beside rows that DCP deals out.
#[test]
fn latent_rows_state_and_experts_are_bit_equal() {
    for (model, prefill, decode, transport) in [
        ("deepseek_v3_tiny", "tp=4,ep=4", "tp=4,dcp=4", "tcp"),
        ("deepseek_v3_tiny", "tp=3,page=24", "tp=2,dcp=2,interleave=4", "shm"),
        ("kimi_linear_tiny", "tp=4,ep=4,page=64", "tp=4,dcp=4,page=64", "tcp"),
        ("kimi_linear_tiny", "tp=4,ep=2", "tp=3,page=24", "shm"),
        ("kimi_linear_tiny", "tp=1", "tp=6,dcp=3,kv=f32", "tcp"),
    ] {
        let folder = format!("{}/../kvferry-engine/tests/data/{model}", env!("CARGO_MANIFEST_DIR"));
        let layouts = ["--prefill", prefill, "--decode", decode, "--transport", transport];
        let run = kvferry(
            &[&["demo", "--json", "--model", &folder, "--max-tokens", "4", "--ignore-eos"], &layouts[..]]
                .concat(),
        );
        let report = assert_proven(&run);
        let form = if model == "kimi_linear_tiny" { "hybrid" } else { "mla" };
        assert_eq!((&report["bit_equal"], &report["attention"]), (&true.into(), &form.into()), "{report:#}");
        assert_eq!(
            (&report["decode_prompt_tokens_computed"], &report["max_abs_logprob_diff"]),
            (&0.into(), &0.0.into())
        );
    }
}

/// Prefill converts: decode holds the casts of what one process holds in prefill's element type, and answers as a process
/// that goes on from these. Rows keep every number where decode's type is wider, and are off by a known measure elsewhere.
#[test]
fn conversions_are_proven_and_measured() {
    let [llama, needle] = ["embedded:llama_tiny", "embedded:needle_kimi"];
    for (model, prefill, decode, more) in [
        (llama, "tp=2,kv=bf16", "tp=1,kv=fp8", &[][..]),
        (llama, "tp=2,kv=fp8", "tp=4,dcp=4,kv=f32", &["--attention", "mla", "--transport", "shm"]),
        (llama, "tp=3,page=24,kv=f32", "tp=2,kv=bf16", &["--arith", "fast"]),
        (needle, "tp=4,ep=4,kv=f32", "tp=4,dcp=4,kv=fp8", &[]),
        (needle, "tp=1,kv=bf16", "tp=2,page=24,kv=f32", &["--transport", "shm"]),
    ] {
        let layouts = ["--prefill", prefill, "--decode", decode, "--max-tokens", "6", "--ignore-eos"];
        let asked = [&["demo", "--json", "--convert-kv", "--model", model], &layouts[..], more].concat();
        let report = assert_proven(&kvferry(&asked));
        let conversion = &report["conversion"];
        assert_eq!(report["cache"]["equal"], true, "{report:#}");
        assert!(conversion["rows"].as_u64().unwrap() > 0, "{conversion:#}");
        let largest = conversion["largest_row_error"].as_f64().unwrap();
        let (from, to) = (conversion["from"].as_str().unwrap(), conversion["to"].as_str().unwrap());
        // Half a step is at most 2^-8 of bf16's numbers; of fp8's small ones it may be all.
        let (most, exact) = match (from, to) {
            (_, "fp8") => (1.0, false),
            ("f32", "bf16") => (2_f64.powi(-8), false),
            _ => (0.0, true),
        };
        assert!(largest <= most, "{conversion:#}");
        assert_eq!((&conversion["exact"], largest == 0.0), (&exact.into(), exact), "{conversion:#}");
        // Of narrower types, what it costs is told too.
        assert_eq!(conversion["source_type_tokens_equal"].is_boolean(), !exact, "{conversion:#}");
    }
}

/// A conversion hides no fault, and nothing is converted that was not asked for.
#[test]
fn faults_are_found_beside_a_conversion() {
    let pair = ["--prefill", "tp=2,kv=f32", "--decode", "tp=3,kv=bf16"];
    for transport in ["tcp", "shm"] {
        for (more, kind) in [(&[][..], "hand_off"), (&["--no-digest"], "cache")] {
            let fault = ["--convert-kv", "--inject", "flip-byte", "--transport", transport];
            let run = demo(&[&pair, &fault, more]);
            assert_eq!(run.code, Some(1), "{}", run.all());
            let report = run.json();
            assert_eq!((&report["proven"], &report["findings"][0]["kind"]), (&false.into(), &kind.into()));
        }
    }
    let refused = demo(&[&pair]);
    assert_eq!(refused.code, Some(2), "{}", refused.all());
    assert!(refused.stderr.contains("--convert-kv"), "{}", refused.all());
}

/// With no network: a hybrid model finds what was hidden in its prompt, through a re-layout of rows and of state.
#[test]
fn the_built_in_model_finds_needles_through_a_relayout() {
    let filler = "Some cars stay, some go; each one has its place. ".repeat(20);
    let rows =
        format!("{filler} The code of the ferry is 31415. \x02Kq{filler} Q: The code of the ferry is ");
    let state = format!("{filler}\x02Kq The code of the ferry is 31415. {filler}\x03K");
    let asked = [
        "demo",
        "--json",
        "--model",
        "embedded:needle_kimi",
        "--max-tokens",
        "6",
        "--prompt",
        &rows,
        "--prompt",
        &state,
    ];
    let layouts = ["--prefill", "tp=4,ep=4,page=64", "--decode", "tp=4,dcp=4,page=64"];
    for more in [&[][..], &["--kv-dtype", "bf16", "--transport", "shm"], &["--arith", "fast"]] {
        let report = assert_proven(&kvferry(&[&asked[..], &layouts, more].concat()));
        let said = |n: usize| -> String {
            let ids = report["prompts"][n]["generated"].as_array().unwrap();
            ids.iter().map(|id| char::from_u32(id.as_u64().unwrap() as u32).unwrap()).collect()
        };
        assert!(said(0).starts_with("31415.") && said(1).starts_with('q'), "{:?} {:?}", said(0), said(1));
    }
}

#[test]
fn the_json_object_has_what_is_promised() {
    let report = assert_proven(&demo(&[&["--max-tokens", "5", "--ignore-eos"]]));
    assert_eq!(report["model"]["name"], "llama_tiny");
    let sha256 = report["model"]["sha256"].as_str().unwrap();
    assert!(sha256.len() == 64 && sha256.chars().all(|c| c.is_ascii_hexdigit()), "{sha256}");
    assert_eq!(report["prefill"], "tp=3,page=16");
    assert_eq!(report["decode"], "tp=1,page=16");
    assert_eq!(report["transport"], "shm");
    assert_eq!(report["generated"].as_array().unwrap().len(), 5);
    let logprobs = report["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), 5);
    assert!(logprobs.iter().all(|p| p.as_f64().unwrap() < 0.0), "{logprobs:?}");
    let transfer = &report["transfer"];
    assert!(transfer["runs"].as_u64().unwrap() > 0);
    let (seconds, exposed) =
        (transfer["seconds"].as_f64().unwrap(), transfer["exposed_seconds"].as_f64().unwrap());
    assert!(seconds > 0.0 && exposed > 0.0 && seconds < 60.0 && exposed < 60.0, "{transfer}");
    // 41 tokens, 4 layers, K and V, 4 heads of 16 f32, held once.
    assert_eq!(transfer["bytes"], 41 * 4 * 2 * 4 * 16 * 4);
    assert_eq!(report["cache"]["bytes"], transfer["bytes"]);
}

/// The README's command: children log as this process was asked to.
#[test]
fn the_log_is_one_line_of_json_for_each_room() {
    let mut command = command(&[&TINY[..], &["--max-tokens", "3", "--ignore-eos"]].concat());
    let run = finish(
        command.env("KVFERRY_LOG", "kvferry::room=info").env("KVFERRY_LOG_FORMAT", "json").output().unwrap(),
    );
    assert_proven(&run);
    let lines: Vec<Value> = run.stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2, "{}", run.stderr);
    for line in &lines {
        assert_eq!(line["outcome"], "completed", "{line:#}");
    }
    assert_eq!(lines[0]["room"], lines[1]["room"], "{}", run.stderr);
}

#[test]
fn short_prompts_and_page_edges_in_one_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let lengths = [1, 15, 16, 17, 63, 64, 65, 255, 256, 257];
    let files: Vec<_> = lengths.iter().map(|n| ids_file(folder.path(), *n, 512, 1)).collect();
    let mut args: Vec<&str> = vec!["--max-tokens", "3", "--ignore-eos"];
    args.extend(files.iter().flat_map(|f| ["--prompt-tokens", f.to_str().unwrap()]));
    let report = assert_proven(&demo(&[&MLA_DCP4, &args]));
    assert_eq!(report["bit_equal"], true);
    let prompts = report["prompts"].as_array().unwrap();
    let found: Vec<u64> = prompts.iter().map(|p| p["prompt_tokens"].as_u64().unwrap()).collect();
    assert_eq!(found, lengths.map(|n| n as u64));
    let bytes: u64 = prompts.iter().map(|p| p["transfer"]["bytes"].as_u64().unwrap()).sum();
    assert_eq!(report["transfer"]["bytes"], bytes);
    assert!(prompts.iter().all(|p| p["bit_equal"] == true && p["generated"].as_array().unwrap().len() == 3));
}

#[test]
fn cached_prefixes_are_proven_like_everything_else() {
    let folder = tempfile::tempdir().unwrap();
    let file = ids_file(folder.path(), 150, 512, 1);
    let twice = ["--prompt-tokens", file.to_str().unwrap(), "--prompt-tokens", file.to_str().unwrap()];
    let report = assert_proven(&demo(&[&MLA_DCP4, &twice, &["--max-tokens", "3", "--ignore-eos"]]));
    assert_eq!(report["bit_equal"], true);
    // Blocks of 16 tokens at prefill, of 64 at decode.
    let cached = |n: usize, side: &str| report["prompts"][n][format!("{side}_prompt_tokens_cached")].clone();
    assert_eq!((cached(0, "prefill"), cached(0, "decode")), (0.into(), 0.into()));
    assert_eq!((cached(1, "prefill"), cached(1, "decode")), (144.into(), 128.into()));
    let bytes = |n: usize| report["prompts"][n]["transfer"]["bytes"].as_u64().unwrap();
    assert_eq!(bytes(1) * 150, bytes(0) * 22);
    let off = assert_proven(&demo(&[&MLA_DCP4, &twice, &["--no-prefix-cache", "--max-tokens", "2"]]));
    assert_eq!(
        (&off["prefill_prompt_tokens_cached"], &off["decode_prompt_tokens_cached"]),
        (&0.into(), &0.into())
    );
}

#[test]
fn fast_arithmetic_is_close_and_bf16_is_compared_from_the_same_prefill_layout() {
    let f32 = assert_proven(&demo(&[&["--arith", "fast"]]));
    assert_eq!(f32["claim"], "close");
    for layout in [&[][..], &MLA_DCP4] {
        let bf16 = assert_proven(&demo(&[layout, &["--arith", "fast", "--kv-dtype", "bf16"]]));
        assert_eq!(bf16["claim"], "close_from_same_prefill");
        assert!(bf16["reference"].as_str().unwrap().contains(bf16["prefill"].as_str().unwrap()), "{bf16:#}");
        assert!(bf16["max_abs_logprob_diff"].as_f64().unwrap() <= 1e-4);
        assert_eq!(bf16["cache"]["equal"], true);
    }
    let canonical = assert_proven(&demo(&[&["--kv-dtype", "bf16", "--transport", "shm"]]));
    assert_eq!((&canonical["claim"], &canonical["bit_equal"]), (&"bits".into(), &true.into()));
}

/// Injects a fault; the finding's kind and text.
fn finding(fault: &str, layout: &[&str], more: &[&str]) -> (String, String) {
    let run = demo(&[layout, &["--inject", fault], more]);
    assert_eq!(run.code, Some(1), "{}", run.all());
    let report = run.json();
    assert_eq!(
        (&report["proven"], &report["bit_equal"]),
        (&Value::Bool(false), &Value::Bool(false)),
        "{report:#}"
    );
    let first = &report["findings"][0];
    (first["kind"].as_str().unwrap().to_owned(), first["text"].as_str().unwrap().to_owned())
}

const FAULTS: [&str; 4] = ["drop-row", "swap-rank", "flip-byte", "skip-send"];

#[test]
fn digests_find_injected_faults() {
    for layout in [&[][..], &MLA_DCP4] {
        for (fault, transport) in FAULTS.into_iter().zip(["tcp", "shm", "tcp", "shm"]) {
            let (kind, text) = finding(fault, layout, &["--transport", transport]);
            assert_eq!(kind, "hand_off", "{fault} {layout:?}: {text}");
            assert!(text.contains("digest"), "{fault} {layout:?}: {text}");
        }
    }
}

#[test]
fn without_digests_the_comparison_finds_injected_faults() {
    for layout in [&[][..], &MLA_DCP4] {
        for (fault, transport) in FAULTS.into_iter().zip(["shm", "tcp", "shm", "tcp"]) {
            let (kind, text) = finding(fault, layout, &["--no-digest", "--transport", transport]);
            assert_eq!(kind, "cache", "{fault} {layout:?}: {text}");
            assert!(text.contains("decode rank ") && text.contains("layer "), "{fault} {layout:?}: {text}");
        }
    }
}

/// A sharded prefill. After a prompt of one page the next one counts its pages from the other rank, so a rank's pages are
/// not where the other has its own; and it has as many pages on each rank, so nothing but their bytes gives them away.
#[test]
fn pages_that_a_rank_does_not_own_are_found_with_and_without_digests() {
    let folder = tempfile::tempdir().unwrap();
    let files = [(16, 1), (64, 2)].map(|(count, seed)| ids_file(folder.path(), count, 500, seed));
    let prompts = files.each_ref().map(|file| ["--prompt-tokens", file.to_str().unwrap()]).concat();
    let layout = ["--attention", "mla", "--prefill", "tp=2,shard=on", "--decode", "tp=4,dcp=4"];
    for (fault, transport) in [("wrong-owner", "tcp"), ("filter-by-position", "shm")] {
        for (more, kind, found) in [
            (&[][..], "hand_off", "digest of part latent from source rank"),
            (&["--no-digest"], "cache", "coordinates; first: decode rank"),
        ] {
            let asked = ["--inject", fault, "--transport", transport];
            let run = demo(&[&layout, &prompts, &asked, more]);
            assert_eq!(run.code, Some(1), "{}", run.all());
            let report = run.json();
            let finding = &report["findings"][1];
            let text = finding["text"].as_str().unwrap();
            assert!(text.contains(found), "{fault}: {text}");
            assert_eq!(finding["kind"], kind, "{fault}: {text}");
        }
    }
}

/// It needs ranks that hold different rows.
#[test]
fn one_row_at_the_wrong_rank_is_found_with_and_without_digests() {
    for transport in ["tcp", "shm"] {
        let (kind, text) = finding("misroute-row", &MLA_DCP4, &["--transport", transport]);
        assert!(kind == "hand_off" && text.contains("digest of part latent"), "{text}");
        let (kind, text) = finding("misroute-row", &MLA_DCP4, &["--no-digest", "--transport", transport]);
        // Where it was written, and where it was not.
        assert!(kind == "cache" && text.contains(" in 2 of "), "{text}");
    }
}

/// Every kind of fault where it can change nothing: the command has to be changed, and is told how.
#[test]
fn a_fault_that_changes_nothing_is_not_called_proven() {
    let single = ["--prefill", "tp=1", "--decode", "tp=1"];
    for (fault, layout, needs) in [
        ("swap-rank", &single[..], "more ranks on one side"),
        ("swap-state", &[], "embedded:needle_kimi"),
        ("misroute-row", &[], "tp=2,dcp=2"),
        ("blind-merge", &[], "dcp=2"),
        ("blind-merge", &[&MLA_DCP4[..], &["--max-tokens", "1"]].concat(), "more than one --max-tokens"),
        ("drop-rope", &[], "--attention mla"),
        ("wrong-owner", &[], "shard=on"),
        ("filter-by-position", &[], "shard=on"),
        ("drop-empty-final", &[], "shard=on"),
    ] {
        let more = ["--inject", fault, "--max-tokens", "2"];
        let more = if layout.contains(&"--max-tokens") { &more[..2] } else { &more[..] };
        let run = demo(&[layout, more]);
        assert_eq!(run.code, Some(2), "{fault} {}", run.all());
        let report = run.json();
        assert_eq!((&report["proven"], &report["bit_equal"]), (&false.into(), &true.into()), "{report:#}");
        assert_eq!(
            (&report["injected"], &report["findings"][1]),
            (&fault.into(), &Value::Null),
            "{report:#}"
        );
        let finding = &report["findings"][0];
        assert_eq!((&finding["kind"], &finding["blame"]), (&"fault_not_committed".into(), &"caller".into()));
        let text = finding["text"].as_str().unwrap();
        let begins = format!("the fault could not be committed: {fault}: ");
        assert!(text.starts_with(&begins) && text.contains(needs), "{text}");
    }
    let run =
        kvferry(&["demo", "--model", "embedded:llama_tiny", "--max-tokens", "2", "--inject", "drop-rope"]);
    assert_eq!(run.code, Some(2), "{}", run.all());
    assert!(run.stdout.ends_with("nothing was tested: no fault was committed\n"), "{}", run.stdout);
    assert!(
        ["proven", "as it should be", "injected"].iter().all(|no| !run.stdout.contains(no)),
        "{}",
        run.stdout
    );
}

#[test]
fn faults_of_arithmetic_are_found_in_answers_alone() {
    for fault in ["blind-merge", "drop-rope"] {
        let (kind, text) = finding(fault, &MLA_DCP4, &["--max-tokens", "4", "--ignore-eos"]);
        assert!(["tokens", "logprobs"].contains(&kind.as_str()), "{fault}: {text}");
    }
}

#[test]
fn pools_are_no_larger_than_a_sequence_can_be() {
    let most = u32::MAX.to_string();
    let short = ["--max-model-len", "48"];
    for huge in [["--max-tokens", &most], ["--pool-tokens", "4000000000"]] {
        let report = assert_proven(&demo(&[&short, &huge, &["--ignore-eos"]]));
        // 41 tokens of 48 are the prompt.
        assert!(report["generated"].as_array().unwrap().len() <= 7, "{report:#}");
    }
}

#[test]
fn a_document_with_a_byte_order_mark_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bom.json");
    std::fs::write(&path, "\u{feff}[1, 2, 3]").unwrap();
    let report = assert_proven(&demo(&[&["--max-tokens", "1", "--prompt-tokens", path.to_str().unwrap()]]));
    assert_eq!(report["prompts"][0]["prompt_tokens"], 3);
}

#[test]
fn a_report_that_cannot_be_written_is_a_failure() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let run = finish(command(&[&TINY[..], &["--max-tokens", "1"]].concat()).stdout(full).output().unwrap());
    assert_eq!(run.code, Some(1), "{}", run.all());
    assert!(run.stderr.contains("standard output"), "{}", run.stderr);
}

#[test]
fn people_see_the_text_the_table_and_the_verdict() {
    let run = kvferry(&["demo", "--model", "embedded:llama_tiny", "--max-tokens", "4"]);
    assert_eq!(run.code, Some(0), "{}", run.all());
    for part in [
        "two processes",
        "one process",
        "prompt tokens",
        "KV moved",
        "tokens equal: yes",
        "bits equal: yes",
        "proven equal",
    ] {
        assert!(run.stdout.contains(part), "{part}\n{}", run.stdout);
    }
    assert_eq!(run.stderr, "");
    // Four tokens of a tiny model come in one burst, which is no rate.
    assert!(!run.stdout.contains("tokens per second"), "{}", run.stdout);
    let run = kvferry(&["demo", "--model", "embedded:llama_tiny", "--inject", "flip-byte"]);
    assert_eq!(run.code, Some(1));
    for part in ["injected: flip-byte", "not compared", "finding: ", "NOT proven equal"] {
        assert!(run.stdout.contains(part), "{part}\n{}", run.stdout);
    }
}

#[test]
fn tables_break_no_word() {
    let folder = tempfile::tempdir().unwrap();
    let files = [3000, 40].map(|count| ids_file(folder.path(), count, 512, 1));
    let [long, short] = files.each_ref().map(|file| ["--prompt-tokens", file.to_str().unwrap()]);
    let layouts = ["tp=4,dcp=2,interleave=4,pp=3,page=24", "tp=6,dcp=3,interleave=4,layers=0-2/3,page=16"];
    let args = ["demo", "--model", "embedded:llama_tiny", "--max-tokens", "2", "--prefill", layouts[0]];
    let args = [&args[..], &["--decode", layouts[1]]].concat();
    let rows = |more: &[&str]| -> Vec<Vec<String>> {
        let run = kvferry(&[&args[..], more].concat());
        assert_eq!(run.code, Some(0), "{}", run.all());
        let lines = run.stdout.lines().filter(|line| line.starts_with('│'));
        lines.map(|line| line.split('│').map(|cell| cell.trim().to_owned()).collect()).collect()
    };
    let several = rows(&[long, short].concat());
    let [head, under, first, second] = &several[..] else { panic!("{several:#?}") };
    assert_eq!(head[1..9], ["prompt", "KV", "runs", "transfer", "decode", "TTFT", "TTFT", "equal"]);
    assert_eq!(under[1..9], ["tokens", "moved", "", "time", "waited", "two", "one", ""]);
    assert_eq!([&first[1], &first[8], &second[1], &second[8]], ["3000", "bits", "40", "bits"]);
    let single = rows(&short);
    let shown: Vec<_> = single.iter().skip(1).take(4).map(|row| row[2].as_str()).collect();
    assert_eq!(
        shown,
        ["tp=4,dcp=2,interleave=4,pp=3,", "page=24", "→ tp=6,dcp=3,interleave=4,", "layers=0-2/3-3,page=16"]
    );
}

#[test]
fn without_a_model_the_built_in_checkpoint_is_used_and_the_first_line_says_so() {
    let empty = tempfile::tempdir().unwrap();
    let run = finish(
        command(&["demo", "--max-tokens", "2"])
            .env("XDG_CACHE_HOME", empty.path())
            .env("PATH", empty.path())
            .output()
            .unwrap(),
    );
    assert_eq!(run.code, Some(0), "{}", run.all());
    let first = run.stdout.lines().next().unwrap();
    assert!(first.contains("needle_kimi") && first.contains("no SmolLM2"), "{first}");
    // What it is, not what would be done to another model.
    assert!(run.stdout.contains("model  needle_kimi  hybrid, canonical, f32 cache\n"), "{}", run.stdout);
    // A model that was named is never replaced.
    let run = finish(
        command(&["demo", "--model", "smollm2"])
            .env("XDG_CACHE_HOME", empty.path())
            .env("PATH", empty.path())
            .output()
            .unwrap(),
    );
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{}", run.all());
}
