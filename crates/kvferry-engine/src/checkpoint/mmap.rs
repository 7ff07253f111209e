//! Read-only file mappings: the one place of the loader with unsafe code.

#![allow(unsafe_code)]

use super::LoadError;
use memmap2::Mmap;
use std::{fs::File, path::Path};

/// Maps a regular file. Anything else (a pipe, a device) is refused, because its length says nothing.
pub(super) fn map(path: &Path) -> Result<Mmap, LoadError> {
    let file_name = path.display().to_string();
    let read = |source| LoadError::Read { file: file_name.clone(), source };
    let file = File::open(path).map_err(read)?;
    if !file.metadata().map_err(read)?.is_file() {
        return Err(LoadError::NotAModel {
            file: file_name,
            reason: "it is neither a regular file nor a folder".to_owned(),
        });
    }
    // SAFETY: the mapping is private and read-only and no reference to it outlives it. What remains is that
    // another process shortens or rewrites the file meanwhile: weights are installed by renaming complete files
    // into place, and no invariant of this program rests on the bytes (they are checked as hostile input and
    // copied before use), so a rewrite can spoil a model but not memory safety of anything derived from it.
    unsafe { Mmap::map(&file) }.map_err(read)
}
