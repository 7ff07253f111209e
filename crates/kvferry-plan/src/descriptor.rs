//! What two peers compare before they serve each other.

use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{Blame, CacheShape, Dtypes, LayerId, Placement, StateShape};

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
    /// As a source it converts what a target keeps in another element type; false when absent.
    #[cbor(n(4), skip_if = "unsaid")]
    #[serde(default, skip_serializing_if = "unsaid")]
    pub converts: bool,
}

/// What need not be written.
fn unsaid(flag: &bool) -> bool {
    !flag
}

/// The first field in which two descriptors cannot be served together.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, thiserror::Error)]
#[error("`{field}` differs: here {ours}, at the peer {theirs}{}", self.advice())]
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

impl Mismatch {
    /// Nobody did wrong; the two cannot be served together.
    #[must_use]
    pub fn blame(&self) -> Blame {
        Blame::PeerIncompatible
    }

    /// What to change, of the fields that a person chooses.
    fn advice(&self) -> &'static str {
        match self.field.as_str() {
            "protocol" => "; run the same version on both sides",
            "model" => "; give both the same weights, attention form and arithmetic",
            "parts" => "; give both the same model and attention form",
            "digest" => "; have both take digests, or neither",
            "transports" => "; give both a transport that the other has",
            field if field.ends_with(DTYPE) => {
                "; give both the same element type, or have the prefill side convert with `--convert-kv`"
            }
            _ => "",
        }
    }
}

/// How the names of fields with an element type end.
const DTYPE: &str = ".dtype";

impl Descriptor {
    /// Whether the element types of a target may differ from those of this instance as its source.
    #[must_use]
    pub fn dtypes(&self) -> Dtypes {
        if self.converts { Dtypes::Converted } else { Dtypes::Equal }
    }

    /// Compares everything that both sides must share, with the [`Descriptor::dtypes`] of the one that is the source.
    /// Layouts may differ; whether two layouts fit is [`crate::Pair::with`]'s question.
    ///
    /// # Errors
    /// The first field that differs, in the order protocol, parts, then for each part layers, heads, head size,
    /// state and dtype, then model.
    pub fn compare(&self, peer: &Self, dtypes: Dtypes) -> Result<(), Mismatch> {
        fn same<T: PartialEq>(
            field: &str,
            (ours, theirs): (&T, &T),
            show: impl Fn(&T) -> String,
        ) -> Result<(), Mismatch> {
            if ours == theirs {
                return Ok(());
            }
            Err(Mismatch { field: field.into(), ours: show(ours), theirs: show(theirs) })
        }
        same("protocol", (&self.protocol, &peer.protocol), ToString::to_string)?;
        let parts = |d: &Self| d.shape.parts.iter().map(|p| p.part).collect::<Vec<_>>();
        same("parts", (&parts(self), &parts(peer)), |p| join(p.iter(), "+"))?;
        for (ours, theirs) in self.shape.parts.iter().zip(&peer.shape.parts) {
            let part = ours.part;
            same(&format!("{part}.layers"), (&ours.layers, &theirs.layers), |l| show_layers(l))?;
            same(&format!("{part}.heads"), (&ours.heads, &theirs.heads), ToString::to_string)?;
            same(&format!("{part}.head_elems"), (&ours.head_elems, &theirs.head_elems), ToString::to_string)?;
            same(&format!("{part}.state"), (&ours.state, &theirs.state), |s| show_state(s.as_ref()))?;
            let dtype = |d: &Self| d.placement.part(part).map(|l| l.dtype);
            if dtypes == Dtypes::Equal {
                same(&format!("{part}{DTYPE}"), (&dtype(self), &dtype(peer)), |d| {
                    d.map_or_else(|| "none".into(), |d| d.to_string())
                })?;
            }
        }
        same("model", (&self.model, &peer.model), Clone::clone)
    }
}

fn join<T: ToString>(items: impl Iterator<Item = T>, between: &str) -> String {
    items.map(|item| item.to_string()).collect::<Vec<_>>().join(between)
}

/// `3 rows of 32+32+32 heads`.
fn show_state(state: Option<&StateShape>) -> String {
    let groups = |s: &StateShape| join(s.groups.iter().take(8), "+");
    state.map_or_else(|| "none".into(), |s| format!("{} rows of {} heads", s.window, groups(s)))
}

/// `30 layers 0-29`; of many spans only the first few, because a peer chose how many there are.
fn show_layers(layers: &[LayerId]) -> String {
    let spans: Vec<_> = layers.chunk_by(|a, b| a.0.checked_add(1) == Some(b.0)).collect();
    let span = |s: &&[LayerId]| match s {
        [first, .., last] => format!("{first}-{last}"),
        _ => join(s.iter(), ""),
    };
    let more = if spans.len() > 8 { ",..." } else { "" };
    format!("{} layers {}{more}", layers.len(), join(spans.iter().take(8).map(span), ","))
}
