//! Who may serve whom: what does not fit is named, on both sides, and no hello costs more than it should.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

use kvferry_plan::{
    Blame, CacheShape, Descriptor, Dtype, Incarnation, InstanceId, LayerId, LayoutSpec, PROTOCOL, TokenMap,
};
use kvferry_session::{Capabilities, Endpoint, Goodbye, Hello, Message, Pairing, PairingError, Peer, Side};

fn hello(name: &str, spec: &str) -> Hello {
    // Rows of 4 KiB.
    let shape = CacheShape::gqa(4, 4, 512);
    let placement = spec.parse::<LayoutSpec>().unwrap().placement(&shape, Dtype::Bf16).unwrap();
    Hello {
        capabilities: Capabilities::DIGEST,
        instance: InstanceId(name.into()),
        incarnation: Incarnation { started_ms: 1, nonce: name.len() as u64 },
        descriptor: Descriptor { protocol: PROTOCOL, model: "m".into(), shape, placement, converts: false },
        pages: 100,
        transports: ["tcp", "shm"]
            .map(|name| Endpoint { name: name.into(), address: format!("{name}://here") })
            .into(),
        hosts: None,
        slots: None,
    }
}

/// Prefill answers a decode whose hello was changed.
fn answer(change: impl FnOnce(&mut Hello)) -> Result<Peer, PairingError> {
    let mut decode = hello("decode", "tp=1");
    change(&mut decode);
    Pairing::new(hello("prefill", "tp=2"), Side::Source, None).answer(Message::Hello(decode))
}

#[test]
fn two_that_fit_know_each_other() {
    let peer = answer(|h| {
        h.transports.reverse();
        h.transports.push(Endpoint { name: "carrier-pigeon".into(), address: "coo".into() });
    })
    .unwrap();
    assert_eq!((peer.instance.0.as_str(), peer.side, peer.digest), ("decode", Side::Source, true));
    assert_eq!((peer.pair.src().tp, peer.pair.dst().tp), (2, 1));
    // Prefill wants tcp first and decode shm: kvferry's order, their addresses.
    let found: Vec<_> = peer.transports.iter().map(|(c, at)| (c.transport, at.address.as_str())).collect();
    assert_eq!(found, [("shm", "shm://here"), ("tcp", "tcp://here")]);

    let decode = Pairing::new(
        hello("decode", "tp=1"),
        Side::Target,
        Some((InstanceId("prefill".into()), hello("prefill", "tp=2").incarnation)),
    );
    let peer = decode.answer(Message::Hello(hello("prefill", "tp=2"))).unwrap();
    assert_eq!((peer.pair.src().tp, peer.pair.dst().tp), (2, 1));
}

#[test]
fn every_field_that_does_not_fit_is_named() {
    type Change = Box<dyn FnOnce(&mut Hello)>;
    let cases: Vec<(&str, Change)> = vec![
        ("protocol", Box::new(|h| h.descriptor.protocol += 1)),
        ("model", Box::new(|h| h.descriptor.model = "n".into())),
        ("key.heads", Box::new(|h| h.descriptor.shape.parts[0].heads = 8)),
        ("value.head_elems", Box::new(|h| h.descriptor.shape.parts[1].head_elems = 4)),
        ("key.dtype", Box::new(|h| h.descriptor.placement.parts[0].dtype = Dtype::F32)),
        ("digest", Box::new(|h| h.capabilities = Capabilities::default())),
        ("transports", Box::new(|h| h.transports.clear())),
        ("placement", Box::new(|h| h.descriptor.placement.tp = 0)),
        ("placement", Box::new(|h| h.descriptor.placement.parts[0].page_size = 0)),
        ("placement", Box::new(|h| h.descriptor.placement.cp = u32::MAX)),
        ("context parallel", Box::new(|h| h.descriptor.placement.cp = 2)),
        ("host tier", Box::new(|h| h.descriptor.placement.host_pages = Some(64))),
        (
            "placement",
            Box::new(|h| {
                h.descriptor.placement.parts[0].tokens = TokenMap::Interleaved { ranks: 3, interleave: 1 };
            }),
        ),
        (
            "key.tokens",
            Box::new(|h| {
                (h.descriptor.placement.tp, h.descriptor.placement.cp) = (1, 2);
                let parts = &mut h.descriptor.placement.parts;
                parts.iter_mut().for_each(|p| p.tokens = TokenMap::PageSharded { ranks: 2 });
            }),
        ),
        ("stages", Box::new(|h| h.descriptor.placement.stages[0].extend([LayerId(0); 50_000]))),
        ("stages", Box::new(|h| h.descriptor.placement.stages.clear())),
        (
            "pages",
            Box::new(|h| {
                // Only the product of the three overflows.
                h.pages = u32::MAX;
                h.descriptor.placement.parts.iter_mut().for_each(|p| p.page_size = 1 << 20);
            }),
        ),
    ];
    for (field, change) in cases {
        let error = answer(change).expect_err(field);
        assert_eq!(
            (error.mismatch().unwrap().field.as_str(), error.blame()),
            (field, Blame::PeerIncompatible)
        );
        // The peer hears the same, with the values turned round.
        let told = Pairing::new(hello("decode", "tp=1"), Side::Target, None).answer(error.refusal().unwrap());
        let PairingError::RefusedByPeer(theirs) = told.unwrap_err() else { panic!() };
        let ours = error.mismatch().unwrap();
        assert_eq!((&theirs.field, &theirs.ours, &theirs.theirs), (&ours.field, &ours.theirs, &ours.ours));
    }
}

/// The source converts if it says so, whichever side hears it; a target that would convert does not help.
#[test]
fn element_types_may_differ_when_the_source_converts() {
    for (prefill_converts, decode_converts) in [(false, false), (false, true), (true, false), (true, true)] {
        let with = |name, spec, converts| {
            let mut hello = hello(name, spec);
            hello.descriptor.converts = converts;
            hello
        };
        let prefill = with("prefill", "tp=2,kv=f32", prefill_converts);
        let decode = with("decode", "tp=1,kv=fp8", decode_converts);
        for (mine, side, theirs) in [(&prefill, Side::Source, &decode), (&decode, Side::Target, &prefill)] {
            let answer = Pairing::new(mine.clone(), side, None).answer(Message::Hello(theirs.clone()));
            match answer {
                Ok(peer) => {
                    assert!(prefill_converts);
                    let casts: Vec<_> = peer.pair.casts().map(|(_, cast)| cast.to_string()).collect();
                    assert_eq!(casts, ["f32 to fp8", "f32 to fp8"]);
                }
                Err(error) => {
                    assert!(!prefill_converts);
                    assert_eq!(error.mismatch().unwrap().field, "key.dtype");
                    assert!(
                        error.to_string().contains("have the prefill side convert with `--convert-kv`"),
                        "{error}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_is_not_built_is_named_with_what_to_change() {
    let text = |change: fn(&mut Hello)| answer(change).unwrap_err().to_string();
    assert_eq!(
        text(|h| h.descriptor.placement.cp = 2),
        "refused the peer: `context parallel` differs: here cp 1, at the peer cp 2 (the target has cp 2; 1 is supported)"
    );
    assert_eq!(
        text(|h| h.descriptor.placement.host_pages = Some(64)),
        "refused the peer: `host tier` differs: here none, at the peer 64 pages in host memory (the target keeps 64 \
         pages in host memory; start it without a host-tier cache)"
    );
}

#[test]
fn who_was_not_meant_is_refused() {
    let expect = |instance: &str, nonce| {
        let expected = (InstanceId(instance.into()), Incarnation { started_ms: 1, nonce });
        Pairing::new(hello("decode", "tp=1"), Side::Target, Some(expected))
            .answer(Message::Hello(hello("prefill", "tp=1")))
    };
    assert!(expect("prefill", 7).is_ok());
    assert_eq!(expect("prefill", 8).unwrap_err().mismatch().unwrap().field, "incarnation");
    assert_eq!(expect("other", 7).unwrap_err().mismatch().unwrap().field, "instance");
}

#[test]
fn anything_but_a_hello_first_is_a_breach() {
    let bye = Message::Goodbye(Goodbye { reason: String::new() });
    let error = Pairing::new(hello("a", "tp=1"), Side::Source, None).answer(bye).unwrap_err();
    assert_eq!((error.blame(), error.refusal()), (Blame::PeerMisbehaved, None));
}

/// Prefill may deal its pages to its ranks; decode may not, and both say so.
#[test]
fn only_prefill_may_be_sharded() {
    let pairing = |mine: &Hello, side, theirs: &Hello| {
        Pairing::new(mine.clone(), side, None).answer(Message::Hello(theirs.clone()))
    };
    let (prefill, decode) = (hello("prefill", "cp=2,shard=on"), hello("decode", "tp=2"));
    let source = pairing(&prefill, Side::Source, &decode).unwrap();
    let target = pairing(&decode, Side::Target, &prefill).unwrap();
    assert_eq!((source.pair.src().shard_ranks(), target.pair.src().shard_ranks()), (2, 2));

    let (prefill, decode) = (hello("prefill", "tp=2"), hello("decode", "cp=2,shard=on"));
    let seen_by_prefill = pairing(&prefill, Side::Source, &decode).unwrap_err();
    assert_eq!(
        seen_by_prefill.to_string(),
        "refused the peer: `key.tokens` differs: here any, at the peer page-sharded, which only prefill may be: leave \
         `shard=on` out of decode's layout"
    );
    let seen_by_decode = pairing(&decode, Side::Target, &prefill).unwrap_err();
    let turned = |error: &PairingError| {
        let mismatch = error.mismatch().unwrap().clone();
        (mismatch.field, mismatch.theirs, mismatch.ours)
    };
    let told = seen_by_prefill.mismatch().unwrap();
    assert_eq!(turned(&seen_by_decode), (told.field.clone(), told.ours.clone(), told.theirs.clone()));

    // Keys that are dealt by page and values that are not: an offer could not list pages of both.
    let mut mixed = hello("prefill", "cp=2,shard=on");
    mixed.descriptor.placement.parts[1].tokens = TokenMap::Dense;
    let error = pairing(&hello("decode", "tp=1"), Side::Target, &mixed).unwrap_err();
    assert_eq!(error.mismatch().unwrap().field, "value.tokens");
}
