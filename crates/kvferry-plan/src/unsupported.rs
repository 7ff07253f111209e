//! Why there is no plan.

use alloc::string::String;
use core::fmt;

use crate::Blame;

/// The axis on which two layouts cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Axis {
    /// A side's placement makes no sense by itself.
    Placement,
    /// Some coordinate of the cache is held by no rank of a side.
    Coverage,
    /// The target splits the prompt over context-parallel ranks, which nobody has built for decode.
    ContextParallel,
    /// A side keeps pages in host memory, which nobody has built hand-offs for.
    HostTier,
    /// The element types differ.
    Dtype,
    /// A page table is too short or names pages that do not fit.
    PageTable,
    /// The rank does not exist.
    Rank,
    /// A number overflows, or the answer would be absurdly large.
    Size,
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Placement => "placement",
            Self::Coverage => "coverage",
            Self::ContextParallel => "context parallel",
            Self::HostTier => "host tier",
            Self::Dtype => "dtype",
            Self::PageTable => "page table",
            Self::Rank => "rank",
            Self::Size => "size",
        })
    }
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unsupported {axis}: {reason}")]
pub struct Unsupported {
    /// The axis at fault.
    pub axis: Axis,
    /// What is wrong with it, with the numbers.
    pub reason: String,
}

impl Unsupported {
    /// Who is at fault: what [`crate::Pair::new`] finds lies between the peers, the rest is the caller's.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self.axis {
            Axis::Placement | Axis::Coverage | Axis::ContextParallel | Axis::HostTier | Axis::Dtype => {
                Blame::PeerIncompatible
            }
            Axis::PageTable | Axis::Rank | Axis::Size => Blame::Caller,
        }
    }
}

pub(crate) fn unsupported<T>(axis: Axis, reason: String) -> Result<T, Unsupported> {
    Err(Unsupported { axis, reason })
}
