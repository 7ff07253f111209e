//! The wire form of what peers tell each other about themselves: round trips, the committed first version, keys
//! that this build does not know, and bytes that are no message.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use kvferry_plan::*;
use minicbor::{Encoder, decode, to_vec};
use proptest::prelude::*;

/// A decode side with two stages, DCP keys and dense values: every kind of field is in it.
fn descriptor() -> Descriptor {
    let shape = CacheShape::gqa(4, 8, 128);
    let layout = |part, tokens, page_size| PartLayout { part, tokens, page_size, dtype: Dtype::Bf16 };
    let placement = Placement {
        stages: vec![vec![LayerId(0), LayerId(3)], vec![LayerId(1), LayerId(2)]],
        cp: 1,
        tp: 4,
        parts: vec![
            layout(Part::Key, TokenMap::Interleaved { ranks: 2, interleave: 1 }, 64),
            layout(Part::Value, TokenMap::Dense, 128),
        ],
        host_pages: None,
    };
    Descriptor { protocol: 1, model: "5d1b0c".into(), shape, placement, converts: false }
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// Written by the first version. Do not regenerate it: later versions must read it.
#[test]
fn the_committed_first_version_is_read() {
    let bytes = hex(include_str!("vectors/descriptor_v1.hex"));
    assert_eq!(decode::<Descriptor>(&bytes).unwrap(), descriptor());
}

#[test]
fn keys_of_a_later_version_are_ignored() {
    let descriptor = descriptor();
    let mut bytes = Vec::new();
    let mut e = Encoder::new(&mut bytes);
    // What this version writes, and two keys more, one of them nested.
    e.map(6).unwrap().u32(0).unwrap().u32(descriptor.protocol).unwrap();
    e.u32(1).unwrap().encode(&descriptor.model).unwrap();
    e.u32(77)
        .unwrap()
        .array(2)
        .unwrap()
        .str("later")
        .unwrap()
        .map(1)
        .unwrap()
        .u8(0)
        .unwrap()
        .bytes(b"x")
        .unwrap();
    e.u32(2).unwrap().encode(&descriptor.shape).unwrap();
    e.u32(3).unwrap().encode(&descriptor.placement).unwrap();
    e.u32(5).unwrap().null().unwrap();
    assert_eq!(decode::<Descriptor>(&bytes).unwrap(), descriptor);

    let mut bytes = Vec::new();
    let mut e = Encoder::new(&mut bytes);
    e.array(2).unwrap().u32(1).unwrap();
    e.map(3)
        .unwrap()
        .u32(0)
        .unwrap()
        .u32(4)
        .unwrap()
        .u32(1)
        .unwrap()
        .u32(2)
        .unwrap()
        .u32(9)
        .unwrap()
        .bool(true)
        .unwrap();
    assert_eq!(decode::<TokenMap>(&bytes).unwrap(), TokenMap::Interleaved { ranks: 4, interleave: 2 });
}

#[test]
fn a_kind_that_this_version_does_not_know_is_an_error() {
    assert!(decode::<Part>(&to_vec(99_u32).unwrap()).is_err());
    assert!(decode::<Dtype>(&to_vec(99_u32).unwrap()).is_err());
    assert_eq!(Part::from_code(99), None);
    for part in Part::ALL {
        assert_eq!(Part::from_code(part.code()), Some(part));
        assert_eq!(to_vec(part).unwrap(), [part.code()], "the code is the wire form");
    }
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = to_vec(descriptor()).unwrap();
    for end in 0..bytes.len() {
        assert!(decode::<Descriptor>(&bytes[..end]).is_err(), "{end} of {} bytes", bytes.len());
    }
}

/// A list that claims 2^60 layers costs an error, not memory.
#[test]
fn a_length_that_lies_is_an_error() {
    let mut bytes = Vec::new();
    let mut e = Encoder::new(&mut bytes);
    e.map(1).unwrap().u32(0).unwrap().array(1).unwrap().array(1 << 60).unwrap().u32(7).unwrap();
    assert!(decode::<Placement>(&bytes).is_err());
}

fn part_layout() -> impl Strategy<Value = PartLayout> {
    let map = prop_oneof![
        Just(TokenMap::Dense),
        any::<(u32, u32)>().prop_map(|(ranks, interleave)| TokenMap::Interleaved { ranks, interleave }),
        any::<u32>().prop_map(|ranks| TokenMap::PageSharded { ranks }),
    ];
    let part = prop::sample::select(Part::ALL.to_vec());
    let dtype = prop::sample::select(vec![Dtype::F32, Dtype::Bf16, Dtype::Fp8E4m3]);
    (part, map, any::<u32>(), dtype).prop_map(|(part, tokens, page_size, dtype)| PartLayout {
        part,
        tokens,
        page_size,
        dtype,
    })
}

fn layers() -> impl Strategy<Value = Vec<LayerId>> {
    prop::collection::vec(any::<u32>().prop_map(LayerId), 0..9)
}

fn state() -> impl Strategy<Value = Option<StateShape>> {
    let state = (any::<u32>(), prop::collection::vec(any::<u32>(), 0..4));
    prop::option::of(state.prop_map(|(window, groups)| StateShape { window, groups }))
}

prop_compose! {
    fn any_descriptor()(
        protocol in any::<u32>(),
        model in ".{0,20}",
        shapes in prop::collection::vec((layers(), any::<u32>(), any::<u32>(), state()), 0..3),
        stages in prop::collection::vec(layers(), 0..4),
        (cp, tp) in any::<(u32, u32)>(),
        parts in prop::collection::vec(part_layout(), 0..3),
        host_pages in any::<Option<u32>>(),
        converts in any::<bool>(),
    ) -> Descriptor {
        let parts_of = shapes.into_iter().zip([Part::Latent, Part::Key, Part::Value]);
        let shape = CacheShape {
            parts: parts_of
                .map(|((layers, heads, head_elems, state), part)| PartShape { part, layers, heads, head_elems, state })
                .collect(),
        };
        Descriptor { protocol, model, shape, placement: Placement { stages, cp, tp, parts, host_pages }, converts }
    }
}

proptest! {
    #[test]
    fn descriptors_survive_the_wire(descriptor in any_descriptor()) {
        let bytes = to_vec(&descriptor).unwrap();
        prop_assert_eq!(&decode::<Descriptor>(&bytes).unwrap(), &descriptor);
        let json = serde_json::to_string(&descriptor).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Descriptor>(&json).unwrap(), &descriptor);
    }

    #[test]
    fn ids_survive_the_wire(room in any::<u128>(), attempt in any::<u32>(), start in any::<u64>(), end in any::<u64>()) {
        let key = RoomKey { room: RoomId(room), attempt: Attempt(attempt) };
        prop_assert_eq!(decode::<RoomKey>(&to_vec(key).unwrap()).unwrap(), key);
        prop_assert_eq!(serde_json::from_str::<RoomKey>(&serde_json::to_string(&key).unwrap()).unwrap(), key);
        prop_assert_eq!(RoomId::parse(&key.room.to_string()), Some(key.room));
        let range = TokenRange::new(start, end);
        prop_assert_eq!(decode::<TokenRange>(&to_vec(range).unwrap()).unwrap(), range);
    }

    #[test]
    fn covers_survive_the_wire(parts in prop::collection::vec((0..8_u8, any::<[u64; 4]>()), 0..4)) {
        let covered = |(code, n): (u8, [u64; 4])| Covered {
            parts: vec![Part::from_code(code).unwrap()],
            runs: vec![TokenRange::new(n[0], n[1]), TokenRange::new(n[2], n[3])],
        };
        let cover = Cover(parts.into_iter().map(covered).collect());
        prop_assert_eq!(&decode::<Cover>(&to_vec(&cover).unwrap()).unwrap(), &cover);
    }

    #[test]
    fn flipped_bytes_never_panic(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = to_vec(descriptor()).unwrap();
        for (at, byte) in &flips {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        // What still reads as a descriptor may be nonsense; pairing with it must have an answer.
        if let Ok(theirs) = decode::<Descriptor>(&bytes) {
            let dtypes = theirs.dtypes();
            let _ = descriptor().compare(&theirs, dtypes).map_err(|m| m.to_string());
            let (src, dst) = (descriptor().placement, theirs.placement);
            let _ = Pair::with(theirs.shape, src, dst, dtypes).map_err(|e| e.to_string());
        }
    }

    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode::<Descriptor>(&bytes);
        let _ = decode::<PageTable>(&bytes);
        let _ = decode::<RoomKey>(&bytes);
        let _ = decode::<PartDigest>(&bytes);
        let _ = decode::<Cover>(&bytes);
    }
}
