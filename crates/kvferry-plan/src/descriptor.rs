//! What two peers compare before they serve each other.

use alloc::{
    format,
    string::{String, ToString},
};
use core::fmt;
use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{CacheShape, Placement};

/// Version of the wire protocol that this build speaks.
pub const PROTOCOL: u32 = 1;

/// An instance's canonical description of its cache.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
pub struct Descriptor {
    /// Protocol version, [`PROTOCOL`].
    #[n(0)]
    pub protocol: u32,
    /// Digest of the model's weights and of how they are used (attention form, arithmetic), hexadecimal.
    #[n(1)]
    pub model: String,
    /// What the model caches.
    #[n(2)]
    pub shape: CacheShape,
    /// Who holds it.
    #[n(3)]
    pub placement: Placement,
}

/// The first field in which two descriptors cannot be served together.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
pub struct Mismatch {
    /// Name of the field, such as `dtype`.
    #[n(0)]
    pub field: String,
    /// The value here.
    #[n(1)]
    pub ours: String,
    /// The value at the peer.
    #[n(2)]
    pub theirs: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` differs: here {}, at the peer {}", self.field, self.ours, self.theirs)
    }
}

impl core::error::Error for Mismatch {}

impl Descriptor {
    /// Compares everything that both sides must share. Layouts may differ; whether two layouts fit is
    /// [`crate::Pair::new`]'s question.
    ///
    /// # Errors
    /// The first field that differs, in the order protocol, layers, heads, head size, parts, dtype, model.
    pub fn compare(&self, peer: &Self) -> Result<(), Mismatch> {
        fn same<T: PartialEq>(
            field: &str,
            ours: T,
            theirs: T,
            show: impl Fn(&T) -> String,
        ) -> Result<(), Mismatch> {
            if ours == theirs {
                return Ok(());
            }
            Err(Mismatch { field: field.into(), ours: show(&ours), theirs: show(&theirs) })
        }
        same("protocol", self.protocol, peer.protocol, ToString::to_string)?;
        let parts = |d: &Self| d.shape.parts.iter().map(|p| p.part).collect::<alloc::vec::Vec<_>>();
        same("parts", parts(self), parts(peer), |p| {
            p.iter().map(ToString::to_string).collect::<alloc::vec::Vec<_>>().join("+")
        })?;
        for (ours, theirs) in self.shape.parts.iter().zip(&peer.shape.parts) {
            let part = ours.part;
            same(&format!("{part}.layers"), &ours.layers, &theirs.layers, |l| {
                format!("{} layers {:?}", l.len(), l.iter().map(|l| l.0).collect::<alloc::vec::Vec<_>>())
            })?;
            same(&format!("{part}.heads"), ours.heads, theirs.heads, ToString::to_string)?;
            same(&format!("{part}.head_elems"), ours.head_elems, theirs.head_elems, ToString::to_string)?;
            let dtype = |d: &Self| d.placement.part(part).map(|l| l.dtype);
            same(&format!("{part}.dtype"), dtype(self), dtype(peer), |d| {
                d.map_or_else(|| "none".into(), |d| d.to_string())
            })?;
        }
        same("model", &self.model, &peer.model, ToString::to_string)
    }
}
