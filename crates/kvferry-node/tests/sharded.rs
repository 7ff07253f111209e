//! A source that deals its pages to its ranks, and targets that do not: every byte where it belongs, from whatever rank
//! the pages are counted; and what goes wrong is found.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::time::Duration;

use common::*;
use kvferry_node::{CauseKind, Limits, Receive, RoomError, Side, SourceFault, SourceRoom, TransportKind};
use kvferry_plan::{Blame, CacheShape, PageId, PageTable, RankId, Rotation, TokenRange};

fn gqa() -> CacheShape {
    CacheShape::gqa(2, 3, 8)
}

fn mla() -> CacheShape {
    CacheShape::mla(2, 20)
}

/// Tokens that the target holds already, all tokens, and how many are computed at a time.
type Prompt = (u64, u64, u64);

async fn exact(shape: &CacheShape, prefill: &'static str, decode: &'static str, prompts: &[Prompt]) {
    for transport in EVERY {
        for rotation in 0.. {
            let rotation = Rotation(rotation);
            let recipe = Recipe { rotation, ..Recipe::new("prefill", shape, prefill, transport) };
            let source = start(&recipe);
            if source.placement.check_rotation(rotation).is_err() {
                assert!(rotation.0 > 1, "not sharded");
                break;
            }
            for (n, &(held, tokens, chunk)) in (0..).zip(prompts) {
                let target = start(&Recipe::new("decode", shape, decode, transport));
                let case = format!(
                    "{prefill} from {rotation} to {decode}, {held}..{tokens} by {chunk}, {transport}"
                );
                let key = room(n);
                let sending = source.send(key, tokens);
                let wanted = TokenRange::new(held, tokens);
                let receiving = target.node.receive(Receive {
                    key,
                    peers: vec![source.node.addr()],
                    table: target.table(tokens),
                    slot: target.slot(),
                    tokens: wanted,
                    transport: None,
                    prompt: None,
                });
                source.clear();
                compute_and_send(&source, &sending, tokens, chunk);
                let (sent, received) =
                    soon(async { tokio::join!(sending.outcome(), receiving.outcome()) }).await;
                let (sent, received) = (sent.expect(&case), received.expect(&case));
                assert_eq!(target.wrong_bytes(key, &target.table(tokens), wanted), 0, "{case}");
                assert_eq!((sent.bytes, received.bytes), (received.planned_bytes, received.planned_bytes));
                quiet(&target).await;
                soon(target.node.shutdown()).await;
            }
            quiet(&source).await;
            soon(source.node.shutdown()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn latent_rows_over_tp_to_tp() {
    exact(&mla(), "tp=2,shard=on,page=16", "tp=1,page=16", &[(0, 100, 40), (24, 150, 48)]).await;
    exact(&mla(), "tp=3,shard=on,page=8", "tp=2,page=24", &[(0, 49, 5)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn latent_rows_over_tp_to_dcp() {
    let prompts = [(0, 257, 64), (64, 130, 40), (128, 129, 16)];
    exact(&mla(), "tp=4,shard=on,page=16", "tp=4,dcp=4,page=16", &prompts).await;
    exact(&mla(), "tp=2,shard=on,page=24", "tp=4,dcp=2,interleave=6,page=4", &[(24, 63, 5)]).await;
}

/// Three ranks own nothing of it, and say so.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_of_one_page_to_four_ranks() {
    let prompts = [(0, 1, 1), (0, 16, 16), (0, 13, 4)];
    exact(&mla(), "tp=4,shard=on,page=16", "tp=4,dcp=4,page=16", &prompts).await;
    exact(&mla(), "tp=4,shard=on,page=16", "tp=1,page=8", &prompts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_over_cp() {
    exact(&gqa(), "cp=2,shard=on,page=16", "tp=3,page=16", &[(0, 100, 32), (40, 90, 100)]).await;
    exact(&gqa(), "cp=4,pp=2,shard=on,page=8", "tp=2,page=24", &[(0, 70, 24)]).await;
    // TP ranks of one CP rank have the same latent rows, and share the sending.
    exact(&mla(), "cp=2,tp=2,shard=on,page=8", "tp=4,dcp=4,page=8", &[(0, 90, 32), (17, 50, 10)]).await;
}

/// State is cut by TP and not by page: a rank without a page of the last chunk sends its part of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_hybrid_model_shards_its_pages_and_not_its_state() {
    let prompts = [(0, 1, 1), (0, 70, 32), (32, 70, 16)];
    exact(&hybrid(), "tp=4,shard=on,page=16", "tp=2,page=16", &prompts).await;
    exact(&hybrid(), "tp=2,shard=on,page=16", "tp=4,dcp=4,page=16", &prompts).await;
}

/// What a source commits on purpose is found by a digest or ends in a typed error; without digests the bytes are wrong
/// and only they say so.
#[tokio::test(flavor = "multi_thread")]
async fn pages_of_the_wrong_owner_are_found() {
    for fault in [SourceFault::WrongOwner, SourceFault::FilterByPosition] {
        for transport in EVERY {
            // Two pages of each rank, whose number nothing gives away; and an odd one, that its length does.
            for (tokens, digest) in [(64, true), (64, false), (75, true), (75, false)] {
                let case = format!("{fault:?} {transport}, {tokens} tokens, digest {digest}");
                let spec = "tp=2,shard=on,page=16";
                let source = start(&Recipe {
                    digest,
                    fault: Some(fault),
                    rotation: Rotation(1),
                    ..Recipe::new("prefill", &mla(), spec, transport)
                });
                let target =
                    start(&Recipe { digest, ..Recipe::new("decode", &mla(), "tp=4,dcp=4", transport) });
                let (sent, received) = hand_over(&source, &target, room(3), tokens, 32).await;
                assert_eq!(source.node.ledger().faults, 1, "{case}");
                if digest || tokens != 64 {
                    let error = received.expect_err(&case);
                    assert_eq!(error.blame(), Blame::PeerMisbehaved, "{case}: {error}");
                    let RoomError::Ended { cause, .. } = &error else { panic!("{case}: {error}") };
                    let digests = cause.text.starts_with("digest of part latent from source rank");
                    assert!(digests || tokens != 64, "{case}: {error}");
                    sent.expect_err(&case);
                } else {
                    let received = received.expect(&case);
                    assert_eq!(received.bytes, received.planned_bytes, "{case}");
                    let wanted = TokenRange::new(0, tokens);
                    assert!(target.wrong_bytes(room(3), &target.table(tokens), wanted) > 0, "{case}");
                }
                quiet(&source).await;
                quiet(&target).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_final_that_does_not_come_ends_the_room_in_time() {
    for transport in EVERY {
        let mut limits = Limits::default();
        limits.rooms.transfer = Duration::from_millis(300);
        let source = start(&Recipe {
            fault: Some(SourceFault::DropEmptyFinal),
            limits: limits.clone(),
            ..Recipe::new("prefill", &mla(), "tp=4,shard=on,page=16", transport)
        });
        let target = start(&Recipe { limits, ..Recipe::new("decode", &mla(), "tp=1", transport) });
        // The last chunk is on the third page.
        let (sent, received) =
            within(Duration::from_secs(5), hand_over(&source, &target, room(4), 40, 32)).await;
        for outcome in [sent.map(drop), received.map(drop)] {
            let RoomError::Ended { cause, .. } = outcome.unwrap_err() else { panic!() };
            assert_eq!((cause.kind, cause.at), (CauseKind::Stalled, Side::Source), "{cause}");
            assert_eq!(cause.text, "no manifest from source ranks [0, 1, 3]");
        }
        assert_eq!(source.node.ledger().faults, 1);
        quiet(&source).await;
        quiet(&target).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_whose_owners_are_out_of_turn_is_refused() {
    let source = start(&Recipe::new("prefill", &mla(), "tp=2,shard=on,page=16", TransportKind::Mem));
    let sending = source.node.send(SourceRoom {
        key: room(1),
        table: PageTable([3, 4, 8].map(PageId).into()),
        slot: None,
        tokens: TokenRange::new(0, 40),
        prompt: None,
    });
    let error = soon(sending.outcome()).await.unwrap_err();
    let text = "entry 2 of the page table is page 8 of shard rank 0, but the turn is rank 1's of 2";
    assert!(error.to_string().contains(text), "{error}");
}

/// The processes of one source have one page table; the target finds out when they have not.
#[tokio::test(flavor = "multi_thread")]
async fn processes_of_a_source_that_count_from_different_pages_are_refused() {
    for transport in EVERY {
        let process = |rank, rotation| {
            start(&Recipe {
                hosts: Some(vec![RankId(rank)]),
                rotation: Rotation(rotation),
                ..Recipe::new("prefill", &mla(), "tp=2,shard=on,page=16", transport)
            })
        };
        for (rotation, agreed) in [(1, true), (0, false)] {
            let sources = [process(0, 1), process(1, rotation)];
            let target = start(&Recipe::new("decode", &mla(), "tp=2,page=16", transport));
            let key = room(6);
            let sending = [0, 1].map(|i: usize| sources[i].send(key, 64));
            let peers = sources.iter().map(|s| s.node.addr()).collect();
            let receiving = target.receive_from(key, 64, peers);
            sources.iter().zip(&sending).for_each(|(s, h)| compute_and_send(s, h, 64, 32));
            let outcome = soon(receiving.outcome()).await;
            for handle in &sending {
                assert_eq!(soon(handle.outcome()).await.is_ok(), agreed, "{transport}");
            }
            match outcome {
                Ok(_) => {
                    assert!(agreed, "{transport}");
                    let wanted = TokenRange::new(0, 64);
                    assert_eq!(target.wrong_bytes(key, &target.table(64), wanted), 0, "{transport}");
                }
                Err(error) => {
                    assert!(!agreed && error.blame() == Blame::PeerMisbehaved, "{transport}: {error}");
                    assert!(error.to_string().contains("rotation"), "{transport}: {error}");
                }
            }
            quiet(&target).await;
        }
    }
}

/// Sharding is a part of what an instance says of itself.
#[tokio::test(flavor = "multi_thread")]
async fn processes_of_which_one_shards_are_not_one_instance() {
    let part = |rank, spec| {
        start(&Recipe {
            hosts: Some(vec![RankId(rank)]),
            ..Recipe::new("prefill", &mla(), spec, TransportKind::Tcp)
        })
    };
    let sources = [part(0, "tp=2,shard=on,page=16"), part(1, "tp=2,page=16")];
    let target = start(&Recipe::new("decode", &mla(), "tp=1,page=16", TransportKind::Tcp));
    let receiving = target.receive_from(room(1), 40, sources.iter().map(|s| s.node.addr()).collect());
    let error = soon(receiving.outcome()).await.unwrap_err();
    assert!(error.to_string().contains("describe different instances"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sharded_target_is_refused_by_name() {
    let source = start(&Recipe::new("prefill", &mla(), "tp=2,page=16", TransportKind::Tcp));
    let target = start(&Recipe::new("decode", &mla(), "tp=2,shard=on,page=16", TransportKind::Tcp));
    let error = soon(target.receive(room(1), 40, &source).outcome()).await.unwrap_err();
    let RoomError::Incompatible { mismatch, .. } = &error else { panic!("{error}") };
    assert_eq!(mismatch.field, "latent.tokens");
    assert!(error.to_string().contains("leave `shard=on` out of decode's layout"), "{error}");
}
