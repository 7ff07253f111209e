//! Instances that die or stop, clients that leave, and clusters that cannot serve.

use std::time::Instant;

use serde_json::{Value, json};

use crate::{
    common::{Server, wait_until},
    fleet::{Fleet, notice},
    service::{Service, request},
};

const LAYOUTS: [&[&str]; 2] = [&["--layout", "tp=2"], &["--layout", "tp=1,page=24"]];

#[test]
fn a_decode_that_is_killed_in_the_middle_of_an_answer_is_named_and_the_other_serves_on() {
    let service = Service::start(&LAYOUTS, &LAYOUTS);
    let mut answer = service.stream(&request(30, 3000));
    assert!(answer.next().is_some());
    let [victim] = service.busy("decode")[..] else { panic!("one decode has the request") };
    service.decodes[victim].signal("KILL");
    let struck = Instant::now();
    let (error, at) = answer.end().unwrap_err();
    assert!(at.duration_since(struck) < notice(), "{:?}", at.duration_since(struck));
    assert_eq!(
        (&error["stage"], &error["blame"]),
        (&json!("compute"), &json!("peer_misbehaved")),
        "{error:#}"
    );
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(&format!("d{victim}")), "{error:#}");
    // At once, and again.
    for _ in 0..3 {
        let (status, answer) = service.complete(&request(30, 4));
        assert_eq!(status, 200, "{answer:#}");
    }
    service.quiet("after it", service.prefills.iter().chain([&service.decodes[1 - victim]]));
}

#[test]
fn a_prefill_that_stops_in_the_middle_of_a_hand_off_is_noticed_and_the_other_serves_on() {
    let slow: [&[&str]; 2] = [&["--transport", "tcp", "--throttle", "262144", "--chunk", "16"]; 2];
    let service = Service::start(&slow, &[&[], &[]]);
    let (_, whole) = service.complete(&request(600, 4));
    let struck = std::thread::scope(|scope| {
        let asked = scope.spawn(|| service.complete(&request(600, 4)));
        wait_until("a prefill is at work", || {
            service.prefills.iter().any(|p| p.ledger().count("/node/sending") == 1)
        });
        let [victim] = service.busy("prefill")[..] else { panic!("one prefill has the request") };
        service.prefills[victim].signal("STOP");
        // Its client has heard nothing yet, and never hears of it.
        let (status, answer) = asked.join().unwrap();
        assert_eq!(status, 200, "{answer:#}");
        assert_eq!(answer["choices"], whole["choices"]);
        victim
    });
    // The other one is preferred at once, before anybody knows that this one is dead.
    let (status, answer) = service.complete(&request(20, 4));
    assert_eq!(status, 200, "{answer:#}");
    service.prefills[struck].signal("CONT");
    service.quiet("after it", service.all());
}

/// The one that survives tells of it; the one that died is named.
#[test]
fn whoever_dies_in_a_hand_off_is_named_and_not_who_tells_it() {
    for victim in ["p0", "d0"] {
        let service =
            Service::start(&[&["--transport", "tcp", "--throttle", "65536", "--chunk", "16"]], &[&[]]);
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| service.complete(&request(600, 4)));
            wait_until("it is at work", || service.prefills[0].ledger().count("/node/sending") == 1);
            let peer = service.all().find(|peer| peer.server.instance == victim).unwrap();
            peer.signal("KILL");
            let (status, answer) = asked.join().unwrap();
            let message = answer["error"]["message"].as_str().unwrap();
            assert_eq!((status, message.starts_with(victim)), (502, true), "{answer:#}");
        });
    }
}

/// Its tokens would be read in the wrong vocabulary, and look like an answer.
#[test]
fn instances_of_another_model_are_not_asked() {
    let fleet = Fleet::start();
    let _peers = ["prefill", "decode"].map(|role| fleet.peer(role, role, &[]));
    let router = Server::start(&[
        "--role",
        "router",
        "--model",
        "embedded:needle_kimi",
        "--registry",
        &fleet.registry.url,
    ]);
    let http = kvferry::registry::loopback_http().unwrap().build().unwrap();
    let body = json!({ "prompt": [1, 2, 3], "max_tokens": 1 });
    wait_until("the router has seen them", || {
        let ask = crate::service::complete(&http, &router.url, &body);
        let (status, answer) = fleet.runtime.block_on(ask);
        assert_eq!(status / 100, 5, "{answer:#}");
        let message = answer["error"]["message"].as_str().unwrap();
        message.contains("runs another model than this router speaks for (needle_kimi)")
    });
}

#[test]
fn a_prefill_that_stops_and_has_no_other_is_named() {
    let service =
        Service::start(&[&["--transport", "tcp", "--throttle", "65536", "--chunk", "16"]], &[&[], &[]]);
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| service.complete(&request(600, 4)));
        wait_until("it is at work", || service.prefills[0].ledger().count("/node/sending") == 1);
        service.prefills[0].signal("STOP");
        let struck = Instant::now();
        let (status, answer) = asked.join().unwrap();
        // Noticed with one decode and, if it is still listed then, with the other.
        assert!(struck.elapsed() < 2 * notice(), "{:?}", struck.elapsed());
        assert!([502, 503].contains(&status), "{answer:#}");
        let error = &answer["error"];
        assert!(error["message"].as_str().unwrap().contains("p0"), "{error:#}");
    });
    service.prefills[0].signal("CONT");
    service.quiet("after it", service.all());
}

#[test]
fn requests_that_meet_a_stopped_prefill_are_served_by_the_other() {
    let service = Service::start(&LAYOUTS, &[&[]]);
    let (_, whole) = service.complete(&request(20, 4));
    service.prefills[0].signal("STOP");
    // Before its lease is over.
    for (status, answer) in service.complete_all(&vec![request(20, 4); 6]) {
        assert_eq!(status, 200, "{answer:#}");
        assert_eq!(answer["choices"], whole["choices"]);
    }
    service.prefills[0].signal("CONT");
    service.quiet("after it", service.all());
}

#[test]
fn a_client_that_leaves_frees_everything_on_both_sides() {
    let service = Service::start(&LAYOUTS, &LAYOUTS);
    let mut answer = service.stream(&request(30, 3000));
    assert!(answer.next().is_some());
    assert_eq!(service.busy("decode").len(), 1);
    drop(answer);
    service.quiet("a client left", service.all());
}

#[test]
fn who_is_missing_or_does_not_fit_is_named() {
    let fleet = Fleet::start();
    let router = ["--role", "router", "--model", "embedded:llama_tiny", "--registry", &fleet.registry.url];
    let router = Server::start(&router);
    let http = kvferry::registry::loopback_http().unwrap().build().unwrap();
    let ask = || fleet.runtime.block_on(crate::service::complete(&http, &router.url, &request(5, 2)));
    let ready = || {
        fleet.runtime.block_on(async {
            let answer = http.get(format!("{}/ready", router.url)).send().await.unwrap();
            (answer.status().as_u16(), answer.json::<Value>().await.unwrap())
        })
    };
    let until = |text: &str, status: u16| {
        wait_until(text, || {
            let (code, body) = ready();
            code == 503 && body["reason"].as_str().unwrap().contains(text)
        });
        let (code, answer) = ask();
        assert_eq!(code, status, "{answer:#}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(text), "{answer:#}");
    };
    until("no prefill instance is there", 503);
    let _prefill = fleet.peer("prefill", "p0", &[]);
    until("no decode instance is there", 503);
    let _misfit = fleet.peer("decode", "d0", &["--kv-dtype", "bf16"]);
    until("`key.dtype` differs", 502);
    let _fits = fleet.peer("decode", "d1", &[]);
    wait_until("ready", || ready().0 == 200);
    assert_eq!(ask().0, 200);
}
