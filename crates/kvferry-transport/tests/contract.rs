//! The contract suite, once per back end.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod fabric;

use std::{sync::Arc, time::Instant};

use fabric::Fabric;
use kvferry_transport::{TransportKind, contract};

fn run(kind: TransportKind) {
    check(&kind.to_string(), &|setup| kind.start(setup));
}

fn check(what: &str, start: contract::Start<'_>) {
    for (name, check) in contract::CHECKS {
        let started = Instant::now();
        check(start);
        eprintln!("{what}: {name} {:?}", started.elapsed());
    }
}

/// Blocks that come half by half into few small slots.
#[test]
fn slots() {
    let fabric = Fabric::default();
    check("slots", &|setup| Ok(Arc::new(fabric.start(setup, Fabric::options())?)));
}

#[test]
fn mem() {
    run(TransportKind::Mem);
}

#[test]
fn shm() {
    run(TransportKind::Shm);
}

#[test]
fn tcp() {
    run(TransportKind::Tcp);
}
