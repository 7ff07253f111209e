//! Memory that is registered with an engine and is no pool: blocks are staged in it and land in it.

#![forbid(unsafe_code)]

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
};

use kvferry_plan::Bytes;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};

use crate::{
    ArenaError, Packed, PackedMut, Span, Wait,
    io::{receive as receive_into, send as send_from},
    mmap::{Access, Mapping},
};

/// Memory at one address for as long as it lives, zeroed at first. Others may write it at any time, by their own rules,
/// so bytes come and go by copies only.
#[derive(Debug)]
pub struct Buffer {
    mapping: Mapping,
    /// `None` once the memory is only kept.
    fd: Mutex<Option<OwnedFd>>,
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
        Ok(Self { mapping, fd: Mutex::new(Some(fd)) })
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

    /// A descriptor, for a process that an engine runs in: it maps the same memory.
    ///
    /// # Errors
    /// Those of the system, and [`io::ErrorKind::NotFound`] after [`Self::keep`].
    pub fn fd(&self) -> io::Result<OwnedFd> {
        let fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        fd.as_ref().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?.try_clone()
    }

    /// Leaves the memory mapped for the rest of the process: somebody may still write it, and another mapping at its
    /// address would be written.
    pub fn keep(self: Arc<Self>) {
        self.fd.lock().unwrap_or_else(PoisonError::into_inner).take();
        std::mem::forget(self);
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

    /// Sends bytes of `span` over a stream socket, straight from here. One call: returns how many bytes the socket took;
    /// these are not read here again.
    ///
    /// # Errors
    /// [`ArenaError::OutOfBounds`], [`ArenaError::Socket`].
    pub fn send_to(&self, socket: BorrowedFd<'_>, span: Span) -> Result<usize, ArenaError> {
        send_from(&self.mapping, socket, &[span])
    }

    /// Receives what has come over a stream socket into `span`. One call: returns how many bytes came, 0 when the peer has
    /// closed.
    ///
    /// # Errors
    /// [`ArenaError::Socket`] with [`io::ErrorKind::WouldBlock`] when nothing has come in time, and with what the socket
    /// says else; [`ArenaError::OutOfBounds`].
    pub fn receive_from(&self, socket: BorrowedFd<'_>, span: Span, wait: Wait) -> Result<usize, ArenaError> {
        receive_into(&self.mapping, socket, &[span], wait)
    }
}
