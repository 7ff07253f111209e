//! What a source does with rows that the target keeps in another element type. Not for the arithmetic, which is
//! `kvferry-arena`'s.

use core::fmt;

use crate::{Bytes, Dtype};

/// From one element type to another.
///
/// ```
/// use kvferry_plan::{Bytes, Cast, Dtype};
/// let cast = Cast::between(Dtype::F32, Dtype::Fp8E4m3).unwrap();
/// // Eight bytes of the target come from 32 of the source.
/// assert_eq!(cast.source_len(Bytes(8)), Bytes(32));
/// assert_eq!((cast.exact(), cast.to_string()), (false, "f32 to fp8".into()));
/// assert_eq!(Cast::between(Dtype::Bf16, Dtype::Bf16), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cast {
    from: Dtype,
    to: Dtype,
}

impl Cast {
    /// The conversion that `from` needs to become `to`; `None` when there is nothing to do.
    #[must_use]
    pub fn between(from: Dtype, to: Dtype) -> Option<Self> {
        (from != to).then_some(Self { from, to })
    }

    /// The source's element type.
    #[must_use]
    pub fn from(self) -> Dtype {
        self.from
    }

    /// The target's element type.
    #[must_use]
    pub fn to(self) -> Dtype {
        self.to
    }

    /// Every number of the source's type is one of the target's: fp8 in bf16 in f32.
    #[must_use]
    pub fn exact(self) -> bool {
        self.from.size() < self.to.size()
    }

    /// Bytes at the source that become `target` bytes at the target, saturated.
    #[must_use]
    pub fn source_len(self, target: Bytes) -> Bytes {
        Bytes((target.0 / self.to.size().0).saturating_mul(self.from.size().0))
    }

    /// Bytes at the target that `source` bytes at the source become, saturated.
    #[must_use]
    pub fn target_len(self, source: Bytes) -> Bytes {
        Bytes((source.0 / self.from.size().0).saturating_mul(self.to.size().0))
    }
}

impl fmt::Display for Cast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.from, self.to)
    }
}

/// Whether the element types of two sides may differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dtypes {
    /// No: what is moved is moved as it is.
    #[default]
    Equal,
    /// Yes: the source converts.
    Converted,
}
