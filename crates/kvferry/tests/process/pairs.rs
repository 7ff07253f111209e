//! One prefill instance, several decode instances at the same time.

use kvferry::{plan::Blame, server::Stage};

use crate::fleet::{Alone, Ask, Fleet, Flight, run, settled, wait_for_same};

#[test]
fn two_layouts_are_served_while_misfits_are_refused_over_tcp() {
    served_and_refused("tcp");
}

#[test]
fn two_layouts_are_served_while_misfits_are_refused_over_shm() {
    served_and_refused("shm");
}

fn served_and_refused(transport: &str) {
    let (fleet, mut alone) = (Fleet::start(), Alone::start());
    let start = |role, name, more: &[&str]| {
        fleet.peer(role, name, &[&["--transport", transport, "--chunk", "16"], more].concat())
    };
    let prefill = start("prefill", "prefill", &["--layout", "tp=4,page=24"]);
    let fits = [
        start("decode", "tp", &["--layout", "tp=2,page=16"]),
        start("decode", "dcp", &["--layout", "tp=4,dcp=4,page=8"]),
    ];
    let misfits = [
        (start("decode", "bf16", &["--kv-dtype", "bf16"]), "key.dtype"),
        (start("decode", "fast", &["--arith", "fast"]), "model"),
    ];
    // A room each, so that connections, links and threads are what later rooms find too.
    for (room, decode) in (1..).zip(&fits) {
        let ask = Ask::new(room, 30, 3);
        assert_eq!(run(&fleet, &ask, &prefill, decode).unwrap(), alone.answer(&ask));
    }
    let everybody = || fits.iter().chain(misfits.iter().map(|(misfit, _)| misfit)).chain([&prefill]);
    let before = settled(everybody());
    let refused = |field| prefill.ledger().refused(field);
    let refused_before = misfits.each_ref().map(|(_, field)| refused(field));

    let rooms = 6;
    let mut flights = Vec::new();
    for round in 0..rooms {
        for (i, decode) in (0..).zip(fits.iter().chain(misfits.iter().map(|(misfit, _)| misfit))) {
            let ask = Ask::new(100 + round * 10 + i, 300 + round as u32, 12);
            let flight = Flight::start(&fleet.runtime, &ask, &prefill, decode);
            flights.push((i as usize, ask, flight));
        }
    }
    for (i, ask, flight) in flights {
        let ended = flight.end(&fleet.runtime);
        if let Some((_, field)) = i.checked_sub(fits.len()).map(|i| &misfits[i]) {
            let problem = ended.expect_err("what does not fit is refused");
            assert_eq!(
                (problem.blame, problem.stage),
                (Blame::PeerIncompatible, Stage::HandOff),
                "{problem}"
            );
            assert!(problem.cause.contains(&format!("`{field}`")), "{field}: {problem}");
        } else {
            assert_eq!(ended.unwrap(), alone.answer(&ask), "room {} at decode {i}", ask.room);
        }
    }
    for (peer, before) in everybody().zip(&before) {
        wait_for_same("after all", peer, before);
    }
    for ((_, field), before) in misfits.iter().zip(refused_before) {
        assert!(refused(field) > before, "{field}");
    }
    assert_eq!(prefill.ledger().count("/node/completed"), 2 + 2 * rooms as u64);
}
