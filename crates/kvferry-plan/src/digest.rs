//! The digest that both sides take over the same bytes.
//!
//! A unit is what one (source rank, target rank) plan moves for one (layer, part, target page, chunk), tokens in
//! order, then heads; of per-request state each channel group is a unit. Its digest is XXH3-64 over these bytes in the target dtype, seeded with the unit's identity,
//! so that right bytes in the wrong place do not match.

use core::hash::Hasher;

use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::{Bytes, Part, RankId, RoomKey, Unit};

/// Identity of a digest unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitId {
    seed: u64,
}

impl UnitId {
    /// The identity of `unit` as it goes to `target` in `key`.
    #[must_use]
    pub fn new(key: RoomKey, target: RankId, unit: &Unit<'_>) -> Self {
        let mut bytes = [0_u8; 16 + 4 + 4 + 1 + 4 + 8];
        bytes[..16].copy_from_slice(&key.room.0.to_le_bytes());
        bytes[16..20].copy_from_slice(&key.attempt.0.to_le_bytes());
        bytes[20..24].copy_from_slice(&unit.layer.0.to_le_bytes());
        bytes[24] = unit.part.code();
        bytes[25..29].copy_from_slice(&target.0.to_le_bytes());
        // State has no tokens: there its channel groups are told apart.
        let first = unit.first_token().0.wrapping_add(u64::from(unit.channels));
        bytes[29..].copy_from_slice(&first.to_le_bytes());
        Self { seed: XxHash3_64::oneshot(&bytes) }
    }

    /// The seed of the unit's digest, for whoever computes XXH3-64 in another way.
    #[must_use]
    pub fn seed(self) -> u64 {
        self.seed
    }

    /// A hasher for the unit's bytes.
    #[must_use]
    pub fn hasher(self) -> UnitHasher {
        UnitHasher(XxHash3_64::with_seed(self.seed))
    }
}

/// Takes a unit's bytes, in pieces of any length, and says their digest.
#[derive(Clone)]
pub struct UnitHasher(XxHash3_64);

impl UnitHasher {
    /// The next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The digest of all bytes so far.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.0.finish()
    }
}

impl core::fmt::Debug for UnitHasher {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("UnitHasher")
    }
}

/// What a manifest says of one part: the wrapping sum of its unit digests and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
pub struct PartDigest {
    /// The part.
    #[n(0)]
    pub part: Part,
    /// Wrapping sum of the unit digests; 0 when digests are off.
    #[n(1)]
    pub sum: u64,
    /// Bytes.
    #[n(2)]
    pub bytes: Bytes,
}

impl PartDigest {
    /// Adds a unit to a list that has one entry per part.
    pub fn add(list: &mut alloc::vec::Vec<Self>, part: Part, digest: u64, bytes: Bytes) {
        match list.iter_mut().find(|p| p.part == part) {
            Some(entry) => {
                entry.sum = entry.sum.wrapping_add(digest);
                entry.bytes.0 = entry.bytes.0.saturating_add(bytes.0);
            }
            None => list.push(Self { part, sum: digest, bytes }),
        }
    }
}
