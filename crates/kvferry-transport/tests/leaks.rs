//! A process that opens and closes ends for days keeps no thread and no descriptor, and ends that have nothing to do use no
//! CPU. Alone in its process, because it counts those of the whole process.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod fabric;

use std::{fs, sync::Arc, time::Duration};

use fabric::Fabric;
use kvferry_transport::{Mem, Shm, Tcp, contract};

fn count(what: &str) -> usize {
    fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

#[test]
fn nothing_leaks_and_nothing_spins() {
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
        let (mut used, rest) = (Duration::ZERO, Duration::from_secs(1));
        contract::at_rest(start, &mut || {
            let before = cpu();
            std::thread::sleep(rest);
            used = cpu() - before;
        });
        assert!(used < rest / 20, "{name}: {used:?} of CPU in {rest:?}");
    }
}

/// Of all threads so far.
fn cpu() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
    // A hundred a second on every Linux.
    Duration::from_millis(10 * ticks)
}
