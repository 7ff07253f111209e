//! Refusals: status, OpenAI's shape, the field by name, and what would work.

use std::sync::LazyLock;

use crate::server::{Server, spoken};
use reqwest::Method;
use serde_json::{Value, json};

static SPOKEN: LazyLock<Server> = LazyLock::new(spoken);

/// The error of a refusal with this status; its shape is checked.
fn refused(answer: (u16, Value), status: u16) -> Value {
    let (found, answer) = answer;
    assert_eq!(found, status, "{answer:#}");
    let mut error = answer["error"].clone();
    let fields: Vec<String> = error.as_object().unwrap().keys().cloned().collect();
    let mut expected = ["blame", "code", "message", "param", "stage", "type"].map(str::to_owned);
    expected.sort();
    let mut fields_sorted = fields;
    fields_sorted.sort();
    assert_eq!(fields_sorted, expected);
    assert_eq!(answer.as_object().unwrap().len(), 1);
    assert!(!error["message"].as_str().unwrap().is_empty());
    error["status"] = json!(status);
    error
}

#[test]
fn fields_that_cannot_be_served_are_named() {
    let completions = [
        (json!({}), "prompt"),
        (json!({ "prompt": null }), "prompt"),
        (json!({ "prompt": "" }), "prompt"),
        (json!({ "prompt": [] }), "prompt"),
        (json!({ "prompt": 3 }), "prompt"),
        (json!({ "prompt": [1, "a"] }), "prompt[1]"),
        (json!({ "prompt": [1, -1] }), "prompt[1]"),
        (json!({ "prompt": ["a", 1] }), "prompt[1]"),
        (json!({ "prompt": [[1], [2, "b"]] }), "prompt[1][1]"),
        (json!({ "prompt": [512] }), "prompt"),
        (json!({ "prompt": [[1], []] }), "prompt"),
        (json!({ "prompt": vec!["a"; 129] }), "prompt"),
        (json!({ "prompt": ["a", "b"], "n": 65 }), "n"),
        (json!({ "prompt": "a", "n": 0 }), "n"),
        (json!({ "prompt": "a", "n": 129 }), "n"),
        (json!({ "prompt": "a", "n": "two" }), "n"),
        (json!({ "prompt": "a", "max_tokens": 0 }), "max_tokens"),
        (json!({ "prompt": "a", "max_tokens": -1 }), "max_tokens"),
        (json!({ "prompt": "a", "max_tokens": 1.5 }), "max_tokens"),
        (json!({ "prompt": "a", "temperature": "hot" }), "temperature"),
        (json!({ "prompt": "a", "temperature": 2.1 }), "temperature"),
        (json!({ "prompt": "a", "temperature": -0.1 }), "temperature"),
        (json!({ "prompt": "a", "top_p": 1.1 }), "top_p"),
        (json!({ "prompt": "a", "seed": 0.5 }), "seed"),
        (json!({ "prompt": "a", "stream": "yes" }), "stream"),
        (json!({ "prompt": "a", "stream_options": { "include_usage": 1 } }), "stream_options.include_usage"),
        (json!({ "prompt": "a", "stream_options": [null] }), "stream_options"),
        (json!({ "prompt": "a", "stop": ["a", "b", "c", "d", "e"] }), "stop"),
        (json!({ "prompt": "a", "stop": "" }), "stop"),
        (json!({ "prompt": "a", "stop": "x".repeat(513) }), "stop"),
        (json!({ "prompt": "a", "stop": [1] }), "stop[0]"),
        (json!({ "prompt": "a", "logprobs": 6 }), "logprobs"),
        (json!({ "prompt": "a", "logprobs": true }), "logprobs"),
        (json!({ "prompt": "a", "model": 1 }), "model"),
        // Not served, so refused rather than left out.
        (json!({ "prompt": "a", "echo": true }), "echo"),
        (json!({ "prompt": "a", "suffix": "z" }), "suffix"),
        (json!({ "prompt": "a", "best_of": 2 }), "best_of"),
        (json!({ "prompt": "a", "logit_bias": { "5": 1 } }), "logit_bias"),
        (json!({ "prompt": "a", "presence_penalty": 0.5 }), "presence_penalty"),
        (json!({ "prompt": "a", "frequency_penalty": -1 }), "frequency_penalty"),
        (json!({ "prompt": "a", "top_k": 5 }), "top_k"),
    ];
    for (body, field) in completions {
        let error = refused(SPOKEN.post("/v1/completions", &body), 400);
        assert_eq!(error["param"], field, "{body} {error}");
        assert_eq!((&error["type"], &error["blame"]), (&json!("invalid_request_error"), &json!("caller")));
    }
    let chat = |more: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "a" }] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let chats = [
        (json!({}), "messages"),
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": "hello" }), "messages"),
        (json!({ "messages": [{ "content": "a" }] }), "messages[0]"),
        (json!({ "messages": [{ "role": "user", "content": 5 }] }), "messages[0].content"),
        (json!({ "messages": [["user", "a", null]] }), "messages[0]"),
        (json!({ "messages": [{ "role": "user", "content": [["text", "a"]] }] }), "messages[0].content[0]"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }] }),
            "messages[0].content[0]",
        ),
        (
            json!({ "messages": [{ "role": "assistant", "content": null, "tool_calls": [{ "id": "x" }] }] }),
            "messages[0].tool_calls",
        ),
        (chat(json!({ "max_completion_tokens": 0 })), "max_completion_tokens"),
        (chat(json!({ "logprobs": 3 })), "logprobs"),
        (chat(json!({ "logprobs": true, "top_logprobs": 21 })), "top_logprobs"),
        (chat(json!({ "top_logprobs": 2 })), "top_logprobs"),
        (chat(json!({ "tools": [{ "type": "function" }] })), "tools"),
        (chat(json!({ "functions": [{}] })), "functions"),
        (chat(json!({ "tool_choice": "required" })), "tool_choice"),
        (chat(json!({ "response_format": { "type": "json_object" } })), "response_format"),
        (chat(json!({ "modalities": ["text", "audio"] })), "modalities"),
        (chat(json!({ "audio": { "voice": "alloy" } })), "audio"),
    ];
    for (body, field) in chats {
        let error = refused(SPOKEN.post("/v1/chat/completions", &body), 400);
        assert_eq!(error["param"], field, "{body} {error}");
    }
}

#[test]
fn fields_that_ask_for_nothing_are_taken() {
    let body = json!({
        "prompt": "a", "max_tokens": 1, "echo": false, "suffix": null, "best_of": 1, "logit_bias": {}, "user": "me",
        "presence_penalty": 0, "frequency_penalty": 0.0, "tools": [], "response_format": { "type": "text" },
        "modalities": ["text"], "tool_choice": "none", "stop": null, "seed": null, "n": null, "stop_token_ids": [],
        "repetition_penalty": 1.0, "top_k": -1, "top_p": 0, "metadata": { "any": "thing" }, "store": true,
        "service_tier": "auto", "never heard of": [{ "deep": [1, 2] }], "messages": null,
    });
    assert_eq!(SPOKEN.completion(&body)["usage"]["completion_tokens"], 1);
}

#[test]
fn what_is_no_request_is_refused() {
    let post = |body: &str| SPOKEN.ask(Method::POST, "/v1/completions", body.to_owned());
    for body in ["", "{", "{\"prompt\": \"a\",}", "{\"prompt\": \"a\"} x", "\u{1}", "[]", "3", "null"] {
        let error = refused(post(body), 400);
        assert_eq!(error["param"], Value::Null, "{body:?} {error}");
    }
    let deep = format!("{{\"prompt\": {}", "[".repeat(100_000));
    refused(post(&deep), 400);
    let unknown = format!("{{\"x\": {}", "[".repeat(100_000));
    refused(post(&unknown), 400);
    let large = format!("{{\"prompt\": \"{}\"}}", "a".repeat(9 << 20));
    let error = refused(post(&large), 413);
    assert_eq!(error["type"], "invalid_request_error");
    assert!(error["message"].as_str().unwrap().contains("8388608"), "the limit is told: {error}");
}

#[test]
fn models_paths_and_methods() {
    let error = refused(SPOKEN.post("/v1/completions", &json!({ "model": "gpt-4", "prompt": "a" })), 404);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    assert!(error["message"].as_str().unwrap().contains("tiny"), "what is served is told: {error}");
    assert_eq!(refused(SPOKEN.get("/v1/models/org/other"), 404)["code"], "model_not_found");
    let error = refused(SPOKEN.post("/v1/embeddings", &json!({ "input": "a" })), 404);
    assert!(error["message"].as_str().unwrap().contains("/v1/chat/completions"), "{error}");
    refused(SPOKEN.get("/elsewhere"), 404);
    assert_eq!(refused(SPOKEN.get("/v1/models/%ff"), 400)["param"], "model");
    let error = refused(SPOKEN.get(&format!("/v1/models?{}", "a".repeat(40_000))), 431);
    assert!(error["message"].as_str().unwrap().contains("32768"), "the limit is told: {error}");
    refused(SPOKEN.get("/v1/completions"), 405);
    refused(SPOKEN.post("/health", &json!({})), 405);
}

#[test]
fn a_prompt_that_can_never_fit_is_told_the_limit() {
    let long = "a ".repeat(2500);
    let chat = json!({ "messages": [{ "role": "user", "content": long }], "n": 3 });
    for (path, body, field) in [
        ("/v1/completions", json!({ "prompt": long }), "prompt"),
        ("/v1/completions", json!({ "prompt": [vec![1], vec![1; 4096]] }), "prompt"),
        ("/v1/chat/completions", chat, "messages"),
    ] {
        let error = refused(SPOKEN.post(path, &body), 400);
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!("context_length_exceeded"), &json!(field)),
            "{error}"
        );
        assert_eq!(error["stage"], "admission");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("4095") && message.contains("shorten the prompt"), "{message}");
    }
    // Nothing was begun for any of them.
    let ledger = SPOKEN.get("/debug/ledger").1;
    assert_eq!(ledger["engine"]["queued"], 0, "{ledger}");
}
