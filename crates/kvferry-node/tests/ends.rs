//! Rooms end on both sides, once, soon, with the same cause, and leave nothing behind, whenever and however they end.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::time::{Duration, Instant};

use common::*;
use kvferry_node::{CauseKind, PeerAddr, Receipt, Receive, RoomError, SourceReceipt, TransportKind};
use kvferry_plan::{Blame, CacheShape, TokenRange};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    time::sleep,
};

const SECOND: Duration = Duration::from_secs(1);

fn nodes(transport: TransportKind) -> (Instance, Instance) {
    let shape = CacheShape::mla(2, 20);
    let source = start(&Recipe::new("prefill", &shape, "tp=2,page=16", transport));
    let target = start(&Recipe::new("decode", &shape, "tp=4,dcp=4,page=16", transport));
    (source, target)
}

fn cause(error: &RoomError) -> &kvferry_node::Cause {
    match error {
        RoomError::Ended { cause, .. } => cause,
        other => panic!("{other}"),
    }
}

/// Both ends of one room tell the same.
fn one_end(sent: &Result<SourceReceipt, RoomError>, received: &Result<Receipt, RoomError>) {
    match (sent, received) {
        (Ok(_), Ok(_)) => {}
        (Err(s), Err(r)) => assert_eq!(cause(s), cause(r)),
        other => panic!("two ends of one room: {other:?}"),
    }
}

/// Where a room is when somebody gives it up.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// Both have just asked for it.
    Start,
    /// Opened, nothing computed.
    Opened,
    /// Some chunks are on their way.
    Chunks,
    /// Everything was sent; the verdict may or may not be there.
    Finished,
    /// Over.
    Ended,
}

async fn abort(transport: TransportKind, moment: Moment, at_source: bool, n: u128) {
    let (source, target) = nodes(transport);
    let key = room(n);
    let sending = source.send(key, 200);
    let receiving = target.receive(key, 200, &source);
    if !matches!(moment, Moment::Start) {
        soon(async {
            while source.node.ledger().connections == 0 || target.node.ledger().grants == 0 {
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
        sleep(Duration::from_millis(20)).await;
    }
    match moment {
        Moment::Start | Moment::Opened => {}
        Moment::Chunks => {
            for start in (0..100).step_by(10) {
                sending.chunk(TokenRange::new(start, start + 10));
            }
        }
        Moment::Finished => compute_and_send(&source, &sending, 200, 10),
        Moment::Ended => {
            compute_and_send(&source, &sending, 200, 10);
            soon(receiving.outcome()).await.unwrap();
            soon(sending.outcome()).await.unwrap();
        }
    }
    let since = Instant::now();
    for _ in 0..2 {
        if at_source {
            sending.abort("the client left");
        } else {
            receiving.abort("the client left");
        }
    }
    let case = format!("{transport} {moment:?} source {at_source}");
    let (sent, received) =
        within(SECOND, async { tokio::join!(sending.outcome(), receiving.outcome()) }).await;
    match (moment, at_source) {
        (Moment::Ended, _) => assert!(sent.is_ok() && received.is_ok(), "{case}"),
        (Moment::Finished, _) => one_end(&sent, &received),
        // The other end may hear of the room only after it is dead, and then hears that.
        (Moment::Start, _) => assert!(sent.is_err() && received.is_err(), "{case}"),
        _ => {
            one_end(&sent, &received);
            let error = received.unwrap_err();
            assert_eq!((cause(&error).kind, error.blame()), (CauseKind::Aborted, Blame::Caller), "{case}");
            assert!(error.to_string().contains("the client left"), "{case}: {error}");
        }
    }
    assert!(since.elapsed() < SECOND, "{case}");
    quiet(&source).await;
    quiet(&target).await;
    // The pair goes on.
    if !matches!(moment, Moment::Start) {
        let (sent, received) = hand_over(&source, &target, room(n + 1000), 30, 30).await;
        sent.unwrap();
        received.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn either_side_may_give_up_at_any_moment_and_twice() {
    let mut n = 0;
    for transport in EVERY {
        for moment in [Moment::Start, Moment::Opened, Moment::Chunks, Moment::Finished, Moment::Ended] {
            for at_source in [true, false] {
                n += 1;
                abort(transport, moment, at_source, n).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_that_gives_up_before_it_is_connected_leaves_nothing() {
    let (source, target) = nodes(TransportKind::Tcp);
    let receiving = target.receive(room(1), 20, &source);
    receiving.abort("never mind");
    let error = within(SECOND, receiving.outcome()).await.unwrap_err();
    assert_eq!(error.blame(), Blame::Caller);
    quiet(&source).await;
    quiet(&target).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_handles_are_aborts() {
    let (source, target) = nodes(TransportKind::Tcp);
    let sending = source.send(room(1), 20);
    let receiving = target.receive(room(1), 20, &source);
    drop(sending);
    let error = within(SECOND, receiving.outcome()).await.unwrap_err();
    assert!(error.to_string().contains("dropped"), "{error}");

    let sending = source.send(room(2), 20);
    drop(target.receive(room(2), 20, &source));
    sleep(Duration::from_millis(100)).await;
    // Whether it was connected in time or not, prefill can give up as well.
    sending.abort("tidy");
    assert_eq!(within(SECOND, sending.outcome()).await.unwrap_err().blame(), Blame::Caller);

    // After the computation a source's handle is not needed any more.
    let sending = source.send(room(3), 20);
    let receiving = target.receive(room(3), 20, &source);
    compute_and_send(&source, &sending, 20, 20);
    drop(sending);
    soon(receiving.outcome()).await.unwrap();
    quiet(&source).await;
    quiet(&target).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_does_not_keep_its_word_is_told() {
    let (source, target) = nodes(TransportKind::Tcp);
    let key = room(1);
    let (sending, receiving) = (source.send(key, 30), target.receive(key, 30, &source));
    sending.chunk(TokenRange::new(0, 10));
    sending.finish(FIRST);
    let (sent, received) =
        within(SECOND, async { tokio::join!(sending.outcome(), receiving.outcome()) }).await;
    assert!(sent.as_ref().unwrap_err().to_string().contains("finished after 10 of 30 tokens"));
    one_end(&sent, &received);

    let sending = source.send(room(2), 30);
    sending.chunk(TokenRange::new(0, 20));
    sending.chunk(TokenRange::new(10, 30));
    let error = within(SECOND, sending.outcome()).await.unwrap_err();
    assert_eq!(error.blame(), Blame::Caller);
    assert!(error.to_string().contains("10..30"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_that_do_not_fit_are_the_callers_fault_and_named() {
    for transport in EVERY {
        let (source, target) = nodes(transport);
        let ask = |n, pages: u32, tokens| {
            target.node.receive(Receive {
                key: room(n),
                peers: vec![source.node.addr()],
                table: kvferry_plan::PageTable::identity(pages),
                slot: None,
                tokens: TokenRange::new(0, tokens),
                transport: None,
                prompt: None,
            })
        };
        // 300 tokens over four DCP ranks need five pages of 16.
        let error = within(SECOND, ask(1, 4, 300).outcome()).await.unwrap_err();
        assert!(error.to_string().contains("page"), "{transport}: {error}");
        let error = within(SECOND, ask(2, 100, 64 * 100).outcome()).await.unwrap_err();
        assert!(error.to_string().contains("page"), "{transport}: {error}");

        let sending = source.node.send(kvferry_node::SourceRoom {
            key: room(3),
            table: kvferry_plan::PageTable::identity(1),
            slot: None,
            tokens: TokenRange::new(0, 20),
            prompt: None,
        });
        sending.chunk(TokenRange::new(0, 20));
        let error = within(SECOND, sending.outcome()).await.unwrap_err();
        assert_eq!(error.blame(), Blame::Caller, "{error}");
        assert!(error.to_string().contains("page table of 1 pages"), "{error}");
        quiet(&target).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_dropped_fails_the_rooms_of_its_peer_within_a_second() {
    for transport in EVERY {
        for drop_source in [true, false] {
            let (source, target) = nodes(transport);
            let key = room(1);
            let (sending, receiving) = (source.send(key, 200), target.receive(key, 200, &source));
            sending.chunk(TokenRange::new(0, 50));
            sleep(Duration::from_millis(100)).await;
            let case = format!("{transport} source {drop_source}");
            if drop_source {
                drop(source);
                let error = within(SECOND, receiving.outcome()).await.unwrap_err();
                let lost = matches!(cause(&error).kind, CauseKind::Lost | CauseKind::Transport);
                assert!(lost && error.blame() == Blame::PeerMisbehaved, "{case}: {error}");
                assert_eq!(within(SECOND, sending.outcome()).await, Err(RoomError::ShutDown));
                quiet(&target).await;
                assert_eq!(target.node.ledger().connections, 0, "{case}");
                // The next start of the peer is served.
                let (again, _) = nodes(transport);
                let (sent, received) = hand_over(&again, &target, room(2), 100, 30).await;
                sent.unwrap();
                received.unwrap();
            } else {
                drop(target);
                let error = within(SECOND, sending.outcome()).await.unwrap_err();
                assert_eq!(error.blame(), Blame::PeerMisbehaved, "{case}: {error}");
                assert_eq!(within(SECOND, receiving.outcome()).await, Err(RoomError::ShutDown));
                quiet(&source).await;
                let (_, again) = nodes(transport);
                let (sent, received) = hand_over(&source, &again, room(2), 100, 30).await;
                sent.unwrap();
                received.unwrap();
            }
        }
    }
}

/// A pair whose source ends what is open this long after it begins to shut down.
fn draining(transport: TransportKind, drain: Duration) -> (Instance, Instance) {
    let shape = CacheShape::mla(2, 20);
    let mut recipe = Recipe::new("prefill", &shape, "tp=2,page=16", transport);
    recipe.limits.drain = drain;
    let target = start(&Recipe::new("decode", &shape, "tp=4,dcp=4,page=16", transport));
    (start(&recipe), target)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_lets_open_rooms_end_and_takes_no_new_ones() {
    for transport in EVERY {
        let (source, target) = draining(transport, Duration::from_secs(10));
        let key = room(1);
        let (sending, receiving) = (source.send(key, 200), target.receive(key, 200, &source));
        // Announced, but not opened yet: it is one of the rooms that are let in.
        let (later, early) = (source.send(room(2), 50), target.receive(room(9), 50, &source));
        soon(async {
            while source.node.ledger().waiting == 0 {
                sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
        let down = tokio::spawn({
            let node = source.node.clone();
            async move { node.shutdown().await }
        });
        // An open that waits for a room that will never be announced now.
        let error = within(SECOND, early.outcome()).await.unwrap_err();
        assert_eq!(
            (cause(&error).kind, error.blame()),
            (CauseKind::Unavailable, Blame::Environment),
            "{error}"
        );
        assert_eq!(soon(source.send(room(3), 10).outcome()).await, Err(RoomError::ShutDown));
        let error = within(SECOND, target.receive(room(3), 10, &source).outcome()).await.unwrap_err();
        assert!(error.to_string().contains("shutting down"), "{error}");
        assert!(!down.is_finished());

        later.abort("not needed");
        compute_and_send(&source, &sending, 200, 50);
        soon(receiving.outcome()).await.unwrap();
        soon(sending.outcome()).await.unwrap();
        assert_eq!(target.wrong_bytes(key, &target.table(200), TokenRange::new(0, 200)), 0, "{transport}");
        within(SECOND * 2, down).await.unwrap();
        assert!(source.node.ledger().is_quiet());
        soon(async {
            while target.node.ledger().connections > 0 {
                sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_ends_what_takes_too_long_and_tells_the_peers() {
    for transport in EVERY {
        let (source, target) = draining(transport, Duration::from_millis(200));
        let key = room(1);
        let (sending, receiving) = (source.send(key, 200), target.receive(key, 200, &source));
        sending.chunk(TokenRange::new(0, 50));
        sleep(Duration::from_millis(100)).await;
        within(Duration::from_secs(3), source.node.shutdown()).await;
        let (sent, received) =
            within(SECOND, async { tokio::join!(sending.outcome(), receiving.outcome()) }).await;
        one_end(&sent, &received);
        let error = received.unwrap_err();
        assert_eq!(cause(&error).kind, CauseKind::Unavailable, "{error}");
        assert!(source.node.ledger().is_quiet());
        assert_eq!(soon(source.send(room(2), 10).outcome()).await, Err(RoomError::ShutDown));
        quiet(&target).await;
        // Twice is harmless, and an idle node goes at once.
        within(SECOND, source.node.shutdown()).await;
        within(SECOND, target.node.shutdown()).await;
    }
}

/// Forwards a node's control connections and can fall silent without closing them, like a stopped process.
async fn proxy(to: PeerAddr) -> (PeerAddr, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = listener.local_addr().unwrap().to_string();
    let (open, is_open) = watch::channel(true);
    let upstream = to.endpoint.clone();
    tokio::spawn(async move {
        loop {
            let (mut near, _) = listener.accept().await.unwrap();
            let mut far = TcpStream::connect(&upstream).await.unwrap();
            let mut is_open = is_open.clone();
            tokio::spawn(async move {
                let silence = async { is_open.wait_for(|open| !open).await.is_ok() };
                let silent = tokio::select! {
                    _ = copy_bidirectional(&mut near, &mut far) => false,
                    silent = silence => silent,
                };
                if silent {
                    // Keep both sockets, say nothing.
                    is_open.changed().await.ok();
                }
            });
        }
    });
    (PeerAddr { endpoint, ..to }, open)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_peer_is_dead_within_a_second_and_others_are_not_disturbed() {
    let (source, target) = nodes(TransportKind::Tcp);
    let (_, bystander) = nodes(TransportKind::Tcp);
    let (peer, open) = proxy(source.node.addr()).await;
    let key = room(1);
    let sending = source.send(key, 100);
    let receiving = target.node.receive(Receive {
        key,
        peers: vec![peer],
        table: target.table(100),
        slot: None,
        tokens: TokenRange::new(0, 100),
        transport: None,
        prompt: None,
    });
    let (good_sending, good) = (source.send(room(2), 100), bystander.receive(room(2), 100, &source));
    sending.chunk(TokenRange::new(0, 50));
    // Longer than it takes to be declared dead: heartbeats keep an idle room alive.
    sleep(Duration::from_millis(1500)).await;
    assert_eq!((target.node.ledger().receiving, source.node.ledger().sending), (1, 2));

    open.send_replace(false);
    let (sent, received) =
        within(SECOND, async { tokio::join!(sending.outcome(), receiving.outcome()) }).await;
    for error in [sent.unwrap_err(), received.unwrap_err()] {
        assert_eq!((cause(&error).kind, error.blame()), (CauseKind::Lost, Blame::PeerMisbehaved), "{error}");
        assert!(error.to_string().contains("silent"), "{error}");
    }
    compute_and_send(&source, &good_sending, 100, 25);
    soon(good.outcome()).await.unwrap();
    soon(good_sending.outcome()).await.unwrap();
    quiet(&source).await;
    quiet(&target).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_many_rooms_the_ledger_is_where_it_was() {
    for transport in EVERY {
        let (source, target) = nodes(transport);
        hand_over(&source, &target, room(0), 10, 10).await.1.unwrap();
        quiet(&source).await;
        quiet(&target).await;
        let held = |i: &Instance| {
            let l = i.node.ledger();
            (
                l.sending,
                l.receiving,
                l.waiting,
                l.leases,
                l.grants,
                l.jobs,
                l.connections,
                l.links,
                l.accepted,
            )
        };
        let before = (held(&source), held(&target));
        for n in 1..60 {
            let (sending, receiving) = (source.send(room(n), 60), target.receive(room(n), 60, &source));
            for start in (0..60).step_by(20) {
                sending.chunk(TokenRange::new(start, start + 20));
            }
            match n % 3 {
                0 => sending.abort("left"),
                1 => receiving.abort("left"),
                _ => sending.finish(FIRST),
            }
            let (sent, received) = soon(async { tokio::join!(sending.outcome(), receiving.outcome()) }).await;
            if n % 3 == 2 {
                sent.unwrap();
                received.unwrap();
            }
        }
        quiet(&source).await;
        quiet(&target).await;
        assert_eq!((held(&source), held(&target)), before, "{transport}");
    }
}
