//! Rooms over two instances that say what a test wants.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use axum::{Json, Router, body::Body, response::IntoResponse, routing::post};
use futures_util::{StreamExt, stream};
use kvferry_engine::Alternative;
use kvferry_plan::{Attempt, Bytes, RoomId, RoomKey};

use super::*;
use crate::{SamplingSpec, Transfer};

/// Far more than anything here takes, on any machine.
const LONG: Duration = Duration::from_secs(20);

/// What an instance says, each part after a pause in milliseconds; it then stays silent with the connection open.
#[derive(Clone, Default)]
struct Script {
    decode: Vec<(u64, DecodeRecord)>,
    refused: Option<Problem>,
    prefill: Option<(u64, Result<PrefillReply, Problem>)>,
}

/// An instance, how often it was asked, and how many of its requests are open.
#[derive(Clone, Default)]
struct Seen {
    asked: Arc<AtomicUsize>,
    open: Arc<AtomicUsize>,
}

struct Open(Arc<AtomicUsize>);

impl Seen {
    fn begin(&self) -> Open {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.open.fetch_add(1, Ordering::SeqCst);
        Open(Arc::clone(&self.open))
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    async fn closed(&self) {
        let gone = async {
            while self.open.load(Ordering::SeqCst) > 0 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LONG, gone).await.expect("the request was not given up");
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn instance(name: &str, script: Script) -> (Leg, Seen) {
    let seen = Seen::default();
    let decode = {
        let (script, seen) = (script.clone(), seen.clone());
        async move || {
            let open = seen.begin();
            if let Some(problem) = script.refused.clone() {
                return problem.into_response();
            }
            let lines = stream::iter(script.decode.clone()).then(async |(pause, record)| {
                sleep(Duration::from_millis(pause)).await;
                Ok::<_, std::io::Error>(serde_json::to_string(&record).unwrap() + "\n")
            });
            let lines = lines.chain(stream::pending()).map(move |line| {
                let _ = &open;
                line
            });
            Body::from_stream(lines).into_response()
        }
    };
    let prefill = {
        let seen = seen.clone();
        async move || {
            let _open = seen.begin();
            match script.prefill.clone() {
                Some((pause, said)) => {
                    sleep(Duration::from_millis(pause)).await;
                    said.map(Json).into_response()
                }
                None => std::future::pending().await,
            }
        }
    };
    let app = Router::new().route("/internal/decode", post(decode)).route("/internal/prefill", post(prefill));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    let client = InstanceClient::new(&url).unwrap();
    (Leg { instance: InstanceId(name.into()), client }, seen)
}

async fn pair(script: Script) -> (InstancePair, Seen, Seen) {
    let ((prefill, asked), (decode, opened)) =
        (instance("p", script.clone()).await, instance("d", script).await);
    (InstancePair { prefill, decode }, asked, opened)
}

fn request(top_logprobs: u32) -> DecodeRequest {
    DecodeRequest {
        key: RoomKey { room: RoomId(7), attempt: Attempt(0) },
        prefill: InstanceId("nobody".into()),
        prompt: vec![1, 2, 3],
        max_tokens: 2,
        sampling: SamplingSpec::default(),
        top_logprobs,
        ignore_eos: false,
        hold: false,
    }
}

fn token(id: u32) -> (u64, DecodeRecord) {
    (0, DecodeRecord::Token(Chosen { id, logprob: -1.0, top: Vec::new() }))
}

fn done() -> (u64, DecodeRecord) {
    let transfer = Transfer {
        transport: "tcp".into(),
        transport_why: String::new(),
        bytes: Bytes(1),
        planned_bytes: Bytes(1),
        runs: 1,
        seconds: 0.1,
    };
    let done = DecodeDone {
        reason: "length".into(),
        prompt_tokens: 3,
        prompt_tokens_computed: 0,
        prompt_tokens_cached: 0,
        transfer,
    };
    (0, DecodeRecord::Done(done))
}

const RESERVED: (u64, DecodeRecord) = (0, DecodeRecord::Reserved { cached_tokens: 0 });

fn reply() -> PrefillReply {
    let top = vec![Alternative { id: 9, logprob: -0.5 }];
    PrefillReply {
        first: Chosen { id: 5, logprob: -1.0, top },
        prompt_tokens: 3,
        prompt_tokens_cached: 2,
        exposed_seconds: 0.25,
        seconds: 1.0,
    }
}

fn problem(blame: Blame, stage: Stage) -> Problem {
    Problem::new(blame, stage, "because")
}

/// The tokens and the end.
async fn run(script: Script, top: u32) -> (Result<(Vec<Chosen>, PairDone), Problem>, Seen, Seen) {
    let (pair, prefill, decode) = pair(script).await;
    let whole = async {
        let (mut answer, mut tokens) = (pair.open(request(top)).await?, Vec::new());
        loop {
            match answer.next().await? {
                Some(PairEvent::Token(token)) => tokens.push(token),
                Some(PairEvent::Done(done)) => {
                    assert_eq!(answer.next().await, Ok(None));
                    return Ok((tokens, done));
                }
                None => panic!("no end"),
            }
        }
    };
    let ended = timeout(LONG, whole).await.expect("the room hangs");
    (ended, prefill, decode)
}

#[tokio::test]
async fn the_answer_has_what_both_sides_say() {
    let script = Script {
        decode: vec![RESERVED, token(5), token(6), done()],
        prefill: Some((50, Ok(reply()))),
        ..Script::default()
    };
    let (ended, ..) = run(script, 1).await;
    let (tokens, done) = ended.unwrap();
    assert_eq!(tokens.iter().map(|t| t.id).collect::<Vec<_>>(), [5, 6]);
    assert_eq!((&tokens[0].top, tokens[1].top.len()), (&reply().first.top, 0));
    assert_eq!(done.prefill, Some(reply()));
}

#[tokio::test]
async fn prefill_is_asked_once_decode_has_its_pages() {
    let script = Script { decode: vec![(300, RESERVED.1)], ..Script::default() };
    let (pair, prefill, decode) = pair(script).await;
    // The status comes at once; a decode without pages would not even send that.
    let queued = Script { refused: Some(problem(Blame::Caller, Stage::Admission)), ..Script::default() };
    let (full, _) = instance("full", queued).await;
    let refused = InstancePair { decode: full, ..pair.clone() }.open(request(0)).await.unwrap_err();
    assert_eq!(refused.instance, Some(InstanceId("full".into())));
    assert_eq!(prefill.asked(), 0);
    let answer = pair.open(request(0)).await.unwrap();
    drop(answer);
    decode.closed().await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_both_sides() {
    let (pair, prefill, decode) =
        pair(Script { decode: vec![RESERVED, token(5)], ..Script::default() }).await;
    let mut answer = pair.open(request(0)).await.unwrap();
    assert!(matches!(answer.next().await, Ok(Some(PairEvent::Token(_)))));
    // A second poll sends prefill's request if the first one did not.
    assert!(timeout(Duration::from_millis(300), answer.next()).await.is_err());
    drop(answer);
    prefill.closed().await;
    decode.closed().await;
    assert_eq!(decode.asked(), 1);
}

#[tokio::test]
async fn decodes_failure_ends_prefill_at_once() {
    let failure = problem(Blame::PeerMisbehaved, Stage::HandOff);
    let script = Script { decode: vec![RESERVED, (50, DecodeRecord::Error(failure))], ..Script::default() };
    let (ended, prefill, _) = run(script, 0).await;
    let problem = ended.unwrap_err();
    assert_eq!((problem.stage, problem.instance), (Stage::HandOff, Some(InstanceId("d".into()))));
    prefill.closed().await;
}

#[tokio::test]
async fn prefills_refusal_ends_decode_at_once() {
    let script = Script {
        decode: vec![RESERVED],
        prefill: Some((0, Err(problem(Blame::Caller, Stage::Admission)))),
        ..Script::default()
    };
    let (ended, _, decode) = run(script, 0).await;
    let problem = ended.unwrap_err();
    assert_eq!((problem.stage, problem.instance), (Stage::Admission, Some(InstanceId("p".into()))));
    decode.closed().await;
}

#[tokio::test]
async fn the_reason_is_told_and_not_its_consequence() {
    let (consequence, reason) =
        (problem(Blame::Caller, Stage::HandOff), problem(Blame::Environment, Stage::Compute));
    let prefill_has_it = Script {
        decode: vec![RESERVED, (50, DecodeRecord::Error(consequence.clone()))],
        prefill: Some((60, Err(reason))),
        ..Script::default()
    };
    let (ended, ..) = run(prefill_has_it, 0).await;
    assert_eq!(ended.unwrap_err().instance, Some(InstanceId("p".into())));
    let reason = problem(Blame::PeerMisbehaved, Stage::HandOff);
    let decode_has_it = Script {
        decode: vec![RESERVED, (60, DecodeRecord::Error(reason))],
        prefill: Some((50, Err(consequence))),
        ..Script::default()
    };
    let (ended, ..) = run(decode_has_it, 0).await;
    assert_eq!(ended.unwrap_err().instance, Some(InstanceId("d".into())));
}

#[tokio::test]
async fn a_prefill_that_is_lost_after_the_hand_off_ends_nothing() {
    let script = Script {
        decode: vec![RESERVED, token(5), (200, token(6).1), done()],
        prefill: Some((50, Err(problem(Blame::Environment, Stage::Compute)))),
        ..Script::default()
    };
    let (ended, ..) = run(script, 0).await;
    let (tokens, done) = ended.unwrap();
    assert_eq!((tokens.len(), done.prefill), (2, None));
}

#[tokio::test]
async fn nobody_there_is_told_apart_from_a_refusal() {
    let (pair, ..) = pair(Script { decode: vec![RESERVED], ..Script::default() }).await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    let nobody = Leg { instance: InstanceId("n".into()), client: InstanceClient::new(&url).unwrap() };
    let without_decode = InstancePair { decode: nobody.clone(), ..pair.clone() };
    let problem = without_decode.open(request(0)).await.unwrap_err();
    assert_eq!((problem.reach, problem.stage), (Reach::Refused, Stage::Lookup), "{problem}");
    let without_prefill = InstancePair { prefill: nobody, ..pair };
    let problem = without_prefill.open(request(0)).await.unwrap().next().await.unwrap_err();
    assert_eq!((problem.reach, problem.stage), (Reach::Refused, Stage::Lookup), "{problem}");
    assert_eq!(problem.to_string().split(':').next(), Some("lookup at n"));
}
