//! From logits to a token. The choice depends on the logits, the request and the number of the token, never on
//! what else is in the batch.

use crate::{
    Alternative, EngineError, Sampling,
    math::{argmax, log_softmax_at, softmax},
};

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Choice {
    /// Vocabulary id.
    pub(crate) id: u32,
    /// Natural logarithm of its probability over the full softmax, before temperature.
    pub(crate) logprob: f32,
}

/// Chooses generated token number `index` (from 0) of a request from the logits of the whole vocabulary.
///
/// # Errors
/// [`EngineError::Range`] when a logit is not a number or infinite.
pub(crate) fn sample(logits: &[f32], sampling: &Sampling, index: u64) -> Result<Choice, EngineError> {
    let chosen = if sampling.temperature > 0.0 { draw(logits, sampling, index) } else { argmax(logits) };
    chosen
        .and_then(|id| {
            let logprob = log_softmax_at(logits, id).filter(|l| l.is_finite())?;
            Some(Choice { id: u32::try_from(id).ok()?, logprob })
        })
        .ok_or(EngineError::Range { what: "the logits" })
}

/// The `count` most probable tokens, most probable first, the lowest id among equals.
pub(crate) fn most_probable(logits: &[f32], count: usize) -> Vec<Alternative> {
    let count = count.min(logits.len());
    if count == 0 {
        return Vec::new();
    }
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    let order = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    ids.select_nth_unstable_by(count - 1, order);
    ids.truncate(count);
    ids.sort_unstable_by(order);
    ids.into_iter()
        .filter_map(|id| {
            Some(Alternative { id: u32::try_from(id).ok()?, logprob: log_softmax_at(logits, id)? })
        })
        .collect()
}

/// The first token, most probable first (lowest id among equals), at which the cumulated probability passes a
/// uniform number.
fn draw(logits: &[f32], sampling: &Sampling, index: u64) -> Option<usize> {
    let mut shares = vec![0.0; logits.len()];
    if !softmax(logits, sampling.temperature, &mut shares) {
        return None;
    }
    let mut tokens: Vec<(usize, f32)> =
        shares.into_iter().enumerate().filter(|(_, share)| *share > 0.0).collect();
    tokens.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let total: f64 = tokens.iter().map(|(_, share)| f64::from(*share)).sum();
    // The nucleus: the shortest head of the list that reaches top_p; at least one token.
    let wanted = f64::from(sampling.top_p) * total;
    let mut nucleus = 0.0;
    let mut kept = 0;
    for (_, share) in &tokens {
        if kept > 0 && nucleus >= wanted {
            break;
        }
        nucleus += f64::from(*share);
        kept += 1;
    }
    tokens.truncate(kept);
    let mut left = uniform(sampling.seed, index) * nucleus;
    for (id, share) in &tokens {
        left -= f64::from(*share);
        if left < 0.0 {
            return Some(*id);
        }
    }
    tokens.last().map(|(id, _)| *id)
}

/// A uniform number in `0 .. 1`, a pure function of seed and counter: SplitMix64's finaliser over both.
fn uniform(seed: u64, counter: u64) -> f64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let bits = mix(mix(seed.wrapping_add(GOLDEN)).wrapping_add(counter.wrapping_add(1).wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampling(temperature: f32, top_p: f32, seed: u64) -> Sampling {
        Sampling { temperature, top_p, seed }
    }

    #[test]
    fn greedy_takes_the_first_of_equals_and_reports_its_share() {
        let choice = sample(&[1.0, 3.0, 3.0, -2.0], &Sampling::GREEDY, 0).unwrap();
        assert_eq!(choice.id, 1);
        let naive = 3.0_f64.exp() / (1.0_f64.exp() + 2.0 * 3.0_f64.exp() + (-2.0_f64).exp());
        assert!((f64::from(choice.logprob) - naive.ln()).abs() < 1e-6);
    }

    #[test]
    fn alternatives_come_in_order_with_the_shares_that_sampling_reports() {
        let logits = [1.0, 3.0, 3.0, -2.0];
        let top = most_probable(&logits, 3);
        assert_eq!(top.iter().map(|a| a.id).collect::<Vec<_>>(), [1, 2, 0]);
        assert_eq!(top[0].logprob, sample(&logits, &Sampling::GREEDY, 0).unwrap().logprob);
        assert_eq!(most_probable(&logits, 9).len(), 4);
        assert!(most_probable(&logits, 0).is_empty());
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0_f32, 1.0, 2.0, -1.0];
        let temperature = 0.7_f32;
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(l / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut counts = [0_u32; 4];
        let draws = 40_000;
        for index in 0..draws {
            counts[sample(&logits, &sampling(temperature, 1.0, 9), index).unwrap().id as usize] += 1;
        }
        for (count, weight) in counts.iter().zip(&weights) {
            // Five standard deviations of a binomial share.
            let p = weight / total;
            let slack = 5.0 * (p * (1.0 - p) / draws as f64).sqrt();
            assert!((f64::from(*count) / draws as f64 - p).abs() < slack, "{counts:?}");
        }
    }

    #[test]
    fn top_p_keeps_the_shortest_head_that_reaches_it() {
        // Shares 0.64, 0.24, 0.09, 0.03.
        let logits = [3.0_f32, 2.0, 1.0, 0.0];
        let seen = |top_p| {
            let mut seen = [false; 4];
            (0..2_000).for_each(|i| {
                seen[sample(&logits, &sampling(1.0, top_p, 1), i).unwrap().id as usize] = true;
            });
            seen
        };
        assert_eq!(seen(0.0), [true, false, false, false]);
        assert_eq!(seen(0.6), [true, false, false, false]);
        assert_eq!(seen(0.7), [true, true, false, false]);
        assert_eq!(seen(0.9), [true, true, true, false]);
        assert_eq!(seen(1.0), [true; 4]);
    }

    #[test]
    fn what_is_not_a_number_is_refused() {
        for bad in [f32::NAN, f32::INFINITY] {
            let error = sample(&[0.0, bad], &Sampling::GREEDY, 0).unwrap_err();
            assert_eq!(error, EngineError::Range { what: "the logits" });
        }
        assert!(sample(&[], &Sampling::GREEDY, 0).is_err());
        assert!(sample(&[f32::NEG_INFINITY; 2], &sampling(1.0, 1.0, 0), 0).is_err());
    }

    proptest! {
        #[test]
        fn the_logprob_does_not_depend_on_temperature_and_shares_sum_to_one(
            logits in proptest::collection::vec(-20.0_f32..20.0, 1..50), seed: u64, index: u64,
        ) {
            let choice = sample(&logits, &sampling(0.8, 0.95, seed), index).unwrap();
            prop_assert_eq!(choice, sample(&logits, &sampling(0.8, 0.95, seed), index).unwrap());
            let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
            let naive = f64::from(logits[choice.id as usize]) - total.ln();
            prop_assert!((f64::from(choice.logprob) - naive).abs() < 1e-4);
        }
    }
}
