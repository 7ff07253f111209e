//! A process that opens and closes ends for days keeps no thread and no descriptor. Alone in its process, because
//! it counts those of the whole process.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod fabric;

use std::{fs, sync::Arc, time::Duration};

use fabric::Fabric;
use kvferry_transport::{Mem, Shm, Tcp, contract};

fn count(what: &str) -> usize {
    fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

#[test]
fn nothing_leaks() {
    let fabric = Fabric::default();
    let starts: [(&str, contract::Start<'_>); 4] = [
        ("mem", &|setup| Ok(Arc::new(Mem::new(setup)))),
        ("shm", &|setup| Ok(Arc::new(Shm::new(setup)?))),
        ("tcp", &|setup| Ok(Arc::new(Tcp::new(setup)?))),
        ("slots", &|setup| Ok(Arc::new(fabric.start(setup, Fabric::options())?))),
    ];
    for (name, start) in starts {
        contract::gone(start);
        let before = (count("task"), count("fd"));
        for _ in 0..5 {
            contract::gone(start);
            contract::closed(start);
            contract::repeated(start);
        }
        // A thread that has been joined may still be listed for a moment.
        let settled = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            (count("task"), count("fd")) == before
        });
        assert!(
            settled,
            "{name}: {before:?} threads and descriptors became {:?}",
            (count("task"), count("fd"))
        );
    }
}
