//! Every byte of every target rank is the one that the coordinates ask for, and no other byte is touched.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::*;
use std::{
    mem::discriminant,
    sync::{Arc, Mutex},
};

use kvferry_node::{Moment, Observer, Receive, Side, TransportKind};
use kvferry_plan::{CacheShape, InstanceId, RoomKey, TokenRange};

fn gqa() -> CacheShape {
    CacheShape::gqa(3, 3, 8)
}

fn mla() -> CacheShape {
    CacheShape::mla(3, 20)
}

async fn exact(shape: &CacheShape, prefill: &'static str, decode: &'static str, tokens: u64, chunk: u64) {
    for transport in EVERY {
        let source = start(&Recipe::new("prefill", shape, prefill, transport));
        let target = start(&Recipe::new("decode", shape, decode, transport));
        let key = room(u128::from(tokens) << 8 | 3);
        let (sent, received) = hand_over(&source, &target, key, tokens, chunk).await;
        let case = format!("{prefill} to {decode}, {tokens} tokens by {chunk}, {transport}");
        let (sent, received) = (sent.expect(&case), received.expect(&case));

        let wrong = target.wrong_bytes(key, &target.table(tokens), TokenRange::new(0, tokens));
        assert_eq!(wrong, 0, "{case}");
        assert_eq!(received.first, FIRST);
        assert_eq!(received.transport, transport);
        assert_eq!((received.bytes, sent.bytes), (received.planned_bytes, received.planned_bytes), "{case}");
        assert!(received.copies > 0 && received.seconds > 0.0 && sent.exposed_seconds > 0.0, "{case}");

        quiet(&source).await;
        quiet(&target).await;
        soon(async { tokio::join!(source.node.shutdown(), target.node.shutdown()) }).await;
    }
}

/// A target that holds the first `held` tokens already wants only the others, and nothing else is written.
async fn exact_rest(
    shape: &CacheShape,
    (prefill, decode): (&'static str, &'static str),
    (held, tokens, chunk): (u64, u64, u64),
) {
    for transport in EVERY {
        let source = start(&Recipe::new("prefill", shape, prefill, transport));
        let target = start(&Recipe::new("decode", shape, decode, transport));
        let key = room(u128::from(held) << 8 | 5);
        let case = format!("{prefill} to {decode}, tokens {held}..{tokens} by {chunk}, {transport}");
        let sending = source.send(key, tokens);
        let receiving = target.node.receive(Receive {
            key,
            peers: vec![source.node.addr()],
            table: target.table(tokens),
            slot: target.slot(),
            tokens: TokenRange::new(held, tokens),
            transport: None,
            prompt: None,
        });
        compute_and_send(&source, &sending, tokens, chunk);
        let (sent, received) = soon(async { tokio::join!(sending.outcome(), receiving.outcome()) }).await;
        let (sent, received) = (sent.expect(&case), received.expect(&case));
        // Tokens before `held` must have stayed as they were, which is empty.
        let wrong = target.wrong_bytes(key, &target.table(tokens), TokenRange::new(held, tokens));
        assert_eq!(wrong, 0, "{case}");
        assert_eq!((received.bytes, sent.bytes), (received.planned_bytes, received.planned_bytes), "{case}");
        assert!(shape.has_state() || received.bytes.0 % (tokens - held) == 0, "{case}");
        quiet(&source).await;
        quiet(&target).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rest_of_a_prompt_whose_beginning_the_target_holds() {
    // On a page boundary of the source and not, within a chunk and between two, down to the last token.
    for (held, tokens, chunk) in [(64, 150, 32), (24, 150, 48), (72, 100, 100), (48, 49, 16)] {
        exact_rest(&gqa(), ("tp=3,page=16", "tp=2,page=24"), (held, tokens, chunk)).await;
    }
    for (held, tokens, chunk) in [(64, 130, 40), (128, 129, 16)] {
        exact_rest(&mla(), ("tp=2,page=24", "tp=4,dcp=4,page=16"), (held, tokens, chunk)).await;
    }
    exact_rest(&mla(), ("tp=1,page=64", "tp=4,dcp=2,interleave=6,page=4"), (24, 63, 5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tp3_to_tp1() {
    exact(&gqa(), "tp=3,page=16", "tp=1,page=16", 100, 100).await;
}

/// State goes between any two TP sizes, q, k and v apart, whatever DCP does to the rows; with the last chunk, of one
/// token or many; also to ranks that get some state and no row, or a row and no state.
#[tokio::test(flavor = "multi_thread")]
async fn state_goes_with_the_last_chunk() {
    for (prefill, decode, tokens, chunk) in [
        ("tp=1,page=16", "tp=1,page=16", 40, 16),
        ("tp=2,page=16", "tp=3,page=24", 70, 32),
        ("tp=4,page=16", "tp=4,dcp=4,page=16", 1, 1),
        ("tp=3,page=8", "tp=6,dcp=2,page=16", 65, 64),
        ("tp=6,page=16", "tp=1,page=64", 33, 33),
    ] {
        exact(&hybrid(), prefill, decode, tokens, chunk).await;
    }
}

/// Rows that the target holds do not go again; the state does, which exists only after the whole prompt.
#[tokio::test(flavor = "multi_thread")]
async fn state_goes_with_the_rest_of_a_prompt() {
    exact_rest(&hybrid(), ("tp=2,page=16", "tp=4,dcp=2,page=16"), (32, 70, 16)).await;
}

/// Half of a prompt has no state that could be handed over.
#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_wants_less_than_the_prompt_is_refused() {
    let source = start(&Recipe::new("prefill", &hybrid(), "tp=2,page=16", TransportKind::Tcp));
    let target = start(&Recipe::new("decode", &hybrid(), "tp=1,page=16", TransportKind::Tcp));
    let sending = source.send(room(9), 40);
    let receiving = target.receive(room(9), 32, &source);
    compute_and_send(&source, &sending, 40, 8);
    let (sent, received) = soon(async { tokio::join!(sending.outcome(), receiving.outcome()) }).await;
    let error = received.unwrap_err().to_string();
    assert!(error.contains("the state of a request exists only after its last token"), "{error}");
    sent.unwrap_err();
    quiet(&source).await;
    quiet(&target).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tp_that_divides_nothing() {
    exact(&CacheShape::gqa(2, 5, 6), "tp=2,page=16", "tp=3,page=16", 70, 32).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mla_tp2_to_dcp4() {
    exact(&mla(), "tp=2,page=16", "tp=4,dcp=4,page=16", 257, 64).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_64_to_pages_of_24() {
    exact(&gqa(), "tp=1,page=64", "tp=2,page=24", 200, 48).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_token_leaves_three_ranks_without_any() {
    exact(&mla(), "tp=2,page=16", "tp=4,dcp=4,page=16", 1, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_that_end_inside_pages() {
    exact(&mla(), "tp=1,page=16", "tp=4,dcp=2,interleave=8,page=4", 63, 5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_ranks_than_heads() {
    exact(&CacheShape::gqa(2, 2, 8), "tp=4,page=8", "tp=3,page=8", 33, 16).await;
}

/// Keeps what it is told.
#[derive(Debug, Default)]
struct Diary(Mutex<Vec<(Side, RoomKey, Moment)>>);

impl Observer for Diary {
    fn saw(&self, side: Side, key: RoomKey, moment: Moment) {
        self.0.lock().unwrap().push((side, key, moment));
    }
}

impl Diary {
    /// What was told of one side of a room.
    fn of(&self, side: Side, key: RoomKey) -> Vec<Moment> {
        let all = self.0.lock().unwrap();
        all.iter().filter(|(s, k, _)| (*s, *k) == (side, key)).map(|(.., moment)| moment.clone()).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_observer_sees_each_step_of_a_room_and_all_of_its_bytes() {
    for transport in EVERY {
        let source = start(&Recipe::new("prefill", &gqa(), "tp=3,page=16", transport));
        let target = start(&Recipe::new("decode", &gqa(), "tp=2,page=16", transport));
        let (sent, received) = (Arc::new(Diary::default()), Arc::new(Diary::default()));
        source.node.observe(sent.clone());
        target.node.observe(received.clone());
        assert!(source.node.answers().await && target.node.answers().await);
        let key = room(5);
        let (given, taken) = hand_over(&source, &target, key, 100, 32).await;
        let (given, taken) = (given.unwrap(), taken.unwrap());

        let named = |name: &str| Moment::Paired { peer: InstanceId(name.into()), transport };
        let moved = |diary: &Diary, side| {
            diary.of(side, key).into_iter().fold((0, 0), |(bytes, copies), moment| match moment {
                Moment::Moved { bytes: b, copies: c, .. } => (bytes + b.0, copies + c),
                _ => (bytes, copies),
            })
        };
        assert_eq!(moved(&sent, Side::Source), (given.bytes.0, given.copies), "{transport}");
        assert_eq!(moved(&received, Side::Target), (taken.bytes.0, taken.copies), "{transport}");
        let told = sent.of(Side::Source, key);
        assert!(told.contains(&named("decode")) && told.contains(&Moment::Computed), "{told:?}");
        let told = received.of(Side::Target, key);
        let at = |moment: &Moment| told.iter().position(|m| discriminant(m) == discriminant(moment));
        let order =
            [named("prefill"), Moment::Granted, Moment::Offered, Moment::Declared].map(|m| at(&m).unwrap());
        assert!(order.is_sorted(), "{told:?}");
        assert_eq!(told[order[0]], named("prefill"));

        soon(async { tokio::join!(source.node.shutdown(), target.node.shutdown()) }).await;
        assert!(!source.node.answers().await, "a node that has ended does not answer");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_rooms_share_a_connection() {
    let shape = gqa();
    for transport in [TransportKind::Tcp, TransportKind::Shm] {
        let source = start(&Recipe::new("prefill", &shape, "tp=3,page=4", transport));
        let target = start(&Recipe::new("decode", &shape, "tp=1,page=4", transport));
        let rooms: Vec<_> =
            (0..20).map(|n| (source.send(room(n), 40), target.receive(room(n), 40, &source))).collect();
        for (sending, _) in &rooms {
            for start in (0..40).step_by(8) {
                sending.chunk(TokenRange::new(start, start + 8));
            }
            sending.finish(FIRST);
        }
        for (sending, receiving) in &rooms {
            soon(sending.outcome()).await.unwrap();
            soon(receiving.outcome()).await.unwrap();
        }
        quiet(&source).await;
        quiet(&target).await;
        let ledger = target.node.ledger();
        assert_eq!((ledger.connections, ledger.completed), (1, 20));
        assert_eq!(source.node.ledger().completed, 20);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_transport_that_the_pair_prefers_or_the_target_asks_for() {
    let shape = gqa();
    let recipe = |name, transports: &[TransportKind]| Recipe {
        transports: transports.to_vec(),
        ..Recipe::new(name, &shape, "tp=1,page=16", TransportKind::Tcp)
    };
    let source = start(&recipe("prefill", &[TransportKind::Tcp, TransportKind::Shm]));
    let target = start(&recipe("decode", &[TransportKind::Shm, TransportKind::Tcp]));
    let receipt = hand_over(&source, &target, room(1), 20, 20).await.1.unwrap();
    assert_eq!(receipt.transport, TransportKind::Shm);

    let ask = |n, transport| {
        target.node.receive(Receive {
            key: room(n),
            peers: vec![source.node.addr()],
            table: target.table(20),
            slot: None,
            tokens: TokenRange::new(0, 20),
            transport: Some(transport),
            prompt: None,
        })
    };
    let error = soon(ask(2, TransportKind::Mem).outcome()).await.unwrap_err();
    assert!(error.to_string().contains("`mem` is not one of both; shm, tcp are"), "{error}");

    let (sending, receiving) = (source.send(room(3), 20), ask(3, TransportKind::Tcp));
    sending.chunk(TokenRange::new(0, 20));
    sending.finish(FIRST);
    assert_eq!(soon(receiving.outcome()).await.unwrap().transport, TransportKind::Tcp);
}
