//! The matrix of layouts in docs/plan.md, and the part of it in README.md, are what the planner says: each cell is planned
//! for every pair of ranks and its bytes are counted. `KVFERRY_BLESS=1` writes both anew.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::fmt::Write;
use std::path::Path;

use kvferry_plan::*;

const PREFILL: [&str; 13] = [
    "tp=1",
    "tp=2",
    "tp=3",
    "tp=4",
    "pp=2",
    "tp=2,pp=2",
    "tp=2,dcp=2",
    "tp=4,dcp=4",
    "cp=2",
    "tp=4,shard=on",
    "cp=2,shard=on",
    "tp=2,cp=4,shard=on",
    "tp=3,pp=3,shard=on",
];
const DECODE: [&str; 11] = [
    "tp=1",
    "tp=2",
    "tp=3",
    "tp=4",
    "pp=2",
    "tp=2,dcp=2",
    "tp=4,dcp=2",
    "tp=4,dcp=4",
    "tp=4,dcp=4,interleave=4",
    "tp=4,shard=on",
    "cp=2",
];
const TOKENS: TokenRange = TokenRange { start: Token(0), end: Token(200) };

#[derive(Clone, Copy, PartialEq)]
enum Model {
    Mla,
    Gqa,
    Hybrid,
}

impl Model {
    fn shape(self) -> CacheShape {
        match self {
            Self::Mla => CacheShape::mla(4, 576),
            Self::Gqa => CacheShape::gqa(4, 8, 128),
            Self::Hybrid => {
                let mut shape =
                    CacheShape { parts: vec![PartShape::rows(Part::Latent, vec![LayerId(3)], 1, 576)] };
                shape.parts.extend(CacheShape::kda((0..3).map(LayerId).collect(), 32, 128, 4));
                shape
            }
        }
    }
}

/// Plans a pair of layouts for every pair of ranks and checks that all bytes come.
fn serve(shape: &CacheShape, src: &LayoutSpec, dst: &LayoutSpec) -> Result<(), String> {
    let place = |spec: &LayoutSpec| spec.placement(shape, Dtype::Bf16).map_err(|_| "layout".to_owned());
    if dst.shard {
        // The planner could; instances refuse it when they pair, because only prefill deals pages.
        return place(dst).and(Err("sharding".into()));
    }
    let pair = Pair::new(shape.clone(), place(src)?, place(dst)?).map_err(|e| e.axis.to_string())?;
    let table = PageTable::identity(50);
    for d in (0..pair.dst().ranks()).map(RankId) {
        let dst = End { rank: d, table: &table };
        let (mut rows, mut state) = (0, 0);
        for s in (0..pair.src().ranks()).map(RankId) {
            let slot = |rank| Slot { rank, slot: SlotId(0) };
            rows += pair
                .plan(End { rank: s, table: &table }, dst, TOKENS)
                .map_err(|e| e.axis.to_string())?
                .bytes()
                .0;
            state += pair.state(slot(s), slot(d)).map_err(|e| e.axis.to_string())?.bytes().0;
        }
        assert_eq!(
            (Bytes(rows), Bytes(state)),
            (pair.granted_bytes(dst, TOKENS).unwrap(), pair.state_bytes(d))
        );
    }
    Ok(())
}

/// Whether SGLang 0.5.23 pairs the two, by its source.
fn upstream(model: Model, src: &LayoutSpec, dst: &LayoutSpec) -> bool {
    // Its heads (8 and 32 here) are split evenly or not at all.
    let even = model == Model::Mla || (8_u32.is_multiple_of(src.tp) && 8_u32.is_multiple_of(dst.tp));
    let divides = even && (src.tp.is_multiple_of(dst.tp) || dst.tp.is_multiple_of(src.tp));
    let pipeline = stages(dst) == 1 || stages(dst) == stages(src);
    let dcp = match (src.dcp, dst.dcp) {
        (a, b) if a == b => a == 1 || (src.tp, src.interleave) == (dst.tp, dst.interleave),
        (1, _) => model != Model::Gqa && src.cp == 1 && !src.shard && dst.interleave == 1,
        _ => false,
    };
    let shard = match (src.shard, src.cp) {
        (false, _) => true,
        (true, 1) => model == Model::Mla && src.tp == dst.tp && dst.dcp == 1,
        (true, _) => model != Model::Hybrid && dst.dcp == 1,
    };
    dst.cp == 1 && !dst.shard && divides && pipeline && dcp && shard
}

/// The layouts that `kvferry demo --suite matrix` starts on both sides and pairs, each with every other; those with a `>` on
/// prefill's side alone.
const RUN: &str = include_str!("../../kvferry/src/demo/matrix/layouts.txt");

/// What two layouts must have in common to be one for the column "run": page sizes and where stages begin differ.
fn axes(spec: &LayoutSpec) -> [u32; 7] {
    [spec.tp, spec.dcp, spec.interleave, stages(spec), spec.cp, spec.shard.into(), spec.ep]
}

fn stages(spec: &LayoutSpec) -> u32 {
    match &spec.layers {
        LayerSplit::Stages(n) => *n,
        LayerSplit::Explicit(stages) => stages.len() as u32,
    }
}

/// What runs at prefill, and what at decode.
fn run() -> [Vec<[u32; 7]>; 2] {
    let lines = RUN.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let spec =
        |line: &str| line.trim_start_matches(['*', '>', ' ']).replace("uneven", "0/1-3").parse().unwrap();
    let (only, both): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.contains('>'));
    let axes = |lines: &[&str]| lines.iter().map(|line| axes(&spec(line))).collect::<Vec<_>>();
    [[axes(&both), axes(&only)].concat(), axes(&both)]
}

fn table(model: Model, prefill: &[&str], decode: &[&str]) -> String {
    let mut text = String::new();
    let [from, to] = run();
    let names: Vec<_> = decode.iter().map(|d| format!("`{d}`")).collect();
    let _ = writeln!(text, "| prefill ↓ decode → | {} | run |", names.join(" | "));
    let _ = writeln!(text, "|---|{}", ":-:|".repeat(decode.len() + 1));
    for prefill in prefill {
        let _ = write!(text, "| `{prefill}` |");
        let (mut served_pairs, mut run_pairs) = (0, 0);
        for decode in decode {
            let (src, dst): (LayoutSpec, LayoutSpec) = (prefill.parse().unwrap(), decode.parse().unwrap());
            let served = serve(&model.shape(), &src, &dst);
            served_pairs += u32::from(served.is_ok());
            let both = from.contains(&axes(&src)) && to.contains(&axes(&dst));
            run_pairs += u32::from(served.is_ok() && both);
            let cell = match (served, upstream(model, &src, &dst)) {
                (Ok(()), true) => "●",
                (Ok(()), false) => "○",
                (Err(axis), upstream) => {
                    assert!(!upstream, "{prefill} to {decode}: upstream serves it, we refuse: {axis}");
                    &axis.clone()
                }
            };
            let _ = write!(text, " {cell} |");
        }
        let _ = match served_pairs {
            0 => writeln!(text, " - |"),
            _ => writeln!(text, " {run_pairs} of {served_pairs} |"),
        };
    }
    text
}

fn matrix() -> String {
    let titles = [
        (Model::Mla, "MLA: latent rows"),
        (Model::Gqa, "GQA: 8 key/value heads"),
        (Model::Hybrid, "Hybrid: MLA layers and KDA layers with per-request state"),
    ];
    let tables = titles.map(|(model, title)| format!("### {title}\n\n{}\n", table(model, &PREFILL, &DECODE)));
    tables.concat()
}

/// The text between the marks of a page is this one.
fn assert_shows(page: &str, expected: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page);
    let text = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- matrix: begin -->\n", "<!-- matrix: end -->");
    let (before, rest) = text.split_once(begin).expect("the page has a matrix");
    let (shown, after) = rest.split_once(end).expect("the matrix ends");
    if std::env::var_os("KVFERRY_BLESS").is_some() {
        std::fs::write(&path, format!("{before}{begin}{expected}{end}{after}")).unwrap();
        return;
    }
    assert!(
        shown == expected,
        "{page} is stale; run: KVFERRY_BLESS=1 cargo test -p kvferry-plan --test matrix"
    );
}

#[test]
fn the_page_shows_what_the_planner_serves() {
    assert_shows("docs/plan.md", &matrix());
}

#[test]
fn the_readme_shows_a_part_of_it() {
    let prefill = ["tp=1", "tp=3", "tp=4", "tp=2,pp=2", "tp=2,dcp=2", "tp=4,dcp=4"];
    let dealt = ["cp=2", "cp=2,shard=on", "tp=4,shard=on", "tp=3,pp=3,shard=on"];
    let prefill = [&prefill[..], &dealt].concat();
    let decode = ["tp=1", "tp=3", "tp=4", "pp=2", "tp=2,dcp=2", "tp=4,dcp=4", "tp=4,dcp=4,interleave=4"];
    assert_shows("README.md", &table(Model::Hybrid, &prefill, &decode));
}
