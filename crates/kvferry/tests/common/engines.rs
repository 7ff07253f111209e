//! Demos that every engine of others has to prove, over its transport.

use crate::common::{Run, assert_proven, kvferry};

pub(crate) const TINY: [&str; 4] = ["demo", "--json", "--model", "embedded:llama_tiny"];

/// A demo of the smallest model.
pub(crate) fn tiny(transport: &str, more: &[&str]) -> Run {
    kvferry(&[&TINY[..], &["--transport", transport], more].concat())
}

pub(crate) fn layouts(transport: &str) {
    for layout in [
        &[][..],
        &["--attention", "mla", "--prefill", "tp=2", "--decode", "tp=4,dcp=4"],
        &["--prefill", "tp=1,page=64", "--decode", "tp=2,page=24"],
        &["--prefill", "pp=2", "--decode", "pp=2"],
    ] {
        let report = assert_proven(&tiny(transport, layout));
        let (equal, over) = (&report["bit_equal"], &report["transport"]);
        assert_eq!((equal, over), (&true.into(), &transport.into()), "{layout:?}");
    }
}

pub(crate) fn models(transport: &str) {
    for (model, prefill, decode) in [
        ("deepseek_v3_tiny", "tp=4,ep=4", "tp=4,dcp=4"),
        ("kimi_linear_tiny", "tp=4,ep=4,page=64", "tp=4,dcp=4,page=64"),
        ("kimi_linear_tiny", "tp=1", "tp=6,dcp=3,kv=f32"),
    ] {
        let folder = format!("{}/../kvferry-engine/tests/data/{model}", env!("CARGO_MANIFEST_DIR"));
        let layouts = ["--prefill", prefill, "--decode", decode, "--transport", transport];
        let demo = ["demo", "--json", "--model", &folder, "--max-tokens", "4", "--ignore-eos"];
        let run = kvferry(&[&demo[..], &layouts].concat());
        assert_eq!(assert_proven(&run)["bit_equal"], true, "{model}");
    }
}

pub(crate) fn fault(transport: &str) {
    let run = tiny(transport, &["--inject", "flip-byte"]);
    assert_eq!(run.code, Some(1), "{}", run.all());
    assert!(run.all().contains("digest"), "{}", run.all());
}

/// Lists of prefill and of decode, and which transport the two use.
pub(crate) fn mixed(cases: &[[&str; 3]]) {
    for [prefill, decode, chosen] in cases {
        let lists = ["--prefill-transport", prefill, "--decode-transport", decode];
        let report = assert_proven(&kvferry(&[&TINY[..], &lists].concat()));
        assert_eq!(&report["transport"], chosen, "{prefill} {decode}");
    }
}
