//! A peer's memory.

#![forbid(unsafe_code)]

use std::os::fd::BorrowedFd;

use kvferry_plan::{Bytes, PoolLayout};
use rustix::fs::{fcntl_get_seals, fstat};

use crate::{
    ArenaError, Memory,
    arena::SEALS,
    memory::Mapped,
    mmap::{Access, Mapping},
};

/// The pool of a rank of another process, mapped read-only. It stays readable when that process dies.
#[derive(Debug)]
pub struct ArenaView {
    layout: PoolLayout,
    mapping: Mapping,
}

impl ArenaView {
    /// Maps what a peer sent, after checking that it has the size of `layout` and can neither be resized nor mapped
    /// writable by anybody but its owner.
    ///
    /// # Errors
    /// [`ArenaError::Unsealed`] and [`ArenaError::Size`] are the peer's fault, [`ArenaError::Os`] is not.
    pub fn map(fd: BorrowedFd<'_>, layout: PoolLayout) -> Result<Self, ArenaError> {
        let os = |action, source| ArenaError::Os { action, name: "of a peer".into(), source };
        // A descriptor that is no memfd has no seals to ask for.
        let seals = fcntl_get_seals(fd).map_err(|_| ArenaError::Unsealed)?;
        if !seals.contains(SEALS) {
            return Err(ArenaError::Unsealed);
        }
        let stat = fstat(fd).map_err(|e| os("measure", e.into()))?;
        let found = Bytes(u64::try_from(stat.st_size).unwrap_or(0));
        if found != layout.len() || layout.is_empty() {
            return Err(ArenaError::Size { expected: layout.len(), found });
        }
        let mapping = Mapping::new(fd, layout.len(), Access::Read).map_err(|e| os("map", e))?;
        Ok(Self { layout, mapping })
    }
}

impl Mapped for ArenaView {
    fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

impl Memory for ArenaView {
    fn layout(&self) -> &PoolLayout {
        &self.layout
    }
}
