//! Requests as an application sends them, several at once, and when their tokens come.

use std::time::Instant;

use kvferry_plan::Blame;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::cluster::Target;
use crate::{bench::numbers::median, failure::Failure};

/// Medians over the requests of a wave; tokens of all of them per second of the wave.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wave {
    pub(super) ttft_ms: f64,
    pub(super) per_token_ms: f64,
    pub(super) tokens_per_s: f64,
}

/// Sends `at_once` different prompts at once and waits for all answers.
pub(super) async fn wave(
    target: &Target,
    prompt: u32,
    at_once: u32,
    max_tokens: u32,
    seed: u32,
) -> Result<Wave, Failure> {
    let begin = Instant::now();
    let mut tasks = JoinSet::new();
    for i in 0..at_once {
        tasks.spawn(one(target.clone(), ids(prompt, seed, i), max_tokens));
    }
    let (mut ttft, mut per_token) = (Vec::new(), Vec::new());
    while let Some(answer) = tasks.join_next().await {
        let (first, rest) = answer.map_err(|e| Failure::new(Blame::Us, e))??;
        ttft.push(first);
        per_token.push(rest);
    }
    let seconds = begin.elapsed().as_secs_f64();
    Ok(Wave {
        ttft_ms: median(&ttft),
        per_token_ms: median(&per_token),
        tokens_per_s: f64::from(at_once * max_tokens) / seconds,
    })
}

/// Tokens that every vocabulary has, and no two prompts that start alike.
fn ids(count: u32, seed: u32, request: u32) -> Vec<u32> {
    let mut state = (u64::from(seed) << 32 | u64::from(request)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            3 + (state >> 33) as u32 % 500
        })
        .collect()
}

/// Milliseconds to the first token, and per further token.
async fn one(target: Target, prompt: Vec<u32>, max_tokens: u32) -> Result<(f64, f64), Failure> {
    let failed = |what: String| Failure::new(Blame::Us, format!("{}: {what}", target.name));
    let body = json!({
        "model": target.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": true,
        "ignore_eos": true, "return_token_ids": true,
    });
    let begin = Instant::now();
    let request = target.http.post(format!("{}/v1/completions", target.url)).json(&body);
    let mut response = request.send().await.map_err(|e| failed(e.to_string()))?;
    let (mut first, mut last, mut pending) = (None, begin, Vec::new());
    while let Some(bytes) = response.chunk().await.map_err(|e| failed(e.to_string()))? {
        pending.extend_from_slice(&bytes);
        while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            let Some(data) = line.strip_prefix(b"data: ") else { continue };
            let Ok(event) = serde_json::from_slice::<Value>(data) else { continue };
            if !event["error"].is_null() {
                return Err(failed(event["error"]["message"].to_string()));
            }
            if event["choices"].as_array().is_some_and(|choices| !choices.is_empty()) {
                last = Instant::now();
                first = first.or(Some(last));
            }
        }
    }
    let Some(first) = first else {
        return Err(failed(String::from_utf8_lossy(&pending).trim().to_owned()));
    };
    let ms = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
    Ok((ms(begin, first), ms(first, last) / f64::from(max_tokens - 1)))
}
