//! Time as the machines see it: whatever clock the driver has.

use core::{ops::Add, time::Duration};

/// A moment on the driver's monotonic clock, counted from an epoch of the driver's choice. Machines never read a
/// clock; they compare the moments that they are given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub Duration);

impl Time {
    /// The time that has passed since `earlier`; zero when that is not in the past.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    fn add(self, rest: Duration) -> Self {
        Self(self.0.saturating_add(rest))
    }
}
