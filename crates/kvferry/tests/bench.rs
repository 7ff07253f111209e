//! The benchmarks at a size that says only that they work.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::kvferry;

/// All cases over both transports, with all fields that docs/bench.md names.
#[test]
fn transfer() {
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("transfer.svg");
    let at = svg.to_str().unwrap();
    let run = kvferry(&["bench", "transfer", "--size", "small", "--rounds", "1", "--json", "--svg", at]);
    assert_eq!(run.code, Some(0), "{}", run.all());
    let json = run.json();
    assert_eq!(json["version"], 1);
    assert_eq!((&json["size"], &json["rounds"], &json["streams"]), (&"small".into(), &1.into(), &1.into()));
    for field in ["cpu", "cores", "memory_gib", "load", "debug_build"] {
        assert!(!json["machine"][field].is_null(), "machine.{field}: {json:#}");
    }
    assert!(json["congestion"].is_string() && json["memory"].is_string(), "{json:#}");
    let cases = json["cases"].as_array().unwrap();
    let names: Vec<_> = cases.iter().map(|case| case["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["dcp", "heads", "kimi"]);
    for case in cases {
        // Two layers of latent rows, or of 8 key and 8 value heads of 128 elements, two bytes each; or one of latent rows
        // and three of state: a bf16 convolution of three rows and an f32 matrix a head.
        let (row, state) = match case["name"].as_str().unwrap() {
            "dcp" => (2 * 1152, 0),
            "heads" => (2 * 4096, 0),
            _ => (1152, 3 * (3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4)),
        };
        let tokens = case["tokens"].as_u64().unwrap();
        assert_eq!(case["bytes"].as_u64().unwrap(), row * tokens + state, "{case:#}");
        assert!(case["what"].is_string() && case["chunk_tokens"].is_u64(), "{case:#}");
        assert!(case["memcpy_gb_per_s"].as_f64().unwrap() > 0.0, "{case:#}");
        let ways = case["ways"].as_array().unwrap();
        let names: Vec<_> = ways
            .iter()
            .map(|way| (way["transport"].as_str().unwrap(), way["digests"].as_bool().unwrap()))
            .collect();
        assert_eq!(names, [("tcp", false), ("tcp", true), ("shm", false), ("shm", true)]);
        for way in ways {
            for field in ["gb_per_s", "ceiling_gb_per_s", "ratio", "ratio_lowest", "ratio_highest"] {
                assert!(way[field].as_f64().unwrap() > 0.0, "{field}: {way:#}");
            }
            for field in ["cpu_s_per_gb", "ceiling_cpu_s_per_gb"] {
                assert!(way[field].as_f64().unwrap() >= 0.0, "{field}: {way:#}");
            }
            assert!(way["ceiling"].is_string(), "{way:#}");
            let rate = |field: &str| way[field].as_f64().unwrap();
            assert!(rate("gb_per_s_lowest") <= rate("gb_per_s"), "{way:#}");
            assert!(rate("gb_per_s") <= rate("gb_per_s_highest"), "{way:#}");
            assert_eq!((&way["naive"], way["descriptors"].is_null()), (&false.into(), true), "{way:#}");
        }
    }
    let drawn = std::fs::read_to_string(&svg).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n"), "{drawn}");
    assert_eq!(drawn.matches("<rect").count(), 1 + 12, "{drawn}");
}

#[test]
fn a_picture_that_cannot_be_written() {
    let run =
        kvferry(&["bench", "transfer", "--size", "small", "--rounds", "1", "--svg", "/no/such/folder/x.svg"]);
    assert_eq!(run.code, Some(2), "{}", run.all());
    assert!(run.stderr.contains("--svg /no/such/folder/x.svg"), "{}", run.all());
}

/// What engines have allocated: with KV sharding a rank has its share and at most a page more, and beside the pool room for
/// two layers' rows of the longest context and of a chunk.
#[test]
fn memory() {
    let deepseek = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvferry-engine/tests/data/deepseek_v3_tiny");
    // Bytes of one token's rows in all layers, and in one.
    for (model, cases, token, layer) in [
        ("embedded:llama_tiny", [("mla", "tp"), ("gqa", "cp")], 4 * 512, 512),
        (deepseek, [("mla", "tp"), ("mla", "cp")], 4 * 320, 320),
        ("embedded:kimi_linear_tiny", [("hybrid", "tp"), ("hybrid", "cp")], 2 * 320, 320),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let svg = folder.path().join("memory.svg");
        let at = svg.to_str().unwrap();
        let run = kvferry(&["bench", "memory", "--model", model, "--context", "2000", "--json", "--svg", at]);
        assert_eq!(run.code, Some(0), "{}", run.all());
        let json = run.json();
        let bytes = |row: &serde_json::Value, name: &str| row[name].as_u64().unwrap();
        assert_eq!(bytes(&json, "context_tokens"), 2000);
        let chunk = bytes(&json, "chunk_tokens");
        let found = json["cases"].as_array().unwrap();
        assert_eq!(found.len(), cases.len());
        for (case, (attention, over)) in found.iter().zip(cases) {
            assert_eq!((&case["attention"], &case["over"]), (&attention.into(), &over.into()));
            let rows = case["rows"].as_array().unwrap();
            assert_eq!(rows.iter().map(|row| bytes(row, "ranks")).collect::<Vec<_>>(), [1, 2, 4]);
            for row in rows {
                let (ranks, page) = (bytes(row, "ranks"), bytes(row, "page_bytes"));
                assert_eq!(bytes(row, "unsharded_kv_bytes"), 2000 * token);
                assert_eq!(page, 16 * token);
                let kv = bytes(row, "kv_bytes");
                assert!((2000 * token / ranks..=2000 * token / ranks + page).contains(&kv), "{row:#}");
                assert!(row["ratio"].as_f64().unwrap() >= 1.0 / ranks as f64, "{row:#}");
                if attention != "hybrid" {
                    let [unsharded, pool] =
                        ["unsharded_pool_bytes", "pool_bytes"].map(|name| bytes(row, name));
                    assert!(pool >= kv && pool <= unsharded / ranks + page, "{row:#}");
                }
                let scratch = bytes(row, "scratch_bytes");
                assert_eq!(scratch > 0, ranks > 1, "{row:#}");
                assert!(scratch <= 2 * layer * (2000 + chunk), "{row:#}");
                assert_eq!(row["holds"], true, "{row:#}");
            }
        }
        let drawn = std::fs::read_to_string(&svg).unwrap();
        assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n"), "{drawn}");
        assert_eq!(drawn.matches("<rect").count(), 1 + 6, "{drawn}");
    }
}

/// Without llama.cpp, which the command says.
#[test]
fn engine() {
    let args = ["bench", "engine", "--model", "embedded:llama_tiny", "--prompt", "40", "--decode", "4"];
    let run = kvferry(&[&args[..], &["--rounds", "1", "--json"]].concat());
    assert_eq!(run.code, Some(0), "{}", run.all());
    let json = run.json();
    assert_eq!(
        (&json["version"], &json["prompt_tokens"], &json["decode_tokens"]),
        (&1.into(), &40.into(), &4.into())
    );
    assert_eq!(json["model"], "embedded:llama_tiny");
    let names: Vec<_> = json["rows"].as_array().unwrap().iter().map(|row| &row["engine"]).collect();
    assert_eq!(names, ["kvferry fast", "kvferry canonical"]);
    for row in json["rows"].as_array().unwrap() {
        assert!(row["prefill_per_cpu_s"].as_f64().unwrap() > 0.0, "{row:#}");
        assert!(row["decode_per_cpu_s"].as_f64().unwrap() > 0.0, "{row:#}");
        assert!(row["prefill_ratio"].is_null() && row["decode_ratio"].is_null(), "{row:#}");
    }
    let forms = json["decode_batch"].as_array().unwrap();
    assert_eq!(forms.iter().map(|row| row["requests"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 5, 8]);
    for row in forms {
        assert!(row["ratio"].as_f64().unwrap() > 0.0, "{row:#}");
    }
    assert!(json["llama_cpp_missing"].as_str().unwrap().contains("npm i"), "{json:#}");
}

/// The parts of a long prompt are all named and make the whole; the model has all of them.
#[test]
fn engine_with_a_long_prompt() {
    let run = kvferry(&["bench", "engine", "--long", "--prompt", "700", "--rounds", "1", "--json"]);
    assert_eq!(run.code, Some(0), "{}", run.all());
    let json = run.json();
    assert_eq!(
        (&json["version"], &json["prompt_tokens"], &json["ranks"], &json["model"]),
        (&1.into(), &700.into(), &2.into(), &"embedded:needle_kimi".into())
    );
    let names: Vec<_> = json["rows"].as_array().unwrap().iter().map(|row| &row["arith"]).collect();
    assert_eq!(names, ["fast", "canonical"]);
    for row in json["rows"].as_array().unwrap() {
        let parts = row["parts"].as_object().unwrap();
        let sum: f64 = parts.values().map(|part| part.as_f64().unwrap()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{row:#}");
        assert!(parts.values().all(|part| part.as_f64().unwrap() > 0.0), "{row:#}");
        let memory = ["workspace_mib", "attention_mib"].map(|name| row[name].as_f64().unwrap());
        assert!(memory[0] > memory[1] && memory[1] > 0.0, "{row:#}");
    }
    let refused = kvferry(&["bench", "engine", "--long", "--decode", "3"]);
    assert_eq!(refused.code, Some(2), "{}", refused.all());
    assert!(refused.stderr.contains("--decode"), "{}", refused.all());
}

/// What is too long for the model is told in options that this command has, and what it names as the most is possible.
#[test]
fn a_prompt_that_the_model_was_not_made_for() {
    for (more, after) in [(&["--long"][..], "1 token"), (&["--decode", "3"], "4 tokens")] {
        let ask = |prompt| {
            let tiny = ["bench", "engine", "--model", "embedded:llama_tiny", "--rounds", "1"];
            kvferry(&[&tiny[..], more, &["--prompt", prompt]].concat())
        };
        let run = ask("32768");
        assert_eq!(run.code, Some(2), "{}", run.all());
        let expected = format!("--prompt 32768, and {after} after it: embedded:llama_tiny was made for ");
        assert!(run.stderr.contains(&expected), "{}", run.all());
        let (_, most) = run.stderr.split_once("use --prompt ").unwrap();
        let run = ask(most.split(' ').next().unwrap());
        assert_eq!(run.code, Some(0), "{}", run.all());
    }
    let run = kvferry(&["bench", "engine", "--model", "embedded:llama_tiny", "--decode", "32768"]);
    assert_eq!(run.code, Some(2), "{}", run.all());
    assert!(run.stderr.contains("use a smaller --decode"), "{}", run.all());
}

/// Figures of few clock ticks are left out or said to mean little, in the table; the command to copy stays one.
#[test]
fn tables_of_tiny_sizes_say_so() {
    let run = kvferry(&["bench", "transfer", "--size", "small", "--rounds", "1"]);
    assert!(
        run.stdout.ends_with("--size small: this shows that it works, not how fast it is\n"),
        "{}",
        run.all()
    );
    assert!(
        run.stdout.contains("\n1 interleaved round; ") && run.stdout.contains(" 1 layer of "),
        "{}",
        run.all()
    );
    assert!(!run.stdout.contains(" 0.00 "), "{}", run.all());
    let tiny = ["bench", "engine", "--model", "embedded:llama_tiny", "--prompt", "9", "--decode", "1"];
    let run = kvferry(&[&tiny[..], &["--rounds", "1"]].concat());
    assert!(run.stdout.contains("So little CPU time: this shows that it works"), "{}", run.all());
    assert!(run.stdout.contains("--omit=optional \\\n    node-llama-cpp@"), "{}", run.all());
}

/// A folder without the package is an error that names the command which fills it.
#[test]
fn llama_cpp_that_is_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    let run = kvferry(&["bench", "engine", "--model", "embedded:llama_tiny", "--llama-cpp", at]);
    assert_eq!(run.code, Some(2), "{}", run.all());
    assert!(run.stderr.contains(at) && run.stderr.contains("npm i"), "{}", run.all());
}

/// A pair behind a router and one process alone, with real processes.
#[test]
fn serve() {
    let run = kvferry(&["bench", "serve", "--model", "embedded:llama_tiny", "--quick", "--json"]);
    assert_eq!(run.code, Some(0), "{}", run.all());
    let json = run.json();
    assert_eq!(
        (&json["version"], &json["max_tokens"], &json["transport"]),
        (&1.into(), &4.into(), &"shm".into())
    );
    let cells = json["cells"].as_array().unwrap();
    let names: Vec<_> = cells
        .iter()
        .map(|c| (c["prompt_tokens"].as_u64().unwrap(), c["concurrency"].as_u64().unwrap()))
        .collect();
    assert_eq!(names, [(16, 1), (16, 2), (48, 1), (48, 2)]);
    for cell in cells {
        for side in ["pd", "mono"] {
            for field in ["ttft_ms", "tokens_per_s"] {
                assert!(cell[side][field].as_f64().unwrap() > 0.0, "{side}.{field}: {cell:#}");
            }
            // Tokens may come together, so that nothing lies between the first and the last.
            assert!(cell[side]["per_token_ms"].as_f64().unwrap() >= 0.0, "{cell:#}");
        }
        for field in ["ttft_ratio", "ttft_ratio_lowest", "ttft_ratio_highest", "throughput_ratio"] {
            assert!(cell[field].as_f64().unwrap() > 0.0, "{field}: {cell:#}");
        }
        assert!(cell.get("per_token_ratio").is_some(), "{cell:#}");
        assert_eq!(cell["rounds"], 1);
        assert!(cell["exposed_ms"].is_null() || cell["exposed_ms"].as_f64().unwrap() >= 0.0, "{cell:#}");
    }
    assert_eq!(json["left_out"].as_array().unwrap().len(), 0);
}

/// What would not fit this machine's patience is named.
#[test]
fn cells_that_are_left_out() {
    let args =
        ["bench", "serve", "--model", "embedded:llama_tiny", "--prompts", "200", "--concurrency", "1,96"];
    let run = kvferry(&[&args[..], &["--max-tokens", "2", "--rounds", "1", "--json"]].concat());
    assert_eq!(run.code, Some(0), "{}", run.all());
    let json = run.json();
    assert_eq!(json["cells"].as_array().unwrap().len(), 1);
    assert_eq!(json["left_out"][0]["concurrency"], 96);
    assert!(json["left_out"][0]["because"].as_str().unwrap().contains("16384"), "{json:#}");
}
