//! What the command line says, and what it refuses.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{command, finish, ids_file, kvferry};
use serde_json::Value;

/// What goes wrong with a request names what to change, and never its parser's inside.
#[test]
fn plan_requests_that_cannot_be_read() {
    use std::io::Write;
    let plan = |args: &[&str], input: &str| {
        let mut plan = command(&[&["plan"], args].concat());
        let pipes = plan.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut child = pipes.stderr(std::process::Stdio::piped()).spawn().unwrap();
        // It may have ended without reading.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let run = finish(child.wait_with_output().unwrap());
        format!("exit {}\n{}{}", run.code.unwrap(), run.stdout, run.stderr)
    };
    let request = r#"{"model_shape": "mla:1x8", "prefill": "tp=1", "decode": "tp=1", "tokens": 5}"#;
    let all = [
        plan(&[], request),
        plan(&["-"], "{"),
        plan(&["-"], &request.replace("5", "\"many\"")),
        plan(&["-"], &request.replace("\"tp=1\", \"decode", "3, \"decode")),
        plan(&["-"], &request.replace("\"mla:1x8\"", "[]")),
        plan(&["-"], &request.replace("tokens", "token")),
        plan(&["-"], &request.replace("5", "{\"start\": 5, \"end\": 2}")),
        plan(&["--model-shape", "mla:1x8", "--tokens", "20..10"], ""),
        plan(&["--model-shape", "mla:1x8", "--tokens", "20...30"], ""),
    ];
    insta::assert_snapshot!("plan_requests", all.join("\n"));
}

/// `serve` takes its options from a file as `up` does, also the role.
#[test]
fn serve_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    let at = path.to_str().unwrap();
    std::fs::write(&path, "role = \"mono\"\nmodel = \"embedded:llama_tiny\"\ninstance = \"alone\"").unwrap();
    let server = common::Server::start(&[at]);
    assert_eq!(server.instance, "alone");
    assert_eq!(server.terminate(), Some(0));
    for (text, expected) in
        [("role = \"decode\"", "--registry <URL>"), ("layout = \"tp=2\"", "--role <ROLE>")]
    {
        std::fs::write(&path, text).unwrap();
        let run = kvferry(&["serve", at]);
        assert_eq!(run.code, Some(2), "{}", run.all());
        assert!(run.stderr.contains("mine.toml") && run.stderr.contains(expected), "{}", run.all());
    }
}

/// What the log is asked for is understood, or refused; never ignored.
#[test]
fn logs_that_cannot_be() {
    for (name, value, expected) in [
        ("KVFERRY_LOG", "kvferry=loud", "KVFERRY_LOG=kvferry=loud: "),
        ("KVFERRY_LOG_FORMAT", "xml", "KVFERRY_LOG_FORMAT=xml: write `text` or `json`"),
    ] {
        let run = finish(command(&["bench", "plan"]).env(name, value).output().unwrap());
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{}", run.all());
        assert!(run.stderr.contains(expected), "{}", run.all());
    }
}

/// Exit status and everything said.
fn said(args: &[&str]) -> String {
    let run = kvferry(args);
    format!("exit {}\n{}{}", run.code.unwrap(), run.stdout, run.stderr)
}

#[test]
fn help() {
    insta::assert_snapshot!("help", said(&["--help"]));
    insta::assert_snapshot!("help_doctor", said(&["doctor", "--help"]));
    insta::assert_snapshot!("help_demo", said(&["demo", "--help"]));
    insta::assert_snapshot!("help_serve", said(&["serve", "--help"]));
    insta::assert_snapshot!("help_up", said(&["up", "--help"]));
    insta::assert_snapshot!("help_plan", said(&["plan", "--help"]));
    insta::assert_snapshot!("help_bench_transfer", said(&["bench", "transfer", "--help"]));
    insta::assert_snapshot!("help_bench_engine", said(&["bench", "engine", "--help"]));
    insta::assert_snapshot!("help_bench_memory", said(&["bench", "memory", "--help"]));
    insta::assert_snapshot!("help_bench_serve", said(&["bench", "serve", "--help"]));
    insta::assert_snapshot!("help_bench_plan", said(&["bench", "plan", "--help"]));
    insta::assert_snapshot!("help_model", said(&["model", "--help"]));
    insta::assert_snapshot!("help_model_pull", said(&["model", "pull", "--help"]));
}

/// Everything that is for people and not for programs.
#[test]
fn what_people_see_fits_80_columns() {
    let folder = tempfile::tempdir().unwrap();
    let ids = [41, 97].map(|count| ids_file(folder.path(), count, 512, count as u32));
    let [short, long] = ids.each_ref().map(|path| path.to_str().unwrap());
    let mut all: Vec<Vec<&str>> = vec![
        vec!["doctor", "--offline"],
        vec!["bench", "plan"],
        vec!["bench", "transfer", "--size", "small", "--rounds", "1"],
        vec!["bench", "engine", "--model", "embedded:llama_tiny", "--prompt", "9", "--rounds", "1"],
        vec!["bench", "memory", "--model", "embedded:kimi_linear_tiny", "--context", "300"],
        vec!["bench", "serve", "--model", "embedded:llama_tiny", "--quick"],
    ];
    let benches = ["bench plan", "bench engine", "bench memory", "bench serve", "bench transfer"];
    let commands = benches.into_iter().chain(["model pull", "model path"]);
    for command in ["", "bench", "demo", "doctor", "model", "plan", "serve", "up"].into_iter().chain(commands)
    {
        for help in ["-h", "--help"] {
            all.push(command.split_whitespace().chain([help]).collect());
        }
    }
    for plan in [
        "--prefill tp=4 --decode tp=4,dcp=4 --model-shape mla:61x576xbf16 --tokens 32768 --page 64",
        "--prefill tp=4,shard=on --decode tp=4,dcp=2,interleave=16,page=4096 --tokens 100000000 --page 1024 \
         --model-shape mla:7x576xbf16@3/7/11/15/19/23/26+kda:20x32x128",
        "--decode cp=2 --model-shape mla:1x8",
        "--capacity --decode cp=2 --model-shape mla:1x8",
        "--prefill tp=4,kv=f32 --decode tp=4,dcp=4,kv=fp8 --convert-kv --model-shape mla:61x576xbf16 --tokens 32768",
        "--decode tp=2,dcp=2 --model-shape mla:1x8+kda:1x2x4@0 --tokens 5 --page 2 --rows",
    ] {
        all.push(["plan"].into_iter().chain(plan.split_whitespace()).collect());
    }
    for demo in [
        vec!["--prompt-tokens", short, "--prompt-tokens", long],
        vec![
            "--attention",
            "mla",
            "--prefill",
            "tp=4,dcp=2,page=16",
            "--decode",
            "tp=4,dcp=4,interleave=2,page=24",
        ],
        vec![
            "--arith",
            "fast",
            "--kv-dtype",
            "bf16",
            "--prefill",
            "tp=3,page=16",
            "--decode",
            "tp=2,page=24",
        ],
        vec!["--inject", "flip-byte"],
        vec!["--inject", "flip-byte", "--no-digest"],
        vec!["--inject", "swap-rank", "--prefill", "tp=1", "--decode", "tp=1"],
    ] {
        let tiny = ["demo", "--model", "embedded:llama_tiny", "--max-tokens", "9"];
        all.push(tiny.into_iter().chain(demo).collect());
    }
    for args in all {
        let run = kvferry(&args);
        assert!(!run.stdout.is_empty(), "{args:?}: {}", run.all());
        common::assert_narrow(&run.stdout);
    }
}

#[test]
fn prefill_that_could_hold_no_prompt_does_not_start() {
    let args = ["serve", "--role", "prefill", "--model", "embedded:llama_tiny", "--layout", "cp=4,shard=on"];
    let run = kvferry(&[&args[..], &["--pool-tokens", "64", "--registry", "http://127.0.0.1:1"]].concat());
    assert_eq!(run.code, Some(2), "{}", run.all());
    for part in ["pool-tokens=64", "no prompt would fit", "use at least 83"] {
        assert!(run.stderr.contains(part), "{}", run.all());
    }
}

#[test]
fn layouts_that_cannot_be() {
    let all: Vec<String> = [
        "tp=0",
        "tp=4,dcp=3",
        "tp=2,heads=3",
        "tp",
        "tp=2,tp=2",
        "page=0",
        "kv=f16",
        "layers=0-1/3-2",
        "pp=2,layers=0-1/2-3",
    ]
    .into_iter()
    .map(|spec| format!("{spec}\n{}", said(&["demo", "--prefill", spec])))
    .chain(["cp=2", "tp=2,shard=on"].map(|spec| format!("{spec}\n{}", said(&["demo", "--decode", spec]))))
    .collect();
    insta::assert_snapshot!("layouts", all.join("\n"));
}

#[test]
fn numbers_and_files_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let long = ids_file(folder.path(), 70, 512, 0);
    let tiny = ["demo", "--model", "embedded:llama_tiny"];
    let cases: &[&[&str]] = &[
        &["--kv-dtype", "fp4"],
        &["--chunk", "0"],
        &["--max-tokens", "0"],
        &["--transport", "rdma"],
        &["--inject", "gremlin"],
        &["--prompt", "hello"],
        &["--prompt-tokens", "/no/such/file"],
        &["--prompt-tokens", &file("text.json", "hello")],
        &["--prompt-tokens", &file("empty.json", "[]")],
        &["--prompt-tokens", &file("vocabulary.json", "[1, 512]")],
        &["--max-model-len", "64", "--prompt-tokens", long.to_str().unwrap()],
        &["--max-model-len", "1000000"],
        &["--max-model-len", "4294967295"],
        &["--decode", ","],
        &["--decode", "pp=5"],
        &["--prefill", "layers=0-1/3"],
        &["--decode", "tp=1,kv=bf16"],
        &["--pool-tokens", "1"],
        &["--pool-tokens", "50", "--max-tokens", "1"],
    ];
    let mut all: Vec<String> = cases.iter().map(|more| said(&[&tiny, *more].concat())).collect();
    for model in
        ["/no/such/model.gguf", at, &file("model.gguf", "GGUF"), "hf:owner/repo", "embedded:other", ""]
    {
        all.push(said(&["demo", "--model", model]));
    }
    all.push(said(&["serve", "--role", "prefill"]));
    all.push(said(&["serve", "--role", "registry", "--listen", "0.0.0.0:0"]));
    all.push(said(&["serve", "--role", "registry", "--listen", "8000"]));
    all.push(said(&[
        "serve",
        "--role",
        "decode",
        "--model",
        "embedded:llama_tiny",
        "--registry",
        "http://10.0.0.1:1",
    ]));
    for name in ["", "../x", "a/b", "a b", ".."] {
        all.push(said(&[
            "serve",
            "--role",
            "decode",
            "--registry",
            "http://127.0.0.1:1",
            "--instance",
            name,
        ]));
    }
    for text in &all {
        assert!(!text.starts_with("exit 0") && !text.contains("panicked"), "{text}");
    }
    insta::assert_snapshot!("refusals", all.join("\n").replace(at, "FOLDER"));
}

#[test]
fn a_pull_that_cannot_succeed_names_every_source_and_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    let wrong = folder.path().join("wrong.gguf");
    std::fs::write(&wrong, "GGUF").unwrap();
    let pull = |url: Option<&str>| {
        let mut pull = command(&["model", "pull"]);
        pull.env("XDG_CACHE_HOME", at).env("PATH", at);
        if let Some(url) = url {
            pull.env("KVFERRY_MODEL_URL", url);
        }
        let run = finish(pull.output().unwrap());
        format!("exit {}\n{}{}", run.code.unwrap(), run.stdout, run.stderr)
    };
    let mut all =
        vec![pull(None), pull(Some(&format!("file://{}", wrong.display()))), pull(Some("ftp://x/y"))];
    // A damaged file in the cache is not used.
    let cached = folder.path().join("kvferry/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    std::fs::write(&cached, "GGUF").unwrap();
    all.push(pull(None));
    insta::assert_snapshot!("pull", all.join("\n").replace(at, "FOLDER"));
    let left: Vec<_> = std::fs::read_dir(cached.parent().unwrap()).unwrap().collect();
    assert_eq!(left.len(), 1, "temporary files were left: {left:?}");
}

#[test]
fn a_hub_file_is_fetched_once() {
    use std::io::{Read, Write};
    let folder = tempfile::tempdir().unwrap();
    let hub = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", hub.local_addr().unwrap());
    // Answers two requests: one file, one that is not there.
    let server = std::thread::spawn(move || {
        let mut asked = Vec::new();
        for answer in
            ["200 OK\r\nContent-Length: 4\r\n\r\nGGUF", "404 Not Found\r\nContent-Length: 0\r\n\r\n"]
        {
            let (mut stream, _) = hub.accept().unwrap();
            let mut buffer = [0; 4096];
            let n = stream.read(&mut buffer).unwrap();
            asked.push(String::from_utf8_lossy(&buffer[..n]).into_owned());
            stream.write_all(format!("HTTP/1.1 {answer}").as_bytes()).unwrap();
        }
        asked
    });
    let pull = |file: &str| {
        finish(
            command(&["model", "pull", file])
                .env("XDG_CACHE_HOME", folder.path())
                .env("HF_ENDPOINT", &endpoint)
                .env("HF_TOKEN", "secret")
                .output()
                .unwrap(),
        )
    };
    let first = pull("hf:owner/repo/sub/model.gguf");
    assert_eq!(first.code, Some(0), "{}", first.all());
    assert_eq!(std::fs::read(first.stdout.trim()).unwrap(), b"GGUF");
    let again = pull("hf:owner/repo/sub/model.gguf");
    assert_eq!((again.code, &again.stdout), (Some(0), &first.stdout));
    let absent = pull("hf:owner/repo/absent.gguf");
    assert_eq!(absent.code, Some(1));
    assert!(absent.stderr.contains("404") && absent.stderr.contains("HF_TOKEN"), "{}", absent.stderr);
    let asked = server.join().unwrap();
    assert!(asked[0].starts_with("GET /owner/repo/resolve/main/sub/model.gguf "), "{}", asked[0]);
    assert!(asked[0].to_lowercase().contains("authorization: bearer secret"), "{}", asked[0]);
}

/// What the doctor looks at, in its order; what it finds is the machine's.
#[test]
fn the_doctor_says_what_is_missing_and_how_to_get_it() {
    let empty = tempfile::tempdir().unwrap();
    let ask = |path: &str| {
        let run = command(&["doctor", "--offline", "--json"])
            .env("XDG_CACHE_HOME", empty.path())
            .env("PATH", path)
            .output()
            .unwrap();
        let run = finish(run);
        let report = run.json();
        let missing = |finding: &Value| finding["state"] == "missing";
        let findings = report["findings"].as_array().unwrap().clone();
        assert_eq!(report["ready"], !findings.iter().any(missing), "{report:#}");
        assert_eq!(run.code, Some(i32::from(report["ready"] == false)), "{report:#}");
        for finding in &findings {
            let state = finding["state"].as_str().unwrap();
            assert!(["ok", "info", "missing"].contains(&state), "{finding}");
            assert!(!finding["says"].as_str().unwrap().is_empty(), "{finding}");
            // Whatever is missing has a way to get it.
            assert!(state != "missing" || finding["remedy"].is_string(), "{finding}");
        }
        findings
    };
    let looked = ask(&std::env::var("PATH").unwrap());
    let names: Vec<_> = looked.iter().map(|finding| finding["what"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "cores",
            "memory",
            "instruction set",
            "shared memory",
            "locked memory",
            "huge pages",
            "loopback",
            "open files",
            "TCP congestion control",
            "Python with pip",
            "package index",
            "default model",
            "other cached models",
            "NIXL",
            "Mooncake",
            "llama.cpp",
            "OpenAI client",
        ]
    );
    // Paths have their own line, and commands go on where those begin.
    let table = command(&["doctor", "--offline"]).env("XDG_CACHE_HOME", empty.path()).output().unwrap();
    let table = finish(table).stdout;
    common::assert_narrow(&table);
    let column = |line: &str| line.len() - line.trim_start().len();
    let lines: Vec<_> = table.lines().collect();
    let path = lines.iter().find(|line| line.contains("/kvferry/models/")).unwrap();
    let further: Vec<_> =
        lines.windows(2).filter(|pair| pair[0].ends_with('\\')).map(|pair| pair[1]).collect();
    assert!(!further.is_empty() && further.iter().all(|line| column(line) == column(path)), "{table}");
    // Without Python there is no way to the model, which is not in this cache.
    let without = ask("/nowhere");
    let state = |findings: &[Value], what: &str| {
        findings.iter().find(|f| f["what"] == what).unwrap()["state"].as_str().unwrap().to_owned()
    };
    assert_eq!(state(&without, "Python with pip"), "missing");
    assert_eq!(state(&without, "default model"), "missing");
    assert_eq!(state(&without, "loopback"), "ok");
    assert_eq!(state(&without, "shared memory"), "ok");
}
