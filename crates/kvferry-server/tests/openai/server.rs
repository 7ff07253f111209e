//! A running server, and a client of it.

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use kvferry_engine::{EngineConfig, LoadOptions, Model, checkpoint};
use kvferry_plan::InstanceId;
use kvferry_registry::loopback_http;
use kvferry_server::{Mono, MonoConfig, Span, TraceSink};
use reqwest::{Method, Response};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

/// Begins a turn, and ends it: special tokens 510 and 511 of [`spoken`]'s tokenizer.
pub(crate) const SPECIAL: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

/// Spans as they come.
#[derive(Debug, Default)]
pub(crate) struct Collected(pub(crate) Mutex<Vec<Span>>);

impl TraceSink for Collected {
    fn collect(&self, spans: Vec<Span>) {
        self.0.lock().unwrap().extend(spans);
    }
}

/// Serves in this process until it is dropped.
pub(crate) struct Server {
    runtime: Runtime,
    pub(crate) url: String,
    pub(crate) spans: Arc<Collected>,
    drain: CancellationToken,
}

/// A server of the built-in model, which has no tokenizer.
pub(crate) fn by_ids() -> Server {
    Server::start(
        Model::from_checkpoint(&checkpoint::embedded().unwrap(), LoadOptions::default()).unwrap(),
        4096,
    )
}

/// A server of the same weights with a byte-level tokenizer and a chat template.
pub(crate) fn spoken() -> Server {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path());
    Server::start(Model::load(folder.path(), LoadOptions::default()).unwrap(), 4096)
}

fn write_model(folder: &Path) {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvferry-engine/models/llama_tiny");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(models.join(file), folder.join(file)).unwrap();
    }
    // One token per byte, as byte-level BPE writes it; then merges of two letters each.
    let mut hidden = 0x100_u32..;
    let mut alphabet: Vec<String> = (0_u8..=255)
        .map(|byte| match byte {
            0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(byte).to_string(),
            _ => char::from_u32(hidden.next().unwrap()).unwrap().to_string(),
        })
        .collect();
    let letters = || (b'a'..=b'z').map(|letter| char::from(letter).to_string());
    let pairs: Vec<(String, String)> =
        letters().flat_map(|a| letters().map(move |b| (a.clone(), b))).take(254).collect();
    alphabet.extend(pairs.iter().map(|(a, b)| format!("{a}{b}")));
    let vocab: serde_json::Map<String, Value> =
        alphabet.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    let added: Vec<Value> = (510..)
        .zip(SPECIAL)
        .map(|(id, content)| {
            json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true })
        })
        .collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                   "merges": pairs },
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('no narrators') }}{% endif %}\
                    <|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let config = json!({ "chat_template": template, "eos_token": SPECIAL[1] });
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

impl Server {
    fn start(model: Arc<Model>, pool_tokens: u64) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let spans = Arc::new(Collected::default());
        let config = MonoConfig {
            instance: InstanceId("mono-test".into()),
            model_name: Some("tiny".into()),
            listen: "127.0.0.1:0".parse().unwrap(),
            engine: EngineConfig { pool_tokens, ..EngineConfig::default() },
            traces: Some(spans.clone()),
        };
        let mono = runtime.block_on(Mono::start(model, config)).unwrap();
        let (url, drain) = (mono.url(), CancellationToken::new());
        runtime.spawn(mono.serve(drain.clone()));
        Self { runtime, url, spans, drain }
    }

    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Sends any bytes.
    pub(crate) async fn send(&self, method: Method, path: &str, body: impl Into<reqwest::Body>) -> Response {
        let http = loopback_http().unwrap().build().unwrap();
        http.request(method, format!("{}{path}", self.url)).body(body).send().await.unwrap()
    }

    /// Status and JSON.
    pub(crate) fn ask(&self, method: Method, path: &str, body: impl Into<reqwest::Body>) -> (u16, Value) {
        self.block_on(async {
            let answer = self.send(method, path, body).await;
            let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
            (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text:?}")))
        })
    }

    pub(crate) fn get(&self, path: &str) -> (u16, Value) {
        self.ask(Method::GET, path, "")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.ask(Method::POST, path, body.to_string())
    }

    /// An answer that is expected to be one.
    pub(crate) fn completion(&self, body: &Value) -> Value {
        let (status, answer) = self.post("/v1/completions", body);
        assert_eq!(status, 200, "{answer:#}");
        answer
    }

    pub(crate) fn chat(&self, body: &Value) -> Value {
        let (status, answer) = self.post("/v1/chat/completions", body);
        assert_eq!(status, 200, "{answer:#}");
        answer
    }

    /// The chunks of a stream, without the `[DONE]` that has to end it.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let text = self.block_on(async {
            let answer = self.send(Method::POST, path, body.to_string()).await;
            assert_eq!(answer.status(), 200);
            assert_eq!(answer.headers()["content-type"], "text/event-stream; charset=utf-8");
            answer.text().await.unwrap()
        });
        let mut events: Vec<&str> = text.split_terminator("\n\n").collect();
        assert!(text.ends_with("\n\n") && events.pop() == Some("data: [DONE]"), "{text}");
        let data = |event: &&str| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        events.iter().map(data).collect()
    }

    /// Waits until nothing is under way and all pages are free.
    pub(crate) fn wait_until_idle(&self) {
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        loop {
            let ledger = self.get("/debug/ledger").1;
            let engine = &ledger["engine"];
            let busy =
                ["pages_held", "queued", "prefilling", "decoding"].iter().any(|name| engine[name] != 0);
            if !busy && ledger["tasks"] == 0 {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "still busy: {ledger:#}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.drain.cancel();
    }
}
