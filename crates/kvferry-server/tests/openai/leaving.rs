//! Clients that leave, and more of them than there is room for.

use std::time::Duration;

use crate::server::{by_ids, spoken};
use futures_util::StreamExt;
use reqwest::Method;
use serde_json::json;

/// A request whose answer would take all of the pool.
fn long(stream: bool) -> String {
    json!({ "prompt": [180], "max_tokens": 4000, "ignore_eos": true, "stream": stream, "return_token_ids": true }).to_string()
}

#[test]
fn a_client_that_closes_its_stream_frees_everything() {
    let server = by_ids();
    server.block_on(async {
        let answer = server.send(Method::POST, "/v1/completions", long(true)).await;
        let mut body = answer.bytes_stream();
        assert!(body.next().await.unwrap().unwrap().starts_with(b"data: {"));
    });
    server.wait_until_idle();
}

#[test]
fn a_client_that_gives_up_waiting_frees_everything() {
    let server = by_ids();
    server.block_on(async {
        // One that is computed, and one that waits for its pages.
        let ask = || server.send(Method::POST, "/v1/completions", long(false));
        let both = futures_util::future::join(ask(), ask());
        tokio::select! {
            _ = both => panic!("it was to take longer"),
            () = async {
                loop {
                    let ledger = server.send(Method::GET, "/debug/ledger", "").await;
                    let ledger: serde_json::Value = ledger.json().await.unwrap();
                    if ledger["tasks"] == 2 && ledger["engine"]["decoding"] == 1 && ledger["engine"]["queued"] == 1 {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            } => {}
        }
    });
    server.wait_until_idle();
    // The next client finds room.
    let answer = server.completion(&json!({ "prompt": [180], "max_tokens": 3, "ignore_eos": true }));
    assert_eq!(answer["usage"]["completion_tokens"], 3);
}

#[test]
fn many_at_once_are_all_answered() {
    let server = by_ids();
    let answers = server.block_on(async {
        let ask = |at: u32| {
            let body = json!({ "prompt": [at + 3], "max_tokens": 32, "ignore_eos": true, "seed": at, "stream": at.is_multiple_of(2) });
            server.send(Method::POST, "/v1/completions", body.to_string())
        };
        let answers = futures_util::future::join_all((0..32).map(ask)).await;
        futures_util::future::join_all(answers.into_iter().map(reqwest::Response::text)).await
    });
    for answer in answers {
        let answer = answer.unwrap();
        assert!(answer.contains("\"finish_reason\":\"length\""), "{answer}");
    }
    server.wait_until_idle();
}

#[test]
fn an_answer_that_a_stop_string_ends_is_a_success_and_tells_what_was_cached() {
    let server = spoken();
    let ask = |stop: Option<&str>| {
        server.completion(&json!({
            "prompt": "k".repeat(64), "max_tokens": 200, "temperature": 0, "ignore_eos": true, "stop": stop,
        }))
    };
    let whole = ask(None);
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let stop: String = text.chars().skip(20).take(3).collect();
    let cut = ask(Some(&stop));
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
    assert!(cut["usage"]["completion_tokens"].as_u64().unwrap() < 200, "{cut}");
    assert_ne!(cut["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "{cut}");
    let metrics =
        server.block_on(async { server.send(Method::GET, "/metrics", "").await.text().await.unwrap() });
    assert!(metrics.contains("kvferry_rooms_total{outcome=\"completed\"} 2"), "{metrics}");
    assert!(metrics.contains("kvferry_rooms_total{outcome=\"aborted\"} 0"), "{metrics}");
    assert!(!metrics.contains("kvferry_failures_total{"), "{metrics}");
    server.wait_until_idle();
}
