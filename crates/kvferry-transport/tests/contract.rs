//! The contract suite, once per back end.

use std::time::Instant;

use kvferry_transport::{TransportKind, contract};

fn run(kind: TransportKind) {
    for (name, check) in contract::CHECKS {
        let started = Instant::now();
        check(&|setup| kind.start(setup));
        eprintln!("{kind}: {name} {:?}", started.elapsed());
    }
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
