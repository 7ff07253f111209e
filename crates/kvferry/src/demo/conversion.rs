//! Casts between element types once more, slowly and after their definition, to hold those on the way to; and how far what
//! was cast is from what it was.

use std::{collections::HashMap, sync::LazyLock};

use half::bf16;
use kvferry_engine::Coordinate;
use kvferry_plan::{Cast, Dtype};
use kvferry_server::{Chosen, KvDump};
use serde::Serialize;

use super::report::Outcome;

/// The fp8 e4m3fn numbers that are not negative, by code: steps of 2^-9, then eight to each power of two, up to 448.
static FP8: LazyLock<Vec<f64>> = LazyLock::new(|| {
    let number = |code: i32| match (code >> 3, code & 7) {
        (0, steps) => f64::from(steps) * 2_f64.powi(-9),
        (power, eighths) => f64::from(8 + eighths) * 2_f64.powi(power - 10),
    };
    (0..0x7f).map(number).collect()
});

/// Elements as they lie in a pool.
fn read(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let fp8 = |code: u8| {
        let size = FP8.get(usize::from(code & 0x7f)).map_or(f32::NAN, |size| *size as f32);
        if code & 0x80 == 0 { size } else { -size }
    };
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_ne_bytes(*x)).collect(),
        Dtype::Bf16 => bytes.as_chunks().0.iter().map(|x| bf16::from_ne_bytes(*x).to_f32()).collect(),
        _ => bytes.iter().map(|code| fp8(*code)).collect(),
    }
}

/// The code of the nearest fp8 number; of two that are equally near, the even one.
fn fp8(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7f;
    }
    let size = f64::from(value.abs()).min(448.0);
    let above = FP8.partition_point(|number| *number < size);
    let off = |code: usize| FP8.get(code).map_or(f64::INFINITY, |number| (number - size).abs());
    let below = above.saturating_sub(1);
    let code =
        if off(below) < off(above) || (off(below) == off(above) && below % 2 == 0) { below } else { above };
    sign | code as u8
}

/// What a target must hold of a source's elements.
pub(super) fn convert(cast: Cast, bytes: &[u8]) -> Vec<u8> {
    let values = read(cast.from(), bytes);
    match cast.to() {
        Dtype::F32 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_ne_bytes()).collect(),
        _ => values.iter().map(|x| fp8(*x)).collect(),
    }
}

/// The prompt in the source's element type alone, in one process.
#[derive(Debug)]
pub(super) struct Unconverted {
    /// Its rows.
    pub(super) cache: Vec<KvDump>,
    /// The answer, where it was asked for.
    pub(super) tokens: Option<Vec<Chosen>>,
}

/// What a conversion made of rows, and of the answer.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Conversion {
    pub(super) from: String,
    pub(super) to: String,
    /// The target's type has all numbers of the source's.
    pub(super) exact: bool,
    /// Heads of tokens, and of rows of state, that were converted, on all decode ranks.
    pub(super) rows: u64,
    /// Length of the difference over length of the row.
    pub(super) largest_row_error: f64,
    pub(super) mean_row_error: f64,
    /// Against one process in the source's element type; `null` where the conversion is exact.
    pub(super) source_type_tokens_equal: Option<bool>,
    /// Over the tokens up to the first that differs.
    pub(super) source_type_max_abs_logprob_diff: Option<f32>,
}

impl Conversion {
    /// Compares what decode has with what there was before the conversion.
    pub(super) fn new(cast: Cast, before: &Unconverted, decode: &[KvDump], tokens: &[Chosen]) -> Self {
        let rows: HashMap<Coordinate, (Dtype, &[u8])> = before
            .cache
            .iter()
            .flat_map(KvDump::pieces)
            .map(|(at, dtype, bytes)| (at, (dtype, bytes)))
            .collect();
        let (mut count, mut largest, mut sum) = (0_u64, 0_f64, 0_f64);
        for (at, dtype, bytes) in decode.iter().flat_map(KvDump::pieces) {
            // Some state has one type on every side.
            let Some((source, original)) = rows.get(&at).filter(|(source, _)| *source != dtype) else {
                continue;
            };
            let error = row_error(&read(*source, original), &read(dtype, bytes));
            (count, sum) = (count + 1, sum + error);
            // What is not a number is not small.
            largest = if error > largest || error.is_nan() { error } else { largest };
        }
        let same = |other: &Vec<Chosen>| {
            let pairs = || tokens.iter().zip(other);
            let equal = tokens.len() == other.len() && pairs().all(|(a, b)| a.id == b.id);
            let together = pairs().take_while(|(a, b)| a.id == b.id);
            (equal, together.map(|(a, b)| (a.logprob - b.logprob).abs()).reduce(f32::max))
        };
        let answers = before.tokens.as_ref().map(same);
        Self {
            from: cast.from().to_string(),
            to: cast.to().to_string(),
            exact: cast.exact(),
            rows: count,
            largest_row_error: largest,
            mean_row_error: sum / count.max(1) as f64,
            source_type_tokens_equal: answers.map(|(equal, _)| equal),
            source_type_max_abs_logprob_diff: answers.and_then(|(_, diff)| diff),
        }
    }

    /// What it did to rows, in words.
    pub(super) fn loss(&self) -> String {
        if self.exact && !self.lossy() {
            return "exact".into();
        }
        let percent = |error: f64| format!("{:.2} %", error * 100.0);
        let (mean, largest) = (percent(self.mean_row_error), percent(self.largest_row_error));
        format!("row error {mean} mean, {largest} largest")
    }

    /// Whether something was lost that cannot be.
    pub(super) fn lossy(&self) -> bool {
        self.exact && !(self.largest_row_error == 0.0)
    }

    /// Of several prompts together.
    pub(super) fn all<'a>(outcomes: impl Iterator<Item = &'a Outcome>) -> Option<Self> {
        outcomes.filter_map(|outcome| outcome.conversion.clone()).reduce(|a, b| {
            let rows = a.rows + b.rows;
            let sum = |one: &Self| one.mean_row_error * one.rows as f64;
            let equal = [a.source_type_tokens_equal, b.source_type_tokens_equal];
            let diffs = [a.source_type_max_abs_logprob_diff, b.source_type_max_abs_logprob_diff];
            Self {
                rows,
                largest_row_error: a.largest_row_error.max(b.largest_row_error),
                mean_row_error: (sum(&a) + sum(&b)) / rows.max(1) as f64,
                source_type_tokens_equal: equal.into_iter().flatten().reduce(|a, b| a && b),
                source_type_max_abs_logprob_diff: diffs.into_iter().flatten().reduce(f32::max),
                ..a
            }
        })
    }
}

/// Length of the difference over length of the row, 0 for rows of zeros that stayed so.
fn row_error(before: &[f32], after: &[f32]) -> f64 {
    let length = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = length(&mut before.iter().zip(after).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    if difference == 0.0 { 0.0 } else { difference / length(&mut before.iter().map(|x| f64::from(*x))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two implementations that have nothing in common agree: on all bf16 numbers and all codes, and on f32 numbers between
    /// them.
    #[test]
    fn these_casts_and_those_on_the_way_agree() {
        let halves: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
        let codes: Vec<u8> = (0..=u8::MAX).collect();
        let wide: Vec<u8> = (0..=u32::MAX).step_by(65_521).flat_map(u32::to_ne_bytes).collect();
        let types = [(Dtype::F32, &wide), (Dtype::Bf16, &halves), (Dtype::Fp8E4m3, &codes)];
        let mut compared = 0;
        for (from, bytes) in types {
            for cast in types.into_iter().filter_map(|(to, _)| Cast::between(from, to)) {
                let mut on_the_way =
                    vec![0; cast.target_len(kvferry_plan::Bytes(bytes.len() as u64)).index()];
                kvferry_arena::convert(cast, bytes, &mut on_the_way);
                let [ours, theirs] = [convert(cast, bytes), on_the_way].map(|made| read(cast.to(), &made));
                assert_eq!(ours.len(), theirs.len(), "{cast}");
                for (a, b) in ours.iter().zip(&theirs) {
                    // One NaN is as good as another.
                    assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{cast}: {a} {b}");
                }
                compared += 1;
            }
        }
        assert_eq!(compared, 6);
    }

    #[test]
    fn errors_are_relative_to_the_row() {
        assert_eq!(row_error(&[3.0, 4.0], &[3.0, 4.5]), 0.1);
        assert_eq!(row_error(&[0.0, 0.0], &[0.0, 0.0]), 0.0);
        assert!(row_error(&[1.0], &[f32::NAN]).is_nan());
    }
}
