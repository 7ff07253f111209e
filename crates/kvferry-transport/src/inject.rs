//! Deliberate faults, to prove that the checks above find them.

use std::{fmt, str::FromStr};

/// A fault that a target commits once per room while bytes land: below its digest, which covers the place where the
/// bytes should be. Reports claim the bytes as moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inject {
    /// One row is not written.
    DropRow,
    /// One bit is inverted.
    FlipByte,
    /// The bytes of one unit are not written.
    SkipSend,
    /// The bytes of two target ranks are exchanged, where there are several; else those of two source ranks.
    SwapRank,
}

impl Inject {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::DropRow, Self::FlipByte, Self::SkipSend, Self::SwapRank];
}

impl fmt::Display for Inject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DropRow => "drop-row",
            Self::FlipByte => "flip-byte",
            Self::SkipSend => "skip-send",
            Self::SwapRank => "swap-rank",
        })
    }
}

impl FromStr for Inject {
    type Err = String;

    /// ```
    /// use kvferry_transport::Inject;
    /// assert_eq!("drop-row".parse(), Ok(Inject::DropRow));
    /// assert!("drop".parse::<Inject>().is_err());
    /// ```
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|fault| fault.to_string() == text).ok_or_else(|| {
            format!("`{text}` is not a fault; use `drop-row`, `flip-byte`, `skip-send` or `swap-rank`")
        })
    }
}
