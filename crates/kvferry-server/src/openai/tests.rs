//! What the API makes of a backend that fails, hangs or refuses: things that an engine does too seldom to wait for.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::Router;
use futures_util::future::{self, BoxFuture};
use kvferry_engine::{Voice, tokenizer::Tokenizer};
use kvferry_plan::Blame;
use kvferry_registry::loopback_http;
use serde_json::{Value, json};

use super::Api;
use crate::{
    Chosen, Problem, Stage,
    backend::{Answer, Backend, Extent, Finish, Job, Piece},
};

/// What happens to a job depends on the first token of its prompt.
const HANGS: u32 = 1;
const FAILS_AT_ONCE: u32 = 2;
const FAILS_LATER: u32 = 3;
const ENDS: u32 = 4;
const UNSERVED: u32 = 5;

#[derive(Default)]
struct Fake {
    /// Answers that somebody still wants.
    live: Arc<AtomicUsize>,
    draining: bool,
}

/// Counts an answer until it is dropped.
struct Live(Arc<AtomicUsize>);

impl Drop for Live {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn broken() -> Problem {
    Problem::new(Blame::PeerMisbehaved, Stage::HandOff, "the link broke")
}

/// Six letters, then what the prompt asks for.
struct Spoken {
    letters: std::vec::IntoIter<u8>,
    then: u32,
    _live: Live,
}

impl Answer for Spoken {
    fn next(&mut self) -> BoxFuture<'_, Result<Piece, Problem>> {
        let piece = match (self.letters.next(), self.then) {
            (Some(byte), _) => Ok(Piece::Token(Chosen { id: byte.into(), logprob: -1.0, top: Vec::new() })),
            (None, HANGS) => return Box::pin(future::pending()),
            (None, FAILS_LATER) => Err(broken()),
            (None, _) => Ok(Piece::Finish(Finish { eos: true, cached_tokens: 7 })),
        };
        Box::pin(future::ready(piece))
    }

    fn enough(&mut self) -> BoxFuture<'_, Finish> {
        Box::pin(future::ready(Finish { eos: false, cached_tokens: 5 }))
    }
}

impl Backend for Fake {
    fn start(&self, job: Job) -> BoxFuture<'_, Result<Box<dyn Answer>, Problem>> {
        Box::pin(async move {
            let then = job.prompt[0];
            if then == FAILS_AT_ONCE {
                return Err(broken());
            }
            self.live.fetch_add(1, Ordering::SeqCst);
            let letters = b"abcdef".to_vec().into_iter();
            Ok(Box::new(Spoken { letters, then, _live: Live(Arc::clone(&self.live)) }) as Box<dyn Answer>)
        })
    }

    fn check(&self, extent: Extent) -> Result<(), Problem> {
        if extent.prompt_tokens < 10 {
            Ok(())
        } else {
            Err(Problem::new(Blame::Caller, Stage::Admission, "too long"))
        }
    }

    fn ready(&self) -> Result<(), Problem> {
        let cause = "shutting down";
        if self.draining { Err(Problem::new(Blame::Environment, Stage::Admission, cause)) } else { Ok(()) }
    }
}

/// Serves the backend and asks it.
async fn with<T>(fake: Fake, ask: impl AsyncFnOnce(Client) -> T) -> T {
    let live = Arc::clone(&fake.live);
    let tokenizer = Some(Tokenizer::latin1());
    let voice = Voice {
        name: "fake".into(),
        sha256: String::new(),
        vocab: 256,
        eos: Vec::new(),
        tokenizer,
        chat_template: None,
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/completions", listener.local_addr().unwrap());
    let api = Api::new(voice, Arc::new(fake));
    let app = api.app(Router::new());
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    let answer = ask(Client { http: loopback_http().unwrap().build().unwrap(), url, live, api }).await;
    server.abort();
    answer
}

struct Client {
    http: reqwest::Client,
    url: String,
    live: Arc<AtomicUsize>,
    api: Arc<Api>,
}

impl Client {
    async fn ask(&self, body: &Value) -> (u16, String) {
        let answer = self.http.post(&self.url).body(body.to_string()).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    async fn error(&self, body: &Value) -> (u16, Value) {
        let (status, text) = self.ask(body).await;
        (status, serde_json::from_str::<Value>(&text).unwrap()["error"].clone())
    }

    /// Waits until so many answers are wanted.
    async fn live(&self, count: usize) {
        let until = async {
            while self.live.load(Ordering::SeqCst) != count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(30), until).await;
        assert!(waited.is_ok(), "{} answers are wanted, not {count}", self.live.load(Ordering::SeqCst));
    }
}

#[tokio::test]
async fn one_failure_ends_the_other_continuations() {
    with(Fake::default(), async |client| {
        for first in [FAILS_AT_ONCE, FAILS_LATER] {
            let (status, error) = client.error(&json!({ "prompt": [[HANGS], [first], [HANGS]] })).await;
            assert_eq!((status, &error["message"]), (502, &json!("the link broke")), "{error}");
            assert_eq!((&error["type"], &error["code"]), (&json!("server_error"), &Value::Null));
            assert_eq!((&error["stage"], &error["blame"]), (&json!("hand_off"), &json!("peer_misbehaved")));
            client.live(0).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_failure_in_the_middle_of_a_stream_is_its_last_event() {
    with(Fake::default(), async |client| {
        let (status, text) = client.ask(&json!({ "prompt": [[HANGS], [FAILS_LATER]], "stream": true })).await;
        assert_eq!(status, 200);
        let events: Vec<Value> = text
            .split_terminator("\n\n")
            .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
            .collect();
        let (last, others) = events.split_last().unwrap();
        assert_eq!(
            (&last["error"]["message"], &last["error"]["stage"]),
            (&json!("the link broke"), &json!("hand_off"))
        );
        let told = |index| -> String {
            let choices =
                others.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
            choices.map(|choice| choice["text"].as_str().unwrap()).collect()
        };
        assert_eq!(told(1), "abcdef", "what came before the failure was told");
        client.live(0).await;
        let (status, error) = client.error(&json!({ "prompt": [FAILS_AT_ONCE], "stream": true })).await;
        assert_eq!((status, &error["message"]), (502, &json!("the link broke")));
    })
    .await;
}

#[tokio::test]
async fn an_answer_that_outlasts_the_drain_ends_with_an_error_and_not_with_silence() {
    with(Fake::default(), async |client| {
        let drain = tokio_util::sync::CancellationToken::new();
        drain.cancel();
        let body = json!({ "prompt": [HANGS], "stream": true });
        let (answer, ()) = tokio::join!(client.ask(&body), client.api.drained(&drain, || {}));
        let last = answer.1.trim_end().rsplit("data: ").next().unwrap();
        let error = &serde_json::from_str::<Value>(last).unwrap()["error"];
        assert_eq!((&error["blame"], &error["stage"]), (&json!("environment"), &json!("compute")), "{error}");
        client.live(0).await;
    })
    .await;
}

#[tokio::test]
async fn a_stop_string_gives_up_what_is_still_computed() {
    with(Fake::default(), async |client| {
        let (status, text) = client.ask(&json!({ "prompt": [HANGS], "stop": "de" })).await;
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &answer["choices"][0]["text"]), (200, &json!("abc")), "{answer}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let usage = &answer["usage"];
        assert_eq!(usage["completion_tokens"], 5, "what was cut off had been computed");
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 5, "{usage}");
        client.live(0).await;
    })
    .await;
}

#[tokio::test]
async fn cached_tokens_are_told() {
    with(Fake::default(), async |client| {
        let (_, text) = client.ask(&json!({ "prompt": [[ENDS], [ENDS]], "n": 3 })).await;
        let usage = &serde_json::from_str::<Value>(&text).unwrap()["usage"];
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 14, "once for each prompt: {usage}");
        assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(2), &json!(36)));
    })
    .await;
}

#[tokio::test]
async fn what_takes_no_work_says_so() {
    let draining = Fake { draining: true, ..Fake::default() };
    with(draining, async |client| {
        let (status, error) = client.error(&json!({ "prompt": [ENDS] })).await;
        assert_eq!((status, &error["message"], &error["code"]), (503, &json!("shutting down"), &Value::Null));
    })
    .await;
    with(Fake::default(), async |client| {
        let (status, error) = client.error(&json!({ "prompt": [vec![UNSERVED], vec![UNSERVED; 10]] })).await;
        assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")), "{error}");
        assert_eq!(client.live.load(Ordering::SeqCst), 0, "nothing was begun for the prompt that fits");
    })
    .await;
}

#[tokio::test]
async fn more_than_all_places_is_refused_and_places_come_back() {
    with(Fake::default(), async |client| {
        let many = json!({ "prompt": [HANGS], "n": 128 });
        let all = future::join_all((0..8).map(|_| client.ask(&many)));
        tokio::select! {
            _ = all => panic!("they never end"),
            () = client.live(1024) => {}
        }
        // Those who have left are seen a moment later.
        client.live(0).await;
        let all = future::join_all((0..8).map(|_| client.ask(&many)));
        let refused = async {
            client.live(1024).await;
            client.error(&json!({ "prompt": [ENDS] })).await
        };
        tokio::select! {
            _ = all => panic!("they never end"),
            (status, error) = refused => {
                assert_eq!((status, &error["code"]), (429, &json!("rate_limit_exceeded")));
                assert_eq!(error["type"], "rate_limit_error");
            }
        }
        client.live(0).await;
        assert_eq!(client.ask(&json!({ "prompt": [ENDS] })).await.0, 200);
    })
    .await;
}
