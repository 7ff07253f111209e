//! Answers are those of one process, whichever pair gives them.

use serde_json::Value;

use crate::{
    common::Server,
    service::{Service, request},
};

#[test]
fn answers_over_two_by_two_layouts_equal_one_process_to_the_bit() {
    let service = Service::start(
        &[&["--layout", "tp=2"], &["--layout", "tp=1,page=24", "--chunk", "16"]],
        &[&["--layout", "tp=3"], &["--layout", "tp=4,dcp=2,page=8"]],
    );
    assert_eq!(service.get("/ready").0, 200);
    assert_eq!(service.get("/health").1["role"], "router");
    assert_eq!(service.get("/v1/models").1["data"][0]["id"], "llama_tiny");
    let mono = Server::start(&["--role", "mono", "--model", "embedded:llama_tiny"]);
    let alone = |body: &Value| {
        let http = kvferry::registry::loopback_http().unwrap().build().unwrap();
        let (status, answer) =
            service.fleet.runtime.block_on(crate::service::complete(&http, &mono.url, body));
        assert_eq!(status, 200, "{answer:#}");
        answer
    };
    let mut requests: Vec<Value> = (0..12).map(|i| request(5 + i * 17, 6)).collect();
    // Draws go on across the two instances where they left off.
    requests[3]["temperature"] = 1.3.into();
    requests[3]["seed"] = 7.into();
    for (asked, (status, answer)) in requests.iter().zip(service.complete_all(&requests)) {
        let expected = alone(asked);
        assert_eq!(status, 200, "{answer:#}");
        assert_eq!(answer["choices"], expected["choices"], "{asked}");
        assert_eq!(answer["choices"][0]["token_ids"].as_array().unwrap().len(), 6);
        for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(answer["usage"][count], expected["usage"][count], "{asked}");
        }
    }
    // Twelve at once do not all go to one.
    for peer in service.all() {
        assert!(peer.ledger().count("/node/completed") > 0, "{} was never asked", peer.server.instance);
    }
    service.quiet("at the end", service.all());
}

#[test]
fn sigterm_lets_answers_finish() {
    let service = Service::start(&[&[]], &[&[]]);
    let mut answer = service.stream(&request(20, 300));
    assert!(answer.next().is_some());
    let pid = service.router.child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(answer.end(), Ok(()));
    let Service { mut router, .. } = service;
    crate::common::wait_until("the router ends", || router.child.try_wait().unwrap().is_some());
    assert_eq!(router.child.wait().unwrap().code(), Some(0));
}
