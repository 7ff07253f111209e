use super::{Kernels, TILE, WEIGH_ROWS};
use crate::math::grid::MAGIC;

/// The sets to compare with the scalar one.
fn sets() -> (Vec<&'static Kernels>, &'static Kernels) {
    let mut sets = Kernels::available();
    let scalar = sets.pop().unwrap();
    (sets, scalar)
}

/// Numbers in [-1, 1) that depend on the seed alone.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let step = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(step).take(count).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    // NaNs count as equal whatever their payload.
    values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// Ordinary numbers with every kind of odd one among them.
fn odd_numbers(count: usize, scale: f32) -> Vec<f32> {
    let odd = [
        0.0,
        -0.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        1e-40,
        -1e-40,
        f32::MAX,
        524_287.0,
        524_288.0,
    ];
    let mut values: Vec<f32> = numbers(count, 5).iter().map(|x| x * scale).collect();
    for (i, odd) in odd.iter().enumerate() {
        if let Some(slot) = values.get_mut(i * 7 + 3) {
            *slot = *odd;
        }
    }
    values
}

#[test]
fn chain() {
    let (sets, scalar) = sets();
    for set in sets {
        for mr in 1..=set.rows {
            let mut np = (set.panels)(mr);
            while np > 0 {
                for k in [1, 2, 63, 64, 65] {
                    let stride = k * 16 + 48;
                    let (x, w) = (numbers(mr * k, 1), numbers((np - 1) * stride + k * 16, 2));
                    let (mut a, mut b) = ([0.0; TILE], [0.0; TILE]);
                    (scalar.chain)(mr, np, &x, &w, stride, &mut a);
                    (set.chain)(mr, np, &x, &w, stride, &mut b);
                    assert_eq!(bits(&a), bits(&b), "{} {mr} x {np}, k {k}", set.name);
                }
                np /= 2;
            }
        }
    }
}

#[test]
fn elementwise() {
    let (sets, scalar) = sets();
    for set in sets {
        for count in [0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 577] {
            for scale in [1.0, 120.0, 1e6] {
                let values = odd_numbers(count, scale);
                let what = format!("{} count {count} scale {scale}", set.name);

                let (mut a, mut b) = (vec![3i64; count], vec![3i64; count]);
                assert_eq!((scalar.fold)(&values, &mut a), (set.fold)(&values, &mut b), "{what}");
                assert_eq!(a, b, "{what}");

                let (a, b) = ((scalar.peak)(&values), (set.peak)(&values));
                assert!(a.0 == b.0 && a.1 == b.1, "{what}");

                let (mut a, mut b) = (values.clone(), values.clone());
                assert_eq!((scalar.stick)(&mut a), (set.stick)(&mut b), "{what}");
                assert_eq!(bits(&a), bits(&b), "{what}");

                let max = if count < 20 { scale } else { f32::INFINITY };
                let (mut a, mut b) = (values.clone(), values.clone());
                assert_eq!((scalar.exp_grid)(&mut a, max), (set.exp_grid)(&mut b, max), "{what}");
                assert_eq!(bits(&a), bits(&b), "{what}");

                let (mut a, mut b) = (values.clone(), values.clone());
                let sums = ((scalar.exp_sum)(&mut a, scale), (set.exp_sum)(&mut b, scale));
                assert_eq!(bits(&[sums.0]), bits(&[sums.1]), "{what}");
                assert_eq!(bits(&a), bits(&b), "{what}");

                let other = numbers(count, 9);
                let (mut a, mut b) = (vec![0.0; count], vec![0.0; count]);
                (scalar.rms_norm)(&values, &other, 1e-5, &mut a);
                (set.rms_norm)(&values, &other, 1e-5, &mut b);
                assert_eq!(bits(&a), bits(&b), "{what}");
                (scalar.silu_mul)(&values, &other, &mut a);
                (set.silu_mul)(&values, &other, &mut b);
                assert_eq!(bits(&a), bits(&b), "{what}");
            }
        }
    }
}

#[test]
fn exponential_at_many_points() {
    let (sets, scalar) = sets();
    let points: Vec<f32> = numbers(100_000, 3).iter().map(|x| x * 95.0).collect();
    let mut expected = points.clone();
    (scalar.exp_grid)(&mut expected, 0.0);
    for set in sets {
        let mut found = points.clone();
        (set.exp_grid)(&mut found, 0.0);
        assert_eq!(bits(&expected), bits(&found), "{}", set.name);
    }
}

#[test]
fn weighing() {
    let (sets, scalar) = sets();
    for set in sets {
        for r in 1..=WEIGH_ROWS {
            for (tokens, dv) in [(0, 16), (1, 16), (5, 48), (37, 64), (3, 80), (2, 208)] {
                let what = format!("{} {r} rows, {tokens} tokens, {dv} values", set.name);
                let p: Vec<f32> = numbers(tokens * r, 4).iter().map(|x| x.abs()).collect();
                let wide: Vec<f64> = p.iter().map(|&p| f64::from(p)).collect();
                let v = numbers(tokens * dv, 5);

                let start = numbers(r * dv, 6);
                let (mut a, mut b) = (start.clone(), start);
                (scalar.weigh)(r, &p, &v, dv, &mut a);
                (set.weigh)(r, &p, &v, dv, &mut b);
                assert_eq!(bits(&a), bits(&b), "{what}");

                let (mut a, mut b) = (vec![MAGIC; r * dv], vec![MAGIC; r * dv]);
                (scalar.weigh_binade)(r, &wide, &v, dv, &mut a);
                (set.weigh_binade)(r, &wide, &v, dv, &mut b);
                assert_eq!(a, b, "{what}");

                let (mut a, mut b) = (vec![-7i64; r * dv], vec![-7i64; r * dv]);
                (scalar.weigh_wide)(r, &wide, &v, dv, &mut a);
                (set.weigh_wide)(r, &wide, &v, dv, &mut b);
                assert_eq!(a, b, "{what}");
            }
        }
    }
}

#[test]
fn transpose() {
    let (sets, scalar) = sets();
    for set in sets {
        for (k, stride) in [(1, 1), (7, 9), (8, 8), (17, 20), (31, 31), (64, 64), (80, 96)] {
            let rows = numbers(15 * stride + k, 7);
            let (mut a, mut b) = (vec![0.0; k * 16], vec![0.0; k * 16]);
            (scalar.transpose)(&rows, k, stride, &mut a);
            (set.transpose)(&rows, k, stride, &mut b);
            assert_eq!(a, b, "{} k {k} stride {stride}", set.name);
        }
    }
}

#[test]
fn linear_attention() {
    let (sets, scalar) = sets();
    for set in sets {
        for d in [1, 7, 16, 32, 45, 128] {
            let what = format!("{} {d} elements", set.name);
            let q = numbers(d, 1);
            let (mut x, mut y) = (vec![0.0; d], vec![0.0; d]);
            let window: Vec<f32> = [odd_numbers(d, 30.0), numbers(d, 6), numbers(d, 7)].concat();
            let taps = numbers(3 * d, 8);
            (scalar.convolve)(&window, &taps, &mut x);
            (set.convolve)(&window, &taps, &mut y);
            assert_eq!(bits(&x), bits(&y), "{what}");

            (scalar.decay)(&window[..d], &q, 1.5, &mut x);
            (set.decay)(&window[..d], &q, 1.5, &mut y);
            assert_eq!(bits(&x), bits(&y), "{what}");

            (x, y) = (window[..d].to_vec(), window[..d].to_vec());
            (scalar.gate)(&mut x, &window[..d]);
            (set.gate)(&mut y, &window[..d]);
            assert_eq!(bits(&x), bits(&y), "{what}");

            (x, y) = (q.clone(), q.clone());
            (scalar.set_length)(&mut x, 1e-6, 3.0);
            (set.set_length)(&mut y, 1e-6, 3.0);
            assert_eq!(bits(&x), bits(&y), "{what}");
        }
    }
}

/// Against the definition, in f64.
#[test]
fn what_is_left_of_a_state() {
    let (_, scalar) = sets();
    let x: Vec<f32> = (-400..400).map(|i| i as f32 * 0.25).collect();
    let mut out = vec![0.0; x.len()];
    (scalar.decay)(&x, &vec![0.0; x.len()], 0.8, &mut out);
    for (x, out) in x.iter().zip(out) {
        let expected = (-f64::from(0.8_f32) * f64::from(*x).exp().ln_1p()).exp();
        let expected = if *x > 60.0 { (-f64::from(0.8_f32) * f64::from(*x)).exp() } else { expected };
        // An error in the exponent counts as many times as the exponent is large.
        let tolerance = 1e-6 * (1.0 - expected.max(1e-38).ln()) * expected + 1e-37;
        assert!((f64::from(out) - expected).abs() < tolerance, "{x}: {out}, not {expected}");
    }
}

/// A run of tokens has the bits of the tokens one by one, in every set, and touches only its own head's places.
#[test]
fn delta() {
    use super::super::delta::DeltaTokens;
    let (mut sets, scalar) = sets();
    sets.push(scalar);
    for (d, heads) in [(1, 1), (7, 2), (16, 3), (32, 1), (45, 2), (128, 2), (160, 1)] {
        for count in [1, 3, 4, 9] {
            let (row, head) = (heads * d, heads - 1);
            let [decay, q, k, v, beta] = [4, 1, 2, 3, 5].map(|seed| numbers(count * row, seed));
            let from = |token: usize, count| DeltaTokens {
                count,
                heads,
                dim: d,
                decay: &decay[token * row + head * d..],
                q: &q[token * row + head * d..],
                k: &k[token * row + head * d..],
                v: &v[token * row + head * d..],
                beta: &beta[token * heads + head..],
            };
            let (mut state, mut out) = (numbers(d * d, 6), vec![9.0; count * row]);
            for token in 0..count {
                (scalar.delta)(&mut state, &from(token, 1), &mut out[token * row + head * d..]);
            }
            let others = out.chunks_exact(row).flat_map(|row| &row[..head * d]);
            assert!(others.clone().all(|x| *x == 9.0), "{d} elements, {count} tokens: another head");
            for set in &sets {
                let (mut a, mut b) = (numbers(d * d, 6), vec![9.0; count * row]);
                (set.delta)(&mut a, &from(0, count), &mut b[head * d..]);
                assert_eq!((bits(&a), bits(&b)), (bits(&state), bits(&out)), "{} {d} {count}", set.name);
            }
        }
    }
}
