//! SIGTERM: what is open is finished, what is new is refused with the reason, and nobody is sent there any more.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use kvferry::{plan::Blame, server::Stage};

use crate::{
    common::{Server, wait_until},
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
    // Which is nobody's defect.
    let metrics = runtime.block_on(async {
        let http = kvferry::registry::loopback_http().unwrap().build().unwrap();
        let answer = http.get(format!("{}/metrics", drained.server.url)).send().await.unwrap();
        answer.text().await.unwrap()
    });
    assert!(!metrics.contains("blame=\"internal\""), "{metrics}");
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

#[test]
fn half_a_request_and_an_idle_connection_do_not_delay_the_end() {
    let fleet = Fleet::start();
    let with = |role: &str| {
        Server::start(&["--role", role, "--model", "embedded:llama_tiny", "--registry", &fleet.registry.url])
    };
    let registry = Server::start(&["--role", "registry"]);
    let mono = Server::start(&["--role", "mono", "--model", "embedded:llama_tiny"]);
    for server in [with("prefill"), with("decode"), with("router"), mono, registry] {
        let at = server.url.trim_start_matches("http://").to_owned();
        let say = |bytes: &str| {
            let mut stream = TcpStream::connect(&at).unwrap();
            stream.write_all(bytes.as_bytes()).unwrap();
            stream
        };
        let mut idle = say("GET /health HTTP/1.1\r\nhost: x\r\n\r\n");
        idle.read_exact(&mut [0; 16]).unwrap();
        let half = say("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{");
        let kept = [say(""), say("GET /health HTTP/1.1\r\nho"), half, idle];
        let told = Instant::now();
        assert_eq!(server.terminate(), Some(0));
        // Far less than answers under way would get.
        assert!(told.elapsed() < Duration::from_secs(8), "{:?}", told.elapsed());
        drop(kept);
    }
}
