//! `kvferry up` as a process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
};

use common::{command, kvferry, ready, wait_until};
use serde_json::{Value, json};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/up.toml");

struct Up {
    child: Child,
    ready: Value,
}

impl Up {
    fn start(args: &[&str]) -> Self {
        let mut child = command(&[&["up"], args, &["--json", "--port", "0"]].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let ready = ready(&mut child);
        Self { child, ready }
    }

    fn pid(&self, instance: &str) -> String {
        let all = self.ready["processes"].as_array().unwrap();
        let one = all.iter().find(|p| p["instance"] == instance).unwrap();
        one["pid"].as_u64().unwrap().to_string()
    }

    /// What an instance answers at its own port.
    fn get(&self, instance: &str, path: &str) -> Value {
        let all = self.ready["processes"].as_array().unwrap();
        let one = all.iter().find(|p| p["instance"] == instance).unwrap();
        let url = format!("{}{path}", one["http"].as_str().unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let http = kvferry::registry::loopback_http().unwrap().build().unwrap();
        runtime.block_on(async { http.get(url).send().await.unwrap().json().await.unwrap() })
    }

    fn pids(&self) -> Vec<String> {
        let all = self.ready["processes"].as_array().unwrap();
        all.iter().map(|p| p["pid"].as_u64().unwrap().to_string()).collect()
    }

    fn ask(&self) -> (u16, Value) {
        self.try_ask().unwrap()
    }

    /// `None` while nobody listens.
    fn try_ask(&self) -> Option<(u16, Value)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let http = kvferry::registry::loopback_http().unwrap().build().unwrap();
        let body = json!({
            "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": true, "temperature": 0, "return_token_ids": true
        });
        runtime.block_on(async {
            let url = format!("{}/v1/completions", self.ready["url"].as_str().unwrap());
            let answer = http.post(url).json(&body).send().await.ok()?;
            Some((answer.status().as_u16(), answer.json().await.unwrap()))
        })
    }

    /// Ends it by a signal; the exit code and what it said on standard error.
    fn end(mut self, signal: &str) -> (Option<i32>, String) {
        kill(signal, &self.child.id().to_string());
        self.ended()
    }

    fn ended(&mut self) -> (Option<i32>, String) {
        let pids = self.pids();
        wait_until("up ends", || self.child.try_wait().unwrap().is_some());
        wait_until("its children are gone", || !pids.iter().any(|pid| alive(pid)));
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap().code(), said)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // Its children follow it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn kill(signal: &str, pid: &str) {
    assert!(Command::new("kill").args([&format!("-{signal}"), pid]).status().unwrap().success());
}

fn alive(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn the_example_file_starts_serves_and_ends_with_nothing_left() {
    let up = Up::start(&[EXAMPLE, "--model", "embedded:llama_tiny"]);
    let layouts: Vec<_> =
        up.ready["processes"].as_array().unwrap().iter().map(|p| p["layout"].as_str()).collect();
    // The file's two decodes, in the middle of router and registry.
    assert_eq!(layouts.len(), 5, "{:#}", up.ready);
    assert_eq!((layouts[0], layouts[4]), (None, None));
    let (status, answer) = up.ask();
    assert_eq!((status, &answer["model"]), (200, &json!("llama_tiny")), "{answer:#}");
    let (code, said) = up.end("INT");
    assert_eq!((code, said.as_str()), (Some(0), ""));
}

/// The router pairs what prefill converts between; a file can say so, as every option.
#[test]
fn instances_of_two_element_types_serve_when_prefill_converts() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("up.toml");
    std::fs::write(&file, "prefill = 'tp=2,kv=bf16'\ndecode = 'tp=3,kv=fp8'\nconvert-kv = true\n").unwrap();
    let up = Up::start(&[file.to_str().unwrap(), "--model", "embedded:llama_tiny"]);
    let (status, answer) = up.ask();
    assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(4)), "{answer:#}");
    assert_eq!(up.end("INT").0, Some(0));
}

/// One prefill, a decode of another host's transports, and one of this host's: each pair uses what both have. That a
/// third has nothing in common with prefill is told.
#[test]
fn a_mixed_cluster_gives_one_answer_over_the_transport_of_each_pair() {
    let up = Up::start(
        &[
            &["--model", "embedded:llama_tiny", "--decode", "tp=1,page=16", "--decode", "tp=2,page=8"],
            &["--prefill-transport", "shm,tcp", "--decode-transport", "tcp"][..],
            &["--decode-transport", "shm,mooncake-tcp", "--no-prefix-cache"],
            &["--decode", "tp=1,page=8", "--decode-transport", "mooncake-tcp"],
        ]
        .concat(),
    );
    let only = "the only one that both have";
    let pair = |decode: &str, transport: &str| json!({ "prefill": "prefill-0", "decode": decode, "transport": transport, "why": only });
    assert_eq!(up.ready["pairs"], json!([pair("decode-0", "tcp"), pair("decode-1", "shm")]));
    let refused = up.ready["refused"].as_array().unwrap();
    assert!(refused[0].as_str().unwrap().contains("prefill-0 cannot serve decode-2: `transports` differs"));
    assert_eq!(refused.len(), 1);

    let decodes = [("decode-0", "tcp"), ("decode-1", "shm")];
    let served = |instance: &str| up.get(instance, "/debug/ledger")["node"]["completed"].as_u64().unwrap();
    let mut answers = Vec::new();
    wait_until("both decodes have served", || {
        // Two at a time: the second goes where the first is not.
        std::thread::scope(|scope| {
            let asked = [0; 2].map(|_| scope.spawn(|| up.ask()));
            answers.extend(asked.map(|asked| asked.join().unwrap()));
        });
        decodes.iter().all(|(instance, _)| served(instance) > 0)
    });
    for (status, answer) in &answers {
        assert_eq!((status, &answer["choices"]), (&200, &answers[0].1["choices"]), "{answer:#}");
    }
    for (instance, transport) in decodes {
        let peers = json!([{ "instance": "prefill-0", "transport": transport, "why": only }]);
        assert_eq!(up.get(instance, "/health")["peers"], peers);
    }
    assert_eq!(up.get("prefill-0", "/health")["transports"], json!(["shm", "tcp"]));
    assert_eq!(up.end("INT").0, Some(0));
}

#[test]
fn lists_of_transports_that_make_no_sense_are_refused_before_anything_starts() {
    for (args, says) in [
        (&["--transport", "tcp,shm,tcp"][..], "`tcp` is named twice"),
        (
            &["--prefill-transport", "tcp", "--prefill-transport", "shm"],
            "is given 2 times for 1 prefill instance;",
        ),
    ] {
        let run = kvferry(&[&["up", "--model", "embedded:llama_tiny"], args].concat());
        assert_eq!(run.code, Some(2), "{}", run.all());
        assert!(run.stderr.contains(says), "{}", run.all());
    }
    // Nothing in common is found by the router, by field.
    let args = ["--prefill-transport", "tcp", "--decode-transport", "shm,mooncake-tcp"];
    let run = kvferry(&[&["up", "--port", "0", "--model", "embedded:llama_tiny"], &args[..]].concat());
    assert_eq!(run.code, Some(1), "{}", run.all());
    let said = run.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains("`transports` differs: here tcp, at the peer shm+mooncake-tcp"), "{}", run.all());
}

/// Nothing is started, and no model read, for layouts of which no two could serve together.
#[test]
fn sides_of_two_element_types_are_refused_before_anything_starts() {
    let run = kvferry(&["up", "--model", "embedded:llama_tiny", "--port", "0", "--prefill", "tp=2,kv=bf16"]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{}", run.all());
    assert!(run.stderr.contains("error (caller): ") && run.stderr.contains("--convert-kv"), "{}", run.all());
}

#[test]
fn an_instance_that_dies_is_started_again() {
    let up = Up::start(&["--model", "embedded:llama_tiny"]);
    assert_eq!(up.ask().0, 200);
    kill("KILL", &up.pid("decode-0"));
    // First nobody is there, then the new one.
    wait_until("it serves again", || up.ask().0 == 200);
    let (code, said) = up.end("TERM");
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("decode-0") && said.contains("signal 9") && said.contains("runs again"), "{said}");
}

/// The API stays where clients know it, and the registry where the instances do.
#[test]
fn a_router_or_registry_that_dies_is_started_again_at_its_port() {
    let up = Up::start(&["--model", "embedded:llama_tiny"]);
    for process in ["router-0", "registry-0"] {
        kill("KILL", &up.pid(process));
        wait_until("its end is noticed", || !alive(&up.pid(process)));
        wait_until("it serves again", || up.try_ask().is_some_and(|(status, _)| status == 200));
    }
    // The new registry knows the instances, so that a new router finds them.
    let (code, said) = up.end("TERM");
    assert_eq!(code, Some(0), "{said}");
    for process in ["router-0", "registry-0"] {
        assert!(said.contains(&format!("{process} runs again")), "{said}");
    }
}

#[test]
fn a_process_that_cannot_be_kept_ends_all_and_is_named() {
    let mut up = Up::start(&["--model", "embedded:llama_tiny"]);
    let port = up.ready["url"].as_str().unwrap().rsplit(':').next().unwrap().parse::<u16>().unwrap();
    // Somebody else takes the port while nobody can start a new router at it.
    let keeper = up.child.id().to_string();
    kill("STOP", &keeper);
    kill("KILL", &up.pid("router-0"));
    wait_until("it ends", || !alive(&up.pid("router-0")));
    // Its last thread may hold the port for a moment longer.
    let mut taken = None;
    wait_until("the port is free", || {
        taken = std::net::TcpListener::bind(("127.0.0.1", port)).ok();
        taken.is_some()
    });
    kill("CONT", &keeper);
    let (code, said) = up.ended();
    assert_eq!(code, Some(1), "{said}");
    let (notes, error) = said.split_once("error (environment): ").unwrap();
    assert!(notes.contains("router-0") && notes.contains("signal 9"), "{said}");
    assert!(error.starts_with("router-0 did not start") && error.contains("in use"), "{said}");
    // It is named once in what is said of its end, not by everybody who passes it on.
    assert_eq!(error.matches("router-0").count(), 1, "{said}");
}

#[test]
fn what_people_see_fits_80_columns() {
    let mut child = command(&[
        "up",
        "--model",
        "embedded:llama_tiny",
        "--port",
        "0",
        "--attention",
        "mla",
        "--prefill",
        "tp=2,page=16",
        "--decode",
        "tp=4,dcp=4,interleave=16,page=64,kv=f32",
    ])
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut said: Vec<String> = Vec::new();
    for line in lines {
        said.push(line);
        if said.last().unwrap().ends_with("}'") {
            break;
        }
    }
    let _ = child.kill();
    let _ = child.wait();
    assert!(said.iter().any(|line| line.starts_with("curl -N http://127.0.0.1:")), "{said:#?}");
    common::assert_narrow(&said.join("\n"));
}

#[test]
fn a_port_that_is_taken_is_said_before_anything_is_loaded() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let run = kvferry(&["up", "--model", "embedded:llama_tiny", "--port", &port]);
    assert_eq!(run.code, Some(2), "{}", run.all());
    assert!(run.stderr.contains(&format!("port {port} is taken")), "{}", run.all());
    assert!(run.stderr.contains("--port"), "{}", run.all());
}

#[test]
fn what_a_file_gets_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    let cases = [
        ("pool_tokens = 100", "there is no option `pool_tokens`; did you mean `pool-tokens`?"),
        ("prefil = [\"tp=2\"]", "did you mean `prefill`?"),
        ("colour = \"red\"", "there are: "),
        ("port = 70000", "70000"),
        ("decode = [\"tp=x\"]", "tp=x"),
        ("no-digest = 3", "`no-digest` is true or false"),
        ("[prefill]\ntp = 2", "`prefill` cannot be"),
        ("port = ", "line 1"),
        ("max-queued = 0", "max-queued"),
    ];
    for (text, expected) in cases {
        std::fs::write(&path, text).unwrap();
        let run = kvferry(&["up", path.to_str().unwrap()]);
        assert_eq!(run.code, Some(2), "{text}: {}", run.all());
        assert!(run.stderr.contains(expected), "{text}: {}", run.all());
        assert!(run.stderr.contains("mine.toml"), "{text}: {}", run.all());
    }
    let run = kvferry(&["up", "nowhere.toml"]);
    assert!(run.code == Some(2) && run.stderr.contains("nowhere.toml: cannot be read"), "{}", run.all());
}

#[test]
fn the_command_line_counts_before_the_environment_and_that_before_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    std::fs::write(&path, "port = 70001\nchunk = 70002\ndecode = [\"tp=bad\"]").unwrap();
    let path = path.to_str().unwrap();
    let said = |args: &[&str], environment: &[(&str, &str)]| {
        let mut command = command(&[&["up", path], args].concat());
        let run = common::finish(command.envs(environment.iter().copied()).output().unwrap());
        assert_eq!(run.code, Some(2), "{}", run.all());
        run.stderr
    };
    // Each is told by what it gets wrong.
    assert!(said(&["--decode", "tp=1"], &[]).contains("70001"));
    assert!(said(&["--decode", "tp=1"], &[("KVFERRY_PORT", "70003")]).contains("70003"));
    let all = said(&["--port", "0", "--decode", "tp=worse"], &[("KVFERRY_PORT", "70003")]);
    assert!(all.contains("tp=worse") && !all.contains("7000"), "{all}");
    let file = said(&["--port", "0"], &[]);
    assert!(file.contains("mine.toml") && file.contains("tp=bad"), "{file}");
    let mut serve = command(&["serve", "--role", "registry"]);
    let run = common::finish(serve.env("KVFERRY_POOL_TOKENS", "many").output().unwrap());
    assert!(run.code == Some(2) && run.stderr.contains("many"), "{}", run.all());
}
