//! `ln`, `exp`, `sin` and `cos` in `f64` from additions, products and divisions only, so that two machines with
//! different mathematics libraries agree. Accurate to a few units in the last place; not for hot loops.

use std::f64::consts::{FRAC_2_PI, LN_2, SQRT_2};

/// Natural logarithm of a positive, normal, finite number; NaN for NaN or negative numbers, -∞ for 0.
pub(super) fn ln(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    if x.is_infinite() {
        return x;
    }
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln m = 2 artanh s with |s| < 0.172: twelve terms of the series leave less than 1e-19.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let series = (0..12).rev().fold(0.0, |sum, i| sum * square + 1.0 / f64::from(2 * i + 1));
    exponent as f64 * LN_2 + 2.0 * s * series
}

/// eˣ for |x| <= 700.
pub(super) fn exp(x: f64) -> f64 {
    let n = (x / LN_2).round();
    let r = x - n * LN_2;
    let series = (1..=18).rev().fold(1.0, |sum, i| 1.0 + sum * r / f64::from(i));
    series * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// (sin x, cos x) for |x| <= 2^30.
pub(super) fn sin_cos(x: f64) -> (f64, f64) {
    // π/2 in three pieces of 33 bits or fewer, so that n times the first two is exact.
    const HIGH: f64 = 1.570_796_326_734_125_6;
    const MIDDLE: f64 = 6.077_100_506_303_966e-11;
    const LOW: f64 = 2.022_266_248_795_950_6e-21;
    let n = (x * FRAC_2_PI).round();
    let r = ((x - n * HIGH) - n * MIDDLE) - n * LOW;
    let square = r * r;
    let term = |first: i32, sum: f64, i: i32| {
        let at = f64::from(2 * i + first);
        1.0 - sum * square / (at * (at - 1.0))
    };
    let sin = r * (1..=9).rev().fold(1.0, |sum, i| term(1, sum, i));
    let cos = (1..=9).rev().fold(1.0, |sum, i| term(0, sum, i));
    match (n as i64) & 3 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agree_with_the_library() {
        for i in 1..20_000 {
            let x = f64::from(i) * 0.37;
            assert!((ln(x) - x.ln()).abs() < 4e-15 * x.ln().abs().max(1.0), "ln {x}");
            let (sin, cos) = sin_cos(x * 11.3);
            assert!((sin - (x * 11.3).sin()).abs() < 1e-13, "sin {x}");
            assert!((cos - (x * 11.3).cos()).abs() < 1e-13, "cos {x}");
            let y = f64::from(i) * 0.005 - 60.0;
            assert!((exp(y) / y.exp() - 1.0).abs() < 2e-14, "exp {y}");
        }
    }

    #[test]
    fn edges_of_ln() {
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(ln(0.0), f64::NEG_INFINITY);
        assert_eq!(ln(f64::INFINITY), f64::INFINITY);
        assert!(ln(-1.0).is_nan() && ln(f64::NAN).is_nan());
    }
}
