//! The MLA rewriting against a plain GQA attention, on the reference models' own weights.

use kvferry_engine::checkpoint::{AttentionTensors, Checkpoint, GqaTensors, ModelConfig};
use kvferry_plan::LayerId;

/// `matrix . x + bias` in f64.
fn apply(matrix: &[f32], bias: Option<&Vec<f32>>, x: &[f64]) -> Vec<f64> {
    let rows =
        matrix.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum());
    let bias = bias.into_iter().flatten().map(|b| f64::from(*b)).chain(std::iter::repeat(0.0));
    rows.zip(bias).map(|(y, b): (f64, f64)| y + b).collect()
}

/// Turns every run of `ladder` elements for a position, rotate-half.
fn rope(x: &mut [f64], ladder: usize, theta: f32, position: usize) {
    for run in x.chunks_exact_mut(ladder) {
        let (low, high) = run.split_at_mut(ladder / 2);
        for (i, (a, b)) in low.iter_mut().zip(high).enumerate() {
            let angle = position as f64 * f64::from(theta).powf(-2.0 * i as f64 / ladder as f64);
            let (sin, cos) = angle.sin_cos();
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Causal softmax over scores, applied to rows.
fn attend(scores: &[f64], rows: &[&[f64]]) -> Vec<f64> {
    let top = scores.iter().copied().fold(f64::MIN, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; rows[0].len()];
    for (weight, row) in weights.iter().zip(rows) {
        out.iter_mut().zip(*row).for_each(|(o, v)| *o += weight / sum * v);
    }
    out
}

fn gqa(layer: &GqaTensors, config: &ModelConfig, xs: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let hd = config.head_dim;
    let project = |w: &[f32], b: &Option<Vec<f32>>, turn: bool| -> Vec<Vec<f64>> {
        let row = |(t, x): (usize, &Vec<f64>)| {
            let mut y = apply(w, b.as_ref(), x);
            if turn {
                rope(&mut y, hd, config.rope_theta, t);
            }
            y
        };
        xs.iter().enumerate().map(row).collect()
    };
    let q = project(&layer.q, &layer.q_bias, true);
    let (k, v) = (project(&layer.k, &layer.k_bias, true), project(&layer.v, &layer.v_bias, false));
    let token = |t: usize| {
        let head = |h: usize| {
            let g = h / (config.heads / config.kv_heads);
            let slice = |rows: &'_ [f64]| rows[g * hd..(g + 1) * hd].to_vec();
            let scores: Vec<f64> = (0..=t)
                .map(|s| dot(&q[t][h * hd..(h + 1) * hd], &slice(&k[s])) / (hd as f64).sqrt())
                .collect();
            let values: Vec<Vec<f64>> = v[..=t].iter().map(|v| slice(v)).collect();
            attend(&scores, &values.iter().map(Vec::as_slice).collect::<Vec<_>>())
        };
        apply(&layer.o, None, &(0..config.heads).flat_map(head).collect::<Vec<_>>())
    };
    (0..xs.len()).map(token).collect()
}

fn mla(layer: &GqaTensors, config: &ModelConfig, xs: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let (shape, w) = (config.to_mla(), layer.to_mla(config));
    let row = |(t, x): (usize, &Vec<f64>)| {
        let mut row = apply(&w.kv_a, w.kv_a_bias.as_ref(), x);
        rope(&mut row[shape.lora..], shape.rope_ladder, config.rope_theta, t);
        row
    };
    let cache: Vec<Vec<f64>> = xs.iter().enumerate().map(row).collect();
    let width = shape.nope + shape.rope;
    let token = |t: usize| {
        let mut q = apply(&w.q, w.q_bias.as_ref(), &xs[t]);
        let head = |(h, q): (usize, &mut [f64])| {
            rope(&mut q[shape.nope..], shape.rope_ladder, config.rope_theta, t);
            let w_uk = &w.w_uk[h * shape.nope * shape.lora..(h + 1) * shape.nope * shape.lora];
            let score = |row: &Vec<f64>| {
                let key = apply(w_uk, None, &row[..shape.lora]);
                f64::from(shape.scale)
                    * (dot(&q[..shape.nope], &key) + dot(&q[shape.nope..], &row[shape.lora..]))
            };
            let scores: Vec<f64> = cache[..=t].iter().map(score).collect();
            let rows: Vec<&[f64]> = cache[..=t].iter().map(|row| &row[..shape.lora]).collect();
            let size = shape.v_dim * shape.lora;
            apply(&w.w_uv[h * size..(h + 1) * size], None, &attend(&scores, &rows))
        };
        let heads: Vec<f64> = q.chunks_exact_mut(width).enumerate().flat_map(head).collect();
        apply(&w.o, None, &heads)
    };
    (0..xs.len()).map(token).collect()
}

#[test]
fn gqa_written_as_mla_is_the_same_attention() {
    for folder in ["tests/data/llama_tiny", "tests/data/qwen2_tiny"] {
        let checkpoint = Checkpoint::open(folder.as_ref()).unwrap();
        let (config, layer) = (checkpoint.config(), checkpoint.layer(LayerId(2)).unwrap());
        let AttentionTensors::Gqa(layer) = layer.attention else { panic!("grouped queries") };
        let wave = |t: usize| (0..config.hidden).map(move |i| ((t * 37 + i * 11) as f64).sin()).collect();
        let xs: Vec<Vec<f64>> = (0..9).map(wave).collect();
        let (plain, latent) = (gqa(&layer, config, &xs), mla(&layer, config, &xs));
        let largest = plain.iter().flatten().fold(0.0, |top: f64, y| top.max(y.abs()));
        assert!(largest > 0.01, "nothing is compared");
        for (a, b) in plain.iter().flatten().zip(latent.iter().flatten()) {
            // The scale is f32 on one side: its rounding is all that differs.
            assert!((a - b).abs() < 1e-6 * largest, "{folder}: {a} and {b}");
        }
    }
}
