//! Who must move which bytes where: the one coordinate system and the one planner of kvferry.
//!
//! Every byte of cache content is named `(layer id, part, head, token)`; per-request state has no token. A [`Placement`] is *data* that says,
//! for a coordinate, which rank holds it and at which page and row; a [`PageTable`] says which pages of that
//! rank's pool a request owns; a [`PoolLayout`] turns a row into a byte offset of the rank's arena. From two
//! placements and two page tables a [`Pair`] derives the factored copy that one source rank owes one target rank.
//! That the two sides cover the same coordinates is proven when the pair is made; that the chunks of a hand-off cover
//! its tokens is watched by [`Coverage`].
//!
//! The crate is pure: `no_std` + `alloc`, no clock, no I/O, no unsafe, and no function panics on bad input.
//! It is *not* for moving bytes (`kvferry-arena`, `kvferry-transport`) nor for agreeing on who may move them
//! (`kvferry-session`).

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod assembly;
mod block;
mod capacity;
mod cast;
mod cover;
mod coverage;
mod descriptor;
mod digest;
mod flat;
mod footprint;
mod holding;
mod ids;
mod moves;
mod pair;
mod placement;
mod plan;
mod pool;
mod rotation;
mod run;
mod runs;
mod shape;
mod spec;
mod split;
mod table;
mod tokens;
mod unsupported;

pub use assembly::Assembly;
pub use block::PrefixBlock;
pub use capacity::{AdmissionPath, Capacity, Fit, Hold, Limit, Need};
pub use cast::{Cast, Dtypes};
pub use cover::{Cover, Covered};
pub use coverage::{Accepted, Coverage, CoverageError};
pub use descriptor::{Descriptor, Mismatch, PROTOCOL};
pub use digest::{PartDigest, UnitHasher, UnitId};
pub use flat::{Flat, RowRun, coalesce};
pub use footprint::{Footprint, LongestPrompt, PartBytes, RankFootprint};
pub use ids::{
    Attempt, Blame, Bytes, Generation, HeadId, Incarnation, InstanceId, LayerId, PageId, RankId, RoomId,
    RoomKey, Row, SlotId, Token, TokenRange,
};
pub use moves::{Slice, StridedMove, Strides};
pub use pair::{End, Pair, Slot};
pub use placement::{PartLayout, Placement, PlacementError, RankCoords, Replica};
pub use plan::{Group, Plan, Unit};
pub use pool::{PoolLayout, PoolSize, Region};
pub use rotation::{Entries, Rotation};
pub use run::Run;
pub use shape::{CacheShape, Dtype, Part, PartShape, StateShape};
pub use spec::{LayerSplit, LayoutSpec, SpecError};
pub use split::{shard, shard_replicated};
pub use table::PageTable;
pub use tokens::TokenMap;
pub use unsupported::{Axis, Unsupported};
