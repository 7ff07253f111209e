//! The layouts that are paired.

use kvferry_plan::{Blame, LayoutSpec, SpecError};

use crate::failure::Failure;

/// One line for each layout; the planner's page of layouts reads it too.
const LIST: &str = include_str!("layouts.txt");

/// Layouts that are paired with a conversion: every one of these at prefill with every one of those at decode that has
/// another element type. The first two of each are those that `quick` runs.
const CONVERTED: [[&str; 3]; 2] = [
    ["tp=3,page=24,kv=f32", "tp=4,layers=uneven,page=16,kv=fp8", "tp=2,dcp=2,page=64,kv=bf16"],
    ["tp=4,dcp=4,interleave=4,page=16,kv=fp8", "tp=2,pp=3,page=24,kv=bf16", "tp=1,page=64,kv=f32"],
];

/// Names of the prefill layouts and of the decode layouts that are paired with a conversion.
pub(super) fn converted(quick: bool) -> [Vec<&'static str>; 2] {
    CONVERTED.map(|side| side.into_iter().take(if quick { 2 } else { 3 }).collect())
}

/// Names of the layouts that are listed for both sides, or of those of them that `quick` runs.
pub(super) fn names(quick: bool) -> Vec<&'static str> {
    named_by(quick, |line| !line.prefill_only)
}

/// Names of the layouts that only prefill can have, likewise.
pub(super) fn prefill_only(quick: bool) -> Vec<&'static str> {
    named_by(quick, |line| line.prefill_only)
}

fn named_by(quick: bool, wanted: fn(&Line) -> bool) -> Vec<&'static str> {
    lines().filter(wanted).filter(|line| line.quick || !quick).map(|line| line.name).collect()
}

/// What a name means for a model of `layers` layers.
pub(super) fn named(name: &str, layers: usize) -> Result<LayoutSpec, Failure> {
    let uneven = format!("layers=0/1-{}", layers.saturating_sub(1));
    let spec = name.replace("layers=uneven", &uneven).parse();
    spec.map_err(|e: SpecError| Failure::new(Blame::Us, e).within(name))
}

/// A line of the list.
struct Line {
    name: &'static str,
    quick: bool,
    prefill_only: bool,
}

fn lines() -> impl Iterator<Item = Line> {
    let lines = LIST.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| {
        let name = line.trim_start_matches(['*', '>', ' ']);
        let marks = line.strip_suffix(name).unwrap_or_default();
        Line { name, quick: marks.contains('*'), prefill_only: marks.contains('>') }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_plan::{Cast, Dtype, LayerSplit};
    use std::collections::BTreeSet;

    /// Number of pipeline stages.
    fn stages(spec: &LayoutSpec) -> usize {
        match &spec.layers {
            LayerSplit::Stages(n) => *n as usize,
            LayerSplit::Explicit(stages) => stages.len(),
        }
    }

    fn listed(layers: usize, quick: bool) -> Vec<LayoutSpec> {
        names(quick).into_iter().map(|name| named(name, layers).unwrap()).collect()
    }

    /// The values of a layout on each axis.
    fn axes(spec: &LayoutSpec) -> [u32; 5] {
        [spec.tp, spec.dcp, spec.interleave, stages(spec) as u32, spec.page]
    }

    #[test]
    fn every_two_values_that_can_go_together_do() {
        let all = listed(4, false);
        let found: BTreeSet<_> = all.iter().map(axes).collect();
        assert!(found.len() == all.len() && all.len() >= 12, "{} different layouts", found.len());
        // One stage, two uneven ones, three.
        let mut possible = Vec::new();
        for tp in [1, 2, 3, 4, 6] {
            for dcp in [1, 2, 3, 4, 6_u32].into_iter().filter(|dcp| tp % dcp == 0) {
                for interleave in if dcp > 1 { &[1, 4][..] } else { &[1] } {
                    for stages in [1, 2, 3] {
                        for page in [16, 24, 64] {
                            possible.push([tp, dcp, *interleave, stages, page]);
                        }
                    }
                }
            }
        }
        let pairs = |layouts: &mut dyn Iterator<Item = [u32; 5]>| -> BTreeSet<_> {
            layouts
                .flat_map(|at| (0..5).flat_map(move |a| (a + 1..5).map(move |b| (a, at[a], b, at[b]))))
                .collect()
        };
        let (wanted, there) = (pairs(&mut possible.into_iter()), pairs(&mut found.into_iter()));
        let missing: Vec<_> = wanted.difference(&there).collect();
        assert!(missing.is_empty(), "axis, value, axis, value: {missing:?}");
        assert!(there.is_subset(&wanted), "{:?}", there.difference(&wanted).collect::<Vec<_>>());
    }

    /// The types of every pair, prefill's first.
    fn conversions(quick: bool) -> Vec<(Dtype, Dtype)> {
        let [prefill, decode] = converted(quick)
            .map(|side| side.into_iter().map(|name| named(name, 4).unwrap().kv.unwrap()).collect());
        let pairs = |from: Vec<Dtype>, to: Vec<Dtype>| {
            from.into_iter().flat_map(move |a| to.clone().into_iter().map(move |b| (a, b)))
        };
        pairs(prefill, decode).filter(|(from, to)| from != to).collect()
    }

    #[test]
    fn every_conversion_is_run_and_quick_runs_both_kinds() {
        assert_eq!(conversions(false).len(), 6);
        let exact = |(from, to): &(Dtype, Dtype)| Cast::between(*from, *to).unwrap().exact();
        let quick = conversions(true);
        assert!(quick.iter().any(exact) && !quick.iter().all(exact), "{quick:?}");
    }

    #[test]
    fn prefill_alone_has_context_parallelism_and_dealt_pages() {
        for quick in [true, false] {
            assert!(listed(4, quick).iter().all(|spec| spec.cp == 1 && !spec.shard));
            let only: Vec<_> = prefill_only(quick).into_iter().map(|name| named(name, 4).unwrap()).collect();
            assert!(only.iter().all(|spec| spec.cp > 1 || spec.shard));
            for (cp, shard) in [(true, false), (true, true), (false, true)] {
                assert!(only.iter().any(|spec| (spec.cp > 1, spec.shard) == (cp, shard)), "{cp} {shard}");
            }
        }
    }

    #[test]
    fn two_stages_are_uneven_whatever_the_model() {
        for spec in listed(7, false).iter().filter(|spec| stages(spec) == 2) {
            assert_eq!(spec.layers, LayerSplit::Explicit(vec![(0, 0), (1, 6)]));
        }
    }

    /// Two stages to two and to one, with every size of DCP from one to four on either side; and DCP=4 to DCP=4.
    #[test]
    fn the_quick_part_pairs_stages_with_every_size_of_dcp() {
        let at = |spec: &LayoutSpec| (stages(spec), spec.dcp);
        let quick = listed(4, true);
        let pairs: BTreeSet<_> =
            quick.iter().flat_map(|from| quick.iter().map(move |to| (at(from), at(to)))).collect();
        for (from, to) in (1..=4).flat_map(|from| (1..=4).map(move |to| (from, to))) {
            for stages in [2, 1] {
                assert!(
                    pairs.contains(&((2, from), (stages, to))),
                    "dcp {from} to {stages} stages, dcp {to}"
                );
            }
        }
        assert!(pairs.contains(&((1, 4), (1, 4))));
    }

    #[test]
    fn the_quick_part_has_every_size_of_tp() {
        let sizes: BTreeSet<_> = listed(4, true).iter().map(|spec| spec.tp).collect();
        assert_eq!(sizes, [1, 2, 3, 4, 6].into());
    }
}
