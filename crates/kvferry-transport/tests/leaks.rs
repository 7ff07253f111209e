//! A process that opens and closes ends for days keeps no thread and no descriptor. Alone in its process, because
//! it counts those of the whole process.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{fs, time::Duration};

use kvferry_transport::{TransportKind, contract};

fn count(what: &str) -> usize {
    fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

#[test]
fn nothing_leaks() {
    for kind in [TransportKind::Mem, TransportKind::Shm, TransportKind::Tcp] {
        let start = |setup| kind.start(setup);
        contract::gone(&start);
        let before = (count("task"), count("fd"));
        for _ in 0..5 {
            contract::gone(&start);
            contract::closed(&start);
            contract::repeated(&start);
        }
        // A thread that has been joined may still be listed for a moment.
        let settled = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            (count("task"), count("fd")) == before
        });
        assert!(
            settled,
            "{kind}: {before:?} threads and descriptors became {:?}",
            (count("task"), count("fd"))
        );
    }
}
