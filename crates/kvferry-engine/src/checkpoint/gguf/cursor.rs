//! A bounded little-endian reader.

/// Reads forward through a file; every length is checked against what is left.
#[derive(Clone, Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Offset of the next byte.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Goes on at an offset that [`Self::at`] gave.
    pub(super) fn skip_to(&mut self, at: usize) {
        self.at = at;
    }

    /// Bytes left.
    pub(super) fn left(&self) -> u64 {
        u64::try_from(self.bytes.len().saturating_sub(self.at)).unwrap_or(u64::MAX)
    }

    /// The next `length` bytes, or what is wrong.
    pub(super) fn take(&mut self, length: u64) -> Result<&'a [u8], String> {
        let end = usize::try_from(length).ok().and_then(|length| self.at.checked_add(length));
        let taken = end.and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| {
            format!("{length} bytes at offset {} do not fit in a file of {} bytes", self.at, self.bytes.len())
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let bytes = self.take(u64::try_from(N).unwrap_or(u64::MAX))?;
        bytes.try_into().map_err(|_| format!("{N} bytes are missing"))
    }

    pub(super) fn u8(&mut self) -> Result<u8, String> {
        self.array().map(u8::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    /// A length and that many bytes of UTF-8.
    pub(super) fn text(&mut self) -> Result<&'a str, String> {
        let length = self.u64()?;
        let at = self.at;
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map_err(|_| format!("the text at offset {at} is not UTF-8"))
    }
}
