//! The demo over Mooncake's engine. Without its package these tests are named in the summary as left out; with `KVFERRY_REQUIRE=mooncake`
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
#[path = "process/sidecars.rs"]
mod sidecars;

use std::{
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use common::{assert_proven, command, finish};
use component::{Component, tests};
use kvferry_transport_mooncake::sidecar::located;
use libtest_mimic::Arguments;

const TESTS: [(&str, fn()); 9] = [
    ("every_layout_is_bit_equal", || engines::layouts("mooncake")),
    ("latent_rows_state_and_experts_are_bit_equal", || engines::models("mooncake")),
    ("a_fault_is_found_by_the_digest", || engines::fault("mooncake")),
    ("stopped_and_killed_at_every_phase", || phases::blows("mooncake")),
    ("who_sleeps_past_the_end_of_a_room_reaches_no_page", || late::asleep("mooncake")),
    ("a_sidecar_that_is_killed_costs_its_room_only", sidecars::killed),
    ("no_sidecar_outlives_its_instance", sidecars::orphaned),
    ("an_interpreter_may_be_a_script_that_starts_one", wrapped),
    ("a_pair_uses_it_only_where_both_want_it_most_or_have_nothing_else", || {
        engines::mixed(&[
            ["mooncake,tcp", "tcp,mooncake", "tcp"],
            ["mooncake,tcp", "mooncake,shm,tcp", "mooncake"],
            ["tcp,mooncake", "shm,mooncake", "mooncake"],
        ]);
    }),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let there = located().map_err(|error| error.to_string());
    let engine = Component { name: "mooncake", there, tests: tests(&TESTS) };
    component::run(&arguments, vec![engine], tests(&[("without_the_package_the_way_to_it_is_said", without)]))
}

/// A demo with a Python of its own.
fn demo(python: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut demo = command(&[&engines::TINY[..], &["--transport", "mooncake"]].concat());
    demo.env("KVFERRY_PYTHON", python);
    demo
}

/// Also where the package is there. Nobody has to look for what it opens.
fn without() {
    let run = finish(demo("/nowhere/python3").output().unwrap());
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
    let run = finish(demo("false").output().unwrap());
    assert!(run.code.is_some_and(|code| code != 0), "{}", run.all());
    assert!(run.stderr.contains("its process has ended"), "{}", run.all());
    // Something that never answers, and whose child keeps what it was given open.
    let folder = tempfile::tempdir().unwrap();
    let hangs = script(&folder, "sleep 1000; true");
    let since = Instant::now();
    let run = finish(demo(hangs).output().unwrap());
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
    assert_proven(&finish(demo(python).output().unwrap()));
}
