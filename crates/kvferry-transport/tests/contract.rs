//! The contract suite, once per back end.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod fabric;

use std::{sync::Arc, time::Instant};

use fabric::Fabric;
use kvferry_transport::{Mem, Shm, Tcp, contract};

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
    check("mem", &|setup| Ok(Arc::new(Mem::new(setup))));
}

#[test]
fn shm() {
    check("shm", &|setup| Ok(Arc::new(Shm::new(setup)?)));
}

#[test]
fn tcp() {
    check("tcp", &|setup| Ok(Arc::new(Tcp::new(setup)?)));
}
