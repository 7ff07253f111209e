//! How the prompt tokens of one step are dealt to the prompts that wait. Not for who is let in (`scheduler`).

use std::collections::VecDeque;

use crate::scheduler::JobId;

/// Prompts that are being computed, in the order in which they lead a step.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    queue: VecDeque<JobId>,
    /// Led the last step.
    led: Option<JobId>,
}

impl Turns {
    /// A prompt comes last.
    pub(crate) fn join(&mut self, id: JobId) {
        self.queue.push_back(id);
    }

    /// Deals a budget of prompt tokens. `needed` says how many a prompt still needs; one that needs none leaves. The
    /// first takes what it needs, what is left goes to the next, and so on: several short prompts share a step. Whoever
    /// led the last step is now behind all others, so none waits for a long one to end, nor for those that came later.
    pub(crate) fn deal(&mut self, budget: u64, needed: impl Fn(JobId) -> u64) -> Vec<(JobId, u64)> {
        self.queue.retain(|id| needed(*id) > 0);
        if self.led.is_some() && self.queue.front() == self.led.as_ref() {
            self.queue.rotate_left(1);
        }
        self.led = self.queue.front().copied();
        let mut left = budget;
        self.queue
            .iter()
            .map(|id| {
                let share = left.min(needed(*id));
                left -= share;
                (*id, share)
            })
            .take_while(|(_, share)| *share > 0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn short_prompts_share_a_step_and_long_ones_take_turns() {
        let mut turns = Turns::default();
        let mut left = BTreeMap::from([(1, 1000), (2, 10), (3, 20), (4, 900)]);
        let step = |turns: &mut Turns, left: &mut BTreeMap<JobId, u64>, budget| {
            let dealt = turns.deal(budget, |id| left[&id]);
            dealt.iter().for_each(|(id, share)| *left.get_mut(id).unwrap() -= share);
            dealt
        };
        turns.join(1);
        assert_eq!(step(&mut turns, &mut left, 64), [(1, 64)]);
        // These come before it now.
        [2, 3, 4].iter().for_each(|id| turns.join(*id));
        let mut step = |budget| step(&mut turns, &mut left, budget);
        assert_eq!(step(64), [(2, 10), (3, 20), (4, 34)]);
        // Two and three have gone.
        assert_eq!(step(64), [(4, 64)]);
        assert_eq!(step(64), [(1, 64)]);
        assert_eq!(step(64), [(4, 64)]);
        assert_eq!(step(5000), [(1, 872), (4, 738)]);
        assert_eq!(step(64), []);
    }

    proptest! {
        /// Prompts that come at any time: the budget is used up while anybody needs it, everybody gets what they need and
        /// no more, and nobody waits longer than those before it have turns.
        #[test]
        fn the_budget_is_used_and_nobody_is_passed_over(
            arrivals in prop::collection::vec((0_usize..4, 1_u64..60), 1..20), budget in 1_u64..20,
        ) {
            let mut arrivals = arrivals.into_iter().zip(1..).peekable();
            let mut turns = Turns::default();
            // What each needs, and in how many steps it must be served at the latest.
            let mut waiting = BTreeMap::<JobId, (u64, Option<usize>)>::new();
            let mut pause = 0;
            while arrivals.peek().is_some() || !waiting.is_empty() {
                while let Some(((after, need), id)) = arrivals.peek().copied() {
                    if pause < after && !waiting.is_empty() {
                        break;
                    }
                    arrivals.next();
                    pause = 0;
                    turns.join(id);
                    waiting.insert(id, (need, None));
                }
                pause += 1;
                let present = waiting.len();
                let dealt = turns.deal(budget, |id| waiting.get(&id).map_or(0, |(need, _)| *need));
                let sum: u64 = dealt.iter().map(|(_, share)| share).sum();
                prop_assert_eq!(sum, budget.min(waiting.values().map(|(need, _)| need).sum()));
                let served: BTreeMap<JobId, u64> = dealt.iter().copied().collect();
                prop_assert_eq!(served.len(), dealt.len());
                for (id, (need, patience)) in &mut waiting {
                    if let Some(share) = served.get(id) {
                        prop_assert!(*share > 0 && share <= need);
                        (*need, *patience) = (*need - share, None);
                    } else {
                        let left = patience.unwrap_or(present) - 1;
                        prop_assert!(left > 0, "{id} is passed over");
                        *patience = Some(left);
                    }
                }
                waiting.retain(|_, (need, _)| *need > 0);
            }
        }
    }
}
