//! Middle values, and counts in words.

use crate::terminal::number;

/// The middle value; of an even number the mean of the two in the middle; 0 of none.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |i: usize| sorted.get(i).copied().unwrap_or_default();
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 0 => f64::midpoint(at(n / 2 - 1), at(n / 2)),
        n => at(n / 2),
    }
}

/// The mean; 0 of none.
pub(super) fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// A ratio with its lowest and highest.
pub(super) fn ratio(middle: f64, lowest: f64, highest: f64) -> String {
    format!("{middle:.2} ({lowest:.2}-{highest:.2})")
}

/// `1 round`, `2 rounds`.
pub(super) fn counted(count: u64, what: &str) -> String {
    format!("{} {what}{}", number(count), if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_few() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[4.0, 1.0]), 2.5);
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
    }
}
