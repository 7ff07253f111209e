//! The demo over NIXL. Without its library these tests are named in the summary as left out; with `KVFERRY_REQUIRE=nixl`
//! they fail.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
#[path = "../../../tests/component.rs"]
mod component;
#[path = "common/engines.rs"]
mod engines;
#[path = "process/fleet.rs"]
#[allow(dead_code, reason = "the tests of the other transports use more of it")]
mod fleet;
#[path = "process/late.rs"]
mod late;
#[path = "process/phases.rs"]
mod phases;

use std::process::{Command, ExitCode};

use common::{assert_proven, command, finish, kvferry};
use component::{Component, tests};
use kvferry_transport_mooncake::sidecar;
use kvferry_transport_nixl::located;
use libtest_mimic::Arguments;

const TESTS: [(&str, fn()); 7] = [
    ("every_layout_is_bit_equal", || engines::layouts("nixl")),
    ("latent_rows_state_and_experts_are_bit_equal", || engines::models("nixl")),
    ("a_fault_is_found_by_the_digest", || engines::fault("nixl")),
    ("stopped_and_killed_at_every_phase", || phases::blows("nixl")),
    ("who_sleeps_past_the_end_of_a_room_reaches_no_page", || late::asleep("nixl")),
    ("a_pair_uses_it_where_it_is_the_best_of_both", || {
        engines::mixed(&[
            ["nixl,shm", "tcp,nixl", "nixl"],
            ["nixl,tcp", "nixl,shm,tcp", "nixl"],
            ["nixl,tcp", "tcp,nixl", "tcp"],
        ]);
    }),
    ("what_its_library_prints_stops_nobody", talkative),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let there = located().map(|path| path.display().to_string()).map_err(|error| error.to_string());
    let other = sidecar::located().map_err(|error| error.to_string());
    let both = there.clone().and_then(|ours| other.map(|theirs| format!("{ours}, {theirs}")));
    let bench: &[(&str, fn())] = &[("the_benchmark_has_it_as_a_peer_uses_it", benchmark)];
    let engines = vec![
        Component { name: "nixl", there, tests: tests(&TESTS) },
        // It runs over everything.
        Component { name: "nixl+mooncake", there: both, tests: tests(bench) },
    ];
    component::run(&arguments, engines, tests(&[("without_the_library_the_way_to_it_is_said", without)]))
}

/// A demo with something in its environment.
fn demo(transports: &str, name: &str, value: &str) -> Command {
    let mut demo = command(&[&engines::TINY[..], &["--transport", transports]].concat());
    demo.env(name, value);
    demo
}

/// Beside its packed blocks, rows and pages of the same relayout, which make the same of the pool: else the exit status is 1.
fn benchmark() {
    let run =
        kvferry(&["bench", "transfer", "--transport", "all", "--size", "small", "--rounds", "1", "--json"]);
    assert_eq!(run.code, Some(0), "{}", run.all());
    let json = run.json();
    for case in json["cases"].as_array().unwrap() {
        let ways = case["ways"].as_array().unwrap().iter().filter(|way| way["transport"] == "nixl");
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

/// UCX writes to standard output, where an instance also says that it is ready.
fn talkative() {
    let report = assert_proven(&finish(demo("nixl", "UCX_LOG_LEVEL", "debug").output().unwrap()));
    assert_eq!(report["transport"], "nixl");
    let run = finish(demo("nixl", "UCX_TLS", "self").output().unwrap());
    assert_eq!(run.code, Some(1), "{}", run.all());
    assert!(run.stderr.contains("could not start its UCX backend"), "{}", run.all());
}

/// Also where the library is there.
fn without() {
    let run = finish(demo("nixl", "KVFERRY_NIXL_LIB", "/nowhere/libnixl_capi.so").output().unwrap());
    assert!(run.code.is_some_and(|code| code != 0), "{}", run.all());
    assert!(run.stderr.contains("/nowhere/libnixl_capi.so"), "{}", run.all());
    assert!(run.stderr.contains("pip install --no-deps nixl-cu12==1.5.1"), "{}", run.all());
    // One that is named is not left out, whatever else is.
    let run = finish(demo("tcp,nixl", "KVFERRY_NIXL_LIB", "/nowhere/libnixl_capi.so").output().unwrap());
    assert!(run.stderr.contains("pip install --no-deps nixl-cu12==1.5.1"), "{}", run.all());
    // Something that is no such library.
    let run = finish(demo("nixl", "KVFERRY_NIXL_LIB", "libc.so.6").output().unwrap());
    assert!(run.stderr.contains("it is not of version 1.5"), "{}", run.all());
}
