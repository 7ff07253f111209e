//! The shape of the workspace: which crate may use which, and rules that hold for every file.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Crates from the bottom up, with what each may name; it may also use what those may use.
const ARROWS: [(&str, &[&str]); 12] = [
    ("kvferry-plan", &[]),
    ("kvferry-session", &["kvferry-plan"]),
    ("kvferry-arena", &["kvferry-plan"]),
    ("kvferry-transport", &["kvferry-arena"]),
    ("kvferry-transport-mooncake", &["kvferry-transport"]),
    ("kvferry-transport-nixl", &["kvferry-transport"]),
    ("kvferry-registry", &["kvferry-session"]),
    (
        "kvferry-node",
        &["kvferry-session", "kvferry-transport-mooncake", "kvferry-transport-nixl", "kvferry-registry"],
    ),
    ("kvferry-engine", &["kvferry-arena"]),
    ("kvferry-server", &["kvferry-engine", "kvferry-node"]),
    ("kvferry", &["kvferry-server"]),
    ("kvferry-no-std-proof", &["kvferry-session"]),
];

/// The only crates with unsafe code, each in a few modules.
const UNSAFE: [&str; 3] = ["kvferry-arena", "kvferry-engine", "kvferry-transport-nixl"];

const MAX_LINES: usize = 800;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
    let manifest = root().join("Cargo.toml");
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version=1", "--manifest-path"])
        .arg(manifest)
        .output()
        .expect("cargo runs");
    let said = String::from_utf8_lossy(&output.stderr);
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {said}"));
    metadata["packages"].as_array().unwrap().clone()
}

fn name(package: &Value) -> &str {
    package["name"].as_str().unwrap()
}

#[test]
fn arrows_point_down_only() {
    let mut reach: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (crate_name, names) in ARROWS {
        let below = names.iter().flat_map(|n| reach[n].iter().copied().chain([*n])).collect();
        reach.insert(crate_name, below);
    }
    let packages = packages();
    assert!(packages.len() >= 9, "{} crates", packages.len());
    for package in &packages {
        let may =
            reach.get(name(package)).unwrap_or_else(|| panic!("{} has no place in the table", name(package)));
        for dependency in package["dependencies"].as_array().unwrap() {
            let on = name(dependency);
            let ours = on == "kvferry" || on.starts_with("kvferry-");
            assert!(!ours || may.contains(on), "{} may not use {on}", name(package));
        }
    }
}

#[test]
fn nothing_is_published() {
    for package in packages() {
        assert_eq!(package["publish"], serde_json::json!([]), "{} lacks publish = false", name(&package));
    }
}

#[test]
fn unsafe_is_forbidden_where_it_has_no_business() {
    for package in packages().iter().filter(|package| !UNSAFE.contains(&name(package))) {
        for target in package["targets"].as_array().unwrap() {
            let kinds = target["kind"].as_array().unwrap();
            if kinds.iter().any(|kind| kind == "lib" || kind == "bin") {
                let path = target["src_path"].as_str().unwrap();
                let text = std::fs::read_to_string(path).unwrap();
                assert!(text.contains("#![forbid(unsafe_code)]"), "{path} does not forbid unsafe code");
            }
        }
    }
}

fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

#[test]
fn no_file_is_longer_than_a_reader_can_hold() {
    let mut files = Vec::new();
    sources(&root().join("crates"), &mut files);
    sources(&root().join("proofs"), &mut files);
    assert!(files.len() > 30, "{} files", files.len());
    for file in files {
        let lines = std::fs::read_to_string(&file).unwrap().lines().count();
        assert!(lines <= MAX_LINES, "{} has {lines} lines, more than {MAX_LINES}", file.display());
    }
}

/// `lib.rs` is for documentation and re-exports.
#[test]
fn lib_files_define_nothing() {
    for package in packages() {
        for target in package["targets"].as_array().unwrap() {
            if !target["kind"].as_array().unwrap().iter().any(|kind| kind == "lib") {
                continue;
            }
            let path = target["src_path"].as_str().unwrap();
            let text = std::fs::read_to_string(path).unwrap();
            for line in text.lines() {
                let item = line.trim_start().trim_start_matches("pub ").trim_start_matches("pub(crate) ");
                let defines = ["fn ", "struct ", "enum ", "trait ", "impl ", "impl<", "macro_rules!"];
                assert!(!defines.iter().any(|word| item.starts_with(word)), "{path}: {line}");
            }
        }
    }
}
