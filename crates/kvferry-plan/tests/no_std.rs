//! The link proof of `proofs/no_std`, and that it can fail.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds the proof as a user would, with crates that the workspace build has already fetched.
fn build(features: &[&str]) -> Output {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
    let mut command = Command::new(cargo);
    command.args(["build", "--offline", "--message-format=short", "--manifest-path"]);
    command.arg(root().join("proofs/no_std/Cargo.toml"));
    command.arg("--target-dir").arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("no_std"));
    command.args(features.iter().flat_map(|feature| ["--features", feature]));
    command.output().expect("cargo runs")
}

/// One test, because both builds use one target folder.
#[test]
fn the_pure_crates_link_without_std_and_the_proof_would_notice_it() {
    let clean = build(&[]);
    let said = String::from_utf8_lossy(&clean.stderr).into_owned();
    assert!(clean.status.success(), "plan or session pulls in std, or the proof does not build:\n{said}");

    let tainted = build(&["taint"]);
    let said = String::from_utf8_lossy(&tainted.stderr).into_owned();
    assert!(!tainted.status.success() && said.contains("E0152"), "std went unnoticed:\n{said}");
}

/// The proof builds what the workspace builds.
#[test]
fn the_proof_is_locked_to_the_versions_of_the_workspace() {
    let packages = |path: &str| -> BTreeSet<(String, String)> {
        let text = std::fs::read_to_string(root().join(path)).unwrap();
        let value = |line: &str, key: &str| Some(line.strip_prefix(key)?.trim_matches('"').to_owned());
        let lines: Vec<&str> = text.lines().collect();
        let pairs =
            lines.windows(2).filter_map(|w| Some((value(w[0], "name = ")?, value(w[1], "version = ")?)));
        pairs.collect()
    };
    let (proof, workspace) = (packages("proofs/no_std/Cargo.lock"), packages("Cargo.lock"));
    assert!(proof.len() > 5, "{proof:?}");
    let only: Vec<_> =
        proof.difference(&workspace).filter(|(name, _)| name != "kvferry-no-std-proof").collect();
    assert!(
        only.is_empty(),
        "{only:?} differ; run: cp Cargo.lock proofs/no_std/ && cargo build --manifest-path proofs/no_std/Cargo.toml"
    );
}
