//! Client and server over a real loopback port.

#![allow(clippy::unwrap_used)]
#![cfg(all(feature = "client", feature = "server"))]

use std::{net::SocketAddr, time::Duration};

use kvferry_plan::{Blame, CacheShape, Descriptor, Dtype, Incarnation, InstanceId, PROTOCOL, Placement};
use kvferry_registry::{
    BindError, Client, ClientError, Member, Role, State, Store, bind_loopback, loopback_http, router,
};
use tokio::{net::TcpListener, task::JoinHandle, time::timeout};

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
        descriptor: Descriptor {
            protocol: PROTOCOL,
            model: "abc".into(),
            placement: Placement::single(&shape, 16, Dtype::Bf16),
            shape,
        },
        transports: vec!["shm:///tmp/x".into()],
    }
}

fn start(listener: TcpListener, lease: Duration) -> JoinHandle<()> {
    tokio::spawn(async move { axum::serve(listener, router(Store::new(lease))).await.unwrap() })
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
    assert_eq!(client.find(&InstanceId("prefill-0".into())).await.unwrap(), Some(member(5)));

    let refused = client.register(&member(4)).await.unwrap_err();
    assert!(matches!(refused, ClientError::Refused { status: 409, blame: Blame::Caller, .. }), "{refused}");
    let older = client.keep(member(4));
    let reason = timeout(SOON, older.registered()).await.unwrap().unwrap_err();
    assert!(reason.contains("older incarnation 4-"), "{reason}");

    kept.leave().await.unwrap();
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
    tokio::spawn(async move { axum::serve(listener, axum::Router::new()).await.unwrap() });
    let reason =
        timeout(SOON, Client::new(&other).unwrap().keep(member(5)).registered()).await.unwrap().unwrap_err();
    assert!(reason.contains("404"), "{reason}");
}

#[tokio::test]
async fn only_loopback() {
    let refused = bind_loopback("0.0.0.0:0".parse().unwrap()).await.unwrap_err();
    assert!(matches!(refused, BindError::NotLoopback(_)));
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
