//! Who holds a coordinate: a product of independent maps for layers, heads and tokens.

use alloc::{format, string::String, vec::Vec};
use core::{fmt, ops::Range};
use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{Bytes, CacheShape, Dtype, LayerId, Part, PartShape, RankId, Token};

/// The rule by which `count` whole items are dealt to `n` owners as *work*: owner `r` gets
/// `floor(r*count/n) .. floor((r+1)*count/n)`, which is empty for some owners when `n > count`.
///
/// ```
/// use kvferry_plan::shard;
/// assert_eq!(shard(9, 4, 1), 2..4);
/// assert_eq!(shard(1, 2, 0), 0..0);
/// assert_eq!(shard(1, 2, 1), 0..1);
/// ```
#[must_use]
pub fn shard(count: u32, n: u32, r: u32) -> Range<u32> {
    if n == 0 || r >= n {
        return 0..0;
    }
    let cut = |r: u32| (u64::from(r) * u64::from(count) / u64::from(n)) as u32;
    cut(r)..cut(r + 1)
}

/// The rule by which `count` stored heads are held by `n` owners: as [`shard`] while `n <= count`; with more
/// owners than heads, owner `r` holds head `floor(r*count/n)`, so heads are replicated over consecutive owners.
///
/// ```
/// use kvferry_plan::shard_replicated;
/// let held: Vec<_> = (0..4).map(|r| shard_replicated(2, 4, r)).collect();
/// assert_eq!(held, [0..1, 0..1, 1..2, 1..2]);
/// ```
#[must_use]
pub fn shard_replicated(count: u32, n: u32, r: u32) -> Range<u32> {
    if n <= count || count == 0 || r >= n {
        return shard(count, n, r);
    }
    let head = (u64::from(r) * u64::from(count) / u64::from(n)) as u32;
    head..head + 1
}

/// How the tokens of a request are dealt to the ranks that share a head group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TokenMap {
    /// Every rank holds every token.
    #[n(0)]
    Dense,
    /// Decode context parallelism: token `t` is on DCP rank `(t / interleave) % ranks`.
    #[n(1)]
    Interleaved {
        /// DCP size; divides the attention TP.
        #[n(0)]
        ranks: u32,
        /// Consecutive tokens dealt at a time.
        #[n(1)]
        interleave: u32,
    },
    /// KV sharding: logical page `l` is on shard rank `l % ranks`, as local page `l / ranks`. Ownership comes
    /// from the page id, not from the position.
    #[n(2)]
    PageSharded {
        /// Shard group size.
        #[n(0)]
        ranks: u32,
    },
}

impl TokenMap {
    /// Number of different token classes: ranks with the same class hold the same tokens.
    #[must_use]
    pub fn classes(self) -> u32 {
        match self {
            Self::Dense => 1,
            Self::Interleaved { ranks, .. } | Self::PageSharded { ranks } => ranks,
        }
    }

    /// Where `class` keeps `token`: the index among the tokens it holds, or `None` if another class holds it.
    /// For [`TokenMap::PageSharded`] ownership is decided by page ids, so this counts positions (all of them).
    ///
    /// ```
    /// use kvferry_plan::{Token, TokenMap};
    /// let dcp = TokenMap::Interleaved { ranks: 4, interleave: 1 };
    /// assert_eq!(dcp.local(Token(6), 2), Some(1));
    /// assert_eq!(dcp.local(Token(6), 3), None);
    /// ```
    #[must_use]
    pub fn local(self, token: Token, class: u32) -> Option<u64> {
        match self {
            Self::Dense | Self::PageSharded { .. } => Some(token.0),
            Self::Interleaved { ranks, interleave } => {
                let (n, il) = (u64::from(ranks), u64::from(interleave));
                let block = token.0.checked_div(il)?;
                (block.checked_rem(n)? == u64::from(class)).then(|| block / n * il + token.0 % il)
            }
        }
    }

    /// The token at local index `local` of `class`: the inverse of [`TokenMap::local`].
    #[must_use]
    pub fn token(self, local: u64, class: u32) -> Option<Token> {
        match self {
            Self::Dense | Self::PageSharded { .. } => Some(Token(local)),
            Self::Interleaved { ranks, interleave } => {
                let (n, il) = (u64::from(ranks), u64::from(interleave));
                let cycle = local.checked_div(il)?;
                let block = cycle.checked_mul(n)?.checked_add(u64::from(class))?;
                block.checked_mul(il)?.checked_add(local % il).map(Token)
            }
        }
    }

    /// How many of the tokens `0 .. end` `class` holds: the exact count on a partial last page.
    ///
    /// Source: `(end / cycle) * il + clamp(end % cycle - class * il, 0, il)` with `cycle = ranks * il`.
    ///
    /// ```
    /// use kvferry_plan::{Token, TokenMap};
    /// let dcp = TokenMap::Interleaved { ranks: 4, interleave: 1 };
    /// assert_eq!(dcp.owned(Token(1), 0), 1);
    /// assert_eq!(dcp.owned(Token(1), 3), 0);
    /// assert_eq!(dcp.owned(Token(257), 0), 65);
    /// ```
    #[must_use]
    pub fn owned(self, end: Token, class: u32) -> u64 {
        match self {
            Self::Dense | Self::PageSharded { .. } => end.0,
            Self::Interleaved { ranks, interleave } => {
                let (n, il) = (u64::from(ranks), u64::from(interleave));
                let Some(cycle) = n.checked_mul(il).filter(|c| *c > 0) else { return 0 };
                let rest = (end.0 % cycle).saturating_sub(u64::from(class).saturating_mul(il)).min(il);
                end.0 / cycle * il + rest
            }
        }
    }
}

/// How one part is laid out on every rank of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
pub struct PartLayout {
    /// The part.
    #[n(0)]
    pub part: Part,
    /// Who holds which token.
    #[n(1)]
    pub tokens: TokenMap,
    /// Rows of one page of one rank's pool.
    #[n(2)]
    pub page_size: u32,
    /// Element type in the pool.
    #[n(3)]
    pub dtype: Dtype,
}

/// A rank's place in the product of axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankCoords {
    /// Pipeline stage.
    pub stage: u32,
    /// Prefill context-parallel rank.
    pub cp: u32,
    /// Attention tensor-parallel rank.
    pub tp: u32,
}

/// A rank among those that hold the same bytes of a part: number `index` of `count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    /// 0-based, in rank order.
    pub index: u32,
    /// How many ranks hold these bytes; 1 when nobody else does.
    pub count: u32,
}

/// One side's layout: which rank holds which coordinates, and in what geometry.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
pub struct Placement {
    /// Global layer ids of each pipeline stage.
    #[n(0)]
    pub stages: Vec<Vec<LayerId>>,
    /// Prefill context-parallel size.
    #[n(1)]
    pub cp: u32,
    /// Attention tensor-parallel size.
    #[n(2)]
    pub tp: u32,
    /// Geometry per part, in the order of the [`CacheShape`].
    #[n(3)]
    pub parts: Vec<PartLayout>,
}

/// Why a placement makes no sense; the caller's fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementError(pub(crate) String);

impl fmt::Display for PlacementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for PlacementError {}

impl Placement {
    /// One rank that holds everything: what a monolithic run uses.
    #[must_use]
    pub fn single(shape: &CacheShape, page_size: u32, dtype: Dtype) -> Self {
        let mut layers: Vec<LayerId> = shape.parts.iter().flat_map(|p| p.layers.iter().copied()).collect();
        layers.sort_unstable();
        layers.dedup();
        let parts = shape
            .parts
            .iter()
            .map(|p| PartLayout { part: p.part, tokens: TokenMap::Dense, page_size, dtype })
            .collect();
        Self { stages: [layers].into(), cp: 1, tp: 1, parts }
    }

    /// Number of ranks: stages x cp x tp (0 when that overflows, which [`Placement::check`] refuses).
    #[must_use]
    pub fn ranks(&self) -> u32 {
        u32::try_from(self.stages.len())
            .ok()
            .and_then(|stages| stages.checked_mul(self.cp))
            .and_then(|n| n.checked_mul(self.tp))
            .unwrap_or(0)
    }

    /// The rank's place in the product of axes, or `None` past the last rank.
    #[must_use]
    pub fn coords(&self, rank: RankId) -> Option<RankCoords> {
        if rank.0 >= self.ranks() {
            return None;
        }
        let (outer, tp) = (rank.0 / self.tp, rank.0 % self.tp);
        Some(RankCoords { stage: outer / self.cp, cp: outer % self.cp, tp })
    }

    /// The geometry of `part`.
    #[must_use]
    pub fn part(&self, part: Part) -> Option<&PartLayout> {
        self.parts.iter().find(|p| p.part == part)
    }

    /// The layers of `part` that `rank` holds, ascending.
    #[must_use]
    pub fn layers(&self, shape: &PartShape, rank: RankId) -> Vec<LayerId> {
        let Some(stage) = self.coords(rank).and_then(|c| self.stages.get(c.stage as usize)) else {
            return Vec::new();
        };
        shape.layers.iter().copied().filter(|layer| stage.contains(layer)).collect()
    }

    /// The heads of `part` that `rank` holds. With DCP, consecutive ranks of one head group hold the same heads.
    #[must_use]
    pub fn heads(&self, shape: &PartShape, rank: RankId) -> Range<u32> {
        let (Some(at), Some(layout)) = (self.coords(rank), self.part(shape.part)) else { return 0..0 };
        let per_group = match layout.tokens {
            TokenMap::Interleaved { ranks, .. } => ranks.max(1),
            TokenMap::Dense | TokenMap::PageSharded { .. } => 1,
        };
        shard_replicated(shape.heads, self.tp / per_group, at.tp / per_group)
    }

    /// The token class of `rank` for `part`: its DCP rank, its shard rank, or 0.
    #[must_use]
    pub fn class(&self, part: Part, rank: RankId) -> u32 {
        let (Some(at), Some(layout)) = (self.coords(rank), self.part(part)) else { return 0 };
        match layout.tokens {
            TokenMap::Dense => 0,
            TokenMap::Interleaved { ranks, .. } => at.tp % ranks.max(1),
            TokenMap::PageSharded { .. } if self.cp > 1 => at.cp,
            TokenMap::PageSharded { ranks } => at.tp % ranks.max(1),
        }
    }

    /// Bytes of one row of `part` on `rank`: its heads x elements x element size.
    #[must_use]
    pub fn row_bytes(&self, shape: &PartShape, rank: RankId) -> Bytes {
        let Some(layout) = self.part(shape.part) else { return Bytes(0) };
        let heads = self.heads(shape, rank).len() as u64;
        Bytes(heads.saturating_mul(u64::from(shape.head_elems)).saturating_mul(layout.dtype.size().0))
    }

    /// `rank` among the ranks of its stage that hold the same heads and tokens of `part`.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, Part, Placement, RankId};
    /// let shape = CacheShape::mla(1, 576);
    /// let mut mla_tp2 = Placement::single(&shape, 16, Dtype::Bf16);
    /// mla_tp2.tp = 2;
    /// let replica = mla_tp2.replica(&shape.parts[0], RankId(1));
    /// assert_eq!((replica.index, replica.count), (1, 2));
    /// ```
    #[must_use]
    pub fn replica(&self, shape: &PartShape, rank: RankId) -> Replica {
        let Some(me) = self.coords(rank) else { return Replica { index: 0, count: 1 } };
        let holds = |r: RankId| (self.heads(shape, r), self.class(shape.part, r));
        let mine = holds(rank);
        let (mut index, mut count) = (0, 0);
        let per_stage = self.cp.saturating_mul(self.tp);
        for r in (0..per_stage).map(|i| RankId(me.stage * per_stage + i)) {
            if holds(r) == mine {
                index += u32::from(r < rank);
                count += 1;
            }
        }
        Replica { index, count }
    }

    /// Checks that the placement describes `shape` completely and with sane numbers, so that every later
    /// question about it has an answer.
    ///
    /// # Errors
    /// Names the number that is wrong and what would be right.
    pub fn check(&self, shape: &CacheShape) -> Result<(), PlacementError> {
        let fail = |text: String| Err(PlacementError(text));
        if self.tp == 0 || self.cp == 0 || self.stages.is_empty() {
            return fail("tp, cp and the number of pipeline stages must be at least 1".into());
        }
        if self.ranks() == 0 || self.ranks() > 4096 {
            return fail(format!(
                "{} stages x cp {} x tp {} is more than the 4096 ranks supported",
                self.stages.len(),
                self.cp,
                self.tp
            ));
        }
        for part in &shape.parts {
            let Some(layout) = self.part(part.part) else {
                return fail(format!("the layout says nothing about the part `{}`", part.part));
            };
            if layout.page_size == 0 || layout.page_size > 1 << 20 {
                return fail(format!("page size {} is not in 1..=1048576", layout.page_size));
            }
            if part.heads == 0 || part.head_elems == 0 {
                return fail(format!("part `{}` has rows of no bytes", part.part));
            }
            match layout.tokens {
                TokenMap::Dense => {}
                TokenMap::Interleaved { ranks, interleave } => {
                    if ranks == 0 || interleave == 0 || interleave > 1 << 20 {
                        return fail(format!(
                            "dcp {ranks} with interleave {interleave}: both must be at least 1"
                        ));
                    }
                    if !self.tp.is_multiple_of(ranks) {
                        return fail(format!("dcp {ranks} does not divide tp {}", self.tp));
                    }
                }
                TokenMap::PageSharded { ranks } => {
                    let group = if self.cp > 1 { self.cp } else { self.tp };
                    if ranks != group {
                        return fail(format!("{ranks} shard ranks, but the shard group has {group}"));
                    }
                }
            }
            for layer in &part.layers {
                let held = self.stages.iter().filter(|s| s.contains(layer)).count();
                if held != 1 {
                    return fail(format!("layer {layer} is in {held} pipeline stages, not in exactly one"));
                }
            }
        }
        Ok(())
    }
}
