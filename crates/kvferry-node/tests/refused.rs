//! Peers that cannot be served are refused by the name of the field, at once, and nobody else notices.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::time::Duration;

use common::*;
use kvferry_node::{
    Cause, CauseKind, Limits, Node, NodeError, PeerAddr, Prompt, Receive, RoomError, Side, SourceHandle,
    SourceRoom, TransportKind,
};
use kvferry_plan::{Blame, CacheShape, Dtype, Incarnation, InstanceId, TokenRange};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

fn gqa() -> CacheShape {
    CacheShape::gqa(2, 4, 8)
}

fn prefill() -> Recipe {
    Recipe::new("prefill", &gqa(), "tp=2,page=16", TransportKind::Tcp)
}

fn decode(name: &'static str) -> Recipe {
    Recipe::new(name, &gqa(), "tp=1,page=16", TransportKind::Tcp)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_named_and_a_good_peer_is_not_disturbed() {
    let source = start(&prefill());
    let good = start(&decode("good"));
    let bad = [
        ("model", Recipe { model: "another", ..decode("bad") }),
        ("key.dtype", Recipe { kv: Dtype::F32, ..decode("bad") }),
        ("key.heads", Recipe { shape: CacheShape::gqa(2, 8, 8), ..decode("bad") }),
        ("key.layers", Recipe { shape: CacheShape::gqa(3, 4, 8), ..decode("bad") }),
        ("parts", Recipe { shape: CacheShape::mla(2, 8), ..decode("bad") }),
        ("digest", Recipe { digest: false, ..decode("bad") }),
        ("transports", Recipe { transports: vec![TransportKind::Shm], ..decode("bad") }),
    ];
    for (n, (field, recipe)) in (0..).zip(bad) {
        let bad = start(&recipe);
        let key = room(n);
        let (sending, good_room) = (source.send(key, 40), good.receive(key, 40, &source));
        let bad_room = bad.receive(room(1000 + n), 40, &source);

        let error = within(Duration::from_secs(1), bad_room.outcome()).await.unwrap_err();
        assert_eq!((error.field(), error.blame()), (Some(field), Blame::PeerIncompatible), "{error}");
        assert!(matches!(error, RoomError::Incompatible { .. }));

        compute_and_send(&source, &sending, 40, 16);
        soon(good_room.outcome()).await.unwrap();
        soon(sending.outcome()).await.unwrap();
        soon(async {
            while source.node.ledger().refused.get(field) != Some(&1) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }
    assert_eq!(good.node.ledger().completed, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_start_or_another_instance_at_the_address_is_refused() {
    let source = start(&prefill());
    let target = start(&decode("decode"));
    let ask = |n, peer: PeerAddr| {
        target.node.receive(Receive {
            key: room(n),
            peers: vec![peer],
            table: target.table(8),
            slot: None,
            tokens: TokenRange::new(0, 8),
            transport: None,
            prompt: None,
        })
    };
    let stale = PeerAddr { incarnation: Incarnation { started_ms: 1, nonce: 2 }, ..source.node.addr() };
    let error = soon(ask(1, stale).outcome()).await.unwrap_err();
    assert_eq!(error.field(), Some("incarnation"), "{error}");
    let other = PeerAddr { instance: InstanceId("prefill-9".into()), ..source.node.addr() };
    let error = soon(ask(2, other).outcome()).await.unwrap_err();
    assert_eq!(error.field(), Some("instance"), "{error}");

    let nobody = PeerAddr { endpoint: "127.0.0.1:1".into(), ..source.node.addr() };
    let error = within(Duration::from_secs(2), ask(3, nobody).outcome()).await.unwrap_err();
    assert!(matches!(error, RoomError::Unreachable { .. }), "{error}");
    let outside = PeerAddr { endpoint: "192.0.2.1:80".into(), ..source.node.addr() };
    let error = within(Duration::from_secs(2), ask(4, outside).outcome()).await.unwrap_err();
    assert!(error.to_string().contains("loopback"), "{error}");
    quiet(&target).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_on_the_port_cost_their_own_connection_only() {
    let source = start(&prefill());
    let target = start(&decode("decode"));
    let endpoint = source.node.endpoint();
    let mut idle = TcpStream::connect(&endpoint).await.unwrap();
    let goodbye = kvferry_session::Message::Goodbye(kvferry_session::Goodbye { reason: "hi".into() });
    let goodbye = kvferry_session::encode(&goodbye).unwrap();
    for junk in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0xff; 64],
        &[0; 8],
        &[5, 0, 0, 0, 0x82, 0, 0xff, 0xff, 0xff],
        &[9, 0],
        &[9, 0, 0, 0, 0x82],
        &goodbye,
    ] {
        let mut stranger = TcpStream::connect(&endpoint).await.unwrap();
        stranger.write_all(junk).await.unwrap();
        if junk.len() < 6 {
            stranger.shutdown().await.unwrap();
        }
        let mut answer = Vec::new();
        // Our hello, and then the end, well within the time that a silent peer gets.
        soon(stranger.read_to_end(&mut answer)).await.ok();
    }
    let (sent, received) = hand_over(&source, &target, room(1), 30, 30).await;
    sent.unwrap();
    received.unwrap();
    // One that says nothing is let go as well.
    let mut answer = Vec::new();
    within(Duration::from_secs(3), idle.read_to_end(&mut answer)).await.ok();
    assert!(!answer.is_empty());
    let counted = [("cut", 2), ("hello", 1), ("length", 3), ("malformed", 1), ("silent", 1)];
    let counted = counted.map(|(how, n)| (how.to_owned(), n)).into();
    soon(async {
        while source.node.ledger().broken != counted {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// A peer that is alive, as its heartbeats and questions say, but reads no answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_does_not_read_loses_its_own_rooms_only() {
    use kvferry_session::{Capabilities, Endpoint, Head, Heartbeat, Hello, Message, Open, Settled, encode};
    let mut recipe = prefill();
    recipe.transports.push(TransportKind::Shm);
    recipe.limits.outbox = 64 << 10;
    let (source, good) = (start(&recipe), start(&decode("decode")));
    let deaf = config(&decode("deaf"));
    let ours = Incarnation { started_ms: 5, nonce: 5 };
    let hello = Message::Hello(Hello {
        capabilities: Capabilities::PULL.with(Capabilities::DIGEST),
        instance: deaf.instance,
        incarnation: ours,
        descriptor: deaf.descriptor,
        pages: 64,
        transports: vec![Endpoint { name: "shm".into(), address: "shm://@nowhere".into() }],
        hosts: None,
        slots: None,
    });
    let head = |n| Head {
        key: room(n),
        generation: kvferry_plan::Generation(1),
        from: ours,
        to: source.node.incarnation(),
    };
    let (tokens, transport) = (TokenRange::new(0, 40), "shm".to_owned());
    let lost = source.send(room(1), 40);
    let mut stream = TcpStream::connect(source.node.endpoint()).await.unwrap();
    for message in [hello, Message::Open(Open { head: head(1), tokens, transport, prompt: None })] {
        stream.write_all(&encode(&message).unwrap()).await.unwrap();
    }
    lost.chunk(TokenRange::new(0, 16));
    soon(async {
        while source.node.ledger().leases == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    let (sending, receiving) = (source.send(room(2), 40), good.receive(room(2), 40, &source));

    // Each of these is answered with the end of a room that nobody knows.
    let question = Settled { head: head(99), source: kvferry_plan::RankId(0), tokens };
    let mut questions = encode(&Message::Heartbeat(Heartbeat { sequence: 1 })).unwrap();
    for _ in 0..500 {
        questions.extend(encode(&Message::Settled(question.clone())).unwrap());
    }
    let asking = async {
        for _ in 0..4000 {
            if stream.write_all(&questions).await.is_err() {
                return;
            }
        }
        panic!("its answers are kept without bound");
    };
    soon(asking).await;
    let error = within(Duration::from_secs(5), lost.outcome()).await.unwrap_err();
    assert!(error.to_string().contains("reads too slowly"), "{error}");
    assert_eq!(error.blame(), Blame::PeerMisbehaved);
    compute_and_send(&source, &sending, 40, 16);
    soon(receiving.outcome()).await.unwrap();
    soon(sending.outcome()).await.unwrap();
    quiet(&source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn configurations_that_cannot_work_do_not_start() {
    let mut wide = config(&prefill());
    wide.bind = "0.0.0.0:0".parse().unwrap();
    let error = Node::start(wide).unwrap_err();
    assert!(matches!(error, NodeError::NotLoopback(_)));
    assert!(error.to_string().contains("not authenticated"), "{error}");

    let mut missing = config(&prefill());
    missing.arenas.pop();
    assert_eq!(Node::start(missing).unwrap_err().to_string(), "node configuration: 1 pools for 2 ranks");
    let mut swapped = config(&prefill());
    let other = config(&decode("other")).arenas.remove(0);
    swapped.arenas = vec![other.clone(), other];
    assert!(Node::start(swapped).unwrap_err().to_string().contains("rank 0 is not laid out"));
    let mut mute = config(&prefill());
    mute.transports.clear();
    assert!(Node::start(mute).unwrap_err().to_string().contains("no transport"));

    let taken = start(&prefill());
    let mut second = config(&prefill());
    second.bind = taken.node.endpoint().parse().unwrap();
    let error = Node::start(second).unwrap_err();
    assert_eq!(error.blame(), Blame::Environment, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_room_is_started_once_per_attempt() {
    let source = start(&prefill());
    let target = start(&decode("decode"));
    let key = room(1);
    let first = source.send(key, 16);
    let again = soon(source.send(key, 16).outcome()).await.unwrap_err();
    assert_eq!(again.blame(), Blame::Caller);
    assert!(matches!(again, RoomError::Rejected { .. }), "{again}");

    let receiving = target.receive(key, 16, &source);
    compute_and_send(&source, &first, 16, 16);
    soon(receiving.outcome()).await.unwrap();
    soon(first.outcome()).await.unwrap();
    // It has ended, and is still remembered.
    assert!(matches!(soon(source.send(key, 16).outcome()).await, Err(RoomError::Rejected { .. })));
    assert!(matches!(
        soon(target.receive(key, 16, &source).outcome()).await,
        Err(RoomError::Rejected { .. })
    ));
    assert!(matches!(soon(source.send(room(2), 0).outcome()).await, Err(RoomError::Rejected { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_room_has_one_reader() {
    let source = start(&prefill());
    let (first, second) = (start(&decode("first")), start(&decode("second")));
    let key = room(1);
    let sending = source.send(key, 20);
    let reading = first.receive(key, 20, &source);
    soon(async {
        while first.node.ledger().grants == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        // The open follows the grant at once.
        tokio::time::sleep(Duration::from_millis(50)).await;
    })
    .await;
    let error = soon(second.receive(key, 20, &source).outcome()).await.unwrap_err();
    assert!(error.to_string().contains("read by somebody else"), "{error}");
    compute_and_send(&source, &sending, 20, 20);
    soon(reading.outcome()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_may_come_first_and_waits_for_prefill_but_not_for_ever() {
    let mut recipe = prefill();
    recipe.limits = Limits {
        rooms: kvferry_session::Limits { join: Duration::from_millis(300), ..Default::default() },
        ..Limits::default()
    };
    let source = start(&recipe);
    let target = start(&decode("decode"));
    let early = target.receive(room(1), 20, &source);
    soon(async {
        while source.node.ledger().waiting == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    let sending = source.send(room(1), 20);
    compute_and_send(&source, &sending, 20, 7);
    soon(early.outcome()).await.unwrap();
    assert_eq!(target.wrong_bytes(room(1), &target.table(20), TokenRange::new(0, 20)), 0);

    let alone = target.receive(room(2), 20, &source);
    let error = within(Duration::from_secs(2), alone.outcome()).await.unwrap_err();
    let RoomError::Ended { cause, .. } = &error else { panic!("{error}") };
    assert_eq!(cause.kind, CauseKind::Unknown, "{error}");

    // And prefill does not wait for ever for a decode that never comes.
    let sending = source.send(room(3), 20);
    compute_and_send(&source, &sending, 20, 20);
    let error = within(Duration::from_secs(2), sending.outcome()).await.unwrap_err();
    assert!(error.to_string().contains("was not opened"), "{error}");
    quiet(&source).await;
    quiet(&target).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_another_prompt_is_refused_on_both_sides() {
    let (source, target) = (start(&prefill()), start(&decode("decode")));
    let (ours, theirs) = (Prompt::of(&[1; 40]), Prompt::of(&[2; 40]));
    for (n, prompt) in [(1, Some(theirs)), (2, Some(ours)), (3, None)] {
        let (key, tokens) = (room(n), TokenRange::new(0, 40));
        let table = source.table(40);
        let sending = source.node.send(SourceRoom { key, table, slot: None, tokens, prompt: Some(ours) });
        let (peers, table) = (vec![source.node.addr()], target.table(40));
        let receiving =
            target.node.receive(Receive { key, peers, table, slot: None, tokens, prompt, transport: None });
        compute_and_send(&source, &sending, 40, 16);
        let (sent, received) = soon(async { tokio::join!(sending.outcome(), receiving.outcome()) }).await;
        if n == 1 {
            for error in [sent.unwrap_err(), received.unwrap_err()] {
                assert_eq!(error.blame(), Blame::Caller, "{error}");
                assert!(error.to_string().contains("`prompt`"), "{error}");
            }
        } else {
            assert_eq!(sent.unwrap().bytes, received.unwrap().bytes);
        }
    }
    quiet(&source).await;
    quiet(&target).await;
}

/// A pair that does not fit is found by decode; prefill's room must not wait for a reader that will never come.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_pair_ends_the_room_on_both_sides_with_the_field() {
    let source = start(&prefill());
    let bad = [
        ("model", Recipe { model: "another", ..decode("bad") }),
        ("key.dtype", Recipe { kv: Dtype::F32, ..decode("bad") }),
        ("transports", Recipe { transports: vec![TransportKind::Shm], ..decode("bad") }),
    ];
    for (n, (field, recipe)) in (0..).zip(bad) {
        let bad = start(&recipe);
        for (at, prefill_first) in [(2 * n, true), (2 * n + 1, false)] {
            let key = room(at);
            let early = prefill_first.then(|| source.send(key, 40));
            if let Some(sending) = &early {
                compute_and_send(&source, sending, 40, 16);
            }
            let error = within(BOUND, bad.receive(key, 40, &source).outcome()).await.unwrap_err();
            assert_eq!(error.field(), Some(field), "{error}");
            if early.is_none() {
                soon(async {
                    while source.node.ledger().tombstones <= at as u64 {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                })
                .await;
            }
            let sending = early.unwrap_or_else(|| source.send(key, 40));
            let error = within(BOUND, sending.outcome()).await.unwrap_err();
            let RoomError::Ended { cause, .. } = &error else { panic!("{error}") };
            assert_eq!(cause.kind, CauseKind::Incompatible, "{error}");
            assert!(cause.text.contains(&format!("`{field}`")), "{error}");
            assert_eq!(error.blame(), Blame::PeerIncompatible);
        }
    }
    quiet(&source).await;
}

/// Every rank of a source lives in a process of its own; a pair that is refused ends the room at each.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_built_is_refused_on_every_rank_of_both_sides() {
    let ranks =
        [0, 1].map(|rank| start(&Recipe { hosts: Some(vec![kvferry_plan::RankId(rank)]), ..prefill() }));
    let good = start(&decode("good"));
    let bad = [
        ("context parallel", Recipe { spec: "tp=2,cp=2,page=16", ..decode("bad") }),
        ("host tier", Recipe { spec: "tp=2,dcp=2,page=16", host_pages: Some(64), ..decode("bad") }),
        ("key.dtype", Recipe { kv: Dtype::F32, ..decode("bad") }),
        ("model", Recipe { model: "another", ..decode("bad") }),
    ];
    let peers = || ranks.each_ref().map(|rank| rank.node.addr()).to_vec();
    for (n, (axis, recipe)) in (0..).zip(bad) {
        let bad = start(&recipe);
        let (key, other) = (room(2 * n), room(2 * n + 1));
        let served = ranks.each_ref().map(|rank| rank.send(other, 40));
        let receiving = good.receive_from(other, 40, peers());

        let waits = ranks.each_ref().map(|rank| rank.send(key, 40));
        let refused = within(BOUND, bad.receive_from(key, 40, peers()).outcome()).await.unwrap_err();
        assert_eq!((refused.field(), refused.blame()), (Some(axis), Blame::PeerIncompatible), "{refused}");
        for waiting in waits {
            let error = within(BOUND, waiting.outcome()).await.unwrap_err();
            assert!(error.to_string().contains(&format!("`{axis}`")), "{error}");
            assert_eq!(error.blame(), Blame::PeerIncompatible, "{error}");
        }
        quiet(&bad).await;

        for (rank, sending) in ranks.iter().zip(&served) {
            compute_and_send(rank, sending, 40, 16);
        }
        soon(receiving.outcome()).await.unwrap();
        for sending in served {
            soon(sending.outcome()).await.unwrap();
        }
    }
    for rank in &ranks {
        quiet(rank).await;
    }
}

/// Decode was told an old address: whoever answers there now has the room, and hears that it will not be asked for.
#[tokio::test(flavor = "multi_thread")]
async fn a_room_at_a_restarted_prefill_ends_when_decode_asks_for_the_old_one() {
    let source = start(&prefill());
    let target = start(&decode("decode"));
    let old = PeerAddr { incarnation: Incarnation { started_ms: 1, nonce: 2 }, ..source.node.addr() };
    let other = PeerAddr { instance: InstanceId("prefill-9".into()), ..source.node.addr() };
    for (n, field, peer) in [(1, "incarnation", old), (2, "instance", other)] {
        let sending = source.send(room(n), 40);
        compute_and_send(&source, &sending, 40, 40);
        let receiving = target.receive_from(room(n), 40, vec![peer]);
        assert_eq!(within(BOUND, receiving.outcome()).await.unwrap_err().field(), Some(field));
        let error = within(BOUND, sending.outcome()).await.unwrap_err();
        assert!(error.to_string().contains(field), "{error}");
    }
    let (sent, received) = hand_over(&source, &target, room(3), 40, 16).await;
    sent.unwrap();
    received.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_declined_room_ends_at_its_source_and_a_live_one_does_not() {
    let source = start(&prefill());
    let target = start(&decode("decode"));
    let declined = |n| {
        let cause = Cause::new(CauseKind::Aborted, Side::Target, "the prompt is too long for decode");
        target.node.decline(room(n), vec![source.node.addr()], cause);
    };
    let told = async |sending: SourceHandle| {
        let error = within(BOUND, sending.outcome()).await.unwrap_err();
        assert!(error.to_string().contains("too long for decode"), "{error}");
        assert_eq!(error.blame(), Blame::Caller);
    };
    // Without a connection, and with one.
    for n in [1, 2] {
        let sending = source.send(room(n), 40);
        compute_and_send(&source, &sending, 40, 40);
        declined(n);
        told(sending).await;
    }
    // Before prefill knows of it.
    let ended = source.node.ledger().tombstones;
    declined(3);
    soon(async {
        while source.node.ledger().tombstones == ended {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    told(source.send(room(3), 40)).await;
    // It is over at decode too.
    let again = soon(target.receive(room(3), 40, &source).outcome()).await.unwrap_err();
    assert!(matches!(again, RoomError::Rejected { .. }), "{again}");

    // A duplicate of a room that is received, or was, is no reason to end it.
    let (sending, receiving) = (source.send(room(4), 40), target.receive(room(4), 40, &source));
    declined(4);
    compute_and_send(&source, &sending, 40, 16);
    soon(receiving.outcome()).await.unwrap();
    soon(sending.outcome()).await.unwrap();
    declined(4);
    quiet(&source).await;
    quiet(&target).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_withheld_room_ends_at_whoever_has_opened_it() {
    let source = start(&prefill());
    let target = start(&decode("decode"));
    let cause = Cause::new(CauseKind::Unavailable, Side::Source, "the queue is full");
    let waits = target.receive(room(1), 40, &source);
    soon(async {
        while source.node.ledger().waiting == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    source.node.withhold(room(1), cause.clone());
    source.node.withhold(room(2), cause.clone());
    for receiving in [waits, target.receive(room(2), 40, &source)] {
        let error = within(BOUND, receiving.outcome()).await.unwrap_err();
        assert!(error.to_string().contains("the queue is full"), "{error}");
        assert_eq!(error.blame(), Blame::Environment);
    }
    let (sending, receiving) = (source.send(room(3), 40), target.receive(room(3), 40, &source));
    source.node.withhold(room(3), cause);
    compute_and_send(&source, &sending, 40, 16);
    soon(receiving.outcome()).await.unwrap();
    soon(sending.outcome()).await.unwrap();
    quiet(&source).await;
    quiet(&target).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_on_the_data_port_are_counted_by_cause() {
    let target = start(&decode("decode"));
    let source = start(&prefill());
    let (_, endpoint) = target.node.transports().remove(0);
    let at = endpoint.strip_prefix("tcp://").unwrap();
    let absurd = [&b"kvferry\x01"[..], &[0xff; 4]].concat();
    let half = [&b"kvferry\x01"[..], &[20, 0]].concat();
    for junk in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &absurd, &half] {
        let mut stranger = TcpStream::connect(at).await.unwrap();
        stranger.write_all(junk).await.unwrap();
        if junk.len() < 12 {
            stranger.shutdown().await.unwrap();
        }
        soon(stranger.read_to_end(&mut Vec::new())).await.ok();
    }
    let counted = [("tcp.cut", 1), ("tcp.length", 1), ("tcp.malformed", 2)];
    let counted = counted.map(|(how, n)| (how.to_owned(), n)).into();
    soon(async {
        while target.node.ledger().broken != counted {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let (sent, received) = hand_over(&source, &target, room(1), 30, 30).await;
    sent.unwrap();
    received.unwrap();
}
