//! Client and server over a real loopback port.

#![allow(clippy::unwrap_used)]
#![cfg(all(feature = "client", feature = "server"))]

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, body::Body, routing::get};
use kvferry_plan::{
    Blame, CacheShape, Descriptor, Dtype, Incarnation, InstanceId, PROTOCOL, Placement, RankId,
};
use kvferry_registry::{
    BindError, Bounds, Client, ClientError, Guarded, Member, Offences, Problem, Role, State, Store,
    bind_loopback, loopback_http, refuse, router,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Notify, oneshot},
    time::timeout,
};

const SOON: Duration = Duration::from_secs(10);

fn member(started_ms: u64) -> Member {
    let shape = CacheShape::mla(2, 96);
    Member {
        instance: InstanceId("prefill-0".into()),
        incarnation: Incarnation { started_ms, nonce: u64::MAX },
        role: Role::Prefill,
        http: "http://127.0.0.1:9000".into(),
        control: "127.0.0.1:9001".into(),
        ranks: 1,
        hosts: None,
        descriptor: Descriptor {
            protocol: PROTOCOL,
            model: "abc".into(),
            placement: Placement::single(&shape, 16, Dtype::Bf16),
            shape,
            converts: false,
        },
        transports: vec!["shm://@x".into()],
        capacity: None,
    }
}

fn start(listener: TcpListener, lease: Duration) -> Offences {
    let bounds = Bounds { connections: 16, asking: Duration::from_millis(900), ..Bounds::REGISTRY };
    let guarded = Guarded::new(listener, bounds, refuse);
    let offences = guarded.offences();
    tokio::spawn(guarded.serve(router(Store::new(lease)), std::future::pending()));
    offences
}

async fn listen() -> (TcpListener, String) {
    let listener = bind_loopback("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

#[tokio::test]
async fn a_member_comes_is_seen_whole_and_leaves() {
    let (listener, url) = listen().await;
    start(listener, Duration::from_secs(2));
    let client = Client::new(&url).unwrap();
    let kept = client.keep(member(5));
    timeout(SOON, kept.registered()).await.unwrap().unwrap();
    assert_eq!(kept.state(), State::Registered);
    assert_eq!(client.members().await.unwrap(), [member(5)]);
    let found = client.find(&InstanceId("prefill-0".into())).await.unwrap().unwrap();
    assert_eq!((found.members, found.ranks), (vec![member(5)], 1));

    let refused = client.register(&member(4)).await.unwrap_err();
    assert!(matches!(refused, ClientError::Refused { status: 409, blame: Blame::Caller, .. }), "{refused}");
    let older = client.keep(member(4));
    let reason = timeout(SOON, older.registered()).await.unwrap().unwrap_err();
    assert!(reason.contains("older incarnation 4-"), "{reason}");

    kept.leave().await.unwrap();
    assert_eq!(client.members().await.unwrap(), []);
    // It does not come back with the next heartbeat.
    tokio::time::sleep(kvferry_registry::HEARTBEAT + Duration::from_millis(200)).await;
    assert_eq!(client.members().await.unwrap(), []);
}

#[tokio::test]
async fn the_registry_may_start_later_and_may_forget() {
    let (listener, url) = listen().await;
    drop(listener);
    let client = Client::new(&url).unwrap();
    let error = client.members().await.unwrap_err();
    assert_eq!(error.blame(), Blame::Environment);
    assert!(error.to_string().contains("kvferry serve --role registry"), "{error}");

    let kept = client.keep(member(5));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(kept.state(), State::Trying);

    let at: SocketAddr = url.trim_start_matches("http://").parse().unwrap();
    // The lease is shorter than a heartbeat, so the member is forgotten between two and must register anew.
    start(bind_loopback(at).await.unwrap(), Duration::from_millis(100));
    timeout(SOON, kept.registered()).await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(client.members().await.unwrap(), []);
    timeout(SOON, async {
        while client.members().await.unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn what_cannot_get_better_is_not_tried_again() {
    let (listener, url) = listen().await;
    start(listener, Duration::from_secs(2));
    // A name that is no path segment is one all the same, and refused by its rule.
    for name in ["../x", "a/b", "a b"] {
        let odd = Member { instance: InstanceId(name.into()), ..member(5) };
        let reason =
            timeout(SOON, Client::new(&url).unwrap().keep(odd).registered()).await.unwrap().unwrap_err();
        assert!(reason.contains("letters"), "{name}: {reason}");
    }
    let future = Client::new(&url).unwrap().keep(member(u64::MAX));
    let reason = timeout(SOON, future.registered()).await.unwrap().unwrap_err();
    assert!(reason.contains("clock"), "{reason}");

    // Something else than a registry.
    let listener = bind_loopback("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let other = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new()).await.unwrap() });
    let reason =
        timeout(SOON, Client::new(&other).unwrap().keep(member(5)).registered()).await.unwrap().unwrap_err();
    assert!(reason.contains("404"), "{reason}");
}

#[tokio::test]
async fn only_loopback() {
    let refused = bind_loopback("0.0.0.0:0".parse().unwrap()).await.unwrap_err();
    assert!(matches!(refused, BindError::NotLoopback(_)));
    assert!(refused.to_string().contains("not authenticated yet"), "{refused}");
    assert_eq!(refused.blame(), Blame::Caller);
    assert_eq!(Client::new("http://10.1.2.3:7000").unwrap_err().blame(), Blame::Caller);
}

#[tokio::test]
async fn bodies_that_are_not_members_are_answered() {
    let (listener, url) = listen().await;
    start(listener, Duration::from_secs(2));
    let http = loopback_http().unwrap().build().unwrap();
    let put = |path: &str, body: String| {
        http.put(format!("{url}{path}")).header("content-type", "application/json").body(body).send()
    };
    let record = serde_json::to_string(&member(1)).unwrap();
    for (path, body) in [
        ("/v1/members/prefill-0", "{".to_owned()),
        ("/v1/members/prefill-0", "{\"instance\":3}".to_owned()),
        ("/v1/members/other", record.clone()),
        ("/v1/members/prefill-0", record.replace("127.0.0.1:9000", "8.8.8.8:9000")),
    ] {
        let answer = put(path, body).await.unwrap();
        assert_eq!(answer.status(), 400);
        let problem: serde_json::Value = answer.json().await.unwrap();
        assert_eq!(problem["blame"], "caller");
        assert!(!problem["error"].as_str().unwrap().is_empty());
    }
    assert_eq!(put("/v1/members/prefill-0", " ".repeat(3 << 20)).await.unwrap().status(), 413);
}

#[tokio::test]
async fn ranks_register_in_any_order_and_a_lookup_waits_for_the_last() {
    let (listener, url) = listen().await;
    drop(listener);
    let client = Client::new(&url).unwrap();
    let rank = |rank: u32| Member {
        incarnation: Incarnation { started_ms: 1, nonce: rank.into() },
        control: format!("127.0.0.1:{}", 9001 + rank),
        ranks: 4,
        hosts: Some(vec![RankId(rank)]),
        ..member(1)
    };
    // The first three are there before the registry is.
    let mut kept: Vec<_> = [2, 0, 3].into_iter().map(|n| client.keep(rank(n))).collect();
    let at: SocketAddr = url.trim_start_matches("http://").parse().unwrap();
    start(bind_loopback(at).await.unwrap(), Duration::from_secs(2));
    for registration in &kept {
        timeout(SOON, registration.registered()).await.unwrap().unwrap();
    }
    let name = InstanceId("prefill-0".into());
    let refused = client.lookup(&name).await.unwrap_err();
    assert_eq!(refused.blame(), Blame::Environment);
    assert!(refused.to_string().contains("3 of 4 ranks"), "{refused}");
    assert_eq!(client.find(&name).await.unwrap(), None);
    let absent = client.lookup(&InstanceId("nobody".into())).await.unwrap_err();
    assert!(absent.to_string().contains("there are: prefill-0"), "{absent}");

    kept.push(client.keep(rank(1)));
    timeout(SOON, kept[3].registered()).await.unwrap().unwrap();
    let group = client.lookup(&name).await.unwrap();
    assert_eq!(group.members, [rank(0), rank(1), rank(2), rank(3)]);
    kept.remove(0).leave().await.unwrap();
    assert_eq!(client.groups().await.unwrap()[0].present, 3);
}

/// Sends bytes that are no request; what comes back until the connection ends.
async fn insult(at: &str, bytes: &[u8]) -> Vec<u8> {
    let mut stranger = TcpStream::connect(at).await.unwrap();
    // The other end may close before everything is written.
    stranger.write_all(bytes).await.ok();
    let mut answer = Vec::new();
    timeout(SOON, stranger.read_to_end(&mut answer)).await.unwrap().ok();
    answer
}

#[tokio::test]
async fn garbage_ends_its_own_connection_only() {
    let (listener, url) = listen().await;
    let offences = start(listener, Duration::from_secs(60));
    let client = Client::new(&url).unwrap();
    client.register(&member(1)).await.unwrap();
    let at = url.trim_start_matches("http://");
    let head = "PUT /v1/members/prefill-0 HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    let mut noise = Vec::new();
    let mut x = 7_u64;
    for _ in 0..4000 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        noise.extend(x.to_le_bytes());
    }
    let huge = format!("{head}content-length: 99999999999\r\n\r\n{}", "[".repeat(3 << 20));
    let deep = format!("{head}content-length: 200000\r\n\r\n{}", "[".repeat(200_000));
    let endless = format!("GET /{} HTTP/1.1\r\n", "a".repeat(2 << 20));
    insult(at, &noise).await;
    insult(at, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 and what else TLS says").await;
    insult(at, endless.as_bytes()).await;
    assert!(insult(at, huge.as_bytes()).await.starts_with(b"HTTP/1.1 4"));
    assert!(insult(at, deep.as_bytes()).await.starts_with(b"HTTP/1.1 400"));
    // Half a request, and nothing at all, more of them than there are places: each is let go in time.
    let halves = (0..40).map(|n| {
        let (at, bytes) = (at.to_owned(), if n % 2 == 0 { head.as_bytes().to_vec() } else { Vec::new() });
        tokio::spawn(async move { insult(&at, &bytes).await })
    });
    let halves: Vec<_> = halves.collect();
    let patient = async {
        while client.members().await.ok() != Some(vec![member(1)]) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, patient).await.unwrap();
    for half in halves {
        half.await.unwrap();
    }
    insult(at, format!("{head}content-length: 50\r\n\r\n{{").as_bytes()).await;
    // Closed inside of a request; one that comes and goes without a word is no offence.
    let mut stranger = TcpStream::connect(at).await.unwrap();
    stranger.write_all(head.as_bytes()).await.unwrap();
    drop(stranger);
    drop(TcpStream::connect(at).await.unwrap());
    assert_eq!(client.members().await.unwrap(), [member(1)]);
    let counted = async {
        loop {
            let mut counts = offences.counts();
            // Some had to wait for a place; how many depends on who came first.
            let waited = counts.remove("full");
            if counts == [("cut", 1), ("length", 2), ("malformed", 2), ("silent", 41)].into() {
                assert!(waited.is_some());
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let counted = timeout(SOON, counted).await;
    assert!(counted.is_ok(), "{:?}", offences.counts());
}

/// Reads until the end of the connection.
async fn rest(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    timeout(SOON, stream.read_to_end(&mut answer)).await.unwrap().ok();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_port_that_drains_finishes_its_answers_and_waits_for_nobody_else() {
    let (listener, url) = listen().await;
    let at = url.trim_start_matches("http://");
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let app = Router::new().route("/quick", get(async || "quick")).route("/slow", {
        let (begun, go_on) = (begun.clone(), go_on.clone());
        get(async move || {
            begun.notify_one();
            go_on.notified().await;
            "done"
        })
    });
    let (drain, drained) = oneshot::channel::<()>();
    let bounds = Bounds { asking: Duration::from_secs(600), ..Bounds::REGISTRY };
    let server = tokio::spawn(Guarded::new(listener, bounds, refuse).serve(app, async {
        drained.await.ok();
    }));
    let say = async |bytes: &str| {
        let mut stream = TcpStream::connect(at).await.unwrap();
        stream.write_all(bytes.as_bytes()).await.unwrap();
        stream
    };
    let mut silent = say("").await;
    let mut half = say("GET /quick HTTP/1.1\r\nhost").await;
    let mut half_body = say("POST /quick HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n1").await;
    let mut idle = say("GET /quick HTTP/1.1\r\nhost: x\r\n\r\n").await;
    timeout(SOON, idle.read_exact(&mut [0; 16])).await.unwrap().unwrap();
    let mut asking = say("GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await;
    timeout(SOON, begun.notified()).await.unwrap();

    drain.send(()).unwrap();
    assert_eq!((rest(&mut silent).await, rest(&mut half).await), (String::new(), String::new()));
    assert!(rest(&mut idle).await.ends_with("quick"));
    let late = rest(&mut half_body).await;
    assert!(late.starts_with("HTTP/1.1 503") && late.contains("shutting down"), "{late}");
    assert!(!server.is_finished());
    go_on.notify_one();
    assert!(rest(&mut asking).await.ends_with("done"));
    timeout(SOON, server).await.unwrap().unwrap();
}

#[tokio::test]
async fn who_does_not_read_an_answer_is_let_go() {
    let (listener, url) = listen().await;
    let endless = async || {
        Body::from_stream(futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(vec![b'x'; 1 << 16])))
    };
    let app = Router::new().route("/endless", get(endless));
    let bounds = Bounds { unread: Duration::from_millis(300), ..Bounds::REGISTRY };
    let guarded = Guarded::new(listener, bounds, refuse);
    let offences = guarded.offences();
    tokio::spawn(guarded.serve(app, std::future::pending()));
    let mut stream = TcpStream::connect(url.trim_start_matches("http://")).await.unwrap();
    stream.write_all(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let counted = async {
        while offences.counts() != [("unread", 1)].into() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, counted).await.unwrap();
}

#[tokio::test]
async fn what_the_port_refuses_by_itself_is_told_with_the_limit() {
    let (listener, url) = listen().await;
    start(listener, Duration::from_secs(60));
    let http = loopback_http().unwrap().build().unwrap();
    let put = |path: &str| http.put(format!("{url}/v1/members/{path}"));
    let chunked = reqwest::Body::wrap_stream(futures_util::stream::iter(
        (0..40).map(|_| Ok::<_, std::io::Error>(vec![b' '; 1 << 16])),
    ));
    let half = reqwest::Body::wrap_stream(futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>());
    for (request, status, said) in [
        (put("a").header("x", "y".repeat(40_000)), 431, "32768"),
        (put("a").body(vec![b' '; 2 << 20]), 413, "1048576"),
        (put("a").body(chunked), 413, "1048576"),
        (put("a").body(half), 408, "0.9 s"),
        (put("%ff"), 400, "UTF-8"),
    ] {
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), status);
        let problem: Problem = answer.json().await.unwrap();
        assert!(problem.error.contains(said) && problem.blame == Blame::Caller, "{problem:?}");
    }
}
