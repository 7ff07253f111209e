//! The rule by which a request gets its pair.

use super::{fit::Cost, seat::Load};

/// A pair that could hold the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate<'a> {
    /// Names, which decide where nothing else does.
    pub(super) names: (&'a str, &'a str),
    /// The planned hand-off.
    pub(super) cost: Cost,
    /// What this router has at the prefill instance.
    pub(super) prefill: Load,
    /// What it has at the decode instance.
    pub(super) decode: Load,
    /// A room failed at either a moment ago.
    pub(super) doubted: bool,
    /// The request would have to wait for pages at decode, and at prefill.
    pub(super) waits: (bool, bool),
}

/// Chooses: first pairs where no room failed a moment ago; of these where nobody has to wait for pages; of these the prefill with the fewest prompt tokens under
/// way, because these come before ours; then the decode with the fewest requests, because they share its steps; then
/// the hand-off that the planner finds cheapest; then by name. `None` when there is nobody to choose.
pub(super) fn choose(candidates: &[Candidate<'_>]) -> Option<usize> {
    let key = |c: &Candidate<'_>| {
        let load = (c.prefill.tokens, c.decode.requests, c.decode.tokens);
        (c.doubted, c.waits, load, c.cost)
    };
    (0..candidates.len()).min_by(|a, b| {
        let (a, b) = (&candidates[*a], &candidates[*b]);
        key(a).cmp(&key(b)).then_with(|| a.names.cmp(&b.names))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NAMES: [&str; 4] = ["a", "b", "c", "d"];

    fn load() -> impl Strategy<Value = Load> {
        (0..4_u64, 0..3_u64).prop_map(|(requests, tokens)| Load { requests, tokens, pages: 0 })
    }

    prop_compose! {
        fn candidates()(
            prefill in proptest::collection::vec(load(), 4),
            decode in proptest::collection::vec(load(), 4),
            waits in proptest::collection::vec(any::<(bool, bool)>(), 16),
            doubted in proptest::collection::vec(any::<bool>(), 16),
            costs in proptest::collection::vec((0..3_u64, 0..3_u64), 16),
            used in proptest::collection::vec(any::<bool>(), 16),
        ) -> Vec<Candidate<'static>> {
            (0..16)
                .filter(|i| used[*i])
                .map(|i| Candidate {
                    names: (NAMES[i / 4], NAMES[i % 4]),
                    cost: Cost { bytes: costs[i].0, copies: costs[i].1 },
                    prefill: prefill[i / 4],
                    decode: decode[i % 4],
                    doubted: doubted[i],
                    waits: waits[i],
                })
                .collect()
        }
    }

    proptest! {
        #[test]
        fn the_choice_depends_on_nothing_but_loads_costs_and_names(all in candidates(), turn in 0..16_usize) {
            let chosen = choose(&all).map(|i| all[i]);
            let mut turned = all.clone();
            if !turned.is_empty() {
                let middle = turn % turned.len();
                turned.rotate_left(middle);
            }
            prop_assert_eq!(choose(&turned).map(|i| turned[i]), chosen);
            prop_assert_eq!(chosen.is_none(), all.is_empty());
        }

        #[test]
        fn nobody_better_is_passed_over(all in candidates()) {
            if let Some(chosen) = choose(&all).map(|i| all[i]) {
                let axes = |c: &Candidate<'_>| {
                    let load = [c.prefill.tokens, c.decode.requests, c.decode.tokens];
                    let [prefill, requests, tokens] = load;
                    [
                        u64::from(c.doubted), u64::from(c.waits.0), u64::from(c.waits.1),
                        prefill, requests, tokens, c.cost.bytes, c.cost.copies,
                    ]
                };
                for other in &all {
                    let (ours, theirs) = (axes(&chosen), axes(other));
                    // Better in something and worse in nothing.
                    let better = ours != theirs && theirs.iter().zip(&ours).all(|(theirs, ours)| theirs <= ours);
                    prop_assert!(!better, "{other:?} was passed over for {chosen:?}");
                }
                if all.iter().any(|c| !c.doubted && c.waits == (false, false)) {
                    prop_assert_eq!((chosen.doubted, chosen.waits), (false, (false, false)));
                }
            }
        }
    }

    #[test]
    fn idle_pairs_are_chosen_by_the_planned_hand_off() {
        let idle = |names, bytes| Candidate {
            names,
            cost: Cost { bytes, copies: 1 },
            prefill: Load::default(),
            decode: Load::default(),
            doubted: false,
            waits: (false, false),
        };
        assert_eq!(choose(&[idle(("a", "a"), 9), idle(("b", "b"), 3), idle(("c", "c"), 5)]), Some(1));
    }
}
