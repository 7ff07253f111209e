//! The wire: committed messages of version 1 decode forever, every message survives a round trip, later versions may
//! add fields, and no bytes make the decoder panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

use std::{fs, path::PathBuf};

use kvferry_plan::{
    Attempt, Bytes, CacheShape, Descriptor, Dtype, Generation, Incarnation, InstanceId, LayoutSpec, Mismatch,
    PROTOCOL, PageId, Part, PartDigest, RankId, RoomId, RoomKey, Rotation, SlotId, TokenRange,
};
use kvferry_session::{
    Abort, Capabilities, Cause, CauseKind, Closed, Done, Endpoint, Final, FirstToken, Goodbye, Head,
    Heartbeat, Hello, Leg, MAX_MESSAGE, Message, Offer, Open, PageRef, Refuse, Settled, Side, SlotRef,
    WireError, decode, encode, frame_len,
};
use proptest::prelude::*;

fn head() -> Head {
    Head {
        key: RoomKey { room: RoomId(0x0123_4567_89ab_cdef_0011_2233_4455_6677), attempt: Attempt(2) },
        generation: Generation(7),
        from: Incarnation { started_ms: 1_700_000_000_000, nonce: u64::MAX },
        to: Incarnation { started_ms: 1_700_000_000_001, nonce: 1 },
    }
}

fn descriptor(shape: CacheShape, spec: &str) -> Descriptor {
    let spec: LayoutSpec = spec.parse().unwrap();
    let placement = spec.placement(&shape, Dtype::Bf16).unwrap();
    Descriptor { protocol: PROTOCOL, model: "00ff".into(), shape, placement, converts: false }
}

fn hello(descriptor: Descriptor) -> Message {
    Message::Hello(Hello {
        capabilities: Capabilities::PUSH.with(Capabilities::PULL).with(Capabilities::DIGEST),
        instance: InstanceId("decode-0".into()),
        incarnation: head().from,
        descriptor,
        pages: 512,
        transports: [("tcp", "tcp://127.0.0.1:4711"), ("shm", "shm:///tmp/kvferry/sock")]
            .map(|(name, address)| Endpoint { name: name.into(), address: address.into() })
            .into(),
        hosts: None,
        slots: None,
    })
}

/// One message of every kind and of every shape that a field can take, by the name of its file.
fn samples() -> Vec<(&'static str, Message)> {
    let tokens = TokenRange::new(16, 272);
    let leg = Leg {
        target: RankId(3),
        tokens,
        parts: vec![
            PartDigest { part: Part::Key, sum: u64::MAX, bytes: Bytes(4096) },
            PartDigest { part: Part::Value, sum: 0, bytes: Bytes(1 << 40) },
        ],
        copies: 99,
    };
    let cause = Cause::new(CauseKind::Corrupt, Side::Source, "digest of part key differs");
    let first = FirstToken { token: 128_000, logprob: -0.125 };
    vec![
        ("hello-gqa", hello(descriptor(CacheShape::gqa(2, 3, 64), "tp=3,page=16"))),
        ("hello-mla-dcp", hello(descriptor(CacheShape::mla(2, 576), "tp=4,dcp=4,interleave=8,page=64"))),
        ("hello-shard", hello(descriptor(CacheShape::mla(2, 576), "tp=2,shard=on,pp=2"))),
        (
            "refuse",
            Message::Refuse(Refuse {
                mismatch: Mismatch { field: "key.dtype".into(), ours: "bf16".into(), theirs: "f32".into() },
            }),
        ),
        ("heartbeat", Message::Heartbeat(Heartbeat { sequence: 300 })),
        ("open", Message::Open(Open { head: head(), tokens, transport: "shm".into(), prompt: None })),
        (
            "offer-push",
            Message::Offer(Offer {
                head: head(),
                source: RankId(1),
                tokens,
                pages: Vec::new(),
                slot: None,
                rotation: Rotation(0),
            }),
        ),
        (
            "offer-pull",
            Message::Offer(Offer {
                head: head(),
                source: RankId(0),
                tokens,
                pages: vec![
                    PageRef { page: PageId(9), generation: Generation(0) },
                    PageRef { page: PageId(u32::MAX), generation: Generation(u64::MAX) },
                ],
                slot: None,
                rotation: Rotation(0),
            }),
        ),
        (
            "offer-shard",
            Message::Offer(Offer {
                head: head(),
                source: RankId(2),
                tokens,
                pages: vec![PageRef { page: PageId(4), generation: Generation(6) }],
                slot: None,
                rotation: Rotation(3),
            }),
        ),
        (
            "offer-pull-state",
            Message::Offer(Offer {
                head: head(),
                source: RankId(0),
                tokens,
                pages: Vec::new(),
                slot: Some(SlotRef { slot: SlotId(3), generation: Generation(1 << 40) }),
                rotation: Rotation(0),
            }),
        ),
        ("settled", Message::Settled(Settled { head: head(), source: RankId(2), tokens })),
        ("final", Message::Final(Final { head: head(), source: RankId(2), legs: vec![leg], first })),
        ("final-empty", Message::Final(Final { head: head(), source: RankId(0), legs: Vec::new(), first })),
        ("done", Message::Done(Done { head: head(), bytes: Bytes(1 << 33) })),
        ("abort", Message::Abort(Abort { head: head(), cause: cause.clone() })),
        ("closed", Message::Closed(Closed { head: head(), cause: Some(cause) })),
        ("closed-done", Message::Closed(Closed { head: head(), cause: None })),
        ("goodbye", Message::Goodbye(Goodbye { reason: "drained".into() })),
    ]
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/wire/v1")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let text = text.trim();
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

fn body(message: &Message) -> Vec<u8> {
    let frame = encode(message).unwrap();
    let (prefix, body) = frame.split_first_chunk().unwrap();
    assert_eq!(frame_len(*prefix, MAX_MESSAGE), Ok(body.len() as u32));
    body.to_vec()
}

/// To add a version, copy `samples`, do not edit it: the committed bytes of a released version never change. With
/// KVFERRY_WRITE_WIRE=1 files that do not exist yet are written.
#[test]
fn committed_messages_of_version_1_decode() {
    let mut names: Vec<_> = Vec::new();
    for (name, message) in samples() {
        let path = folder().join(format!("{name}.hex"));
        if std::env::var_os("KVFERRY_WRITE_WIRE").is_some() && !path.exists() {
            fs::write(&path, hex(&body(&message)) + "\n").unwrap();
        }
        let committed = unhex(&fs::read_to_string(&path).unwrap());
        assert_eq!(decode(&committed), Ok(message), "{name}");
        names.push(format!("{name}.hex"));
    }
    let mut found: Vec<_> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    found.sort();
    assert_eq!(found, names);
}

/// Adds a field with a key that nobody knows to every map of an encoded message.
fn with_added_fields(bytes: &[u8]) -> Vec<u8> {
    fn item(d: &mut minicbor::Decoder<'_>, out: &mut minicbor::Encoder<Vec<u8>>) {
        use minicbor::data::Type;
        match d.datatype().unwrap() {
            Type::Map => {
                let len = d.map().unwrap().unwrap();
                out.map(len + 1).unwrap();
                for _ in 0..len {
                    item(d, out);
                    item(d, out);
                }
                out.u32(77).unwrap().array(2).unwrap().str("later").unwrap().map(0).unwrap();
            }
            Type::Array => {
                let len = d.array().unwrap().unwrap();
                out.array(len).unwrap();
                for _ in 0..len {
                    item(d, out);
                }
            }
            Type::String => {
                out.str(d.str().unwrap()).unwrap();
            }
            Type::Bytes => {
                out.bytes(d.bytes().unwrap()).unwrap();
            }
            Type::F32 => {
                out.f32(d.f32().unwrap()).unwrap();
            }
            Type::Null => {
                d.null().unwrap();
                out.null().unwrap();
            }
            _ => {
                out.u64(d.u64().unwrap()).unwrap();
            }
        }
    }
    let mut encoder = minicbor::Encoder::new(Vec::new());
    item(&mut minicbor::Decoder::new(bytes), &mut encoder);
    encoder.into_writer()
}

#[test]
fn fields_of_later_versions_are_ignored() {
    for (name, message) in samples() {
        let plain = body(&message);
        let extended = with_added_fields(&plain);
        assert!(extended.len() > plain.len(), "{name}");
        assert_eq!(decode(&extended), Ok(message), "{name}");
    }
}

#[test]
fn kinds_and_causes_of_later_versions_are_recognised() {
    assert_eq!(decode(&[0x82, 0x18, 0x63, 0xa0]), Err(WireError::UnknownKind { kind: 99 }));
    let closed = Message::Closed(Closed {
        head: head(),
        cause: Some(Cause::new(CauseKind::Lost, Side::Target, "gone")),
    });
    let mut bytes = body(&closed);
    // The kind of the cause is the first entry of the innermost map.
    let at = bytes.windows(4).rposition(|w| w[..3] == [0xa3, 0x00, 0x02]).unwrap();
    bytes[at + 2] = 0x17;
    let Ok(Message::Closed(Closed { cause: Some(cause), .. })) = decode(&bytes) else { panic!() };
    assert_eq!((cause.kind, cause.text.as_str()), (CauseKind::Other, "gone"));
}

#[test]
fn every_cut_message_is_refused() {
    for (name, message) in samples() {
        let bytes = body(&message);
        for len in 0..bytes.len() {
            assert!(matches!(decode(&bytes[..len]), Err(WireError::Malformed { .. })), "{name} {len}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(matches!(decode(&longer), Err(WireError::Malformed { .. })), "{name}");
    }
}

#[test]
fn lengths_are_bounded_on_both_sides() {
    assert!(frame_len(0_u32.to_le_bytes(), 10).is_err());
    assert_eq!(frame_len(10_u32.to_le_bytes(), 10), Ok(10));
    let error = frame_len(*b"GET ", MAX_MESSAGE).unwrap_err();
    assert_eq!(error, WireError::Length { len: 0x2054_4547, max: MAX_MESSAGE });
    let long = Message::Goodbye(Goodbye { reason: "x".repeat(MAX_MESSAGE as usize) });
    assert!(matches!(encode(&long), Err(WireError::Length { .. })));
}

fn any_head() -> impl Strategy<Value = Head> {
    (any::<(u128, u32, u64)>(), any::<(u64, u64, u64, u64)>()).prop_map(|((room, attempt, generation), i)| {
        Head {
            key: RoomKey { room: RoomId(room), attempt: Attempt(attempt) },
            generation: Generation(generation),
            from: Incarnation { started_ms: i.0, nonce: i.1 },
            to: Incarnation { started_ms: i.2, nonce: i.3 },
        }
    })
}

fn any_leg() -> impl Strategy<Value = Leg> {
    let part = (any::<(u64, u64)>(), 0_u8..3).prop_map(|((sum, bytes), code)| PartDigest {
        part: Part::from_code(code).unwrap(),
        sum,
        bytes: Bytes(bytes),
    });
    (any::<(u32, u64, u64, u64)>(), prop::collection::vec(part, 0..4)).prop_map(
        |((target, start, end, copies), parts)| Leg {
            target: RankId(target),
            tokens: TokenRange::new(start, end),
            parts,
            copies,
        },
    )
}

fn any_message() -> impl Strategy<Value = Message> {
    let tokens = any::<(u64, u64)>().prop_map(|(a, b)| TokenRange::new(a, b));
    let pages = prop::collection::vec(
        any::<(u32, u64)>().prop_map(|(p, g)| PageRef { page: PageId(p), generation: Generation(g) }),
        0..20,
    );
    let cause = (".{0,40}", any::<bool>()).prop_map(|(text, source)| {
        Cause::new(CauseKind::Stalled, if source { Side::Source } else { Side::Target }, text)
    });
    let legs = prop::collection::vec(any_leg(), 0..6);
    prop_oneof![
        (any_head(), tokens.clone(), ".{0,9}").prop_map(|(head, tokens, transport)| Message::Open(Open {
            head,
            tokens,
            transport,
            prompt: None,
        })),
        (any_head(), any::<(u32, u32)>(), tokens.clone(), pages).prop_map(
            |(head, (source, rotation), tokens, pages)| {
                let (source, rotation) = (RankId(source), Rotation(rotation));
                Message::Offer(Offer { head, source, tokens, pages, slot: None, rotation })
            },
        ),
        (any_head(), any::<u32>(), tokens).prop_map(|(head, source, tokens)| {
            Message::Settled(Settled { head, source: RankId(source), tokens })
        }),
        (any_head(), any::<(u32, u32, u32)>(), legs).prop_map(|(head, (source, token, bits), legs)| {
            let first = FirstToken { token, logprob: f32::from_bits(bits) };
            Message::Final(Final { head, source: RankId(source), legs, first })
        }),
        (any_head(), prop::option::of(cause))
            .prop_map(|(head, cause)| Message::Closed(Closed { head, cause })),
        (any_head(), any::<u64>())
            .prop_map(|(head, bytes)| Message::Done(Done { head, bytes: Bytes(bytes) })),
    ]
}

proptest! {
    #[test]
    fn round_trip(message in any_message()) {
        prop_assert_eq!(decode(&body(&message)), Ok(message));
    }

    #[test]
    fn garbage_is_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        // Random bytes are next to never a message; what matters is that nothing panics.
        if let Ok(message) = decode(&bytes) {
            prop_assert!(encode(&message).is_ok());
        }
    }

    #[test]
    fn damaged_messages_never_panic(message in any_message(), at in any::<prop::sample::Index>(), to: u8) {
        let mut bytes = body(&message);
        let at = at.index(bytes.len());
        bytes[at] = to;
        if let Ok(message) = decode(&bytes) {
            prop_assert!(encode(&message).is_ok());
        }
    }
}
