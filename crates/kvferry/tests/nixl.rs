//! The demo over NIXL. Without its library these tests are named in the summary as left out; with `KVFERRY_REQUIRE=nixl`
//! they fail.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod common;
#[path = "process/fleet.rs"]
#[allow(dead_code, reason = "the tests of the other transports use more of it")]
mod fleet;
#[path = "process/late.rs"]
mod late;
#[path = "process/phases.rs"]
mod phases;

use std::process::ExitCode;

use common::{assert_proven, command, finish, kvferry};
use kvferry_transport_nixl::located;
use libtest_mimic::{Arguments, Failed, Trial};

const COMPONENT: &str = "nixl";
/// It runs over everything, so it needs Mooncake's engine too.
const BENCHMARK: &str = "the_benchmark_has_it_as_a_peer_uses_it";

const TESTS: [(&str, fn()); 8] = [
    ("every_layout_is_bit_equal", layouts),
    ("latent_rows_state_and_experts_are_bit_equal", models),
    ("a_fault_is_found_by_the_digest", fault),
    ("stopped_and_killed_at_every_phase", || phases::blows("nixl")),
    ("who_sleeps_past_the_end_of_a_room_reaches_no_page", || late::asleep("nixl")),
    (BENCHMARK, benchmark),
    ("a_pair_uses_it_where_it_is_the_best_of_both", mixed),
    ("what_its_library_prints_stops_nobody", talkative),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let there = located();
    let is_required = |component: &str| {
        std::env::var("KVFERRY_REQUIRE").is_ok_and(|list| list.split(',').any(|c| c.trim() == component))
    };
    let required = is_required(COMPONENT);
    let no_mooncake = !is_required("mooncake") && kvferry_transport_mooncake::sidecar::located().is_err();
    let missing = there.as_ref().err().map(ToString::to_string);
    let left_out = missing.is_some() && !required;
    let mut trials: Vec<_> = TESTS
        .into_iter()
        .map(|(name, test)| {
            let missing = missing.clone();
            let run = move || match missing {
                Some(why) => Err(Failed::from(format!("{COMPONENT} is required: {why}"))),
                None => {
                    test();
                    Ok(())
                }
            };
            let left_out = left_out || (no_mooncake && name == BENCHMARK);
            Trial::test(name, run).with_kind(COMPONENT).with_ignored_flag(left_out)
        })
        .collect();
    trials.push(Trial::test("without_the_library_the_way_to_it_is_said", || {
        without();
        Ok(())
    }));
    let conclusion = libtest_mimic::run(&arguments, trials);
    match there {
        Ok(path) => println!("components: {COMPONENT} found at {}", path.display()),
        Err(why) => println!(
            "components: {COMPONENT} MISSING, {} tests {} ({why}; KVFERRY_REQUIRE={COMPONENT} makes this a failure)",
            TESTS.len(),
            if required { "failed" } else { "left out" }
        ),
    }
    conclusion.exit_code()
}

const TINY: [&str; 6] = ["demo", "--json", "--model", "embedded:llama_tiny", "--transport", "nixl"];

fn layouts() {
    for layout in [
        &[][..],
        &["--attention", "mla", "--prefill", "tp=2", "--decode", "tp=4,dcp=4"],
        &["--prefill", "tp=1,page=64", "--decode", "tp=2,page=24"],
        &["--prefill", "pp=2", "--decode", "pp=2"],
    ] {
        let report = assert_proven(&kvferry(&[&TINY, layout].concat()));
        assert_eq!(
            (&report["bit_equal"], &report["transport"]),
            (&true.into(), &"nixl".into()),
            "{layout:?}"
        );
    }
}

fn models() {
    for (model, prefill, decode) in [
        ("deepseek_v3_tiny", "tp=4,ep=4", "tp=4,dcp=4"),
        ("kimi_linear_tiny", "tp=4,ep=4,page=64", "tp=4,dcp=4,page=64"),
        ("kimi_linear_tiny", "tp=1", "tp=6,dcp=3,kv=f32"),
    ] {
        let folder = format!("{}/../kvferry-engine/tests/data/{model}", env!("CARGO_MANIFEST_DIR"));
        let run = kvferry(&[
            "demo",
            "--json",
            "--model",
            &folder,
            "--max-tokens",
            "4",
            "--ignore-eos",
            "--transport",
            "nixl",
            "--prefill",
            prefill,
            "--decode",
            decode,
        ]);
        assert_eq!(assert_proven(&run)["bit_equal"], true, "{model}");
    }
}

fn fault() {
    let run = kvferry(&[&TINY[..], &["--inject", "flip-byte"]].concat());
    assert_eq!(run.code, Some(1), "{}", run.all());
    assert!(run.all().contains("digest"), "{}", run.all());
}

/// Beside its packed blocks, rows and pages of the same relayout, which make the same of the pool: else the exit status is 1.
fn benchmark() {
    let run =
        kvferry(&["bench", "transfer", "--transport", "all", "--size", "small", "--rounds", "1", "--json"]);
    assert_eq!(run.code, Some(0), "{}", run.all());
    let json = run.json();
    for case in json["cases"].as_array().unwrap() {
        let ways = case["ways"].as_array().unwrap().iter().filter(|way| way["transport"] == COMPONENT);
        let ways: Vec<_> = ways.map(|way| (&way["descriptor"], &way["descriptors"], &way["naive"])).collect();
        let expected: Vec<_> = [("block", false), ("block", false), ("page", true), ("row", true)].into();
        let found: Vec<_> =
            ways.iter().map(|way| (way.0.as_str().unwrap(), way.2.as_bool().unwrap())).collect();
        assert_eq!(found, expected, "{case:#}");
        if case["name"] == "dcp" {
            // Two layers of 1024 tokens; a chunk has a page of each on each of four ranks.
            let counts: Vec<_> = ways.iter().map(|way| way.1.as_u64().unwrap()).collect();
            assert_eq!(counts[2..], [2 * 1024 / 64, 2 * 1024], "{case:#}");
            assert!(counts[..2].iter().all(|blocks| (1..16).contains(blocks)), "{case:#}");
        }
    }
}

fn mixed() {
    for (prefill, decode, chosen) in [
        ("nixl,shm", "tcp,nixl", "nixl"),
        ("nixl,tcp", "nixl,shm,tcp", "nixl"),
        ("nixl,tcp", "tcp,nixl", "tcp"),
    ] {
        let lists = ["--prefill-transport", prefill, "--decode-transport", decode];
        let report = assert_proven(&kvferry(&[&TINY[..], &lists].concat()));
        assert_eq!(report["transport"], chosen, "{prefill} {decode}");
    }
}

/// UCX writes to standard output, where an instance also says that it is ready.
fn talkative() {
    let report = assert_proven(&finish(command(&TINY).env("UCX_LOG_LEVEL", "debug").output().unwrap()));
    assert_eq!(report["transport"], "nixl");
    let run = finish(command(&TINY).env("UCX_TLS", "self").output().unwrap());
    assert_eq!(run.code, Some(1), "{}", run.all());
    assert!(run.stderr.contains("could not start its UCX backend"), "{}", run.all());
}

/// Also where the library is there.
fn without() {
    let run = finish(command(&TINY).env("KVFERRY_NIXL_LIB", "/nowhere/libnixl_capi.so").output().unwrap());
    assert!(run.code.is_some_and(|code| code != 0), "{}", run.all());
    assert!(run.stderr.contains("/nowhere/libnixl_capi.so"), "{}", run.all());
    assert!(run.stderr.contains("pip install --no-deps nixl-cu12==1.5.1"), "{}", run.all());
    // One that is named is not left out, whatever else is.
    let lists = ["demo", "--json", "--model", "embedded:llama_tiny", "--transport", "tcp,nixl"];
    let run = finish(command(&lists).env("KVFERRY_NIXL_LIB", "/nowhere/libnixl_capi.so").output().unwrap());
    assert!(run.stderr.contains("pip install --no-deps nixl-cu12==1.5.1"), "{}", run.all());
    // Something that is no such library.
    let run = finish(command(&TINY).env("KVFERRY_NIXL_LIB", "libc.so.6").output().unwrap());
    assert!(run.stderr.contains("it is not of version 1.5"), "{}", run.all());
}
