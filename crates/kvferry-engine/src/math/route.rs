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

impl Routing {
    /// A token's experts, ascending, with their weights. They are chosen by `sigmoid(logit) + bias`, of equal ones the
    /// first, and weighted by the sigmoid alone.
    ///
    /// ```
    /// use kvferry_engine::math::Routing;
    /// let rule = Routing { groups: 2, groups_per_token: 1, per_token: 2, renormalise: true, scale: 2.0 };
    /// // The first group has the best expert, the second the best two.
    /// let chosen = rule.choose(&[9.0, -9.0, 1.0, 1.0], &[0.0; 4]);
    /// assert_eq!(chosen.iter().map(|(expert, _)| *expert).collect::<Vec<_>>(), [2, 3]);
    /// assert_eq!(chosen[0].1, 1.0);
    /// ```
    pub fn choose(&self, logits: &[f32], bias: &[f32]) -> Vec<(usize, f32)> {
        let scores: Vec<f32> = logits.iter().map(|logit| sigmoid(*logit)).collect();
        let choice: Vec<f32> = scores.iter().zip(bias).map(|(score, bias)| score + bias).collect();
        let size = (choice.len() / self.groups.max(1)).max(1);
        let of_group = |group: &[f32]| best(group, 2).into_iter().map(|at| group[at]).sum();
        let groups: Vec<f32> = choice.chunks(size).map(of_group).collect();
        let mut open = best(&groups, self.groups_per_token);
        open.sort_unstable();
        let candidates: Vec<usize> =
            open.into_iter().flat_map(|group| group * size..((group + 1) * size).min(choice.len())).collect();
        let of_candidates: Vec<f32> = candidates.iter().map(|expert| choice[*expert]).collect();
        let mut chosen: Vec<usize> =
            best(&of_candidates, self.per_token).into_iter().map(|at| candidates[at]).collect();
        chosen.sort_unstable();
        let sum: f32 = chosen.iter().map(|expert| scores[*expert]).sum();
        let factor = |score: f32| if self.renormalise { score / (sum + 1e-20) } else { score };
        chosen.into_iter().map(|expert| (expert, factor(scores[expert]) * self.scale)).collect()
    }
}

/// Where the `count` largest values are, the largest first; NaN counts as the smallest.
fn best(values: &[f32], count: usize) -> Vec<usize> {
    let key = |at: &usize| if values[*at].is_nan() { f32::NEG_INFINITY } else { values[*at] };
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| key(b).total_cmp(&key(a)));
    order.truncate(count);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Routing =
        Routing { groups: 1, groups_per_token: 1, per_token: 2, renormalise: false, scale: 1.0 };

    #[test]
    fn the_bias_chooses_and_does_not_weigh() {
        let chosen = RULE.choose(&[0.0, 0.0, 0.0], &[0.0, 0.3, 0.2]);
        assert_eq!(chosen, [(1, 0.5), (2, 0.5)]);
    }

    #[test]
    fn of_equal_experts_the_first_are_chosen() {
        assert_eq!(RULE.choose(&[0.0; 4], &[0.0; 4]), [(0, 0.5), (1, 0.5)]);
    }

    /// A negative score outside of the open groups is not better than one inside.
    #[test]
    fn closed_groups_stay_closed() {
        let rule = Routing { groups: 2, per_token: 2, ..RULE };
        let chosen = rule.choose(&[0.0, 0.0, 0.0, 0.0], &[-5.0, -5.0, -9.0, -9.0]);
        assert_eq!(chosen, [(0, 0.5), (1, 0.5)]);
    }

    #[test]
    fn numbers_that_are_none_still_choose_as_many() {
        let chosen = RULE.choose(&[f32::NAN; 3], &[0.0; 3]);
        assert_eq!(chosen.len(), 2);
    }
}
