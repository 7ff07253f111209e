//! AVX-512: a panel is one register.

use std::arch::x86_64::{
    __mmask16, _mm256_loadu_ps as load_half, _mm512_add_epi64 as add_i64, _mm512_castpd_si512 as bits_f64,
    _mm512_cvtps_pd as widen, _mm512_fmadd_pd as fma_f64, _mm512_fmadd_ps as fma_f32,
    _mm512_loadu_pd as load_f64, _mm512_loadu_ps as load_f32, _mm512_loadu_si512 as load_i64,
    _mm512_maskz_loadu_ps, _mm512_set1_epi64 as splat_i64, _mm512_set1_pd as splat_f64,
    _mm512_set1_ps as splat_f32, _mm512_setzero_pd as zero_f64, _mm512_setzero_ps as zero_f32,
    _mm512_setzero_si512 as zero_i64, _mm512_shuffle_f32x4, _mm512_shuffle_ps, _mm512_storeu_pd as store_f64,
    _mm512_storeu_ps as store_f32, _mm512_storeu_si512 as store_i64, _mm512_sub_epi64 as sub_i64,
    _mm512_unpackhi_ps, _mm512_unpacklo_ps,
};

use super::super::delta::DeltaTokens;
use super::super::grid::MAGIC;
use super::{Kernels, scalar, x86};

const LANES: usize = 16;

x86::kernels! {
    name: "avx512",
    features: "avx2,fma,avx512f,avx512dq,avx512vl,avx512bw",
    detected: ["avx2", "fma", "avx512f", "avx512dq", "avx512vl", "avx512bw"],
    rows: 12,
    panels: |rows| if rows <= 6 { 4 } else { 2 },
    tiles: [
        1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1, 7 x 1, 8 x 1, 9 x 1, 10 x 1, 11 x 1, 12 x 1,
        1 x 2, 2 x 2, 3 x 2, 4 x 2, 5 x 2, 6 x 2, 7 x 2, 8 x 2, 9 x 2, 10 x 2, 11 x 2, 12 x 2,
        1 x 4, 2 x 4, 3 x 4, 4 x 4, 5 x 4, 6 x 4
    ],
    columns: 4,
}

fn transpose(rows: &[f32], k: usize, stride: usize, panel: &mut [f32]) {
    // SAFETY: the features were detected.
    unsafe { transpose_blocks(rows, k, stride, panel) };
}

#[target_feature(enable = "avx2,fma,avx512f,avx512dq,avx512vl,avx512bw")]
fn transpose_blocks(rows: &[f32], k: usize, stride: usize, panel: &mut [f32]) {
    assert!(rows.len() >= 15 * stride + k && panel.len() >= k * 16);
    for at in (0..k).step_by(16) {
        // The last block may hold fewer than 16 columns.
        let count = (k - at).min(16);
        let mask = (0xffff_u32 >> (16 - count)) as __mmask16;
        let mut a = [zero_f32(); 16];
        for (lane, row) in a.iter_mut().enumerate() {
            // SAFETY: columns at.. of row `lane`, `count` of them, lie in `rows` (asserted).
            *row = unsafe { _mm512_maskz_loadu_ps(mask, rows.as_ptr().add(lane * stride + at)) };
        }
        let mut b = [zero_f32(); 16];
        for i in 0..8 {
            b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
        }
        // Group g of four rows: a[4g + j] has column 4q + j of those rows in its quarter q.
        for g in 0..4 {
            let [b0, b1, b2, b3] = [b[4 * g], b[4 * g + 1], b[4 * g + 2], b[4 * g + 3]];
            a[4 * g] = _mm512_shuffle_ps::<0x44>(b0, b2);
            a[4 * g + 1] = _mm512_shuffle_ps::<0xee>(b0, b2);
            a[4 * g + 2] = _mm512_shuffle_ps::<0x44>(b1, b3);
            a[4 * g + 3] = _mm512_shuffle_ps::<0xee>(b1, b3);
        }
        for j in 0..4 {
            let low01 = _mm512_shuffle_f32x4::<0x44>(a[j], a[4 + j]);
            let high01 = _mm512_shuffle_f32x4::<0xee>(a[j], a[4 + j]);
            let low23 = _mm512_shuffle_f32x4::<0x44>(a[8 + j], a[12 + j]);
            let high23 = _mm512_shuffle_f32x4::<0xee>(a[8 + j], a[12 + j]);
            b[j] = _mm512_shuffle_f32x4::<0x88>(low01, low23);
            b[4 + j] = _mm512_shuffle_f32x4::<0xdd>(low01, low23);
            b[8 + j] = _mm512_shuffle_f32x4::<0x88>(high01, high23);
            b[12 + j] = _mm512_shuffle_f32x4::<0xdd>(high01, high23);
        }
        for (column, out) in b.iter().zip(panel[at * 16..].chunks_exact_mut(16)).take(count) {
            // SAFETY: `out` holds 16 values.
            unsafe { store_f32(out.as_mut_ptr(), *column) };
        }
    }
}
