//! Server-sent events against plain answers.

use std::{collections::BTreeMap, sync::LazyLock};

use crate::server::{Server, by_ids, spoken};
use serde_json::{Value, json};

static SPOKEN: LazyLock<Server> = LazyLock::new(spoken);

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

/// What a stream says of each choice, put together: text, ids, log-probabilities, the end.
fn together(
    chunks: &[Value],
    text: impl Fn(&Value) -> Value,
) -> BTreeMap<u64, (String, Vec<Value>, Vec<Value>, Value)> {
    let mut choices: BTreeMap<u64, (String, Vec<Value>, Vec<Value>, Value)> = BTreeMap::new();
    for choice in chunks.iter().flat_map(|chunk| list(&chunk["choices"])) {
        let all = choices.entry(choice["index"].as_u64().unwrap()).or_default();
        assert_eq!(all.3, Value::Null, "nothing comes after the end");
        all.0 += text(&choice).as_str().unwrap_or_default();
        all.1.extend(list(&choice["token_ids"]));
        all.2.extend(list(&choice["logprobs"]["content"]));
        all.2.extend(list(&choice["logprobs"]["token_logprobs"]));
        all.3 = choice["finish_reason"].clone();
    }
    choices
}

#[test]
fn a_streamed_completion_is_the_plain_one() {
    let body = json!({ "prompt": ["ab", "xyz"], "n": 2, "max_tokens": 24, "seed": 11, "logprobs": 2,
                       "return_token_ids": true, "stream_options": { "include_usage": true } });
    let plain = SPOKEN.completion(&body);
    let chunks = SPOKEN.stream("/v1/completions", &body);
    let all = together(&chunks, |choice| choice["text"].clone());
    assert_eq!(all.len(), 4);
    for (index, (text, ids, logprobs, end)) in &all {
        let choice = &plain["choices"][*index as usize];
        assert_eq!(&choice["text"], text.as_str());
        assert_eq!(&list(&choice["token_ids"]), ids);
        assert_eq!(&list(&choice["logprobs"]["token_logprobs"]), logprobs);
        assert_eq!(&choice["finish_reason"], end);
    }
    assert_eq!(chunks[0]["prompt_token_ids"], plain["prompt_token_ids"]);
    assert!(chunks[1..].iter().all(|chunk| chunk.get("prompt_token_ids").is_none()));
    let (usage, others) = chunks.split_last().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &plain["usage"]));
    assert!(others.iter().all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some()));
    let one = |name: &str| {
        chunks.iter().map(|chunk| chunk[name].to_string()).collect::<std::collections::HashSet<_>>()
    };
    assert_eq!((one("id").len(), one("created").len()), (1, 1));
    assert!(chunks.iter().all(|chunk| chunk["object"] == "text_completion" && chunk["model"] == "tiny"));
}

#[test]
fn a_streamed_chat_is_the_plain_one() {
    let body = json!({ "messages": [{ "role": "user", "content": "tell" }], "n": 3, "max_tokens": 20, "seed": 2,
                       "logprobs": true, "top_logprobs": 1, "return_token_ids": true, "ignore_eos": true });
    let plain = SPOKEN.chat(&body);
    let chunks = SPOKEN.stream("/v1/chat/completions", &body);
    let all = together(&chunks, |choice| choice["delta"]["content"].clone());
    assert_eq!(all.len(), 3);
    for (index, (text, ids, logprobs, end)) in &all {
        let choice = &plain["choices"][*index as usize];
        assert_eq!(&choice["message"]["content"], text.as_str());
        assert_eq!(&list(&choice["token_ids"]), ids);
        assert_eq!(&list(&choice["logprobs"]["content"]), logprobs);
        assert_eq!((&choice["finish_reason"], end), (&json!("length"), &json!("length")));
    }
    assert!(
        chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk.get("usage").is_none())
    );
    for index in 0..3 {
        let own: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(own[0]["delta"], json!({ "role": "assistant", "content": "" }), "the role comes first");
        assert_eq!(own.last().unwrap()["delta"], json!({}), "the end comes last, alone");
        assert!(own[1..].iter().all(|choice| choice["delta"].get("role").is_none()));
    }
    // No text was cut inside of a character: JSON could not carry it, and a replacement character would show.
    let ids = by_ids();
    let silent = ids.stream(
        "/v1/completions",
        &json!({ "prompt": [180], "max_tokens": 3, "temperature": 0, "return_token_ids": true }),
    );
    let told: Vec<Value> = silent.iter().flat_map(|chunk| list(&chunk["choices"][0]["token_ids"])).collect();
    assert_eq!(told, [323, 52, 8], "a model without texts streams its ids");
}

#[test]
fn what_fails_before_the_first_token_has_its_own_status() {
    let (status, answer) =
        SPOKEN.post("/v1/completions", &json!({ "prompt": vec![1; 5000], "stream": true, "max_tokens": 1 }));
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")));
}
