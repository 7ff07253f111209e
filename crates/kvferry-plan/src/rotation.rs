//! How the pages of a request lie on the ranks of a side that shards them: all that a peer has to be told of a page
//! table, and which of its entries a rank owns. Not for who allocates pages.

use alloc::format;
use core::fmt;
use core::ops::Range;

use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::unsupported::unsupported;
use crate::{Axis, PageId, PageTable, Placement, RankId, TokenRange, Unsupported};

/// The shard rank that owns the first entry of a request's page table. Owners in one table are cyclic, so entry `k` is
/// on shard rank `(rotation + k) % ranks`. Of a side that does not shard its pages it is 0.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize,
)]
#[cbor(transparent)]
#[serde(transparent)]
pub struct Rotation(#[n(0)] pub u32);

impl Rotation {
    /// True for the rotation that goes without saying.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for Rotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The entries of a request's page table that one rank reads or writes for a range of tokens: every one of them, or
/// every `ranks`-th where pages are sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entries {
    first: u64,
    step: u64,
    count: u64,
    end: u64,
}

impl Entries {
    /// Those of `span` that are `offset` modulo `step`.
    fn new(span: Range<u64>, offset: u64, step: u64) -> Self {
        let step = step.max(1);
        // The first number from `span.start` on with this remainder.
        let ahead = (offset % step + step - span.start % step) % step;
        let first = span.start.saturating_add(ahead);
        Self { first, step, count: span.end.saturating_sub(first).div_ceil(step), end: span.end }
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// True when the rank has nothing of the tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The length of the shortest table that reaches the tokens, whoever owns its last entry.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// How many of them come before those of a part of the tokens.
    #[must_use]
    pub fn before(&self, part: &Self) -> u64 {
        part.first.saturating_sub(self.first) / self.step
    }

    /// Their places in the table, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + use<> {
        let Self { first, step, count, .. } = *self;
        (0..count).map(move |n| first.saturating_add(n.saturating_mul(step)))
    }
}

impl Placement {
    /// The rotation of a request that owns the pages of `table` here.
    ///
    /// # Errors
    /// When the owners of its pages are not cyclic: names the first entry that is out of turn.
    ///
    /// ```
    /// use kvferry_plan::*;
    /// let shape = CacheShape::mla(1, 576);
    /// let sharded = "tp=4,shard=on".parse::<LayoutSpec>().unwrap().placement(&shape, Dtype::Bf16).unwrap();
    /// let table = |pages: [u32; 3]| PageTable(pages.map(PageId).into());
    /// assert_eq!(sharded.rotation(&table([6, 11, 4])), Ok(Rotation(2)));
    /// assert!(sharded.rotation(&table([6, 4, 11])).is_err());
    /// let whole = Placement::single(&shape, 16, Dtype::Bf16);
    /// assert_eq!(whole.rotation(&table([6, 4, 11])), Ok(Rotation(0)));
    /// ```
    pub fn rotation(&self, table: &PageTable) -> Result<Rotation, Unsupported> {
        let Some(first) = table.0.first().map(|page| self.owner(*page)) else { return Ok(Rotation(0)) };
        let turns = (0..self.shard_ranks()).cycle().skip(first as usize);
        match table.0.iter().zip(turns).enumerate().find(|(_, (page, turn))| self.owner(**page) != *turn) {
            None => Ok(Rotation(first)),
            Some((entry, (page, turn))) => unsupported(
                Axis::PageTable,
                format!(
                    "entry {entry} of the page table is page {page} of shard rank {}, but the turn is rank {turn}'s of {}",
                    self.owner(*page),
                    self.shard_ranks()
                ),
            ),
        }
    }

    /// Checks a rotation that a peer with this placement names.
    ///
    /// # Errors
    /// When no page table here has it.
    ///
    /// ```
    /// use kvferry_plan::*;
    /// let shape = CacheShape::mla(1, 576);
    /// let sharded = "tp=4,shard=on".parse::<LayoutSpec>().unwrap().placement(&shape, Dtype::Bf16).unwrap();
    /// assert!(sharded.check_rotation(Rotation(3)).is_ok());
    /// assert!(sharded.check_rotation(Rotation(4)).is_err());
    /// assert!(Placement::single(&shape, 16, Dtype::Bf16).check_rotation(Rotation(1)).is_err());
    /// ```
    pub fn check_rotation(&self, rotation: Rotation) -> Result<(), Unsupported> {
        let ranks = self.shard_ranks();
        if rotation.0 < ranks {
            return Ok(());
        }
        unsupported(Axis::PageTable, format!("rotation {rotation} of pages that are dealt to {ranks} ranks"))
    }

    /// The entries of the page table of a request of this `rotation` that `tokens` touch on `rank`, over all parts.
    /// Both sides of a hand-off compute the same, so what lists pages needs no positions.
    ///
    /// ```
    /// use kvferry_plan::*;
    /// let shape = CacheShape::mla(1, 576);
    /// let entries = |spec: &str, rank, rotation| -> Vec<u64> {
    ///     let place = spec.parse::<LayoutSpec>().unwrap().placement(&shape, Dtype::Bf16).unwrap();
    ///     place.entries(RankId(rank), TokenRange::new(20, 80), Rotation(rotation)).iter().collect()
    /// };
    /// assert_eq!(entries("tp=2,page=16", 1, 0), [1, 2, 3, 4]);
    /// assert_eq!(entries("tp=2,shard=on,page=16", 1, 0), [1, 3]);
    /// assert_eq!(entries("tp=2,shard=on,page=16", 1, 1), [2, 4]);
    /// ```
    #[must_use]
    pub fn entries(&self, rank: RankId, tokens: TokenRange, rotation: Rotation) -> Entries {
        let mut span: Option<Range<u64>> = None;
        for part in self.parts.iter().filter(|part| !part.part.is_state()) {
            let class = self.class(part.part, rank);
            let owned = part.tokens.owned(tokens.start, class)..part.tokens.owned(tokens.end, class);
            let size = u64::from(part.page_size.max(1));
            if owned.is_empty() {
                continue;
            }
            let pages = owned.start / size..(owned.end - 1) / size + 1;
            span = Some(match span {
                Some(span) => span.start.min(pages.start)..span.end.max(pages.end),
                None => pages,
            });
        }
        let ranks = u64::from(self.shard_ranks());
        let turn = u64::from(self.shard_rank(rank)) + ranks - u64::from(rotation.0) % ranks;
        Entries::new(span.unwrap_or(0..0), turn, ranks)
    }

    /// The page of a request's table that is page `local` of `rank`'s own pool. `None` past what pages are numbered with.
    ///
    /// ```
    /// use kvferry_plan::*;
    /// let shape = CacheShape::mla(1, 576);
    /// let sharded = "tp=4,shard=on".parse::<LayoutSpec>().unwrap().placement(&shape, Dtype::Bf16).unwrap();
    /// assert_eq!(sharded.logical_page(RankId(2), PageId(1)), Some(PageId(6)));
    /// assert_eq!((sharded.owner(PageId(6)), sharded.local_page(PageId(6))), (2, PageId(1)));
    /// ```
    #[must_use]
    pub fn logical_page(&self, rank: RankId, local: PageId) -> Option<PageId> {
        local.0.checked_mul(self.shard_ranks())?.checked_add(self.shard_rank(rank)).map(PageId)
    }

    /// The place of `rank` among the ranks that logical pages are dealt to; 0 without KV sharding.
    #[must_use]
    pub fn shard_rank(&self, rank: RankId) -> u32 {
        let rows = self.parts.iter().find(|part| !part.part.is_state());
        rows.filter(|_| self.shard_ranks() > 1).map_or(0, |part| self.class(part.part, rank))
    }
}
