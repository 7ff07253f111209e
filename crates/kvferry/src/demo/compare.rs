//! Two caches, coordinate by coordinate. No plan, no layout: each side says itself which coordinates it holds.

use std::collections::{HashMap, HashSet};

use kvferry_engine::Coordinate;
use kvferry_plan::{Dtype, Part, RankId};
use kvferry_server::KvDump;

/// How the prompt's cache on the decode ranks compares with the reference: its rows, or its state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheDiff {
    /// Coordinates compared, over all ranks.
    pub(super) pieces: u64,
    /// Their bytes.
    pub(super) bytes: u64,
    /// Coordinates whose bytes differ.
    pub(super) different: u64,
    /// The first of them, in words.
    pub(super) first: Option<String>,
    /// Coordinates that no decode rank holds, or that the reference does not have.
    pub(super) missing: u64,
    /// Coordinates whose numbers lie farther apart than another order of f32 sums explains.
    pub(super) far: u64,
    /// The first of them, in words.
    pub(super) first_far: Option<String>,
}

/// How far apart cached f32 numbers may lie when only the order of sums differs, relative to 1 + their size. A guard
/// against gross faults: bits are compared in canonical arithmetic only.
const CLOSE: f32 = 1e-3;

impl CacheDiff {
    /// Every byte is there and equal.
    pub(super) fn is_equal(&self) -> bool {
        self.pieces > 0 && self.different == 0 && self.missing == 0
    }

    /// Every number is there and close enough.
    pub(super) fn is_close(&self) -> bool {
        self.pieces > 0 && self.far == 0 && self.missing == 0
    }

    /// Compares the rows of all tokens.
    pub(super) fn rows(reference: &[KvDump], decode: &[KvDump]) -> Self {
        Self::of(reference, decode, |part| !part.is_state())
    }

    /// Compares the state of the request as it is after the prompt; `None` in a model without.
    pub(super) fn state(reference: &[KvDump], decode: &[KvDump]) -> Option<Self> {
        let has = |dumps: &[KvDump]| dumps.iter().flat_map(|dump| &dump.parts).any(|p| p.part.is_state());
        (has(reference) || has(decode)).then(|| Self::of(reference, decode, Part::is_state))
    }

    fn of(reference: &[KvDump], decode: &[KvDump], wanted: fn(Part) -> bool) -> Self {
        let of = |dump| pieces(dump, wanted);
        let expected: HashMap<Coordinate, &[u8]> =
            reference.iter().flat_map(of).map(|(at, _, bytes)| (at, bytes)).collect();
        let mut seen = HashSet::with_capacity(expected.len());
        let mut diff = Self::default();
        for dump in decode {
            for (at, dtype, bytes) in of(dump) {
                let Some(expected) = expected.get(&at) else {
                    diff.missing += 1;
                    continue;
                };
                seen.insert(at);
                diff.pieces += 1;
                diff.bytes += bytes.len() as u64;
                if *expected != bytes {
                    diff.different += 1;
                    diff.first.get_or_insert_with(|| describe(dump.rank, at, expected, bytes));
                    if !close(dtype, expected, bytes) {
                        diff.far += 1;
                        diff.first_far.get_or_insert_with(|| describe(dump.rank, at, expected, bytes));
                    }
                }
            }
        }
        diff.missing += (expected.len() - seen.len()) as u64;
        diff
    }
}

/// What a dump holds of the parts that are wanted.
fn pieces(dump: &KvDump, wanted: fn(Part) -> bool) -> impl Iterator<Item = (Coordinate, Dtype, &[u8])> {
    dump.pieces().filter(move |(at, ..)| wanted(at.part))
}

fn close(dtype: Dtype, expected: &[u8], found: &[u8]) -> bool {
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
    };
    dtype == Dtype::F32
        && expected.len() == found.len()
        && numbers(expected).iter().zip(numbers(found)).all(|(a, b)| (a - b).abs() <= CLOSE * (1.0 + a.abs()))
}

fn describe(rank: RankId, at: Coordinate, expected: &[u8], found: &[u8]) -> String {
    let Coordinate { layer, part, head, token } = at;
    let differing = expected.iter().zip(found).filter(|(a, b)| a != b).count();
    let what = if found.iter().all(|b| *b == 0) {
        "all zero".to_owned()
    } else {
        format!("{differing} of {} bytes differ", found.len())
    };
    let row = if part.is_state() { "row" } else { "token" };
    format!("decode rank {rank}, layer {layer}, {part}, head {head}, {row} {token}: {what}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_plan::{Attempt, LayerId, RoomId, RoomKey, Token};
    use kvferry_server::DumpPart;
    use std::ops::Range;

    fn dump(rank: u32, heads: Range<u32>, tokens: &[u64]) -> KvDump {
        let mut bytes = Vec::new();
        for layer in 0..2_u8 {
            for token in tokens {
                for head in heads.clone() {
                    bytes.extend([layer + 1, *token as u8, head as u8, 0]);
                }
            }
        }
        KvDump {
            key: RoomKey { room: RoomId(1), attempt: Attempt(0) },
            rank: RankId(rank),
            layers: vec![LayerId(0), LayerId(1)],
            parts: vec![DumpPart {
                part: Part::Key,
                layers: vec![LayerId(0), LayerId(1)],
                heads: vec![heads],
                head_elems: 1,
                dtype: Dtype::F32,
                tokens: tokens.iter().copied().map(Token).collect(),
            }],
            bytes,
        }
    }

    #[test]
    fn split_and_replicated_heads_and_tokens_are_put_together() {
        let whole = [dump(0, 0..2, &[0, 1, 2])];
        let split =
            [dump(0, 0..1, &[0, 2]), dump(1, 0..1, &[1]), dump(2, 1..2, &[0, 1, 2]), dump(3, 1..2, &[1])];
        let diff = CacheDiff::rows(&whole, &split);
        assert!(diff.is_equal(), "{diff:?}");
        assert_eq!((diff.pieces, diff.bytes), (14, 56));
        assert!(CacheDiff::rows(&split, &whole).is_equal());
    }

    #[test]
    fn state_is_compared_apart_from_rows() {
        let with_state = |wrong: bool| {
            let mut state = dump(1, 4..6, &[0, 1]);
            state.parts[0].part = Part::Recurrent;
            state.bytes[4 * 5 + 3] ^= u8::from(wrong);
            [dump(0, 0..2, &[0, 1, 2]), state]
        };
        let [right, wrong] = [with_state(false), with_state(true)];
        assert!(CacheDiff::rows(&right, &wrong).is_equal());
        let state = CacheDiff::state(&right, &right).unwrap();
        assert!(state.is_equal() && (state.pieces, state.bytes) == (8, 32), "{state:?}");
        let state = CacheDiff::state(&right, &wrong).unwrap();
        assert_eq!(
            state.first.unwrap(),
            "decode rank 1, layer 1, recurrent, head 5, row 0: 1 of 4 bytes differ"
        );
        // A side without state is not equal to one that has some; where nobody has any, there is nothing to compare.
        let bare = [dump(0, 0..2, &[0, 1, 2])];
        assert!(!CacheDiff::state(&right, &bare).unwrap().is_equal());
        assert_eq!(CacheDiff::state(&bare, &bare), None);
    }

    #[test]
    fn one_wrong_byte_one_missing_token_and_one_foreign_token_are_found() {
        let whole = [dump(0, 0..2, &[0, 1, 2])];
        let mut wrong = [dump(0, 0..2, &[0, 1, 2])];
        wrong[0].bytes[4 * 7 + 3] ^= 0x40;
        let diff = CacheDiff::rows(&whole, &wrong);
        assert_eq!((diff.different, diff.missing, diff.far), (1, 0, 1));
        assert_eq!(diff.first.unwrap(), "decode rank 0, layer 1, key, head 1, token 0: 1 of 4 bytes differ");
        assert_eq!(CacheDiff::rows(&whole, &[dump(0, 0..2, &[0, 2])]).missing, 4);
        assert_eq!(CacheDiff::rows(&whole, &[dump(0, 0..2, &[0, 1, 2, 3])]).missing, 4);
        // The lowest bit of a number is a different byte, and close.
        wrong[0].bytes[4 * 7 + 3] ^= 0x40;
        wrong[0].bytes[4 * 7] ^= 1;
        let diff = CacheDiff::rows(&whole, &wrong);
        assert!(!diff.is_equal() && diff.is_close(), "{diff:?}");
        assert!(!CacheDiff::rows(&whole, &[]).is_equal());
        assert!(!CacheDiff::rows(&[], &[]).is_equal());
    }
}
