//! Faults that a source commits on purpose where it shards its pages, to prove that they are found. Not for what lands
//! wrong: those are [`kvferry_transport::Inject`].

use kvferry_plan::{PageId, PageTable, Placement, RankId, Rotation};
use kvferry_session::Final;

/// A fault of a source that shards its pages (`shard=on`). It commits it in every room where it changes anything, and
/// tells the target the rotation that would be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFault {
    /// Shard rank 1 sends the pages that rank 0 owns, from its own pool, and its own pages are sent by nobody.
    WrongOwner,
    /// Every rank sends the pages at positions that are its number modulo the number of ranks, whoever owns them.
    FilterByPosition,
    /// The manifest of a rank that sent nothing of the last chunk is never sent.
    DropEmptyFinal,
}

impl SourceFault {
    /// The rotation by which `rank` goes, in place of the one of its request.
    pub(crate) fn rotation(self, placement: &Placement, rank: RankId, rotation: Rotation) -> Rotation {
        match self {
            Self::WrongOwner if placement.shard_rank(rank) == 1 => {
                Rotation((rotation.0 + 1) % placement.shard_ranks())
            }
            Self::FilterByPosition => Rotation(0),
            Self::WrongOwner | Self::DropEmptyFinal => rotation,
        }
    }

    /// Whether a manifest of a room that ends at `tokens` is withheld.
    pub(crate) fn drops(self, manifest: &Final, end: kvferry_plan::Token) -> bool {
        self == Self::DropEmptyFinal && manifest.legs.iter().all(|leg| leg.tokens.end != end)
    }
}

/// The table of a rank that takes its pages to be of another `rotation` than they are: the same pages of the pools, with
/// other owners.
pub(crate) fn misdealt(table: &PageTable, placement: &Placement, rotation: Rotation) -> PageTable {
    let ranks = placement.shard_ranks();
    let owners = (0..ranks).cycle().skip(rotation.0 as usize);
    let page = |(page, owner): (&PageId, u32)| PageId(placement.local_page(*page).0 * ranks + owner);
    PageTable(table.0.iter().zip(owners).map(page).collect())
}
