//! The kernels of an x86-64 instruction set, written over whatever vector type the including module names: it
//! imports the intrinsics as `load_f32`, `fma_f64` and so on, and says how many `f32` a vector has (`LANES`).

/// Expands to the table of an instruction set, its detection, and the kernels but for `transpose`.
///
/// `tiles` are the shapes `rows x panels` of product tiles that exist, `columns` the most vectors of columns that
/// a weighing tile of six rows can hold in registers.
macro_rules! kernels {
    (
        name: $name:literal,
        features: $features:literal,
        detected: [$($feature:tt),*],
        rows: $rows:literal,
        panels: $panels:expr,
        tiles: [$($mr:literal x $np:literal),*],
        columns: $columns:literal,
    ) => {
        static KERNELS: Kernels = Kernels {
            name: $name,
            rows: $rows,
            panels: $panels,
            chain,
            fold,
            peak,
            stick,
            exp_grid,
            exp_sum,
            weigh_wide,
            weigh_binade,
            weigh,
            rms_norm,
            silu_mul,
            convolve,
            set_length,
            decay,
            delta,
            gate,
            transpose,
        };

        /// The table, if this processor has the features it uses.
        pub(super) fn detect() -> Option<&'static Kernels> {
            let has = true $(&& is_x86_feature_detected!($feature))*;
            has.then_some(&KERNELS)
        }

        x86::twins! { $features:
            fold(values: &[f32], sums: &mut [i64]) -> u32;
            peak(values: &[f32]) -> (f32, u32);
            stick(values: &mut [f32]) -> u32;
            exp_grid(scores: &mut [f32], max: f32) -> i64;
            exp_sum(scores: &mut [f32], max: f32) -> f32;
            rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> ();
            silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) -> ();
            convolve(window: &[f32], taps: &[f32], out: &mut [f32]) -> ();
            set_length(x: &mut [f32], eps: f32, length: f32) -> ();
            decay(x: &[f32], bias: &[f32], rate: f32, out: &mut [f32]) -> ();
            delta(state: &mut [f32], tokens: &DeltaTokens<'_>, out: &mut [f32]) -> ();
            gate(x: &mut [f32], by: &[f32]) -> ();
        }

        fn chain(mr: usize, np: usize, x: &[f32], w: &[f32], stride: usize, tile: &mut [f32]) {
            match (mr, np) {
                // SAFETY: only the detected table names this function.
                $(($mr, $np) => unsafe { chain_tile::<$mr, { $np * 16 / LANES }>(x, w, stride, tile) },)*
                _ => unreachable!("no tile of {mr} rows and {np} panels"),
            }
        }

        /// MR rows times V vectors of outputs, each sum in its own register.
        #[target_feature(enable = $features)]
        fn chain_tile<const MR: usize, const V: usize>(x: &[f32], w: &[f32], stride: usize, tile: &mut [f32]) {
            let k = x.len() / MR;
            assert!(w.len() >= (V * LANES / 16 - 1) * stride + k * 16 && tile.len() >= MR * V * LANES);
            let mut sums = [[zero_f32(); V]; MR];
            for at in 0..k {
                let mut weights = [zero_f32(); V];
                for (v, weight) in weights.iter_mut().enumerate() {
                    let (panel, lane) = (v * LANES / 16, v * LANES % 16);
                    // SAFETY: the panel holds k groups of 16 from panel * stride on (asserted); at < k.
                    *weight = unsafe { load_f32(w.as_ptr().add(panel * stride + at * 16 + lane)) };
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: at < k = x.len() / MR.
                    let value = splat_f32(unsafe { *x.as_ptr().add(at * MR + i) });
                    for (sum, &weight) in sums.iter_mut().zip(&weights) {
                        *sum = fma_f32(value, weight, *sum);
                    }
                }
            }
            for (sum, out) in sums.as_flattened().iter().zip(tile.chunks_exact_mut(LANES)) {
                // SAFETY: `out` holds LANES values.
                unsafe { store_f32(out.as_mut_ptr(), *sum) };
            }
        }

        fn weigh(r: usize, p: &[f32], v: &[f32], dv: usize, acc: &mut [f32]) {
            x86::weigh_by_rows!(weigh_tile, $columns, LANES, (r, p, v, dv, acc));
        }

        fn weigh_binade(r: usize, p: &[f64], v: &[f32], dv: usize, acc: &mut [f64]) {
            x86::weigh_by_rows!(binade_tile, $columns, LANES / 2, (r, p, v, dv, acc));
        }

        fn weigh_wide(r: usize, p: &[f64], v: &[f32], dv: usize, acc: &mut [i64]) {
            x86::weigh_by_rows!(wide_tile, 2, LANES / 2, (r, p, v, dv, acc));
        }

        #[target_feature(enable = $features)]
        fn weigh_tile<const R: usize, const C: usize>(p: &[f32], v: &[f32], dv: usize, col: usize, acc: &mut [f32]) {
            let tokens = x86::weigh_lengths::<_, _, R>(p, v, dv, col + C * LANES, acc);
            let mut sums = [[zero_f32(); C]; R];
            for (i, sums) in sums.iter_mut().enumerate() {
                for (c, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: row i, columns col + c * LANES and a vector's more, within `acc` (asserted).
                    *sum = unsafe { load_f32(acc.as_ptr().add(i * dv + col + c * LANES)) };
                }
            }
            for t in 0..tokens {
                let mut values = [zero_f32(); C];
                for (c, value) in values.iter_mut().enumerate() {
                    // SAFETY: row t of `v`, the same columns (asserted).
                    *value = unsafe { load_f32(v.as_ptr().add(t * dv + col + c * LANES)) };
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: t < tokens = p.len() / R.
                    let weight = splat_f32(unsafe { *p.as_ptr().add(t * R + i) });
                    for (sum, &value) in sums.iter_mut().zip(&values) {
                        *sum = fma_f32(weight, value, *sum);
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                for (c, &sum) in sums.iter().enumerate() {
                    // SAFETY: as for the load.
                    unsafe { store_f32(acc.as_mut_ptr().add(i * dv + col + c * LANES), sum) };
                }
            }
        }

        #[target_feature(enable = $features)]
        fn binade_tile<const R: usize, const C: usize>(p: &[f64], v: &[f32], dv: usize, col: usize, acc: &mut [f64]) {
            let tokens = x86::weigh_lengths::<_, _, R>(p, v, dv, col + C * LANES / 2, acc);
            let mut sums = [[zero_f64(); C]; R];
            for (i, sums) in sums.iter_mut().enumerate() {
                for (c, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: row i, columns col + c * LANES / 2 and a vector's more, within `acc` (asserted).
                    *sum = unsafe { load_f64(acc.as_ptr().add(i * dv + col + c * LANES / 2)) };
                }
            }
            for t in 0..tokens {
                let mut values = [zero_f64(); C];
                for (c, value) in values.iter_mut().enumerate() {
                    // SAFETY: row t of `v`, the same columns (asserted).
                    *value = widen(unsafe { load_half(v.as_ptr().add(t * dv + col + c * LANES / 2)) });
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: t < tokens = p.len() / R.
                    let weight = splat_f64(unsafe { *p.as_ptr().add(t * R + i) });
                    for (sum, &value) in sums.iter_mut().zip(&values) {
                        *sum = fma_f64(weight, value, *sum);
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                for (c, &sum) in sums.iter().enumerate() {
                    // SAFETY: as for the load.
                    unsafe { store_f64(acc.as_mut_ptr().add(i * dv + col + c * LANES / 2), sum) };
                }
            }
        }

        #[target_feature(enable = $features)]
        fn wide_tile<const R: usize, const C: usize>(p: &[f64], v: &[f32], dv: usize, col: usize, acc: &mut [i64]) {
            let tokens = x86::weigh_lengths::<_, _, R>(p, v, dv, col + C * LANES / 2, acc);
            let magic = splat_f64(MAGIC);
            // Each term carries the magic number's bits once.
            let excess = splat_i64((MAGIC.to_bits() as i64).wrapping_mul(tokens as i64));
            let mut sums = [[zero_i64(); C]; R];
            for (i, sums) in sums.iter_mut().enumerate() {
                for (c, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: row i, columns col + c * LANES / 2 and a vector's more, within `acc` (asserted).
                    let sums = unsafe { load_i64(acc.as_ptr().add(i * dv + col + c * LANES / 2).cast()) };
                    *sum = sub_i64(sums, excess);
                }
            }
            for t in 0..tokens {
                let mut values = [zero_f64(); C];
                for (c, value) in values.iter_mut().enumerate() {
                    // SAFETY: row t of `v`, the same columns (asserted).
                    *value = widen(unsafe { load_half(v.as_ptr().add(t * dv + col + c * LANES / 2)) });
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: t < tokens = p.len() / R.
                    let weight = splat_f64(unsafe { *p.as_ptr().add(t * R + i) });
                    for (sum, &value) in sums.iter_mut().zip(&values) {
                        let term = bits_f64(fma_f64(weight, value, magic));
                        *sum = add_i64(*sum, term);
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                for (c, &sum) in sums.iter().enumerate() {
                    // SAFETY: as for the load.
                    unsafe { store_i64(acc.as_mut_ptr().add(i * dv + col + c * LANES / 2).cast(), sum) };
                }
            }
        }
    };
}
pub(super) use kernels;

/// The scalar bodies compiled with more instructions.
macro_rules! twins {
    ($features:literal: $($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        fn $name($($arg: $ty),*) -> $ret {
            #[target_feature(enable = $features)]
            fn twin($($arg: $ty),*) -> $ret {
                scalar::$name($($arg),*)
            }
            // SAFETY: only the detected table names this function.
            unsafe { twin($($arg),*) }
        }
    )*};
}
pub(super) use twins;

/// Calls `$tile::<R, C>` with R rows for blocks of C vectors of columns, then for what remains of a row.
macro_rules! weigh_by_rows {
    ($tile:ident, $columns:literal, $lanes:expr, ($r:ident, $p:ident, $v:ident, $dv:ident, $acc:ident)) => {
        x86::weigh_by_rows!(@ $tile, $columns, $lanes, ($r, $p, $v, $dv, $acc), 1 2 3 4 5 6)
    };
    (@ $tile:ident, $columns:literal, $lanes:expr, ($r:ident, $p:ident, $v:ident, $dv:ident, $acc:ident), $($n:literal)*) => {
        match $r {
            $($n => {
                let mut col = 0;
                while col + $columns * $lanes <= $dv {
                    // SAFETY: only the detected table names this function; the tile checks the lengths.
                    unsafe { $tile::<$n, $columns>($p, $v, $dv, col, $acc) };
                    col += $columns * $lanes;
                }
                while col < $dv {
                    // SAFETY: as above.
                    unsafe { $tile::<$n, 1>($p, $v, $dv, col, $acc) };
                    col += $lanes;
                }
            })*
            _ => unreachable!("no weighing tile of {} rows", $r),
        }
    };
}
pub(super) use weigh_by_rows;

/// Checks what the weighing tiles rely on; the number of tokens.
#[inline(always)]
pub(super) fn weigh_lengths<P, A, const R: usize>(
    p: &[P],
    v: &[f32],
    dv: usize,
    end: usize,
    acc: &[A],
) -> usize {
    let tokens = p.len() / R;
    assert!(end <= dv && v.len() >= tokens * dv && acc.len() >= R * dv);
    tokens
}
