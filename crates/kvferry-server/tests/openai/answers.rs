//! Plain answers of a model that is served by ids.

use crate::server::by_ids;
use serde_json::{Value, json};

#[test]
fn models_are_listed() {
    let server = by_ids();
    let (status, list) = server.get("/v1/models");
    assert_eq!((status, &list["object"]), (200, &json!("list")));
    let model = &list["data"][0];
    assert_eq!(
        (&model["id"], &model["object"], &model["owned_by"]),
        (&json!("tiny"), &json!("model"), &json!("kvferry"))
    );
    assert_eq!(server.get("/v1/models/tiny").1, *model);
    let health = server.get("/health").1;
    assert_eq!((&health["status"], &health["role"]), (&json!("ok"), &json!("mono")));
    assert_eq!(server.get("/ready"), (200, json!({ "ready": true, "reason": null })));
}

/// The built-in checkpoint's own continuation, as another implementation computes it.
#[test]
fn a_prompt_of_ids_is_continued() {
    let server = by_ids();
    let answer = server.completion(&json!({
        "model": "tiny", "prompt": [180], "max_tokens": 3, "temperature": 0, "return_token_ids": true,
    }));
    assert_eq!(answer["object"], "text_completion");
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"), "{answer:#}");
    assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
    assert!(answer["system_fingerprint"].as_str().unwrap().starts_with("fp_kvferry_"));
    assert_eq!((&answer["model"], &answer["prompt_token_ids"]), (&json!("tiny"), &json!([180])));
    let choice = &answer["choices"][0];
    assert_eq!(choice["token_ids"], json!([323, 52, 8]));
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(""), &json!("length")));
    assert_eq!((&choice["index"], &choice["logprobs"]), (&json!(0), &Value::Null));
    let usage = json!({ "prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4,
                        "prompt_tokens_details": { "cached_tokens": 0 } });
    assert_eq!(answer["usage"], usage);
    let by_default = server.completion(&json!({ "prompt": [180], "temperature": 0, "ignore_eos": true }));
    assert_eq!(by_default["usage"]["completion_tokens"], 16);
    assert!(by_default["choices"][0].get("token_ids").is_none());
}

#[test]
fn several_prompts_and_continuations_come_in_order() {
    let server = by_ids();
    let ask = |more: Value| {
        let mut body = json!({ "max_tokens": 4, "ignore_eos": true, "return_token_ids": true, "seed": 7 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.completion(&body);
        let choices = answer["choices"].as_array().unwrap().clone();
        assert!(choices.iter().enumerate().all(|(at, choice)| choice["index"] == at), "{choices:?}");
        (choices.iter().map(|choice| choice["token_ids"].clone()).collect::<Vec<_>>(), answer)
    };
    let (greedy, answer) = ask(json!({ "prompt": [[180], [7, 8, 9]], "temperature": 0, "n": 2 }));
    assert_eq!(greedy.len(), 4);
    assert!(greedy[0] == greedy[1] && greedy[2] == greedy[3] && greedy[0] != greedy[2], "{greedy:?}");
    assert_eq!(answer["prompt_token_ids"], json!([[180], [7, 8, 9]]));
    let usage = &answer["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(4), &json!(16)));
    // Drawn continuations differ from each other; the first is that of a request for one.
    let (drawn, _) = ask(json!({ "prompt": [180], "n": 8 }));
    assert!(drawn.iter().collect::<std::collections::HashSet<_>>().len() > 4, "{drawn:?}");
    assert_eq!(ask(json!({ "prompt": [180], "n": 8 })).0, drawn, "the same seed");
    assert_eq!(ask(json!({ "prompt": [180] })).0, drawn[..1]);
    assert_ne!(ask(json!({ "prompt": [180], "n": 8, "seed": -1 })).0, drawn);
    // Without a seed every request has one of its own.
    let unseeded = |_| ask(json!({ "prompt": [180], "seed": null, "max_tokens": 16 })).0;
    assert!((0..4).map(unseeded).collect::<std::collections::HashSet<_>>().len() > 1);
}

#[test]
fn the_end_of_a_text_stops_an_answer() {
    let server = by_ids();
    // Token 2 ends a text; some draws reach it, and it is the last token then.
    let body = json!({ "prompt": [180], "max_tokens": 200, "n": 16, "seed": 3, "temperature": 2, "return_token_ids": true });
    let answer = server.completion(&body);
    let mut reasons = std::collections::HashSet::new();
    for choice in answer["choices"].as_array().unwrap() {
        let ids = choice["token_ids"].as_array().unwrap();
        let reason = choice["finish_reason"].as_str().unwrap();
        reasons.insert(reason);
        assert_eq!(reason == "stop", ids.last() == Some(&json!(2)), "{choice}");
        assert!(!ids[..ids.len() - 1].contains(&json!(2)) && (reason == "stop" || ids.len() == 200));
    }
    assert!(reasons.contains("stop"), "no draw reached the end: {reasons:?}");
}

#[test]
fn log_probabilities_of_completions() {
    let server = by_ids();
    let ask = |count: u32| {
        let answer = server.completion(&json!({
            "prompt": [180], "max_tokens": 3, "temperature": 0, "logprobs": count, "return_token_ids": true,
        }));
        answer["choices"][0].clone()
    };
    let choice = ask(3);
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["token_id:323", "token_id:52", "token_id:8"]));
    assert_eq!(logprobs["text_offset"], json!([0, 0, 0]));
    let own = logprobs["token_logprobs"].as_array().unwrap();
    for (at, top) in logprobs["top_logprobs"].as_array().unwrap().iter().enumerate() {
        let top = top.as_object().unwrap();
        assert_eq!(top.len(), 3, "{top:?}");
        let token = logprobs["tokens"][at].as_str().unwrap();
        assert_eq!(top[token], own[at], "the most probable token was chosen");
        assert!(top.values().all(|logprob| logprob.as_f64() <= own[at].as_f64()));
    }
    assert_eq!(ask(0)["logprobs"]["top_logprobs"], Value::Null);
    assert_eq!(ask(0)["logprobs"]["token_logprobs"], json!(own));
}

#[test]
fn a_callers_trace_goes_on() {
    let server = by_ids();
    let caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let ask = server.block_on(async {
        let body = json!({ "prompt": [180, 181], "max_tokens": 2, "ignore_eos": true, "n": 2 });
        let http = kvferry_registry::loopback_http().unwrap().build().unwrap();
        let request = http.post(format!("{}/v1/completions", server.url)).header("traceparent", caller);
        request.body(body.to_string()).send().await.unwrap().status()
    });
    assert_eq!(ask, 200);
    let spans = server.spans.0.lock().unwrap();
    let rooms: Vec<_> = spans.iter().filter(|span| span.name == "room").collect();
    assert_eq!(rooms.len(), 2, "one for each continuation");
    for room in rooms {
        assert_eq!(room.context.trace, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!((room.parent, room.remote_parent), (Some(0x00f0_67aa_0ba9_02b7), true));
    }
}
