//! AVX2 with FMA: a panel is two registers.

use std::arch::x86_64::{
    _mm_loadu_ps as load_half, _mm256_add_epi64 as add_i64, _mm256_castpd_si256 as bits_f64,
    _mm256_cvtps_pd as widen, _mm256_fmadd_pd as fma_f64, _mm256_fmadd_ps as fma_f32,
    _mm256_loadu_pd as load_f64, _mm256_loadu_ps as load_f32, _mm256_loadu_si256 as load_i64,
    _mm256_permute2f128_ps, _mm256_set1_epi64x as splat_i64, _mm256_set1_pd as splat_f64,
    _mm256_set1_ps as splat_f32, _mm256_setzero_pd as zero_f64, _mm256_setzero_ps as zero_f32,
    _mm256_setzero_si256 as zero_i64, _mm256_shuffle_ps, _mm256_storeu_pd as store_f64,
    _mm256_storeu_ps as store_f32, _mm256_storeu_si256 as store_i64, _mm256_sub_epi64 as sub_i64,
    _mm256_unpackhi_ps, _mm256_unpacklo_ps,
};

use super::super::delta::DeltaTokens;
use super::super::grid::MAGIC;
use super::{Kernels, scalar, x86};

const LANES: usize = 8;

x86::kernels! {
    name: "avx2",
    features: "avx2,fma",
    detected: ["avx2", "fma"],
    rows: 6,
    panels: |rows| match rows { 1 => 4, 2 | 3 => 2, _ => 1 },
    tiles: [1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1, 1 x 2, 2 x 2, 3 x 2, 1 x 4],
    columns: 2,
}

fn transpose(rows: &[f32], k: usize, stride: usize, panel: &mut [f32]) {
    assert!(rows.len() >= 15 * stride + k && panel.len() >= k * 16);
    let whole = k / 8 * 8;
    for at in (0..whole).step_by(8) {
        for half in [0, 8] {
            // SAFETY: only the detected table names this function; the lengths are asserted above.
            unsafe { transpose_block(&rows[half * stride + at..], stride, &mut panel[at * 16 + half..]) };
        }
    }
    for at in whole..k {
        for (lane, slot) in panel[at * 16..][..16].iter_mut().enumerate() {
            *slot = rows[lane * stride + at];
        }
    }
}

/// Eight values of eight rows to one half of eight panel steps.
#[target_feature(enable = "avx2,fma")]
fn transpose_block(rows: &[f32], stride: usize, panel: &mut [f32]) {
    assert!(rows.len() >= 7 * stride + 8 && panel.len() >= 7 * 16 + 8);
    let mut a = [zero_f32(); 8];
    for (lane, row) in a.iter_mut().enumerate() {
        // SAFETY: lane < 8, asserted.
        *row = unsafe { load_f32(rows.as_ptr().add(lane * stride)) };
    }
    let mut b = [zero_f32(); 8];
    for i in 0..4 {
        b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    for g in [0, 4] {
        a[g] = _mm256_shuffle_ps::<0x44>(b[g], b[g + 2]);
        a[g + 1] = _mm256_shuffle_ps::<0xee>(b[g], b[g + 2]);
        a[g + 2] = _mm256_shuffle_ps::<0x44>(b[g + 1], b[g + 3]);
        a[g + 3] = _mm256_shuffle_ps::<0xee>(b[g + 1], b[g + 3]);
    }
    for j in 0..4 {
        b[j] = _mm256_permute2f128_ps::<0x20>(a[j], a[4 + j]);
        b[4 + j] = _mm256_permute2f128_ps::<0x31>(a[j], a[4 + j]);
    }
    for (column, &values) in b.iter().enumerate() {
        // SAFETY: column < 8, asserted.
        unsafe { store_f32(panel.as_mut_ptr().add(column * 16), values) };
    }
}
