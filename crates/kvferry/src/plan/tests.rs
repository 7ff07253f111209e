//! Answers as people and programs see them.

use clap::Parser;

use super::*;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    plan: PlanArgs,
}

/// The answer to a command line, with the exit status in front.
fn ask(line: &str) -> String {
    let args = Cli::parse_from(["plan"].into_iter().chain(line.split_whitespace())).plan;
    match answer(&args) {
        Ok(said) => format!("exit {}\n{}", u8::from(!said.supported), said.text),
        Err(failure) => format!("exit {}\n{failure}", if failure.blame() == Blame::Caller { 2 } else { 1 }),
    }
}

#[test]
fn answers_for_people() {
    let mla = "--model-shape mla:61x576xbf16 --tokens 32768 --page 64";
    insta::assert_snapshot!("tp4_to_dcp4", ask(&format!("--prefill tp=4 --decode tp=4,dcp=4 {mla}")));
    insta::assert_snapshot!(
        "heads_pages_prefix",
        ask("--prefill tp=3,page=16 --decode tp=2,page=24 --model-shape gqa:30x3x64xf32 --tokens 5..100")
    );
    insta::assert_snapshot!(
        "hybrid_pipeline",
        ask(
            "--prefill tp=2,pp=2 --decode tp=3 --model-shape mla:2x576@3/7+kda:6x32x128@0-2/4-6 --tokens 100"
        )
    );
    insta::assert_snapshot!(
        "sharded_drafts",
        ask(
            "--prefill tp=4,shard=on --decode tp=4,dcp=2 --model-shape mla:4x576+draft-mla:1x576 --tokens 1000 \
             --scattered"
        )
    );
    insta::assert_snapshot!(
        "rows",
        ask("--decode tp=2,dcp=2 --model-shape mla:1x8+kda:1x2x4@0 --tokens 5 --page 2 --rows")
    );
    insta::assert_snapshot!(
        "many_pairs",
        ask("--prefill tp=9 --decode tp=9,dcp=9 --model-shape mla:1x8 --tokens 800")
    );
}

#[test]
fn conversions_are_asked_for() {
    let pair = "--prefill tp=2,kv=f32 --decode tp=4,dcp=4,kv=fp8 --model-shape mla:2x576@3/7+kda:2x32x128@0-1 --tokens 100";
    insta::assert_snapshot!("refused_conversion", ask(pair));
    insta::assert_snapshot!("conversion", ask(&format!("{pair} --convert-kv")));
}

#[test]
fn answers_for_programs() {
    insta::assert_snapshot!(
        "json_rows",
        ask("--decode tp=2,dcp=2 --model-shape mla:1x8+kda:1x2x4@0 --tokens 6 --page 4 --rows --json")
    );
    insta::assert_snapshot!(
        "json_conversion",
        ask(
            "--prefill tp=2,kv=f32 --decode tp=1,kv=fp8 --model-shape gqa:1x2x4 --tokens 2 --convert-kv --json"
        )
    );
    insta::assert_snapshot!("json_refusal", ask("--decode cp=2 --model-shape mla:1x8 --json"));
}

#[test]
fn capacity_of_pools() {
    let sharded =
        "--capacity --prefill tp=4,shard=on --decode tp=4,dcp=4 --model-shape mla:61x576xbf16 --page 64";
    insta::assert_snapshot!("capacity", ask(&format!("{sharded} --pool-tokens 131072")));
    insta::assert_snapshot!(
        "capacity_hybrid",
        ask(
            "--capacity --prefill tp=2,pp=2 --decode tp=3,kv=fp8 --convert-kv --pool-tokens 1000 --state-slots 8 \
             --model-shape mla:2x576@3/7+kda:6x32x128@0-2/4-6"
        )
    );
    insta::assert_snapshot!(
        "json_capacity",
        ask("--capacity --prefill tp=2,shard=on --model-shape mla:2x8xf32 --pool-tokens 100 --json")
    );
    for (line, exit, says) in [
        ("--prefill tp=2,shard=on --model-shape gqa:2x2x8", 1, "prefill: shard=on needs latent rows (MLA)"),
        ("--decode cp=2 --model-shape mla:2x8", 1, "the target has cp 2; 1 is supported"),
        ("--decode tp=2,shard=on --model-shape mla:2x8", 1, "decode: `shard=on` is for prefill"),
        ("--decode tp=1,kv=fp8 --model-shape mla:2x8xbf16", 1, "--convert-kv"),
        ("--model-shape mla:2x8 --pool-tokens 0", 2, "--pool-tokens 0: a pool holds at least 1 token"),
        ("--model-shape mla:2x8 --pool-tokens 18446744073709551615 --page 1", 2, "less than 2^32 pages"),
        (
            "--model-shape mla:61x65536xf32 --pool-tokens 140737488355328 --page 65536",
            2,
            "larger than an address space",
        ),
    ] {
        let said = ask(&format!("--capacity {line}"));
        assert!(said.starts_with(&format!("exit {exit}\n")) && said.contains(says), "{line}: {said}");
    }
}

#[test]
fn refusals_and_mistakes_have_their_exit_status() {
    for (line, exit, says) in [
        ("--decode cp=2 --model-shape mla:1x8", 1, "context parallel: the target has cp 2; 1 is supported"),
        (
            "--prefill pp=9 --model-shape mla:2x8",
            1,
            "prefill: pp=9: the model has 2 layers; pp may be 1 to 2",
        ),
        (
            "--prefill tp=2,shard=on --model-shape gqa:2x2x8",
            1,
            "shard=on needs latent rows (MLA) or cp above 1",
        ),
        (
            "--prefill kv=f32 --model-shape mla:1x8",
            1,
            "part `latent` is f32 at the source and bf16 at the target",
        ),
        ("--prefill dcp=3 --model-shape mla:1x8", 2, "dcp=3 does not divide tp=1"),
        ("--model-shape mla:1", 2, "not a part"),
        ("--model-shape mla:1x8 --tokens 9..3", 2, "--tokens 9..3: the range ends before it starts"),
        ("--model-shape mla:1x8 --tokens 3..3", 2, "1 to 134,217,728 tokens"),
        ("--model-shape mla:1x8 --tokens many", 2, "write 32768 or 100..32768"),
        (
            "--model-shape mla:61x8 --tokens 2000 --rows",
            2,
            "--rows would print 122,000 rows; 100,000 are the most",
        ),
        ("--prefill tp=300 --decode tp=300 --model-shape mla:1x8", 2, "90,000 pairs of ranks; 65,536"),
        (
            "--tokens 134217728 --page 1 --model-shape mla:1x8",
            2,
            "134,217,728 pages; 4,194,304 are planned at most",
        ),
        (
            "--prefill tp=256 --decode tp=256 --model-shape mla:1x8 --tokens 1000000",
            2,
            "65,536 pairs of ranks and 125,000 pages; 268,435,456",
        ),
        ("--model-shape mla:1x8 --svg /nowhere/x.svg", 2, "cannot write /nowhere/x.svg"),
        ("/nowhere/request.json", 2, "cannot read /nowhere/request.json"),
    ] {
        let said = ask(line);
        assert!(said.starts_with(&format!("exit {exit}\n")) && said.contains(says), "{line}: {said}");
    }
}

/// The rows of a state's window are not those of a page.
#[test]
fn state_needs_no_pages_however_many_tokens() {
    for shape in ["kda:2x4x8", "mla:1x8+kda:2x4x8"] {
        let said = ask(&format!("--model-shape {shape} --tokens 100000000 --page 4096"));
        assert!(said.starts_with("exit 0\n"), "{shape}: {said}");
    }
}

/// The answer to a JSON request.
fn ask_json(request: &serde_json::Value) -> String {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), request.to_string()).unwrap();
    ask(&format!("{} --json", file.path().display())).replace(&file.path().display().to_string(), "FILE")
}

/// A request with placements, shape and pages in full, and one in words, are one request.
#[test]
fn requests_as_json() {
    let words = serde_json::json!({
        "model_shape": "gqa:2x2x8xf32", "prefill": "tp=2", "decode": "tp=1", "tokens": {"start": 3, "end": 30},
        "page": 8, "prefill_pages": [5, 1, 9, 7], "decode_pages": [0, 2, 4, 6],
    });
    let layout = |tp: u32| {
        serde_json::json!({"stages": [[0, 1]], "cp": 1, "tp": tp, "parts": [
            {"part": "key", "tokens": "dense", "page_size": 8, "dtype": "f32"},
            {"part": "value", "tokens": "dense", "page_size": 8, "dtype": "f32"},
        ]})
    };
    let full = serde_json::json!({
        "model_shape": {"parts": [
            {"part": "key", "layers": [0, 1], "heads": 2, "head_elems": 8},
            {"part": "value", "layers": [0, 1], "heads": 2, "head_elems": 8},
        ]},
        "prefill": layout(2), "decode": layout(1), "tokens": {"start": 3, "end": 30},
        "prefill_pages": [5, 1, 9, 7], "decode_pages": [0, 2, 4, 6],
    });
    let pairs = |request: &serde_json::Value| {
        let said = ask_json(request);
        let said: serde_json::Value = serde_json::from_str(said.strip_prefix("exit 0\n").unwrap()).unwrap();
        (said["bytes"].clone(), said["pairs"].clone())
    };
    let (bytes, said) = pairs(&words);
    assert_eq!(bytes, 27 * 2 * 2 * 2 * 8 * 4);
    // Row 3 of page 5.
    assert_eq!(said[0]["groups"][0]["runs"][0]["src_row"], 43);
    assert_eq!((bytes, said), pairs(&full));

    let with = |key: &str, value: serde_json::Value| {
        let mut request = words.clone();
        request[key] = value;
        ask_json(&request)
    };
    assert!(with("decode_pages", serde_json::json!([0, 2])).starts_with("exit 2\nunsupported page table"));
    assert!(with("decode_pages", serde_json::json!([0, 2, 2, 1])).contains("page 2 is in the table twice"));
    assert!(with("page", serde_json::json!(0)).starts_with("exit 2\n"));
    assert!(with("pages", serde_json::json!(4)).contains("unknown field `pages`"));
}

/// An element type has the same name in JSON as in options, layouts and shapes; its long one stays.
#[test]
fn fp8_has_one_name_everywhere() {
    let request = |kv: &str, dtype: &str| {
        let decode = serde_json::json!({"stages": [[0]], "cp": 1, "tp": 1, "parts": [
            {"part": "latent", "tokens": "dense", "page_size": 16, "dtype": dtype},
        ]});
        ask_json(&serde_json::json!({
            "model_shape": "mla:1x8", "kv": kv, "prefill": "tp=1", "decode": decode, "tokens": 5,
        }))
    };
    let said = request("fp8", "fp8");
    assert!(said.starts_with("exit 0\n") && said.contains("\"bytes\":40,"), "{said}");
    assert_eq!(said, request("fp8_e4m3", "fp8_e4m3"));
    // As the options say it.
    for shape in ["mla:1x8xfp8", "mla:1x8xfp8_e4m3"] {
        let said = ask(&format!("--model-shape {shape} --tokens 5"));
        assert!(
            said.split_whitespace().collect::<Vec<_>>().join(" ").contains(&format!("{shape} in fp8 ")),
            "{said}"
        );
    }
}

/// What the help shows can be copied, and is supported.
#[test]
fn examples_of_the_help() {
    let examples = args::EXAMPLES.replace("\\\n", "");
    let lines: Vec<_> =
        examples.lines().filter_map(|line| line.trim().strip_prefix("kvferry plan ")).collect();
    assert_eq!(lines.len(), 3);
    for line in lines {
        let said = ask(line);
        assert!(said.starts_with("exit 0\n"), "{line}: {said}");
        assert_eq!(
            said.contains("prefill converts: latent bf16 to fp8"),
            line.contains("--convert-kv"),
            "{said}"
        );
    }
}

/// A picture is one XML document with a panel for each rank, whatever the layouts.
#[test]
fn pictures_have_a_panel_for_each_rank() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.svg");
    for (line, panels) in [
        ("--prefill tp=4 --decode tp=4,dcp=4 --model-shape mla:61x576 --tokens 32768 --page 64", 8),
        (
            "--prefill tp=2,pp=2 --decode tp=3 --model-shape mla:2x576@3/7+kda:6x32x128@0-2/4-6 --tokens 3..100",
            7,
        ),
        ("--prefill tp=40 --decode tp=1,page=999 --model-shape gqa:1x64x8 --tokens 1", 9),
        ("--prefill tp=2 --decode tp=5 --model-shape kda:2x3x4 --tokens 1", 7),
    ] {
        let said = ask(&format!("{line} --svg {}", file.display()));
        assert!(said.starts_with("exit 0\n"), "{said}");
        let svg = std::fs::read_to_string(&file).unwrap();
        let drawn = svg.matches(">prefill rank ").count() + svg.matches(">decode rank ").count();
        assert_eq!(drawn, panels, "{line}");
        assert_eq!(svg.matches('<').count(), svg.matches('>').count(), "{line}");
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"), "{line}");
    }
}
