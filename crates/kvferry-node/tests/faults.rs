//! Bytes that went wrong on the way are found by the digests, by name; without digests nobody notices.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::*;
use kvferry_node::{CauseKind, Inject, RoomError, TransportKind};
use kvferry_plan::{Blame, CacheShape, TokenRange};

async fn inject(fault: Inject, digest: bool, transport: TransportKind, layout: &str) {
    let (shape, prefill, decode) = match layout {
        "gqa" => (CacheShape::gqa(2, 3, 8), "tp=3,page=16", "tp=1,page=16"),
        "hybrid" => (hybrid(), "tp=2,page=16", "tp=4,dcp=4,page=16"),
        _ => (CacheShape::mla(2, 20), "tp=2,page=16", "tp=4,dcp=4,page=16"),
    };
    let case = format!("{fault} digest {digest} {transport} {layout}");
    let source = start(&Recipe { digest, ..Recipe::new("prefill", &shape, prefill, transport) });
    let target =
        start(&Recipe { digest, inject: Some(fault), ..Recipe::new("decode", &shape, decode, transport) });
    let key = room(9);
    let (sent, received) = hand_over(&source, &target, key, 100, 48).await;
    let wrong = target.wrong_bytes(key, &target.table(100), TokenRange::new(0, 100));
    assert!(wrong > 0, "{case}: the fault changed nothing");
    if digest {
        let error = received.expect_err(&case);
        let RoomError::Ended { cause, .. } = &error else { panic!("{case}: {error}") };
        assert_eq!(cause.kind, CauseKind::Corrupt, "{case}: {error}");
        assert_eq!(error.blame(), Blame::PeerMisbehaved, "{case}");
        assert!(cause.text.starts_with("digest of part "), "{case}: {error}");
        assert!(cause.text.contains("from source rank") && cause.text.contains("to target rank"), "{error}");
        // The source is told the same.
        let RoomError::Ended { cause: told, .. } = sent.expect_err(&case) else { panic!("{case}") };
        assert_eq!(*cause, told, "{case}");
    } else {
        let received = received.expect(&case);
        assert_eq!(received.bytes, received.planned_bytes, "{case}");
        sent.expect(&case);
    }
    quiet(&source).await;
    quiet(&target).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_is_found_and_passes_without_digests() {
    for fault in Inject::ALL {
        for transport in EVERY {
            let layouts = match fault {
                // A fault of state needs some.
                Inject::SwapState => &["hybrid"][..],
                // The GQA layout has one target rank.
                Inject::MisrouteRow => &["mla", "hybrid"],
                _ => &["gqa", "mla", "hybrid"],
            };
            for layout in layouts {
                inject(fault, true, transport, layout).await;
                inject(fault, false, transport, layout).await;
            }
        }
    }
}
