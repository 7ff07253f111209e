//! The grammar of layouts: what is written comes back, and what is wrong is named with what would work.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use kvferry_plan::*;
use proptest::prelude::*;

fn refused(text: &str) -> String {
    text.parse::<LayoutSpec>().expect_err(text).to_string()
}

/// Each with the error that a person sees.
#[test]
fn bad_specifications_name_what_is_wrong_and_what_works() {
    let keys = "tp, dcp, interleave, pp, layers, cp, shard, ep, page, kv";
    for (text, error) in [
        ("tp", format!("`tp` is not KEY=VALUE; keys are {keys}")),
        ("tq=4", format!("`tq` is not a key of a layout; keys are {keys}")),
        ("=4", format!("`` is not a key of a layout; keys are {keys}")),
        ("tp=2,tp=4", "`tp` is given twice".into()),
        ("tp=", "tp=: a number from 1 to 1024 is needed".into()),
        ("tp=0", "tp=0: a number from 1 to 1024 is needed".into()),
        ("tp=1025", "tp=1025: a number from 1 to 1024 is needed".into()),
        ("tp=-1", "tp=-1: a number from 1 to 1024 is needed".into()),
        ("cp=99999999999", "cp=99999999999: a number from 1 to 1024 is needed".into()),
        ("page=0", "page=0: a number from 1 to 65536 is needed".into()),
        ("page=65537", "page=65537: a number from 1 to 65536 is needed".into()),
        ("tp=2,dcp=2,interleave=0", "interleave=0: a number from 1 to 65536 is needed".into()),
        ("tp=4,dcp=3", "dcp=3 does not divide tp=4; dcp may be 1, 2 or 4".into()),
        ("dcp=2", "dcp=2 does not divide tp=1; dcp may be 1".into()),
        (
            "interleave=4",
            "interleave=4 has no meaning without dcp; give dcp=2 or more, or leave it out".into(),
        ),
        ("kv=f16", "kv=f16: use `f32`, `bf16` or `fp8`".into()),
        ("shard=yes", "shard=yes: use `on` or `off`".into()),
        ("shard=on,tp=4,dcp=2", "shard=on and dcp=2 both deal tokens; give one".into()),
        ("pp=2,layers=0-3/4-7", "`pp` and `layers` both say how layers are split; give one".into()),
        ("layers=7-3", "layers=7-3: write FIRST-LAST for each stage, such as `0-11/12-29`".into()),
        ("layers=a-b", "layers=a-b: write FIRST-LAST for each stage, such as `0-11/12-29`".into()),
        ("layers=0-3/", "layers=0-3/: write FIRST-LAST for each stage, such as `0-11/12-29`".into()),
    ] {
        assert_eq!(refused(text), error, "{text}");
    }
}

#[test]
fn specifications_that_do_not_fit_the_model_name_the_model() {
    let gqa = CacheShape::gqa(30, 3, 64);
    for (text, error) in [
        ("pp=31", "pp=31: the model has 30 layers; pp may be 1 to 30"),
        (
            "layers=0-11/13-29",
            "layers: layer 12 is in no stage; the stages must hold layers 0 to 29, each once",
        ),
        (
            "layers=0-12/12-29",
            "layers: layer 12 is in two stages; the stages must hold layers 0 to 29, each once",
        ),
        ("layers=0-29/30-40", "layers: stage 30-40 has no layer of the model, which has layers 0 to 29"),
        (
            "tp=4,shard=on",
            "shard=on needs latent rows (MLA) or cp above 1; use cp=2 or more, or a model with latent rows (`--attention mla` makes \
             them of others), or leave it out",
        ),
        ("tp=1024,pp=8", "8 stages x cp 1 x tp 1024 is more than the 4096 ranks supported"),
    ] {
        let spec: LayoutSpec = text.parse().unwrap();
        let refusal = spec.placement(&gqa, Dtype::F32).expect_err(text);
        assert_eq!((refusal.to_string().as_str(), refusal.blame()), (error, Blame::Caller), "{text}");
    }
}

#[test]
fn specifications_become_placements() {
    let gqa = CacheShape::gqa(5, 3, 64);
    let place = |text: &str| text.parse::<LayoutSpec>().unwrap().placement(&gqa, Dtype::F32).unwrap();
    let ids = |ids: &[u32]| ids.iter().copied().map(LayerId).collect::<Vec<_>>();

    assert_eq!(place(""), Placement::single(&gqa, 16, Dtype::F32));
    assert_eq!(place("pp=2").stages, [ids(&[0, 1]), ids(&[2, 3, 4])]);
    assert_eq!(place("layers=0-3/4").stages, [ids(&[0, 1, 2, 3]), ids(&[4])]);
    assert_eq!(
        place(" tp = 4 , dcp=2,,page=64").parts[0].tokens,
        TokenMap::Interleaved { ranks: 2, interleave: 1 }
    );
    assert_eq!(place("cp=2,shard=on").parts[1].tokens, TokenMap::PageSharded { ranks: 2 });
    assert_eq!(place("kv=bf16").parts[0].dtype, Dtype::Bf16);
    assert_eq!((place("tp=3,cp=2,pp=2").ranks(), place("page=24").parts[1].page_size), (12, 24));

    let mla: LayoutSpec = "tp=4,shard=on".parse().unwrap();
    let sharded = mla.placement(&CacheShape::mla(2, 576), Dtype::Bf16).unwrap();
    assert_eq!(sharded.parts[0].tokens, TokenMap::PageSharded { ranks: 4 });
}

fn spec() -> impl Strategy<Value = LayoutSpec> {
    let layers = prop_oneof![
        (1..40_u32).prop_map(LayerSplit::Stages),
        prop::collection::vec((0..50_u32, 0..50_u32), 1..4)
            .prop_map(|s| LayerSplit::Explicit(s.into_iter().map(|(a, n)| (a, a + n)).collect())),
    ];
    let kv = prop::option::of(prop::sample::select(vec![Dtype::F32, Dtype::Bf16, Dtype::Fp8E4m3]));
    let sizes = (1..9_u32, 1..9_u32, 1..9_u32, 1..99_u32, 1..4_u32, 1..4_u32);
    (sizes, layers, any::<bool>(), kv).prop_map(
        |((group, dcp, interleave, page, cp, ep), layers, shard, kv)| {
            let (dcp, interleave) = if shard { (1, 1) } else { (dcp, if dcp > 1 { interleave } else { 1 }) };
            LayoutSpec { tp: group * dcp, dcp, interleave, layers, cp, shard, ep, page, kv }
        },
    )
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(spec in spec()) {
        prop_assert_eq!(spec.to_string().parse::<LayoutSpec>(), Ok(spec));
    }

    #[test]
    fn any_text_gets_an_answer(text in "([a-z]{0,5}[=,/-]?[0-9]{0,11}[=,/-]?){0,6}|.{0,40}") {
        let shape = CacheShape::gqa(4, 2, 8);
        let placement = text.parse::<LayoutSpec>().and_then(|spec| spec.placement(&shape, Dtype::F32));
        if let Ok(placement) = placement {
            prop_assert_eq!(placement.check(&shape), Ok(()));
        }
    }
}
