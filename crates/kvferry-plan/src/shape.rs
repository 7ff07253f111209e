//! What a model caches per token, before any question of who holds it.

use alloc::{format, vec::Vec};
use core::{fmt, str::FromStr};
use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{Bytes, LayerId, PlacementError};

/// Elements of one token of one layer and part, over all heads.
const MAX_ROW_ELEMS: u64 = 1 << 28;

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
}

impl Part {
    /// The code used on the wire and in digests.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Latent => 0,
            Self::Key => 1,
            Self::Value => 2,
        }
    }

    /// The part of a wire code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        [Self::Latent, Self::Key, Self::Value].into_iter().find(|p| p.code() == code)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Latent => "latent",
            Self::Key => "key",
            Self::Value => "value",
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

/// One part of the cache: the layers that have it and the shape of one token's row over *all* heads,
/// `[heads, head_elems]`, heads outermost.
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
    /// Elements of one head of one token.
    #[n(3)]
    pub head_elems: u32,
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
        let part = |part| PartShape {
            part,
            layers: (0..layers).map(LayerId).collect(),
            heads: kv_heads,
            head_elems: head_dim,
        };
        Self { parts: [part(Part::Key), part(Part::Value)].into() }
    }

    /// Multi-head latent attention: one latent row of `row_elems` elements (`c_kv` then `k_pe`) per token and layer.
    #[must_use]
    pub fn mla(layers: u32, row_elems: u32) -> Self {
        let layers = (0..layers).map(LayerId).collect();
        Self { parts: [PartShape { part: Part::Latent, layers, heads: 1, head_elems: row_elems }].into() }
    }

    /// The shape of `part`, if the model has it.
    #[must_use]
    pub fn part(&self, part: Part) -> Option<&PartShape> {
        self.parts.iter().find(|p| p.part == part)
    }

    /// Bytes that one token occupies over all layers, parts and heads, held once, with every part in `dtype`.
    #[must_use]
    pub fn bytes_per_token(&self, dtype: Dtype) -> Bytes {
        Bytes(
            self.parts
                .iter()
                .map(|p| {
                    (p.layers.len() as u64)
                        .saturating_mul(u64::from(p.heads))
                        .saturating_mul(u64::from(p.head_elems))
                        .saturating_mul(dtype.size().0)
                })
                .fold(0, u64::saturating_add),
        )
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
            } else {
                continue;
            };
            return Err(PlacementError(format!("part `{name}` {problem}")));
        }
        Ok(())
    }
}
