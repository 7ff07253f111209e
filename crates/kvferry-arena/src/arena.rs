//! A rank's own memory.

#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kvferry_plan::{Bytes, Generation, PageId, PoolLayout, SlotId, StridedMove};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};

use crate::{
    ArenaError, Memory, Packed, Pieces, Span, Stores, Wait, io,
    memory::Mapped,
    mmap::{Access, Mapping},
    simd,
};

/// What every arena is sealed with and a peer insists on: the size is final, and apart from the owner's mapping
/// nobody gets a writable one.
pub(crate) const SEALS: SealFlags =
    SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// The pool of one rank in this process, readable and writable, zeroed at first.
#[derive(Debug)]
pub struct Arena {
    layout: PoolLayout,
    mapping: Mapping,
    fd: OwnedFd,
}

impl Arena {
    /// Creates, pre-faults and seals the memory. `name` is shown in `/proc/PID/maps`.
    ///
    /// # Errors
    /// [`ArenaError::Empty`] for a pool of no pages, [`ArenaError::Memory`] when it is larger than the memory that
    /// the machine has left, [`ArenaError::Os`].
    pub fn new(name: &str, layout: PoolLayout) -> Result<Self, ArenaError> {
        if layout.pages() == 0 || layout.is_empty() {
            return Err(ArenaError::Empty);
        }
        let os = |action| move |source| ArenaError::Os { action, name: name.to_owned(), source };
        // The kernel would hand out pages until it has to kill somebody, so ask before.
        let available = available();
        if available.is_some_and(|available| layout.len() > available) {
            return Err(ArenaError::Memory {
                needed: layout.len(),
                available: available.unwrap_or_default(),
            });
        }
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| os("create")(e.into()))?;
        ftruncate(&fd, layout.len().0).map_err(|e| os("size")(e.into()))?;
        // Takes the memory now, so that a lack of it is an error here and not a SIGBUS later.
        fallocate(&fd, FallocateFlags::empty(), 0, layout.len().0).map_err(|e| os("allocate")(e.into()))?;
        let mapping = Mapping::new(fd.as_fd(), layout.len(), Access::ReadWrite).map_err(os("map"))?;
        fcntl_add_seals(&fd, SEALS).map_err(|e| os("seal")(e.into()))?;
        Ok(Self { layout, mapping, fd })
    }

    /// The descriptor that a peer maps read-only.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Copies `data` to `offset`.
    ///
    /// # Errors
    /// [`ArenaError::OutOfBounds`].
    pub fn write(&self, offset: Bytes, data: &[u8]) -> Result<(), ArenaError> {
        self.mapping.write(offset, data)
    }

    /// Says that `page` changes its owner, and returns its new generation. Whoever reads the page now and compares
    /// generations before and after finds out.
    ///
    /// # Errors
    /// [`ArenaError::NoPage`].
    pub fn next_generation(&self, page: PageId) -> Result<Generation, ArenaError> {
        let word = self.layout.generation_offset(page).ok_or(ArenaError::NoPage(page))?;
        self.mapping.increment(word).map(Generation)
    }

    /// As [`Arena::next_generation`], of a state slot.
    ///
    /// # Errors
    /// [`ArenaError::NoSlot`].
    pub fn next_slot_generation(&self, slot: SlotId) -> Result<Generation, ArenaError> {
        let word = self.layout.slot_generation_offset(slot).ok_or(ArenaError::NoSlot(slot))?;
        self.mapping.increment(word).map(Generation)
    }

    /// Writes packed `data` to `pieces`, in order.
    ///
    /// # Errors
    /// [`ArenaError::Length`] unless `data` has exactly the bytes of the pieces, [`ArenaError::OutOfBounds`].
    pub fn scatter(&self, pieces: &Pieces, data: Packed<'_>) -> Result<(), ArenaError> {
        simd::scatter(&self.mapping, pieces, data)
    }

    /// Receives what has come over a stream socket into `spans`, in order. One call: returns how many bytes came, 0
    /// when the peer has closed.
    ///
    /// # Errors
    /// [`ArenaError::Socket`] with [`std::io::ErrorKind::WouldBlock`] when nothing has come in time, and with what the
    /// socket says else; [`ArenaError::OutOfBounds`].
    pub fn receive_from(
        &self,
        socket: BorrowedFd<'_>,
        spans: &[Span],
        wait: Wait,
    ) -> Result<usize, ArenaError> {
        io::receive(&self.mapping, socket, spans, wait)
    }

    /// Copies `m` from `source` to here.
    ///
    /// # Errors
    /// As [`copy_in_turns`].
    pub fn copy_from(
        &self,
        source: &(impl Memory + ?Sized),
        m: &StridedMove,
        stores: Stores,
    ) -> Result<(), ArenaError> {
        copy_in_turns(source, [(self, m)], stores)
    }
}

/// Copies from `source` to several arenas, a piece of each move in turn: moves that take turns with the rows of the
/// same pages read these pages once, from their first byte to their last.
///
/// # Errors
/// [`ArenaError::OutOfBounds`] when a move leaves either arena; then nothing was copied.
pub fn copy_in_turns<'a>(
    source: &(impl Memory + ?Sized),
    moves: impl IntoIterator<Item = (&'a Arena, &'a StridedMove)>,
    stores: Stores,
) -> Result<(), ArenaError> {
    let moves = moves.into_iter().map(|(target, m)| (&target.mapping, m));
    simd::copy(source.mapping(), moves, stores)
}

/// What the machine can give without swapping, if it says so.
fn available() -> Option<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib.saturating_mul(1024)))
}

impl Mapped for Arena {
    fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

impl Memory for Arena {
    fn layout(&self) -> &PoolLayout {
        &self.layout
    }
}
