//! Clients that leave, in any state, from either side or both, and more than once.

use std::time::Instant;

use crate::{
    common::wait_until,
    fleet::{
        Alone, Ask, Fleet, Flight, Ledger, notice, run, settled, start_decode, start_prefill, wait_for_quiet,
        wait_for_same,
    },
};

#[test]
fn leave_at_any_time_over_tcp() {
    leave("tcp");
}

#[test]
fn leave_at_any_time_over_shm() {
    leave("shm");
}

/// A state of a room with both clients there.
struct State {
    name: &'static str,
    /// Length of the prompt, and tokens to generate.
    size: (u32, u32),
    /// How it looks in the ledgers of prefill and decode, and in decode's before the room.
    reached: fn(&Ledger, &Ledger, &Ledger) -> bool,
    /// Prefill's part is over.
    handed_over: bool,
}

const STATES: [State; 4] = [
    State {
        name: "moving",
        size: (2000, 4),
        reached: |p, d, _| p.count("/engine/prefilling") == 1 && d.count("/node/receiving") == 1,
        handed_over: false,
    },
    State {
        name: "computed",
        size: (600, 4),
        reached: |p, d, _| p.count("/engine/finished") == 1 && d.count("/node/receiving") == 1,
        handed_over: false,
    },
    State {
        name: "decoding",
        size: (48, 400),
        reached: |p, d, _| p.count("/tasks") == 0 && d.count("/engine/decoding") == 1,
        handed_over: true,
    },
    State {
        name: "over",
        size: (48, 4),
        reached: |p, d, before| {
            p.count("/tasks") == 0
                && d.count("/tasks") == 0
                && d.count("/node/completed") > before.count("/node/completed")
        },
        handed_over: true,
    },
];

fn leave(transport: &str) {
    let (fleet, mut alone) = (Fleet::start(), Alone::start());
    // Every prompt moves whole, so that there is time to leave.
    let common = ["--transport", transport, "--throttle", "1048576", "--chunk", "16", "--no-prefix-cache"];
    // Which one long answer fills, so that the next request waits.
    let common = [&common[..], &["--pool-tokens", "4096"]].concat();
    let prefill = fleet.peer("prefill", "prefill", &[&common[..], &["--layout", "tp=2"]].concat());
    let decode = fleet.peer("decode", "decode", &[&common[..], &["--layout", "tp=4,dcp=4"]].concat());
    let (runtime, peers) = (&fleet.runtime, [&prefill, &decode]);
    let quiet = |what: &str| peers.iter().for_each(|peer| wait_for_quiet(what, peer));
    let free = |what: &str, left: Instant| {
        quiet(what);
        assert!(left.elapsed() < notice(), "{what}: {:?}", left.elapsed());
    };
    let exact = |alone: &mut Alone, ask: &Ask| {
        assert_eq!(run(&fleet, ask, &prefill, &decode).as_ref(), Ok(&alone.answer(ask)), "{ask:?}");
    };
    exact(&mut alone, &Ask::new(1, 48, 6));
    let before = settled(peers);

    // Nobody but one client: computed and never opened; opened and never computed; waiting for pages.
    let ask = Ask::new(2, 40, 4);
    let prefilling = start_prefill(runtime, &ask, &prefill);
    wait_until("computed", || prefill.ledger().count("/engine/finished") == 1);
    prefilling.abort();
    free("a room that nobody opens", Instant::now());
    let ask = Ask::new(3, 40, 4);
    let decoding = start_decode(runtime, &ask, &prefill, &decode, tokio::sync::oneshot::channel().0);
    wait_until("opened", || prefill.ledger().count("/node/waiting") == 1);
    decoding.abort();
    free("a room that nobody computes", Instant::now());
    let large = Flight::start(runtime, &Ask::new(4, 48, 3500), &prefill, &decode);
    wait_until("pages are held", || decode.ledger().count("/engine/reserved") == 1);
    let waits = Flight::start(runtime, &Ask::new(5, 1500, 4), &prefill, &decode);
    wait_until("queued", || decode.ledger().count("/engine/queued") == 1);
    for flight in [waits, large] {
        flight.prefill.abort();
        flight.decode.abort();
    }
    free("a room that waits for pages", Instant::now());

    let mut room = 10;
    for State { name, size: (tokens, max_tokens), reached, handed_over } in STATES {
        for (prefill_leaves, decode_leaves) in [(true, false), (false, true), (true, true)] {
            room += 1;
            let what =
                format!("{name}, prefill's client leaves: {prefill_leaves}, decode's: {decode_leaves}");
            let mut ask = Ask::new(room, tokens, max_tokens);
            // What the room before it did is not taken for this one's state.
            quiet(&what);
            let earlier = decode.ledger();
            let flight = Flight::start(runtime, &ask, &prefill, &decode);
            wait_until(&what, || reached(&prefill.ledger(), &decode.ledger(), &earlier));
            let left = Instant::now();
            if prefill_leaves {
                flight.prefill.abort();
            }
            if decode_leaves {
                flight.decode.abort();
            }
            if !(handed_over || prefill_leaves && decode_leaves) {
                // Whoever stays is told why.
                let told = if prefill_leaves {
                    runtime.block_on(flight.decode).unwrap().0.map(drop)
                } else {
                    runtime.block_on(flight.prefill).unwrap().0.map(drop)
                };
                let problem = told.expect_err(&what);
                assert!(problem.cause.contains("client"), "{what}: {problem}");
            } else if !decode_leaves {
                let (ended, _) = runtime.block_on(flight.decode).unwrap();
                assert_eq!(ended.unwrap().0, alone.answer(&ask), "{what}");
            }
            if decode_leaves || !handed_over {
                free(&what, left);
            }
            quiet(&what);
            // The same attempt again is refused on both sides, and leaves nothing; the next one is served.
            let said = tokio::sync::oneshot::channel().0;
            let (prefilled, decoded) = (
                start_prefill(runtime, &ask, &prefill),
                start_decode(runtime, &ask, &prefill, &decode, said),
            );
            let decoded = runtime.block_on(decoded).unwrap().0.map(drop);
            let prefilled = runtime.block_on(prefilled).unwrap().0.map(drop);
            for problem in [decoded.expect_err(&what), prefilled.expect_err(&what)] {
                let words = ["a retry is a new attempt", "the client"];
                assert!(words.iter().any(|w| problem.cause.contains(w)), "{what}: {problem}");
            }
            quiet(&what);
            ask = Ask { attempt: 1, ..Ask::new(room, 48, 6) };
            exact(&mut alone, &ask);
        }
    }
    quiet("at the end");
    for (peer, before) in peers.into_iter().zip(&before) {
        wait_for_same("at the end", peer, before);
    }
}
