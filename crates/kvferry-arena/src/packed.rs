//! Bytes in a row that are packed into or unpacked from: a slice, or a piece of a [`crate::Buffer`], to which no Rust
//! reference is formed.

#![forbid(unsafe_code)]

use std::marker::PhantomData;

/// Bytes to unpack from.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    at: *const u8,
    len: usize,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> Packed<'a> {
    /// `len` bytes at `at`, readable for `'a` and no part of a pool.
    pub(crate) fn new(at: *const u8, len: usize) -> Self {
        Self { at, len, memory: PhantomData }
    }

    /// How many.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The first `len` bytes and the rest, if there are so many.
    #[must_use]
    pub fn split_at(self, len: usize) -> Option<(Self, Self)> {
        let rest = self.len.checked_sub(len)?;
        Some((Self { len, ..self }, Self { at: self.at.wrapping_add(len), len: rest, ..self }))
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.at
    }
}

impl<'a> From<&'a [u8]> for Packed<'a> {
    fn from(slice: &'a [u8]) -> Self {
        Self::new(slice.as_ptr(), slice.len())
    }
}

/// Bytes to pack into.
#[derive(Debug)]
pub struct PackedMut<'a> {
    at: *mut u8,
    len: usize,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> PackedMut<'a> {
    /// `len` bytes at `at`, writable for `'a` and no part of a pool.
    pub(crate) fn new(at: *mut u8, len: usize) -> Self {
        Self { at, len, memory: PhantomData }
    }

    /// How many.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The first `len` bytes and the rest, if there are so many.
    #[must_use]
    pub fn split_at(self, len: usize) -> Option<(Self, Self)> {
        let rest = self.len.checked_sub(len)?;
        Some((Self::new(self.at, len), Self::new(self.at.wrapping_add(len), rest)))
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.at
    }
}

impl<'a> From<&'a mut [u8]> for PackedMut<'a> {
    fn from(slice: &'a mut [u8]) -> Self {
        Self::new(slice.as_mut_ptr(), slice.len())
    }
}
