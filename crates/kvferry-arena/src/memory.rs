//! What an arena and a peer's view of one have in common: reads.

#![forbid(unsafe_code)]

use std::os::fd::BorrowedFd;

use kvferry_plan::{Bytes, Generation, LayerId, PageId, Part, PoolLayout, Region, SlotId};

use crate::{ArenaError, Pieces, Span, io, mmap::Mapping, simd};

/// Keeps [`Memory`] to the types of this crate, which uphold the bounds.
pub trait Mapped {
    /// The mapping.
    fn mapping(&self) -> &Mapping;
}

/// Readable registered memory: [`crate::Arena`] or [`crate::ArenaView`].
///
/// Bytes that somebody writes at the same time may be read torn. Whoever cannot exclude that compares
/// [`Memory::generation`] before and after.
#[allow(private_bounds)]
pub trait Memory: Mapped + Send + Sync + std::fmt::Debug {
    /// Where things lie.
    fn layout(&self) -> &PoolLayout;

    /// Where the rows of a layer and part lie.
    ///
    /// # Errors
    /// [`ArenaError::NoRegion`].
    fn region(&self, layer: LayerId, part: Part) -> Result<&Region, ArenaError> {
        self.layout().region(layer, part).ok_or(ArenaError::NoRegion { layer, part })
    }

    /// Copies `out.len()` bytes at `offset` out.
    ///
    /// # Errors
    /// [`ArenaError::OutOfBounds`].
    fn read(&self, offset: Bytes, out: &mut [u8]) -> Result<(), ArenaError> {
        self.mapping().read(offset, out)
    }

    /// How many times `page` has changed its owner. Reads that the caller made before this call are done before it,
    /// later ones after it.
    ///
    /// # Errors
    /// [`ArenaError::NoPage`].
    fn generation(&self, page: PageId) -> Result<Generation, ArenaError> {
        let word = self.layout().generation_offset(page).ok_or(ArenaError::NoPage(page))?;
        self.mapping().load(word).map(Generation)
    }

    /// As [`Memory::generation`], of a state slot.
    ///
    /// # Errors
    /// [`ArenaError::NoSlot`].
    fn slot_generation(&self, slot: SlotId) -> Result<Generation, ArenaError> {
        let word = self.layout().slot_generation_offset(slot).ok_or(ArenaError::NoSlot(slot))?;
        self.mapping().load(word).map(Generation)
    }

    /// Packs `pieces`, in order, into `out`.
    ///
    /// # Errors
    /// [`ArenaError::Length`] unless `out` has exactly the bytes of the pieces, [`ArenaError::OutOfBounds`].
    fn gather(&self, pieces: &Pieces, out: &mut [u8]) -> Result<(), ArenaError> {
        let read = simd::Read { pieces: *pieces, cast: None, into: Some(out.into()), hasher: None };
        simd::read(self.mapping(), &mut [read])
    }

    /// Sends bytes of `spans`, in order, over a stream socket, straight from this memory. One call: returns how many
    /// bytes the socket took, which may be fewer than there are.
    ///
    /// # Errors
    /// [`ArenaError::OutOfBounds`], [`ArenaError::Socket`].
    fn send_to(&self, socket: BorrowedFd<'_>, spans: &[Span]) -> Result<usize, ArenaError> {
        io::send(self.mapping(), socket, spans)
    }
}
