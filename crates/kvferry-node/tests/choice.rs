//! A pair uses the best transport that both sides have and says why, and goes on with the next where no link comes about.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use common::*;
use kvferry_node::{
    CauseKind, Limits, Moment, Node, NodeError, Observer, PeerAddr, Receipt, RoomError, Side, SourceReceipt,
    TransportKind,
};
use kvferry_plan::{CacheShape, RankId, RoomKey, TokenRange};
use kvferry_session::{MAX_HELLO, Message, decode, encode, frame_len};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
};

use TransportKind::{MooncakeTcp, Shm, Tcp};

const TOKENS: u64 = 40;

fn instance(name: &'static str, transports: &[TransportKind], limits: &Limits) -> Instance {
    let spec = if name == "prefill" { "tp=2,page=16" } else { "tp=1,page=8" };
    let recipe = Recipe::new(name, &CacheShape::gqa(2, 4, 8), spec, Tcp);
    start(&Recipe { transports: transports.to_vec(), limits: limits.clone(), ..recipe })
}

#[derive(Debug, Default)]
struct Unlinked(Mutex<Vec<TransportKind>>);

impl Observer for Unlinked {
    fn saw(&self, _: Side, _: RoomKey, moment: Moment) {
        if let Moment::Unlinked { transport, .. } = moment {
            self.0.lock().unwrap().push(transport);
        }
    }
}

impl Unlinked {
    fn of(instance: &Instance) -> Arc<Self> {
        let seen = Arc::new(Self::default());
        instance.node.observe(seen.clone());
        seen
    }

    fn seen(&self) -> Vec<TransportKind> {
        self.0.lock().unwrap().clone()
    }
}

/// Transports whose address one side is told wrongly: those of prefill, and those of decode.
#[derive(Clone, Copy)]
struct Broken(&'static [TransportKind], &'static [TransportKind]);

/// A way to a node's control plane on which nobody listens at some of the transports' addresses.
async fn detour(to: &Instance, broken: Broken) -> PeerAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (endpoint, node) = (listener.local_addr().unwrap().to_string(), to.node.endpoint());
    tokio::spawn(async move {
        while let Ok((mut decode, _)) = listener.accept().await {
            let mut prefill = TcpStream::connect(node.parse::<SocketAddr>().unwrap()).await.unwrap();
            tokio::spawn(async move {
                let Broken(of_prefill, of_decode) = broken;
                prefill.write_all(&greeting(&mut decode, of_decode).await).await.unwrap();
                decode.write_all(&greeting(&mut prefill, of_prefill).await).await.unwrap();
                copy_bidirectional(&mut decode, &mut prefill).await.ok();
            });
        }
    });
    PeerAddr { endpoint, ..to.node.addr() }
}

/// The first message, with wrong addresses.
async fn greeting(from: &mut TcpStream, broken: &[TransportKind]) -> Vec<u8> {
    let mut prefix = [0; 4];
    from.read_exact(&mut prefix).await.unwrap();
    let mut body = vec![0; frame_len(prefix, MAX_HELLO).unwrap() as usize];
    from.read_exact(&mut body).await.unwrap();
    let Message::Hello(mut hello) = decode(&body).unwrap() else { panic!("no hello") };
    for at in hello.transports.iter_mut().filter(|at| broken.iter().any(|kind| kind.name() == at.name)) {
        at.address = match at.name.as_str() {
            "shm" => "shm://@nobody".into(),
            // Port 1 is nobody's.
            name => format!("{name}://127.0.0.1:1"),
        };
    }
    encode(&Message::Hello(hello)).unwrap()
}

async fn hand_over_by(
    source: &Instance,
    target: &Instance,
    n: u128,
    by: &PeerAddr,
) -> (Result<SourceReceipt, RoomError>, Result<Receipt, RoomError>) {
    source.clear();
    target.clear();
    let sending = source.send(room(n), TOKENS);
    let receiving = target.receive_from(room(n), TOKENS, vec![by.clone()]);
    compute_and_send(source, &sending, TOKENS, 16);
    soon(async { tokio::join!(sending.outcome(), receiving.outcome()) }).await
}

fn exact(target: &Instance, n: u128) {
    let wrong = target.wrong_bytes(room(n), &target.table(TOKENS), TokenRange::new(0, TOKENS));
    assert_eq!(wrong, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_pair_uses_the_best_that_both_have_whoever_says_it_first() {
    let limits = Limits::default();
    let source = instance("prefill", &[Tcp, MooncakeTcp, Shm], &limits);
    let cases: [(&str, &[TransportKind], TransportKind, &str); 4] = [
        ("one", &[Shm], Shm, "the only one that both have"),
        ("two", &[Tcp, Shm], Tcp, "both have shm and tcp, and want tcp first"),
        (
            "three",
            &[MooncakeTcp, Tcp],
            Tcp,
            "both have tcp and mooncake-tcp; prefill wants tcp first and decode mooncake-tcp, so kvferry's order decides",
        ),
        (
            "four",
            &[MooncakeTcp, Shm],
            MooncakeTcp,
            "both have shm and mooncake-tcp, and want mooncake-tcp first",
        ),
    ];
    for (n, (name, transports, chosen, why)) in (1..).zip(cases) {
        let target = instance(name, transports, &limits);
        let (sent, received) = hand_over_by(&source, &target, n, &source.node.addr()).await;
        sent.unwrap();
        let receipt = received.unwrap();
        assert_eq!((receipt.transport, receipt.why.as_str()), (chosen, why));
        exact(&target, n);
        for (node, other) in [(&source.node, name), (&target.node, "prefill")] {
            let peers = node.peers();
            let peer = peers.iter().find(|peer| peer.peer.0 == other).unwrap();
            assert_eq!((peer.transport, peer.why.as_str()), (chosen, why));
        }
    }
}

/// The mover finds that there is no link before the room is bound: decode where it pulls, prefill where it pushes.
#[tokio::test(flavor = "multi_thread")]
async fn a_room_goes_on_with_the_next_where_no_link_comes_about() {
    let limits = Limits::default();
    let cases: [(&[TransportKind], Broken, &str, TransportKind); 4] = [
        (&[Shm, Tcp], Broken(&[Shm], &[]), "no link came about over shm", Tcp),
        (&[Tcp, Shm], Broken(&[], &[Tcp]), "no link came about over tcp", Shm),
        (&[MooncakeTcp, Shm, Tcp], Broken(&[Shm], &[MooncakeTcp]), "over mooncake-tcp and shm", Tcp),
        (&[MooncakeTcp, Tcp, Shm], Broken(&[], &[MooncakeTcp, Tcp]), "over mooncake-tcp and tcp", Shm),
    ];
    for (transports, broken, why, chosen) in cases {
        let (source, target) =
            (instance("prefill", transports, &limits), instance("decode", transports, &limits));
        let seen = [Unlinked::of(&source), Unlinked::of(&target)];
        let by = detour(&source, broken).await;
        for n in 1..=3 {
            let (sent, received) = hand_over_by(&source, &target, n, &by).await;
            let receipt = received.unwrap_or_else(|error| panic!("{transports:?}: {error}"));
            assert_eq!(receipt.transport, chosen, "{transports:?}");
            assert!(receipt.why.contains(why), "{}", receipt.why);
            assert!(sent.unwrap().bytes == receipt.bytes);
            exact(&target, n);
        }
        // The first room alone has waited for what does not work. The target is told what the source found.
        let Broken(pulled, pushed) = broken;
        assert_eq!(seen[0].seen().len(), pushed.len(), "{transports:?}");
        assert_eq!(seen[1].seen().len(), pulled.len() + pushed.len(), "{transports:?}");
        assert_eq!(target.node.ledger().failed.len(), 0);
        soon(async { tokio::join!(quiet(&source), quiet(&target)) }).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_failed_is_tried_again_after_a_while_and_when_nothing_else_is_left() {
    let limits = Limits { relink: Duration::ZERO, ..Limits::default() };
    let (source, target) =
        (instance("prefill", &[Shm, Tcp], &limits), instance("decode", &[Shm, Tcp], &limits));
    let seen = Unlinked::of(&target);
    let by = detour(&source, Broken(&[Shm], &[])).await;
    for n in 1..=3 {
        assert_eq!(hand_over_by(&source, &target, n, &by).await.1.unwrap().transport, Tcp);
    }
    assert_eq!(seen.seen(), [Shm; 3]);

    let limits = Limits::default();
    let (source, target) =
        (instance("prefill", &[Shm, Tcp], &limits), instance("decode", &[Shm, Tcp], &limits));
    let seen = Unlinked::of(&target);
    let by = detour(&source, Broken(&[Shm], &[Tcp])).await;
    for n in 1..=2 {
        let (sent, received) = hand_over_by(&source, &target, n, &by).await;
        for error in [sent.unwrap_err(), received.unwrap_err()] {
            let RoomError::Ended { cause, .. } = &error else { panic!("{error}") };
            assert_eq!(cause.kind, CauseKind::Link, "{error}");
            assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
        }
    }
    // Each is tried once a room, also where both were left out.
    let mut tried = seen.seen();
    tried.sort();
    assert_eq!(tried, [Shm, Shm, Tcp, Tcp]);
    soon(async { tokio::join!(quiet(&source), quiet(&target)) }).await;

    // Over an honest way to the same node all is well.
    let (sent, received) = hand_over_by(&source, &target, 3, &source.node.addr()).await;
    assert!(sent.is_ok() && received.unwrap().transport == Shm);
    exact(&target, 3);
}

/// Two processes of a source, of which one has no link. Where they push, one may have bound the room when the other finds
/// that out: the room ends in both, and the next one goes over what both have a link for.
#[tokio::test(flavor = "multi_thread")]
async fn the_processes_of_a_source_use_one_transport_together() {
    let limits = Limits::default();
    for (transports, broken, chosen) in
        [([Shm, Tcp], Broken(&[Shm], &[]), Tcp), ([Tcp, Shm], Broken(&[], &[Tcp]), Shm)]
    {
        let shape = CacheShape::gqa(2, 4, 8);
        let halves = [0, 1].map(|rank| {
            let recipe = Recipe::new("prefill", &shape, "tp=2,page=16", Tcp);
            let (hosts, transports) = (Some(vec![RankId(rank)]), transports.to_vec());
            start(&Recipe { hosts, transports, ..recipe })
        });
        let target = instance("decode", &transports, &limits);
        let by = vec![detour(&halves[0], broken).await, halves[1].node.addr()];
        let mut failed = 0;
        for n in 1..=2 {
            target.clear();
            let sending = halves.each_ref().map(|half| {
                half.clear();
                half.send(room(n), TOKENS)
            });
            let receiving = target.receive_from(room(n), TOKENS, by.clone());
            for (half, sending) in halves.iter().zip(&sending) {
                compute_and_send(half, sending, TOKENS, 16);
            }
            let [one, two] = &sending;
            let (one, two, received) =
                soon(async { tokio::join!(one.outcome(), two.outcome(), receiving.outcome()) }).await;
            match received {
                Ok(receipt) => {
                    assert_eq!(receipt.transport, chosen);
                    assert!(one.is_ok() && two.is_ok());
                    exact(&target, n);
                }
                Err(error) => {
                    failed += 1;
                    assert!(
                        one.is_err() && two.is_err() && error.to_string().contains("127.0.0.1:1"),
                        "{error}"
                    );
                }
            }
        }
        let Broken(_, pushed) = broken;
        assert_eq!(failed, pushed.len(), "{transports:?}");
        soon(async { tokio::join!(quiet(&halves[0]), quiet(&halves[1]), quiet(&target)) }).await;
    }
}

/// A client that leaves while a link is being opened ends the room at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_room_given_up_before_it_has_a_link_is_over_on_both_sides() {
    let limits = Limits::default();
    for transports in [[Shm, Tcp], [Tcp, Shm]] {
        let (source, target) =
            (instance("prefill", &transports, &limits), instance("decode", &transports, &limits));
        for n in 1..=20 {
            let (sending, receiving) =
                (source.send(room(n), TOKENS), target.receive(room(n), TOKENS, &source));
            receiving.abort("the client left");
            let (sent, received) = soon(async { tokio::join!(sending.outcome(), receiving.outcome()) }).await;
            for error in [sent.unwrap_err(), received.unwrap_err()] {
                assert!(error.to_string().contains("the client left"), "{error}");
            }
        }
        soon(async { tokio::join!(quiet(&source), quiet(&target)) }).await;
        let (_, received) = hand_over_by(&source, &target, 21, &source.node.addr()).await;
        received.unwrap();
        exact(&target, 21);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transport_that_is_named_twice_is_refused() {
    let recipe = Recipe::new("prefill", &CacheShape::gqa(2, 4, 8), "tp=1,page=16", Tcp);
    let error = Node::start(config(&Recipe { transports: vec![Tcp, Shm, Tcp], ..recipe })).unwrap_err();
    assert!(matches!(&error, NodeError::Config(text) if text.contains("tcp is named twice")), "{error}");
}
