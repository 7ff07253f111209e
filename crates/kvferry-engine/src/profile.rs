//! Where the time of an engine's steps goes. Not for spans of requests (`kvferry-server`'s telemetry), nor for CPU time: a
//! rank that has to wait for a core spends that time too.

use std::{
    array,
    cell::Cell,
    time::{Duration, Instant},
};

/// What a rank spends its time with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Scores, weights and weighted sums of attention over cached rows.
    Attention,
    /// Reading cached rows, and packing them for attention.
    CacheReads,
    /// Writing the rows of new tokens.
    CacheWrites,
    /// Convolution and recurrence of linear attention, its state's reads and writes included.
    LinearAttention,
    /// Products with the weights of attention, before it and after.
    Projections,
    /// Feed-forward networks and experts, their routing included.
    FeedForward,
    /// Logits of the rows that are asked for.
    Logits,
    /// Waiting for other ranks, and adding up what all of them bring.
    Meetings,
    /// Embedding and norms.
    Other,
}

impl Phase {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Attention,
        Self::CacheReads,
        Self::CacheWrites,
        Self::LinearAttention,
        Self::Projections,
        Self::FeedForward,
        Self::Logits,
        Self::Meetings,
        Self::Other,
    ];

    /// In words for people and for JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::CacheReads => "cache_reads",
            Self::CacheWrites => "cache_writes",
            Self::LinearAttention => "linear_attention",
            Self::Projections => "projections",
            Self::FeedForward => "feed_forward",
            Self::Logits => "logits",
            Self::Meetings => "meetings",
            Self::Other => "other",
        }
    }
}

/// Time that the ranks of an engine have spent, all together; zeros unless
/// [`EngineConfig::profile`](crate::EngineConfig::profile) asks for it.
///
/// ```
/// use kvferry_engine::{Phase, Profile};
/// assert!(Profile::default().spent(Phase::Attention).is_zero());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    spent: [Duration; Phase::ALL.len()],
    /// Memory that attention takes on the rank that takes the most, in bytes.
    pub attention_bytes: usize,
}

impl Profile {
    /// Time spent with `phase`, over all ranks.
    #[must_use]
    pub fn spent(&self, phase: Phase) -> Duration {
        self.spent[phase as usize]
    }

    /// Time spent in all, over all ranks.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.spent.iter().sum()
    }

    /// What came after `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self { spent: array::from_fn(|i| self.spent[i].saturating_sub(earlier.spent[i])), ..*self }
    }

    /// Adds a rank's.
    pub(crate) fn add(&mut self, other: &Self) {
        self.spent = array::from_fn(|i| self.spent[i] + other.spent[i]);
        self.attention_bytes = self.attention_bytes.max(other.attention_bytes);
    }
}

/// A rank's clock: says what the time since it was last asked went to.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    /// None while nobody wants to know.
    last: Cell<Option<Instant>>,
    spent: Cell<Profile>,
}

impl Clock {
    /// Begins a step.
    pub(crate) fn start(&self, on: bool) {
        self.last.set(on.then(Instant::now));
        self.spent.set(Profile::default());
    }

    /// The time until now went to `phase`.
    pub(crate) fn lap(&self, phase: Phase) {
        let Some(last) = self.last.get() else { return };
        let now = Instant::now();
        let mut spent = self.spent.get();
        spent.spent[phase as usize] += now - last;
        self.spent.set(spent);
        self.last.set(Some(now));
    }

    /// What the step has taken; None while nobody wants to know.
    pub(crate) fn spent(&self) -> Option<Profile> {
        self.last.get().map(|_| self.spent.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_has_a_place_and_a_name_of_its_own() {
        for (at, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(phase as usize, at);
            assert!(Phase::ALL[..at].iter().all(|other| other.name() != phase.name()));
        }
    }

    #[test]
    fn laps_go_to_their_phase_and_only_when_somebody_wants_to_know() {
        let clock = Clock::default();
        clock.start(false);
        clock.lap(Phase::Logits);
        assert_eq!(clock.spent(), None);
        clock.start(true);
        std::thread::sleep(Duration::from_millis(2));
        clock.lap(Phase::Logits);
        let spent = clock.spent().unwrap();
        assert!(spent.spent(Phase::Logits) >= Duration::from_millis(2));
        assert_eq!(spent.total(), spent.spent(Phase::Logits));
        assert_eq!(spent.since(&spent).total(), Duration::ZERO);
    }
}
