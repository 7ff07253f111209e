//! What fits now, later and never, on two sides.

use crate::{
    common::wait_until,
    service::{Service, request},
};

#[test]
fn a_prompt_that_one_side_can_never_hold_is_a_400_that_touches_nobody() {
    let service = Service::start(&[&[], &[]], &[&["--pool-tokens", "48"], &["--pool-tokens", "64"]]);
    // Connections are there.
    assert_eq!(service.complete(&request(10, 2)).0, 200);
    service.quiet("before", service.all());
    let counts = || {
        let what = ["completed", "failed", "landed", "tombstones"];
        let node = |peer: &crate::fleet::Peer| {
            let client = peer.client();
            let ledger = service.fleet.runtime.block_on(client.ledger()).unwrap();
            what.map(|name| ledger["node"][name].clone())
        };
        service.all().map(node).collect::<Vec<_>>()
    };
    let before = counts();
    let (status, answer) = service.complete(&request(64, 4));
    assert_eq!(status, 400, "{answer:#}");
    let error = &answer["error"];
    assert_eq!((&error["code"], &error["param"]), (&"context_length_exceeded".into(), &"prompt".into()));
    let message = error["message"].as_str().unwrap();
    // The side that comes nearest, its limit, and what would change it.
    for part in ["decode instance d1", "the limit is 63", "--pool-tokens"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert_eq!(counts(), before);
    // What only one of the two can hold goes there.
    for _ in 0..3 {
        assert_eq!(service.complete(&request(60, 4)).0, 200);
    }
    let after = counts();
    assert_eq!(after[2], before[2]);
    assert_ne!(after[3], before[3]);
}

#[test]
fn what_prefill_can_hold_depends_on_the_request_s_own_path() {
    // 3 pages of 16: with `ignore_eos` one page is left beside a page and 3 tokens; without it 30 tokens.
    let service = Service::start(&[&["--pool-tokens", "48", "--no-prefix-cache"]], &[&[]]);
    let asked = |tokens, ignore_eos: bool| {
        let mut body = request(tokens, 2);
        body["ignore_eos"] = ignore_eos.into();
        service.complete(&body)
    };
    for (ignore_eos, limit) in [(true, 16), (false, 30)] {
        let (status, answer) = asked(limit + 1, ignore_eos);
        assert_eq!(status, 400, "{answer:#}");
        let message = answer["error"]["message"].as_str().unwrap();
        for part in ["prefill instance p0", &format!("the limit is {limit} "), "--pool-tokens to "] {
            assert!(message.contains(part), "{part}: {message}");
        }
        assert_eq!(asked(limit, ignore_eos).0, 200);
    }
    service.quiet("after all", service.all());
}

#[test]
fn small_pools_and_many_requests_crosswise_all_end() {
    // Two requests at a time at most, on any side.
    let small: &[&str] = &["--pool-tokens", "160", "--chunk", "16"];
    let service = Service::start(&[small, small], &[small, small]);
    let requests: Vec<_> = (0..24).map(|i| request(40 + i, 8)).collect();
    for (asked, (status, answer)) in requests.iter().zip(service.complete_all(&requests)) {
        assert_eq!(status, 200, "{answer:#}");
        assert_eq!(answer["choices"][0]["token_ids"].as_array().unwrap().len(), 8, "{asked}");
    }
    service.quiet("after all", service.all());
}

#[test]
fn a_full_decode_does_not_hold_up_the_other() {
    let service = Service::start(&[&[]], &[&[], &[]]);
    // Takes a whole pool, for seconds.
    let mut long = service.stream(&request(30, 4000));
    assert!(long.next().is_some());
    let [full] = service.busy("decode")[..] else { panic!("one decode has the request") };
    for _ in 0..4 {
        let (status, answer) = service.complete(&request(200, 4));
        assert_eq!(status, 200, "{answer:#}");
    }
    let other = service.decodes[1 - full].ledger();
    assert_eq!(other.count("/node/completed"), 4);
    // The first one still runs: nobody waited for it.
    assert_eq!(service.busy("decode"), [full]);
    drop(long);
    service.quiet("after all", service.all());
    wait_until("its pages are free", || service.decodes[full].ledger().count("/engine/pages_held") == 0);
}
