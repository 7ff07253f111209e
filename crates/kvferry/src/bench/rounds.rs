//! Which round is under way, for somebody who sits in front of it. Not for results.

use std::fmt;

use indicatif::ProgressBar;

use crate::model::Progress;

/// A bar over all rounds of a benchmark, gone when this is dropped.
pub(super) struct Rounds {
    bar: ProgressBar,
    begun: u64,
}

impl Rounds {
    /// `all` rounds, those that warm up among them.
    pub(super) fn new(all: u32) -> Self {
        Self { bar: Progress::Shown.things("rounds", all.into()), begun: 0 }
    }

    /// A round of `what` begins; number 0 warms up.
    pub(super) fn begin(&mut self, what: impl fmt::Display, round: u32) {
        self.bar.set_position(self.begun);
        self.bar.set_message(match round {
            0 => format!("{what}: warm-up"),
            _ => format!("{what}: round {round}"),
        });
        self.begun += 1;
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
