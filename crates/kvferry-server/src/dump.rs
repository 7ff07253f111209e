//! The prompt's cache on one rank, by coordinate, on the wire: one JSON line that says what follows, then the bytes.

use std::ops::Range;

use kvferry_engine::{Coordinate, PartRows, RankRows};
use kvferry_plan::{Bytes, Dtype, HeadId, LayerId, Part, RankId, RoomKey, Token};
use serde::{Deserialize, Serialize};

/// Why bytes are not a dump.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DumpError {
    /// The first line is missing or is not the header.
    #[error("not a cache dump: {0}")]
    Header(String),
    /// The bytes do not have the length that the header says.
    #[error("a cache dump of {found} bytes, its header says {expected}")]
    Length {
        /// Bytes there.
        found: u64,
        /// Bytes described.
        expected: u64,
    },
}

/// One part, as the rank holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpPart {
    /// The part.
    pub part: Part,
    /// The rank's layers that have it, ascending.
    pub layers: Vec<LayerId>,
    /// Heads of the model that the rank holds: one run, or of per-request state one in each channel group.
    pub heads: Vec<Range<u32>>,
    /// Elements of one head of one token.
    pub head_elems: u32,
    /// Element type.
    pub dtype: Dtype,
    /// Tokens that the rank holds, or the rows of the state, ascending.
    pub tokens: Vec<Token>,
}

impl DumpPart {
    /// Bytes of one head of one token.
    #[must_use]
    pub fn head_bytes(&self) -> Bytes {
        Bytes(u64::from(self.head_elems).saturating_mul(self.dtype.size().0))
    }
}

/// The prompt's cache of one room on one rank. Per-request state of a room that is held is that which was handed over, as
/// it arrived; else that after the last token that was computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvDump {
    /// The room.
    #[serde(flatten)]
    pub key: RoomKey,
    /// The rank.
    pub rank: RankId,
    /// Global ids of its layers, ascending.
    pub layers: Vec<LayerId>,
    /// What it holds of each part.
    pub parts: Vec<DumpPart>,
    /// The bytes, in the order layer, part, token, head.
    #[serde(skip)]
    pub bytes: Vec<u8>,
}

impl KvDump {
    /// What an engine read of one rank.
    #[must_use]
    pub fn new(key: RoomKey, rows: RankRows) -> Self {
        let part = |part: PartRows| DumpPart {
            part: part.part,
            layers: part.layers,
            heads: part.heads,
            head_elems: part.head_elems,
            dtype: part.dtype,
            tokens: part.tokens,
        };
        let parts = rows.parts.into_iter().map(part).collect();
        Self { key, rank: rows.rank, layers: rows.layers, parts, bytes: rows.bytes }
    }

    /// Bytes that the header describes.
    fn described(&self) -> Option<u64> {
        self.parts.iter().try_fold(0_u64, |sum, p| {
            let heads = |run: &Range<u32>| u64::from(run.end.saturating_sub(run.start));
            let heads = p.heads.iter().map(heads).try_fold(0_u64, u64::checked_add)?;
            let rows = (p.tokens.len() as u64).checked_mul(p.layers.len() as u64)?;
            sum.checked_add(rows.checked_mul(heads)?.checked_mul(p.head_bytes().0)?)
        })
    }

    /// The header line and the bytes.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        // A struct of numbers and lists always has a JSON form.
        let mut out = serde_json::to_vec(&self).unwrap_or_default();
        out.push(b'\n');
        out.extend(self.bytes);
        out
    }

    /// Reads what [`Self::encode`] wrote.
    ///
    /// # Errors
    /// [`DumpError`]; the length is checked against the header.
    pub fn decode(text: &[u8]) -> Result<Self, DumpError> {
        let end = text
            .iter()
            .position(|b| *b == b'\n')
            .ok_or_else(|| DumpError::Header("no header line".into()))?;
        let (header, bytes) = text.split_at(end);
        let mut dump: Self = serde_json::from_slice(header).map_err(|e| DumpError::Header(e.to_string()))?;
        dump.bytes = bytes.get(1..).unwrap_or_default().to_vec();
        let found = dump.bytes.len() as u64;
        let expected = dump.described().unwrap_or(u64::MAX);
        if found == expected { Ok(dump) } else { Err(DumpError::Length { found, expected }) }
    }

    /// Every coordinate that the rank holds, with its bytes.
    pub fn pieces(&self) -> impl Iterator<Item = (Coordinate, Dtype, &[u8])> {
        let coordinates = self.layers.iter().flat_map(move |layer| {
            self.parts.iter().filter(move |p| p.layers.contains(layer)).flat_map(move |p| {
                p.tokens.iter().flat_map(move |token| {
                    p.heads.iter().flat_map(Clone::clone).map(move |head| {
                        (Coordinate { layer: *layer, part: p.part, head: HeadId(head), token: *token }, p)
                    })
                })
            })
        });
        coordinates.scan(self.bytes.as_slice(), |rest, (at, part)| {
            let (piece, after) = rest.split_at_checked(usize::try_from(part.head_bytes().0).ok()?)?;
            *rest = after;
            Some((at, part.dtype, piece))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_plan::{Attempt, RoomId};

    fn dump() -> KvDump {
        let part = |part, heads, tokens: &[u64]| DumpPart {
            part,
            layers: vec![LayerId(0), LayerId(3)],
            heads: vec![heads],
            head_elems: 1,
            dtype: Dtype::Bf16,
            tokens: tokens.iter().copied().map(Token).collect(),
        };
        KvDump {
            key: RoomKey { room: RoomId(7), attempt: Attempt(1) },
            rank: RankId(2),
            layers: vec![LayerId(0), LayerId(3)],
            parts: vec![part(Part::Key, 1..3, &[1, 5]), part(Part::Value, 1..2, &[1, 5])],
            bytes: (0..24).collect(),
        }
    }

    #[test]
    fn a_dump_names_every_coordinate_once_in_order() {
        let dump = KvDump::decode(&dump().encode()).unwrap();
        let pieces: Vec<_> = dump.pieces().collect();
        let at = |layer, part, head, token| Coordinate {
            layer: LayerId(layer),
            part,
            head: HeadId(head),
            token: Token(token),
        };
        assert_eq!(pieces.len(), 12);
        assert_eq!(pieces[0], (at(0, Part::Key, 1, 1), Dtype::Bf16, &[0_u8, 1][..]));
        assert_eq!(pieces[3], (at(0, Part::Key, 2, 5), Dtype::Bf16, &[6_u8, 7][..]));
        assert_eq!(pieces[4], (at(0, Part::Value, 1, 1), Dtype::Bf16, &[8_u8, 9][..]));
        assert_eq!(pieces[11], (at(3, Part::Value, 1, 5), Dtype::Bf16, &[22_u8, 23][..]));
    }

    #[test]
    fn what_is_not_a_dump_is_refused() {
        let good = dump().encode();
        assert!(matches!(KvDump::decode(&good[..good.len() - 1]), Err(DumpError::Length { found: 23, .. })));
        assert!(matches!(KvDump::decode(b"{}"), Err(DumpError::Header(_))));
        assert!(matches!(KvDump::decode(b"{}\n"), Err(DumpError::Header(_))));
        let mut huge = dump();
        huge.parts[0].head_elems = u32::MAX;
        huge.parts[0].heads[0] = 0..u32::MAX;
        assert!(matches!(KvDump::decode(&huge.encode()), Err(DumpError::Length { .. })));
    }
}
