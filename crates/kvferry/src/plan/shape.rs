//! The grammar of `--model-shape`: parts joined by `+`, each `KIND:NUMBERS[xTYPE][@LAYERS]`.

use kvferry_plan::{CacheShape, Dtype, LayerId, Part, PartShape};

const GRAMMAR: &str = "write mla:LAYERSxELEMENTS, gqa:LAYERSxHEADSxELEMENTS or kda:LAYERSxHEADSxELEMENTS[xKERNEL], then \
                       xf32, xbf16 or xfp8 if it is not bf16, then @3/7/11-13 if the layers are not the next ones; \
                       draft-mla and draft-gqa are a draft model's; join parts with +";
/// Layers of a model; more are a typing error.
const MAX_LAYERS: u32 = 4096;

/// The shape, and the element type of what grows with tokens.
pub(super) fn parse(text: &str) -> Result<(CacheShape, Dtype), String> {
    let (mut parts, mut dtype, mut next) = (Vec::new(), None, 0);
    for item in text.split('+') {
        let wrong = |what: &str| format!("`{item}`: {what}; {GRAMMAR}");
        let (body, at) = item.split_once('@').map_or((item, None), |(body, at)| (body, Some(at)));
        let (kind, numbers) = body.split_once(':').ok_or_else(|| wrong("no kind"))?;
        let mut numbers: Vec<&str> = numbers.split('x').collect();
        if let Some(kv) = numbers.last().and_then(|last| last.parse::<Dtype>().ok()) {
            if dtype.is_some_and(|other| other != kv) {
                return Err(wrong("parts have one element type; recurrent state is f32 whatever it says"));
            }
            dtype = Some(kv);
            numbers.pop();
        }
        let numbers: Vec<u32> =
            numbers.iter().map(|n| n.parse()).collect::<Result<_, _>>().map_err(|_| wrong("not a number"))?;
        let count = *numbers.first().ok_or_else(|| wrong("no layers"))?;
        if !(1..=MAX_LAYERS).contains(&count) {
            return Err(wrong("1 to 4096 layers are possible"));
        }
        let layers = match at {
            Some(list) => layer_list(list).filter(|l| l.len() == count as usize).ok_or_else(|| {
                wrong("after @ come as many layers as the part has, ascending, such as 3/7/11-13")
            })?,
            None => (next..next + count).map(LayerId).collect(),
        };
        next = layers.last().map_or(next, |last: &LayerId| last.0 + 1).max(next);
        match (kind, &numbers[1..]) {
            ("mla", &[elems]) => parts.push(PartShape::rows(Part::Latent, layers, 1, elems)),
            ("draft-mla", &[elems]) => parts.push(PartShape::rows(Part::DraftLatent, layers, 1, elems)),
            ("gqa", &[heads, elems]) => {
                parts.push(PartShape::rows(Part::Key, layers.clone(), heads, elems));
                parts.push(PartShape::rows(Part::Value, layers, heads, elems));
            }
            ("draft-gqa", &[heads, elems]) => {
                parts.push(PartShape::rows(Part::DraftKey, layers.clone(), heads, elems));
                parts.push(PartShape::rows(Part::DraftValue, layers, heads, elems));
            }
            ("kda", &[heads, elems]) => parts.extend(CacheShape::kda(layers, heads, elems, 4)),
            ("kda", &[heads, elems, kernel]) => parts.extend(CacheShape::kda(layers, heads, elems, kernel)),
            _ => return Err(wrong("not a part")),
        }
    }
    let shape = CacheShape { parts };
    shape.check().map_err(|e| e.to_string())?;
    Ok((shape, dtype.unwrap_or(Dtype::Bf16)))
}

/// `3/7/11-13`, ascending.
fn layer_list(text: &str) -> Option<Vec<LayerId>> {
    let mut layers = Vec::new();
    for span in text.split('/') {
        let (first, last) = span.split_once('-').unwrap_or((span, span));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if last.checked_sub(first)? >= MAX_LAYERS {
            return None;
        }
        layers.extend((first..=last).map(LayerId));
    }
    layers.is_sorted_by(|a, b| a < b).then_some(layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_as_written() {
        let (shape, dtype) = parse("mla:61x576xfp8").unwrap();
        assert_eq!((shape, dtype), (CacheShape::mla(61, 576), Dtype::Fp8E4m3));
        assert_eq!(parse("gqa:30x3x64").unwrap(), (CacheShape::gqa(30, 3, 64), Dtype::Bf16));

        let (hybrid, _) = parse("mla:2x576@3/7+kda:6x32x128@0-2/4-6+draft-mla:1x576").unwrap();
        let parts: Vec<_> = hybrid.parts.iter().map(|p| p.part).collect();
        assert_eq!(parts, [Part::Latent, Part::Conv, Part::Recurrent, Part::DraftLatent]);
        assert_eq!(hybrid.parts[0].layers, [3, 7].map(LayerId));
        assert_eq!(hybrid.parts[1].layers, [0, 1, 2, 4, 5, 6].map(LayerId));
        assert_eq!(hybrid.parts[3].layers, [LayerId(8)], "drafts follow the last layer that was named");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, says) in [
            ("mla", "no kind"),
            ("mla:61", "not a part"),
            ("mla:0x576", "1 to 4096 layers"),
            ("mla:61x", "not a number"),
            ("mla:2x576@7/3", "ascending"),
            ("mla:2x576@7", "as many layers"),
            ("mla:2x576@0-4294967295", "as many layers"),
            ("mla:2x576xbf16+kda:2x4x8xf32", "one element type"),
            ("gqa:2x0x64", "rows of no bytes"),
            ("kda:2x4x8x1", "window of 0 rows"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
