//! The demo over Mooncake's engine. Without its package these tests are named in the summary as left out; with `KVFERRY_REQUIRE=mooncake`
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
#[path = "process/sidecars.rs"]
mod sidecars;

use std::{
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use common::{assert_proven, command, finish, kvferry};
use kvferry_transport_mooncake::sidecar::located;
use libtest_mimic::{Arguments, Failed, Trial};

const COMPONENT: &str = "mooncake";

const TESTS: [(&str, fn()); 9] = [
    ("every_layout_is_bit_equal", layouts),
    ("latent_rows_state_and_experts_are_bit_equal", models),
    ("a_fault_is_found_by_the_digest", fault),
    ("stopped_and_killed_at_every_phase", || phases::blows("mooncake")),
    ("who_sleeps_past_the_end_of_a_room_reaches_no_page", || late::asleep("mooncake")),
    ("a_sidecar_that_is_killed_costs_its_room_only", sidecars::killed),
    ("no_sidecar_outlives_its_instance", sidecars::orphaned),
    ("an_interpreter_may_be_a_script_that_starts_one", wrapped),
    ("a_pair_uses_it_only_where_both_want_it_most_or_have_nothing_else", mixed),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let there = located();
    let required =
        std::env::var("KVFERRY_REQUIRE").is_ok_and(|list| list.split(',').any(|c| c.trim() == COMPONENT));
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
            Trial::test(name, run).with_kind(COMPONENT).with_ignored_flag(left_out)
        })
        .collect();
    trials.push(Trial::test("without_the_package_the_way_to_it_is_said", || {
        without();
        Ok(())
    }));
    let conclusion = libtest_mimic::run(&arguments, trials);
    match there {
        Ok(what) => println!("components: {COMPONENT} found: {what}"),
        Err(why) => println!(
            "components: {COMPONENT} MISSING, {} tests {} ({why}; KVFERRY_REQUIRE={COMPONENT} makes this a failure)",
            TESTS.len(),
            if required { "failed" } else { "left out" }
        ),
    }
    conclusion.exit_code()
}

const TINY: [&str; 6] = ["demo", "--json", "--model", "embedded:llama_tiny", "--transport", "mooncake"];

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
            (&true.into(), &"mooncake".into()),
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
            "mooncake",
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

fn mixed() {
    for (prefill, decode, chosen) in [
        ("mooncake,tcp", "tcp,mooncake", "tcp"),
        ("mooncake,tcp", "mooncake,shm,tcp", "mooncake"),
        ("tcp,mooncake", "shm,mooncake", "mooncake"),
    ] {
        let lists = ["--prefill-transport", prefill, "--decode-transport", decode];
        let report = assert_proven(&kvferry(&[&TINY[..], &lists].concat()));
        assert_eq!(report["transport"], chosen, "{prefill} {decode}");
    }
}

/// Also where the package is there. Nobody has to look for what it opens.
fn without() {
    let run = finish(command(&TINY).env("KVFERRY_PYTHON", "/nowhere/python3").output().unwrap());
    assert!(run.code.is_some_and(|code| code != 0), "{}", run.all());
    for said in [
        "/nowhere/python3",
        "pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1",
        "apt-get install libibverbs1 libnuma1 libcurl4",
        "listens on all interfaces and has no authentication",
    ] {
        assert!(run.stderr.contains(said), "{}", run.all());
    }
    // Something that is no Python.
    let run = finish(command(&TINY).env("KVFERRY_PYTHON", "false").output().unwrap());
    assert!(run.code.is_some_and(|code| code != 0), "{}", run.all());
    assert!(run.stderr.contains("its process has ended"), "{}", run.all());
    // Something that never answers, and whose child keeps what it was given open.
    let folder = tempfile::tempdir().unwrap();
    let hangs = script(&folder, "sleep 1000; true");
    let since = Instant::now();
    let run = finish(command(&TINY).env("KVFERRY_PYTHON", hangs).output().unwrap());
    assert!(since.elapsed() < Duration::from_secs(120), "{:?}", since.elapsed());
    assert!(run.stderr.contains("Mooncake's engine could not be started"), "{}", run.all());
}

/// A program for the shell.
fn script(folder: &tempfile::TempDir, body: &str) -> PathBuf {
    let path = folder.path().join("python3");
    std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// An interpreter may be a script that starts one.
fn wrapped() {
    let folder = tempfile::tempdir().unwrap();
    let named = std::env::var_os("KVFERRY_PYTHON").map(PathBuf::from);
    let active = || std::env::var_os("VIRTUAL_ENV").map(|folder| PathBuf::from(folder).join("bin/python3"));
    let python = named.or_else(active).unwrap_or_else(|| "python3".into());
    let python = script(&folder, &format!("'{}' \"$@\"; exit $?", python.display()));
    assert_proven(&finish(command(&TINY).env("KVFERRY_PYTHON", python).output().unwrap()));
}
