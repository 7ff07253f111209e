//! The bytes of one file, wherever they live.

use super::{LoadError, mmap};
use memmap2::Mmap;
use std::{fmt, path::Path};

/// The bytes of one model file: mapped, owned, or part of the program.
pub struct Blob(Place);

enum Place {
    Mapped(Mmap),
    Owned(Vec<u8>),
    Static(&'static [u8]),
}

impl Blob {
    /// Maps a file.
    ///
    /// # Errors
    /// [`LoadError::Read`] when the operating system refuses, [`LoadError::NotAModel`] for what is not a file.
    pub fn map(path: &Path) -> Result<Self, LoadError> {
        mmap::map(path).map(|map| Self(Place::Mapped(map)))
    }

    /// All bytes of the file.
    ///
    /// ```
    /// use kvferry_engine::checkpoint::Blob;
    /// assert_eq!(Blob::from(vec![1, 2]).bytes(), [1, 2]);
    /// ```
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            Place::Mapped(map) => map,
            Place::Owned(bytes) => bytes,
            Place::Static(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blob({} bytes)", self.bytes().len())
    }
}

impl From<Vec<u8>> for Blob {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Place::Owned(bytes))
    }
}

impl From<&'static [u8]> for Blob {
    fn from(bytes: &'static [u8]) -> Self {
        Self(Place::Static(bytes))
    }
}
