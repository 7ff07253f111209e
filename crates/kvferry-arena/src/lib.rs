//! Registered memory: the pool of one rank as a sealed memfd, page generations, and the strided row copier.
//!
//! An [`Arena`] is the only memory that transports read or write. It is created at its final size, pre-faulted and
//! sealed, so that a peer that gets its descriptor can neither resize it (no SIGBUS here or there) nor map it
//! writable. A peer maps it as an [`ArenaView`]. Both are [`Memory`]: bytes leave by copies only, and no Rust
//! reference to shared bytes is ever formed, because another process may write them at any time.
//!
//! Addresses come from `kvferry-plan`: a [`kvferry_plan::StridedMove`] copies between two arenas, [`Pieces`] are the
//! rows of a unit on one [`Side`]. [`read_units`] packs and digests units, several in one sweep. Where the source's element
//! type is another one than the target's, all of these convert on the way. Everything is bounds-checked.
//!
//! A [`Buffer`] is memory that engines of others write blocks into; bytes get from there into an arena by
//! [`Arena::scatter`] only.
//!
//! *Not* for deciding what may be copied where (`kvferry-plan`, `kvferry-session`) and not a general allocator.
//!
//! ```
//! use kvferry_arena::{Arena, ArenaView, Memory};
//! use kvferry_plan::{Bytes, CacheShape, Dtype, PageId, Placement, PoolLayout, RankId};
//!
//! let shape = CacheShape::mla(1, 576);
//! let place = Placement::single(&shape, 16, Dtype::Bf16);
//! let layout = PoolLayout::new(&shape, &place, RankId(0), 4)?;
//! let arena = Arena::new("doc", layout.clone())?;
//! let row = layout.regions()[0].offset;
//! arena.write(row, &[7; 8])?;
//! arena.next_generation(PageId(2))?;
//!
//! let peer = ArenaView::map(arena.fd(), layout)?;
//! let mut seen = [0; 8];
//! peer.read(row, &mut seen)?;
//! assert_eq!(seen, [7; 8]);
//! assert_eq!(peer.generation(PageId(2))?.0, 1);
//! assert!(peer.read(Bytes(peer.layout().len().0 - 4), &mut seen).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arena;
mod buffer;
mod cast;
mod digest;
mod error;
mod io;
mod memory;
mod mmap;
mod packed;
mod pieces;
mod read;
mod simd;
mod view;

pub use arena::{Arena, copy_in_turns};
pub use buffer::Buffer;
pub use cast::{convert, narrow_bf16, narrow_fp8, widen_bf16, widen_fp8};
pub use digest::{digest_plan, digest_plans, digest_rows, digest_unit};
pub use error::ArenaError;
pub use io::{Span, Wait};
pub use memory::Memory;
pub use packed::{Packed, PackedMut};
pub use pieces::{Pieces, Side};
pub use read::{UnitRead, read_units};
pub use simd::{RowHasher, Stores};
pub use view::ArenaView;
