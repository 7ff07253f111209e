//! What a model caches, per token or per request, before any question of who holds it.

use alloc::{format, string::String, vec::Vec};
use core::{fmt, ops::Range, str::FromStr};
use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{Bytes, LayerId, PlacementError};

/// Elements of one token of one layer and part, over all heads.
const MAX_ROW_ELEMS: u64 = 1 << 28;
/// Rows of one state slot.
const MAX_WINDOW: u32 = 1 << 20;

/// A kind of cache content. The number is its code on the wire.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize,
)]
#[cbor(index_only)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Part {
    /// MLA latent row: `c_kv` then `k_pe`; one head.
    #[n(0)]
    Latent,
    /// Keys, after RoPE.
    #[n(1)]
    Key,
    /// Values.
    #[n(2)]
    Value,
    /// Latent rows of a draft model.
    #[n(3)]
    DraftLatent,
    /// Keys of a draft model.
    #[n(4)]
    DraftKey,
    /// Values of a draft model.
    #[n(5)]
    DraftValue,
    /// Convolution state of linear attention: per request, not per token.
    #[n(6)]
    Conv,
    /// Recurrent state of linear attention: per request, not per token.
    #[n(7)]
    Recurrent,
}

impl Part {
    /// Every part, by code.
    pub const ALL: [Self; 8] = [
        Self::Latent,
        Self::Key,
        Self::Value,
        Self::DraftLatent,
        Self::DraftKey,
        Self::DraftValue,
        Self::Conv,
        Self::Recurrent,
    ];

    /// The code used on the wire and in digests.
    #[must_use]
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The part of a wire code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// True for what a request has once, whatever its length: it lies in a slot instead of in pages.
    #[must_use]
    pub fn is_state(self) -> bool {
        matches!(self, Self::Conv | Self::Recurrent)
    }

    /// True for the cache of a draft model, which is never dealt over DCP ranks.
    #[must_use]
    pub fn is_draft(self) -> bool {
        matches!(self, Self::DraftLatent | Self::DraftKey | Self::DraftValue)
    }

    /// True for rows that every attention TP rank holds whole.
    #[must_use]
    pub fn is_latent(self) -> bool {
        matches!(self, Self::Latent | Self::DraftLatent)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Latent => "latent",
            Self::Key => "key",
            Self::Value => "value",
            Self::DraftLatent => "draft latent",
            Self::DraftKey => "draft key",
            Self::DraftValue => "draft value",
            Self::Conv => "conv",
            Self::Recurrent => "recurrent",
        })
    }
}

/// An element type of cache content.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize,
)]
#[cbor(index_only)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE binary32.
    #[n(0)]
    F32,
    /// bfloat16.
    #[n(1)]
    Bf16,
    /// fp8 e4m3fn.
    #[n(2)]
    #[serde(alias = "fp8")]
    Fp8E4m3,
}

impl Dtype {
    /// Bytes per element.
    #[must_use]
    pub fn size(self) -> Bytes {
        Bytes(match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Fp8E4m3 => 1,
        })
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3 => "fp8",
        })
    }
}

impl FromStr for Dtype {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            "fp8" | "fp8_e4m3" => Ok(Self::Fp8E4m3),
            _ => Err(()),
        }
    }
}

/// One part of the cache: the layers that have it and the shape of one row over *all* heads,
/// `[heads, head_elems]`, heads outermost. A row is one token's, or one of the `window` rows of a request's state.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
pub struct PartShape {
    /// The kind of content.
    #[n(0)]
    pub part: Part,
    /// Global ids of the layers that have it, ascending.
    #[n(1)]
    pub layers: Vec<LayerId>,
    /// Heads of the whole model; 1 for latent rows.
    #[n(2)]
    pub heads: u32,
    /// Elements of one head of one row.
    #[n(3)]
    pub head_elems: u32,
    /// For per-request state, its rows and channel groups; `None` for parts that grow with tokens.
    #[n(4)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<StateShape>,
}

/// How the per-request state of a layer is cut: `[window, heads, head_elems]`, where `heads` are `groups` of channels
/// one after the other. Each group is split over attention TP on its own, so that a rank's row is its share of the
/// first group, then its share of the second, and so on.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
pub struct StateShape {
    /// Rows of one request: kernel size - 1 for a convolution, 1 for a recurrent state.
    #[n(0)]
    pub window: u32,
    /// Heads of each group; they add up to the part's `heads`. Empty for state that every rank holds whole.
    #[n(1)]
    pub groups: Vec<u32>,
}

impl PartShape {
    /// A part that grows with tokens.
    #[must_use]
    pub fn rows(part: Part, layers: Vec<LayerId>, heads: u32, head_elems: u32) -> Self {
        Self { part, layers, heads, head_elems, state: None }
    }

    /// Per-request state: `window` rows of channel groups with `groups` heads of `head_elems` elements.
    #[must_use]
    pub fn state(part: Part, layers: Vec<LayerId>, window: u32, groups: Vec<u32>, head_elems: u32) -> Self {
        let heads = groups.iter().copied().fold(0, u32::saturating_add);
        Self { part, layers, heads, head_elems, state: Some(StateShape { window, groups }) }
    }

    /// The heads of each group that is split on its own, as ranges of all heads; one for parts that grow with tokens.
    pub fn groups(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        let groups = match &self.state {
            Some(state) if !state.groups.is_empty() => state.groups.as_slice(),
            _ => core::slice::from_ref(&self.heads),
        };
        groups.iter().scan(0_u32, |end, heads| {
            let start = *end;
            *end = start.saturating_add(*heads);
            Some(start..*end)
        })
    }

    /// What makes no sense about the state, if anything.
    fn state_problem(&self) -> Option<String> {
        match &self.state {
            None if self.part.is_state() => Some("is per-request state; give it a window and groups".into()),
            None => None,
            Some(_) if !self.part.is_state() => Some("grows with tokens and has no state window".into()),
            Some(state) if !(1..=MAX_WINDOW).contains(&state.window) => {
                Some(format!("has a window of {} rows; 1 to {MAX_WINDOW} are supported", state.window))
            }
            Some(state) => {
                let sum = state.groups.iter().map(|g| u64::from(*g)).fold(0, u64::saturating_add);
                (!state.groups.is_empty() && sum != u64::from(self.heads))
                    .then(|| format!("has groups of {sum} heads in all, but {} heads", self.heads))
            }
        }
    }
}

/// All parts of a model's cache. Both sides of a pair must agree on it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
pub struct CacheShape {
    /// The parts, in the order in which a plan visits them.
    #[n(0)]
    pub parts: Vec<PartShape>,
}

impl CacheShape {
    /// Grouped-query attention: a key and a value part in each of `layers` layers.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype};
    /// // SmolLM2-135M: 30 layers, 3 KV heads of 64.
    /// let shape = CacheShape::gqa(30, 3, 64);
    /// assert_eq!(shape.parts.len(), 2);
    /// assert_eq!(shape.bytes_per_token(Dtype::F32).0, 30 * 2 * 3 * 64 * 4);
    /// ```
    #[must_use]
    pub fn gqa(layers: u32, kv_heads: u32, head_dim: u32) -> Self {
        let part = |part| PartShape::rows(part, (0..layers).map(LayerId).collect(), kv_heads, head_dim);
        Self { parts: [part(Part::Key), part(Part::Value)].into() }
    }

    /// Multi-head latent attention: one latent row of `row_elems` elements (`c_kv` then `k_pe`) per token and layer.
    #[must_use]
    pub fn mla(layers: u32, row_elems: u32) -> Self {
        let layers = (0..layers).map(LayerId).collect();
        Self { parts: [PartShape::rows(Part::Latent, layers, 1, row_elems)].into() }
    }

    /// The state of Kimi delta attention in `layers`: a convolution of `kernel` taps over the channel groups q, k and v,
    /// and a recurrent `head_dim` x `head_dim` matrix per head.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, LayerId};
    /// let [conv, recurrent] = CacheShape::kda([LayerId(0)].into(), 32, 128, 4);
    /// // bf16 convolution rows of 3 x (q, k, v) x 32 heads x 128; f32 matrices.
    /// assert_eq!(2 * 3 * conv.heads * conv.head_elems, 73_728);
    /// assert_eq!(4 * recurrent.heads * recurrent.head_elems, 2_097_152);
    /// ```
    #[must_use]
    pub fn kda(layers: Vec<LayerId>, heads: u32, head_dim: u32, kernel: u32) -> [PartShape; 2] {
        let window = kernel.saturating_sub(1);
        let matrix = head_dim.saturating_mul(head_dim);
        [
            PartShape::state(Part::Conv, layers.clone(), window, [heads; 3].into(), head_dim),
            PartShape::state(Part::Recurrent, layers, 1, [heads].into(), matrix),
        ]
    }

    /// The shape of `part`, if the model has it.
    #[must_use]
    pub fn part(&self, part: Part) -> Option<&PartShape> {
        self.parts.iter().find(|p| p.part == part)
    }

    /// Bytes that one token occupies over all layers, parts and heads, held once, with every part in `dtype`.
    /// Per-request state does not count.
    #[must_use]
    pub fn bytes_per_token(&self, dtype: Dtype) -> Bytes {
        Bytes(
            self.parts
                .iter()
                .filter(|p| p.state.is_none())
                .map(|p| {
                    (p.layers.len() as u64)
                        .saturating_mul(u64::from(p.heads))
                        .saturating_mul(u64::from(p.head_elems))
                        .saturating_mul(dtype.size().0)
                })
                .fold(0, u64::saturating_add),
        )
    }

    /// True when the model keeps state per request, besides what grows with tokens.
    #[must_use]
    pub fn has_state(&self) -> bool {
        self.parts.iter().any(|part| part.state.is_some())
    }

    /// Checks that every part has rows and appears once, with its layers ascending. [`crate::Placement::check`]
    /// asks this too.
    ///
    /// # Errors
    /// Names the part and the number that is wrong.
    pub fn check(&self) -> Result<(), PlacementError> {
        for (i, part) in self.parts.iter().enumerate() {
            let name = part.part;
            let elems = u64::from(part.heads) * u64::from(part.head_elems);
            let problem = if self.parts.iter().take(i).any(|other| other.part == name) {
                "is described twice".into()
            } else if elems == 0 {
                "has rows of no bytes".into()
            } else if elems > MAX_ROW_ELEMS {
                format!(
                    "has rows of {} heads x {} elements, more than {MAX_ROW_ELEMS}",
                    part.heads, part.head_elems
                )
            } else if !part.layers.is_sorted_by(|a, b| a < b) {
                "has layers that are not ascending".into()
            } else if let Some(problem) = part.state_problem() {
                problem
            } else {
                continue;
            };
            return Err(PlacementError(format!("part `{name}` {problem}")));
        }
        Ok(())
    }
}
