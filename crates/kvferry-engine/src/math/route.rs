//! Which experts a token goes through.

use super::delta::sigmoid;

/// The rule of a router, after its logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Groups of consecutive experts; a group's score is the sum of its two best.
    pub groups: usize,
    /// Groups that are left to choose from.
    pub groups_per_token: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// Weights are divided by their sum.
    pub renormalise: bool,
    /// Factor on the weights.
    pub scale: f32,
}

/// Memory for [`Routing::choose`] to reuse.
#[derive(Debug, Default)]
pub struct RoutingScratch {
    scores: Vec<f32>,
    choice: Vec<f32>,
    groups: Vec<f32>,
    open: Vec<usize>,
    candidates: Vec<usize>,
    chosen: Vec<(usize, f32)>,
}

impl Routing {
    /// A token's experts, ascending, with their weights. They are chosen by `sigmoid(logit) + bias`, of equal ones the
    /// first, and weighted by the sigmoid alone.
    ///
    /// ```
    /// use kvferry_engine::math::{Routing, RoutingScratch};
    /// let rule = Routing { groups: 2, groups_per_token: 1, per_token: 2, renormalise: true, scale: 2.0 };
    /// // The first group has the best expert, the second the best two.
    /// let mut scratch = RoutingScratch::default();
    /// let chosen = rule.choose(&[9.0, -9.0, 1.0, 1.0], &[0.0; 4], &mut scratch);
    /// assert_eq!(chosen.iter().map(|(expert, _)| *expert).collect::<Vec<_>>(), [2, 3]);
    /// assert_eq!(chosen[0].1, 1.0);
    /// ```
    pub fn choose<'s>(
        &self,
        logits: &[f32],
        bias: &[f32],
        scratch: &'s mut RoutingScratch,
    ) -> &'s [(usize, f32)] {
        let RoutingScratch { scores, choice, groups, open, candidates, chosen } = scratch;
        scores.clear();
        scores.extend(logits.iter().map(|logit| sigmoid(*logit)));
        choice.clear();
        choice.extend(scores.iter().zip(bias).map(|(score, bias)| score + bias));
        let size = (choice.len() / self.groups.max(1)).max(1);
        groups.clear();
        for group in choice.chunks(size) {
            best(group, 0..group.len(), 2, open);
            groups.push(open.iter().map(|at| group[*at]).sum());
        }
        best(groups, 0..groups.len(), self.groups_per_token, open);
        open.sort_unstable();
        let all = choice.len();
        let inside = open.iter().flat_map(|group| group * size..((group + 1) * size).min(all));
        best(choice, inside, self.per_token, candidates);
        candidates.sort_unstable();
        let sum: f32 = candidates.iter().map(|expert| scores[*expert]).sum();
        let factor = |score: f32| if self.renormalise { score / (sum + 1e-20) } else { score };
        chosen.clear();
        chosen.extend(candidates.iter().map(|expert| (*expert, factor(scores[*expert]) * self.scale)));
        chosen
    }
}

/// Where among `places` the `count` largest values are, the largest first, of equal ones the first; NaN counts as the
/// smallest.
fn best(values: &[f32], places: impl Iterator<Item = usize>, count: usize, into: &mut Vec<usize>) {
    let key = |at: &usize| if values[*at].is_nan() { f32::NEG_INFINITY } else { values[*at] };
    into.clear();
    into.extend(places);
    into.sort_unstable_by(|a, b| key(b).total_cmp(&key(a)).then(a.cmp(b)));
    into.truncate(count);
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Routing =
        Routing { groups: 1, groups_per_token: 1, per_token: 2, renormalise: false, scale: 1.0 };

    fn choose(rule: Routing, logits: &[f32], bias: &[f32]) -> Vec<(usize, f32)> {
        rule.choose(logits, bias, &mut RoutingScratch::default()).to_vec()
    }

    #[test]
    fn the_bias_chooses_and_does_not_weigh() {
        let chosen = choose(RULE, &[0.0, 0.0, 0.0], &[0.0, 0.3, 0.2]);
        assert_eq!(chosen, [(1, 0.5), (2, 0.5)]);
    }

    #[test]
    fn of_equal_experts_the_first_are_chosen() {
        assert_eq!(choose(RULE, &[0.0; 4], &[0.0; 4]), [(0, 0.5), (1, 0.5)]);
    }

    /// A negative score outside of the open groups is not better than one inside.
    #[test]
    fn closed_groups_stay_closed() {
        let rule = Routing { groups: 2, per_token: 2, ..RULE };
        let chosen = choose(rule, &[0.0, 0.0, 0.0, 0.0], &[-5.0, -5.0, -9.0, -9.0]);
        assert_eq!(chosen, [(0, 0.5), (1, 0.5)]);
    }

    #[test]
    fn numbers_that_are_none_still_choose_as_many() {
        let chosen = choose(RULE, &[f32::NAN; 3], &[0.0; 3]);
        assert_eq!(chosen.len(), 2);
    }
}
