//! Kernels: matrix products, norms, rotary tables, attention; scalar and SIMD twins.
