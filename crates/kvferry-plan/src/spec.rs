//! The grammar in which people write a layout: `tp=4,dcp=4,page=64`.

use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::{fmt, str::FromStr};

use crate::{Blame, CacheShape, Dtype, LayerId, Part, PartLayout, PartShape, Placement, TokenMap};

/// How layers are dealt to pipeline stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerSplit {
    /// `pp=N`: N stages by the split rule.
    Stages(u32),
    /// `layers=0-11/12-29`: explicit stages, first and last layer of each.
    Explicit(Vec<(u32, u32)>),
}

/// One side's layout as written by a person. Keys that are absent have the defaults of [`LayoutSpec::default`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutSpec {
    /// `tp`: attention tensor parallel size.
    pub tp: u32,
    /// `dcp`: decode context parallel size; divides `tp`.
    pub dcp: u32,
    /// `interleave`: consecutive tokens dealt at a time under DCP.
    pub interleave: u32,
    /// `pp` or `layers`.
    pub layers: LayerSplit,
    /// `cp`: prefill context parallel size.
    pub cp: u32,
    /// `shard=on`: KV sharding by logical page.
    pub shard: bool,
    /// `ep`: expert parallel size.
    pub ep: u32,
    /// `page`: rows of one page of one rank's pool.
    pub page: u32,
    /// `kv`: element type; `None` leaves it to the instance's default.
    pub kv: Option<Dtype>,
}

impl Default for LayoutSpec {
    fn default() -> Self {
        Self {
            tp: 1,
            dcp: 1,
            interleave: 1,
            layers: LayerSplit::Stages(1),
            cp: 1,
            shard: false,
            ep: 1,
            page: 16,
            kv: None,
        }
    }
}

/// Why a layout specification was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SpecError(String);

impl SpecError {
    /// Whoever wrote the specification: the caller.
    #[must_use]
    pub fn blame(&self) -> Blame {
        Blame::Caller
    }
}

const KEYS: &str = "tp, dcp, interleave, pp, layers, cp, shard, ep, page, kv";
/// Larger parallel sizes are typing errors, not machines.
const MAX_RANKS: u32 = 1024;

impl FromStr for LayoutSpec {
    type Err = SpecError;

    /// ```
    /// use kvferry_plan::LayoutSpec;
    /// let spec: LayoutSpec = "tp=4,dcp=4,page=64".parse().unwrap();
    /// assert_eq!((spec.tp, spec.dcp, spec.page), (4, 4, 64));
    /// assert_eq!(spec.to_string(), "tp=4,dcp=4,page=64");
    /// let error = "tp=4,dcp=3".parse::<LayoutSpec>().unwrap_err();
    /// assert_eq!(error.to_string(), "dcp=3 does not divide tp=4; dcp may be 1, 2 or 4");
    /// ```
    fn from_str(text: &str) -> Result<Self, SpecError> {
        let mut spec = Self::default();
        let mut seen: Vec<&str> = Vec::new();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let Some((key, value)) = item.split_once('=') else {
                return Err(SpecError(format!("`{item}` is not KEY=VALUE; keys are {KEYS}")));
            };
            let (key, value) = (key.trim(), value.trim());
            if seen.contains(&key) {
                return Err(SpecError(format!("`{key}` is given twice")));
            }
            seen.push(key);
            let size = |max: u32| match value.parse::<u32>() {
                Ok(n) if (1..=max).contains(&n) => Ok(n),
                _ => Err(SpecError(format!("{key}={value}: a number from 1 to {max} is needed"))),
            };
            match key {
                "tp" => spec.tp = size(MAX_RANKS)?,
                "dcp" => spec.dcp = size(MAX_RANKS)?,
                "interleave" => spec.interleave = size(65_536)?,
                "pp" => spec.layers = LayerSplit::Stages(size(MAX_RANKS)?),
                "layers" => spec.layers = LayerSplit::Explicit(stages(value)?),
                "cp" => spec.cp = size(MAX_RANKS)?,
                "shard" => {
                    spec.shard = match value {
                        "on" => true,
                        "off" => false,
                        _ => return Err(SpecError(format!("shard={value}: use `on` or `off`"))),
                    }
                }
                "ep" => spec.ep = size(MAX_RANKS)?,
                "page" => spec.page = size(65_536)?,
                "kv" => {
                    let dtype = value
                        .parse()
                        .map_err(|()| SpecError(format!("kv={value}: use `f32`, `bf16` or `fp8`")))?;
                    spec.kv = Some(dtype);
                }
                _ => return Err(SpecError(format!("`{key}` is not a key of a layout; keys are {KEYS}"))),
            }
        }
        if seen.contains(&"pp") && seen.contains(&"layers") {
            return Err(SpecError("`pp` and `layers` both say how layers are split; give one".into()));
        }
        if !spec.tp.is_multiple_of(spec.dcp) {
            let divisors: Vec<_> =
                (1..=spec.tp).filter(|d| spec.tp.is_multiple_of(*d)).map(|d| d.to_string()).collect();
            let (last, rest) = divisors.split_last().map_or(("1", &[][..]), |(l, r)| (l.as_str(), r));
            let may =
                if rest.is_empty() { last.to_string() } else { format!("{} or {last}", rest.join(", ")) };
            return Err(SpecError(format!(
                "dcp={} does not divide tp={}; dcp may be {may}",
                spec.dcp, spec.tp
            )));
        }
        if spec.interleave > 1 && spec.dcp == 1 {
            return Err(SpecError(format!(
                "interleave={} has no meaning without dcp; give dcp=2 or more, or leave it out",
                spec.interleave
            )));
        }
        if spec.shard && spec.dcp > 1 {
            return Err(SpecError(format!("shard=on and dcp={} both deal tokens; give one", spec.dcp)));
        }
        Ok(spec)
    }
}

fn stages(text: &str) -> Result<Vec<(u32, u32)>, SpecError> {
    let bad = || SpecError(format!("layers={text}: write FIRST-LAST for each stage, such as `0-11/12-29`"));
    text.split('/')
        .map(|stage| {
            let (first, last) = stage.split_once('-').unwrap_or((stage, stage));
            let (first, last) = (first.parse().map_err(|_| bad())?, last.parse().map_err(|_| bad())?);
            if first > last { Err(bad()) } else { Ok((first, last)) }
        })
        .collect()
}

impl fmt::Display for LayoutSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp={}", self.tp)?;
        let default = Self::default();
        if self.dcp != default.dcp {
            write!(f, ",dcp={}", self.dcp)?;
        }
        if self.interleave != default.interleave {
            write!(f, ",interleave={}", self.interleave)?;
        }
        match &self.layers {
            LayerSplit::Stages(1) => {}
            LayerSplit::Stages(n) => write!(f, ",pp={n}")?,
            LayerSplit::Explicit(stages) => {
                for (i, (first, last)) in stages.iter().enumerate() {
                    write!(f, "{}{first}-{last}", if i == 0 { ",layers=" } else { "/" })?;
                }
            }
        }
        if self.cp != default.cp {
            write!(f, ",cp={}", self.cp)?;
        }
        if self.shard {
            write!(f, ",shard=on")?;
        }
        if self.ep != default.ep {
            write!(f, ",ep={}", self.ep)?;
        }
        write!(f, ",page={}", self.page)?;
        match self.kv {
            Some(kv) => write!(f, ",kv={kv}"),
            None => Ok(()),
        }
    }
}

impl LayoutSpec {
    /// The placement of `shape` under this layout, with `kv` (or the spec's own `kv`) as element type.
    ///
    /// # Errors
    /// Names the number that is wrong for this model and what would work.
    pub fn placement(&self, shape: &CacheShape, kv: Dtype) -> Result<Placement, SpecError> {
        let mut layers: Vec<LayerId> = shape.parts.iter().flat_map(|p| p.layers.iter().copied()).collect();
        layers.sort_unstable();
        layers.dedup();
        let dtype = self.kv.unwrap_or(kv);
        let latent = shape.parts.iter().any(|p| p.part.is_latent());
        let tokens = if self.shard {
            let ranks = if self.cp > 1 { self.cp } else { self.tp };
            if self.cp == 1 && !latent {
                return Err(SpecError(
                    "shard=on needs latent rows (MLA) or cp above 1; use cp=2 or more, or a model with latent rows \
                     (`--attention mla` makes them of others), or leave it out".into(),
                ));
            }
            TokenMap::PageSharded { ranks }
        } else if self.dcp > 1 {
            TokenMap::Interleaved { ranks: self.dcp, interleave: self.interleave }
        } else {
            TokenMap::Dense
        };
        let placement = Placement {
            stages: self.stages(&layers)?,
            cp: self.cp,
            tp: self.tp,
            parts: shape.parts.iter().map(|p| self.part(p, tokens, dtype)).collect(),
            host_pages: None,
        };
        placement.check(shape).map_err(|e| SpecError(e.to_string()))?;
        Ok(placement)
    }

    /// The layout of one part where rows of tokens are dealt by `tokens`.
    fn part(&self, shape: &PartShape, tokens: TokenMap, dtype: Dtype) -> PartLayout {
        let part = shape.part;
        match &shape.state {
            // Recurrent state accumulates, so it is kept in f32; convolution state is never narrower than bf16.
            Some(state) => PartLayout {
                part,
                tokens: TokenMap::Dense,
                page_size: state.window,
                dtype: match (part, dtype) {
                    (Part::Recurrent, _) | (_, Dtype::F32) => Dtype::F32,
                    _ => Dtype::Bf16,
                },
            },
            // Drafts are whole on every DCP rank, on pages of as many tokens as the ranks' pages hold together.
            None if part.is_draft() && matches!(tokens, TokenMap::Interleaved { .. }) => {
                let page_size = self.page.saturating_mul(self.dcp);
                PartLayout { part, tokens: TokenMap::Dense, page_size, dtype }
            }
            None => PartLayout { part, tokens, page_size: self.page, dtype },
        }
    }

    fn stages(&self, layers: &[LayerId]) -> Result<Vec<Vec<LayerId>>, SpecError> {
        let count = u32::try_from(layers.len()).unwrap_or(u32::MAX);
        match &self.layers {
            LayerSplit::Stages(n) if *n > count => {
                Err(SpecError(format!("pp={n}: the model has {count} layers; pp may be 1 to {count}")))
            }
            LayerSplit::Stages(n) => Ok((0..*n)
                .map(|r| {
                    let cut = crate::shard(count, *n, r);
                    layers[cut.start as usize..cut.end as usize].to_vec()
                })
                .collect()),
            LayerSplit::Explicit(spans) => explicit_stages(spans, layers),
        }
    }
}

/// The layers of each span; every layer of the model must be in exactly one.
fn explicit_stages(spans: &[(u32, u32)], layers: &[LayerId]) -> Result<Vec<Vec<LayerId>>, SpecError> {
    let model = match layers {
        [first, .., last] => format!("layers {first} to {last}"),
        [only] => format!("layer {only} alone"),
        [] => "no layer".into(),
    };
    for layer in layers {
        let wrong = match spans.iter().filter(|(first, last)| (*first..=*last).contains(&layer.0)).count() {
            0 => "no stage",
            1 => continue,
            _ => "two stages",
        };
        return Err(SpecError(format!(
            "layers: layer {layer} is in {wrong}; the stages must hold {model}, each once"
        )));
    }
    let stage = |&(first, last): &(u32, u32)| {
        let held: Vec<_> = layers.iter().copied().filter(|l| (first..=last).contains(&l.0)).collect();
        match held.is_empty() {
            true => Err(SpecError(format!(
                "layers: stage {first}-{last} has no layer of the model, which has {model}"
            ))),
            false => Ok(held),
        }
    };
    spans.iter().map(stage).collect()
}
