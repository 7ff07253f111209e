//! A shared mapping and the checked raw accesses to it. Unsafe code lives here, in `io` and in `simd`.
//!
//! Other threads and processes may write the mapped bytes at any time, so nothing here ever forms a reference to
//! them, except to the generation words, which are atomics.

use std::{
    os::fd::BorrowedFd,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use kvferry_plan::Bytes;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::ArenaError;

/// What a mapping may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only.
    Read,
    /// Reads and writes.
    ReadWrite,
}

/// A shared file mapping that lives as long as this value.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    access: Access,
}

// SAFETY: the mapping is owned, its address and length never change, and every access is a raw copy or an atomic.
unsafe impl Send for Mapping {}
// SAFETY: as above; racing copies may tear, which callers are told (generations and digests find it).
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps and pre-faults `len` bytes of `fd`. The caller has made sure that the file can never shrink.
    pub fn new(fd: BorrowedFd<'_>, len: Bytes, access: Access) -> std::io::Result<Self> {
        let len = usize::try_from(len.0).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        let prot = match access {
            Access::Read => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a null hint lets the kernel choose a free range, so no existing memory is replaced.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED | MapFlags::POPULATE, fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, access })
    }

    /// Size.
    pub fn len(&self) -> Bytes {
        Bytes(self.len as u64)
    }

    /// A pointer to `len` readable bytes at `offset`.
    pub(crate) fn source(&self, offset: Bytes, len: Bytes) -> Result<*const u8, ArenaError> {
        let at = self.check(offset, len)?;
        // SAFETY: `check` found `at + len <= self.len`.
        Ok(unsafe { self.base.as_ptr().add(at) })
    }

    /// A pointer to `len` writable bytes at `offset`.
    pub(crate) fn target(&self, offset: Bytes, len: Bytes) -> Result<*mut u8, ArenaError> {
        let at = self.check(offset, len)?;
        if self.access == Access::Read {
            return Err(ArenaError::OutOfBounds { offset, len, arena: Bytes(0) });
        }
        // SAFETY: `check` found `at + len <= self.len`.
        Ok(unsafe { self.base.as_ptr().add(at) })
    }

    fn check(&self, offset: Bytes, len: Bytes) -> Result<usize, ArenaError> {
        match offset.0.checked_add(len.0) {
            Some(end) if end <= self.len as u64 => Ok(offset.index()),
            _ => Err(ArenaError::OutOfBounds { offset, len, arena: self.len() }),
        }
    }

    /// Copies bytes out.
    pub fn read(&self, offset: Bytes, out: &mut [u8]) -> Result<(), ArenaError> {
        let from = self.source(offset, Bytes(out.len() as u64))?;
        // SAFETY: `from` is valid for `out.len()` bytes; `out` is exclusive memory that is not part of the mapping.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies bytes in.
    pub fn write(&self, offset: Bytes, data: &[u8]) -> Result<(), ArenaError> {
        let to = self.target(offset, Bytes(data.len() as u64))?;
        // SAFETY: `to` is valid for `data.len()` bytes; `data` is borrowed memory that is not part of the mapping.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
        Ok(())
    }

    /// The word at `offset`; reads before it are done before it, reads after it after it.
    pub fn load(&self, offset: Bytes) -> Result<u64, ArenaError> {
        let word = self.source(aligned(offset, self.len())?, Bytes(8))?;
        fence(Ordering::Acquire);
        // SAFETY: `word` is valid for 8 bytes and aligned, and all accesses to generation words are atomic. A relaxed
        // load is the one that is allowed on a read-only mapping; the fences order it.
        let value = unsafe { AtomicU64::from_ptr(word.cast_mut().cast()) }.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        Ok(value)
    }

    /// Adds 1 to the word at `offset` and returns the new value; later writes are not seen before it.
    pub fn increment(&self, offset: Bytes) -> Result<u64, ArenaError> {
        let word = self.target(aligned(offset, self.len())?, Bytes(8))?;
        // SAFETY: `word` is valid for 8 bytes, writable and aligned, and all accesses to it are atomic.
        let old = unsafe { AtomicU64::from_ptr(word.cast()) }.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Ok(old.wrapping_add(1))
    }
}

fn aligned(offset: Bytes, arena: Bytes) -> Result<Bytes, ArenaError> {
    if offset.0.is_multiple_of(8) {
        Ok(offset)
    } else {
        Err(ArenaError::OutOfBounds { offset, len: Bytes(8), arena })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and no pointer into it outlives `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
