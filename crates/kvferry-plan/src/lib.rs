//! Who must move which bytes where: the one coordinate system and the one planner of kvferry.
//!
//! Every byte of cache content is named `(layer id, part, head, token)`. A [`Placement`] is *data* that says,
//! for a coordinate, which rank holds it and at which page and row; a [`PageTable`] says which pages of that
//! rank's pool a request owns; a [`PoolLayout`] turns a row into a byte offset of the rank's arena. From two
//! placements and two page tables a [`Pair`] derives the factored copy that one source rank owes one target rank.
//!
//! The crate is pure: `no_std` + `alloc`, no clock, no I/O, no unsafe, and no function panics on bad input.
//! It is *not* for moving bytes (`kvferry-arena`, `kvferry-transport`) nor for agreeing on who may move them
//! (`kvferry-session`).

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod descriptor;
mod digest;
mod ids;
mod placement;
mod planner;
mod pool;
mod shape;
mod spec;
mod table;

pub use descriptor::{Descriptor, Mismatch, PROTOCOL};
pub use digest::{PartDigest, UnitId};
pub use ids::{
    Attempt, Blame, Bytes, Generation, HeadId, Incarnation, InstanceId, LayerId, PageId, RankId, RoomId,
    RoomKey, Row, Token, TokenRange,
};
pub use placement::{
    PartLayout, Placement, PlacementError, RankCoords, Replica, TokenMap, shard, shard_replicated,
};
pub use planner::{Axis, End, Group, Pair, Plan, Run, Slice, StridedMove, Strides, Unit, Unsupported};
pub use pool::{PoolLayout, Region};
pub use shape::{CacheShape, Dtype, Part, PartShape};
pub use spec::{LayerSplit, LayoutSpec, SpecError};
pub use table::PageTable;
