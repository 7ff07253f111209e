//! Memory that is registered with an engine and is no pool: blocks are staged in it and land in it.

#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kvferry_plan::Bytes;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};

use crate::{
    ArenaError, Packed, PackedMut, Span,
    mmap::{Access, Mapping},
};

/// Memory at one address for as long as it lives, zeroed at first. Others may write it at any time, by their own rules,
/// so bytes come and go by copies only.
#[derive(Debug)]
pub struct Buffer {
    mapping: Mapping,
    fd: OwnedFd,
}

impl Buffer {
    /// Takes the memory. `name` is shown in `/proc/PID/maps`.
    ///
    /// # Errors
    /// [`ArenaError::Empty`] for no bytes, [`ArenaError::Os`].
    ///
    /// ```
    /// use kvferry_arena::{Buffer, Span};
    /// use kvferry_plan::Bytes;
    /// let buffer = Buffer::new("doc", Bytes(4096))?;
    /// buffer.write(Bytes(8), b"block")?;
    /// let mut seen = [0; 5];
    /// buffer.read(Bytes(8), &mut seen)?;
    /// assert_eq!(&seen, b"block");
    /// assert!(buffer.packed(Span { offset: Bytes(4000), len: Bytes(97) }).is_err());
    /// # Ok::<(), kvferry_arena::ArenaError>(())
    /// ```
    pub fn new(name: &str, len: Bytes) -> Result<Self, ArenaError> {
        if len.0 == 0 {
            return Err(ArenaError::Empty);
        }
        let os = |action| {
            move |source: rustix::io::Errno| ArenaError::Os {
                action,
                name: name.to_owned(),
                source: source.into(),
            }
        };
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(os("create"))?;
        ftruncate(&fd, len.0).map_err(os("size"))?;
        fallocate(&fd, FallocateFlags::empty(), 0, len.0).map_err(os("allocate"))?;
        // Whoever is given the descriptor may write, and not shrink what is mapped here.
        let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW;
        fcntl_add_seals(&fd, seals).map_err(os("seal"))?;
        let mapping = Mapping::new(fd.as_fd(), len, Access::ReadWrite).map_err(|source| ArenaError::Os {
            action: "map",
            name: name.to_owned(),
            source,
        })?;
        Ok(Self { mapping, fd })
    }

    /// Size.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> Bytes {
        self.mapping.len()
    }

    /// Where it lies in this process, as an engine is told.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.mapping.source(Bytes(0), Bytes(0)).map_or(0, |at| at.expose_provenance() as u64)
    }

    /// The descriptor, for a process that an engine runs in: it maps the same memory.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A piece to unpack from.
    ///
    /// # Errors
    /// [`ArenaError::OutOfBounds`].
    pub fn packed(&self, span: Span) -> Result<Packed<'_>, ArenaError> {
        Ok(Packed::new(self.mapping.source(span.offset, span.len)?, span.len.index()))
    }

    /// A piece to pack into. Bytes of pieces that overlap are those of either.
    ///
    /// # Errors
    /// [`ArenaError::OutOfBounds`].
    pub fn packed_mut(&self, span: Span) -> Result<PackedMut<'_>, ArenaError> {
        Ok(PackedMut::new(self.mapping.target(span.offset, span.len)?, span.len.index()))
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// [`ArenaError::OutOfBounds`].
    pub fn read(&self, offset: Bytes, out: &mut [u8]) -> Result<(), ArenaError> {
        self.mapping.read(offset, out)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`ArenaError::OutOfBounds`].
    pub fn write(&self, offset: Bytes, data: &[u8]) -> Result<(), ArenaError> {
        self.mapping.write(offset, data)
    }
}
