//! SIGTERM: what is open is finished, what is new is refused with the reason, and nobody is sent there any more.

use std::time::Duration;

use kvferry::{plan::Blame, server::Stage};

use crate::{
    common::wait_until,
    fleet::{Alone, Ask, Fleet, Flight, Peer, start_decode, start_prefill},
};

#[test]
fn prefill_finishes_its_rooms_first() {
    drains(true);
}

#[test]
fn decode_finishes_its_rooms_first() {
    drains(false);
}

fn drains(prefill_drains: bool) {
    let (fleet, mut alone) = (Fleet::start(), Alone::start());
    let common = ["--throttle", "524288", "--chunk", "16", "--no-prefix-cache"];
    let prefill = fleet.peer("prefill", "prefill", &common);
    let decode = fleet.peer("decode", "decode", &common);
    let (drained, other) = if prefill_drains { (prefill, decode) } else { (decode, prefill) };
    let (prefill, decode) = if prefill_drains { (&drained, &other) } else { (&other, &drained) };
    let runtime = &fleet.runtime;
    // Two seconds of moving.
    let open = Ask::new(1, 600, 8);
    let flight = Flight::start(runtime, &open, prefill, decode);
    wait_until("moving", || {
        prefill.ledger().count("/node/sending") == 1 && decode.ledger().count("/node/receiving") == 1
    });
    drained.signal("TERM");
    wait_until("draining", || drained.health().status == "draining");

    // Refused at once, by reason, while the open room goes on.
    let late = Ask::new(2, 40, 4);
    let (result, _) = if prefill_drains {
        let (result, at) = runtime.block_on(start_prefill(runtime, &late, prefill)).unwrap();
        (result.map(drop), at)
    } else {
        let said = tokio::sync::oneshot::channel().0;
        let (result, at) = runtime.block_on(start_decode(runtime, &late, prefill, decode, said)).unwrap();
        (result.map(drop), at)
    };
    let problem = result.expect_err("a draining instance takes no new rooms");
    assert_eq!((problem.blame, problem.stage), (Blame::Environment, Stage::Admission), "{problem}");
    assert!(problem.cause.contains("shutting down"), "{problem}");
    // It left the registry and stays away, although it lives for longer than a heartbeat.
    let gone = |drained: &Peer| !fleet.members().contains(&drained.server.instance);
    wait_until("it leaves the registry", || gone(&drained));
    while !flight.decode.is_finished() {
        assert!(gone(&drained), "it came back to the registry while it drained");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(flight.end(runtime).unwrap(), alone.answer(&open));
    let mut drained = drained;
    wait_until("it ends", || drained.server.child.try_wait().unwrap().is_some());
    assert_eq!(drained.server.child.wait().unwrap().code(), Some(0));
}
