//! The scalar table.

use super::{Kernels, body};

pub(crate) static SCALAR: Kernels = Kernels {
    name: "scalar",
    rows: 12,
    panels: |_| 1,
    chain: body::chain,
    fold: body::fold,
    peak: body::peak,
    stick: body::stick,
    exp_grid: body::exp_grid,
    exp_sum: body::exp_sum,
    weigh_wide: body::weigh_wide,
    weigh_binade: body::weigh_binade,
    weigh: body::weigh,
    rms_norm: body::rms_norm,
    silu_mul: body::silu_mul,
};
