//! Decode refuses or leaves before the hand-off: prefill, which may have the prompt computed already, is told and does
//! not wait for somebody who will never come.

use std::time::Instant;

use kvferry::{
    plan::Blame,
    server::{PrefillReply, Problem},
};
use tokio::{runtime::Runtime, task::JoinHandle};

use crate::{
    common::wait_until,
    fleet::{Alone, Ask, Ended, Fleet, Peer, notice, run, start_decode, start_prefill, wait_for_quiet},
};

/// Asks prefill alone and waits until it has computed the prompt.
fn computed<'a>(
    fleet: &'a Fleet,
    ask: &Ask,
    prefill: &Peer,
) -> (&'a Runtime, JoinHandle<Ended<PrefillReply>>) {
    let waits = start_prefill(&fleet.runtime, ask, prefill);
    wait_until("computed", || prefill.ledger().count("/engine/finished") == 1);
    (&fleet.runtime, waits)
}

/// How prefill's request ended, soon after `since`.
fn told<T: std::fmt::Debug>((runtime, waits): (&Runtime, JoinHandle<Ended<T>>), since: Instant) -> Problem {
    let (ended, at) = runtime.block_on(waits).unwrap();
    let problem = ended.expect_err("nobody has taken the room");
    let took = at.saturating_duration_since(since);
    assert!(took < notice(), "{took:?}: {problem}");
    problem
}

#[test]
fn reach_a_prefill_that_waits() {
    let (fleet, mut alone) = (Fleet::start(), Alone::start());
    let slow = ["--transport", "tcp", "--throttle", "262144", "--chunk", "16", "--pool-tokens", "4096"];
    let prefill = fleet.peer("prefill", "prefill", &slow);
    let decode = fleet.peer("decode", "decode", &slow);
    let misfit = fleet.peer("decode", "misfit", &["--kv-dtype", "bf16"]);
    let asked = |ask: &Ask, decode: &Peer| {
        start_decode(&fleet.runtime, ask, &prefill, decode, tokio::sync::oneshot::channel().0)
    };

    // The pair does not fit.
    let ask = Ask::new(1, 40, 4);
    let waits = computed(&fleet, &ask, &prefill);
    let since = Instant::now();
    let decoding = asked(&ask, &misfit);
    let problem = told(waits, since);
    assert!(problem.cause.contains("`key.dtype`"), "{problem}");
    assert_eq!(problem.blame, Blame::PeerIncompatible, "{problem}");
    let problem = fleet.runtime.block_on(decoding).unwrap().0.map(drop).unwrap_err();
    assert!(problem.cause.contains("`key.dtype`"), "{problem}");

    // Decode can never hold the prompt.
    let small = fleet.peer("decode", "small", &["--max-model-len", "32"]);
    let ask = Ask::new(2, 40, 4);
    let waits = computed(&fleet, &ask, &prefill);
    let since = Instant::now();
    let refused = fleet.runtime.block_on(asked(&ask, &small)).unwrap().0.map(drop).unwrap_err();
    let problem = told(waits, since);
    assert_eq!((&problem.cause.contains(&refused.cause), problem.blame), (&true, Blame::Caller), "{problem}");

    // The client leaves while decode still waits for pages.
    let large = Ask::new(3, 40, 3500);
    let (holds, held) = (asked(&large, &decode), start_prefill(&fleet.runtime, &large, &prefill));
    wait_until("pages are held", || decode.ledger().count("/engine/decoding") == 1);
    wait_for_quiet("handed over", &prefill);
    let ask = Ask::new(4, 1500, 4);
    let queued = asked(&ask, &decode);
    wait_until("queued", || decode.ledger().count("/engine/queued") == 1);
    let waits = computed(&fleet, &ask, &prefill);
    let since = Instant::now();
    queued.abort();
    let problem = told(waits, since);
    assert!(problem.cause.contains("client"), "{problem}");
    holds.abort();
    fleet.runtime.block_on(held).unwrap().0.unwrap();

    // Duplicates of a room that is being handed over end nothing, whatever they are refused for.
    let ask = Ask::new(5, 600, 8);
    let (decoding, prefilling) = (asked(&ask, &decode), start_prefill(&fleet.runtime, &ask, &prefill));
    wait_until("moving", || decode.ledger().count("/node/receiving") == 1);
    for again in [ask.clone(), Ask::new(5, 5000, 8)] {
        fleet.runtime.block_on(asked(&again, &decode)).unwrap().0.map(drop).unwrap_err();
        fleet
            .runtime
            .block_on(start_prefill(&fleet.runtime, &ask, &prefill))
            .unwrap()
            .0
            .map(drop)
            .unwrap_err();
    }
    let (tokens, _) = fleet.runtime.block_on(decoding).unwrap().0.unwrap();
    assert_eq!(tokens, alone.answer(&ask));
    fleet.runtime.block_on(prefilling).unwrap().0.unwrap();

    // The other way round: prefill refuses what decode waits for.
    let ask = Ask::new(6, 40, 4);
    let decoding = asked(&ask, &decode);
    wait_until("opened", || prefill.ledger().count("/node/waiting") == 1);
    let since = Instant::now();
    let long = Ask::new(6, 5000, 4);
    let refused = fleet.runtime.block_on(start_prefill(&fleet.runtime, &long, &prefill)).unwrap().0.map(drop);
    let problem = told((&fleet.runtime, decoding), since);
    assert!(problem.cause.contains(&refused.unwrap_err().cause), "{problem}");

    wait_for_quiet("at the end", &prefill);
    wait_for_quiet("at the end", &decode);
    let ask = Ask::new(7, 48, 6);
    assert_eq!(run(&fleet, &ask, &prefill, &decode).unwrap(), alone.answer(&ask));
}
