//! What every transport must do: a suite that runs over a back end, given a way to start an end of it.
//!
//! Both ends live in the calling process. A failed check panics, as in a test; that is what the suite is for. It is
//! public so that implementers of [`Transport`] elsewhere run the same checks, and may grow with each release.
//!
//! ```
//! use kvferry_transport::{Mem, contract};
//! contract::repeated(&|setup| Ok(std::sync::Arc::new(Mem::new(setup))));
//! ```

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failed check is a panic")]

mod geometry;
mod lifecycle;
mod safety;
mod world;

use std::sync::Arc;

use crate::{Setup, Transport, TransportError};

pub use geometry::{chunked, concurrent, converted, exact, large_units, long_runs, repeated, sharded};
pub use lifecycle::{at_rest, bounded, cancelled, closed, forgotten, gone, nothing_left, paced, restarted};
pub use safety::{faults, fence, grants, refused, rotations, stale_pages, undigested};

/// Starts an end of the back end.
pub type Start<'a> = &'a (dyn Fn(Setup) -> Result<Arc<dyn Transport>, TransportError> + Sync);

/// A check and its name.
pub type Check = (&'static str, fn(Start<'_>));

/// All checks.
pub const CHECKS: &[Check] = &[
    ("bounded", bounded),
    ("cancelled", cancelled),
    ("chunked", chunked),
    ("closed", closed),
    ("concurrent", concurrent),
    ("converted", converted),
    ("exact", exact),
    ("faults", faults),
    ("fence", fence),
    ("forgotten", forgotten),
    ("gone", gone),
    ("grants", grants),
    ("large_units", large_units),
    ("long_runs", long_runs),
    ("nothing_left", nothing_left),
    ("paced", paced),
    ("refused", refused),
    ("repeated", repeated),
    ("restarted", restarted),
    ("rotations", rotations),
    ("sharded", sharded),
    ("stale_pages", stale_pages),
    ("undigested", undigested),
];
