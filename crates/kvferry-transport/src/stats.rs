//! What a transport has done and holds.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use kvferry_plan::Bytes;

use crate::Refusal;

/// Counters since the transport started, and what it holds now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransportStats {
    /// Payload bytes that this side pushed.
    pub sent: Bytes,
    /// Blocks that an engine has moved from here to landing slots.
    pub blocks: u64,
    /// Payload bytes written to local pools, pushed here or pulled.
    pub landed: Bytes,
    /// Frames (pushes) or sweeps of a layer (pulls) that landed.
    pub frames: u64,
    /// Legs that landed completely.
    pub legs: u64,
    /// Legs refused here, by cause.
    pub refused: BTreeMap<Refusal, u64>,
    /// Payload bytes that came for refused legs and were dropped.
    pub dropped: Bytes,
    /// Connections ended because the other end did not speak the protocol, in the hello or later.
    pub malformed: u64,
    /// Connections ended because the other end announced an absurd length.
    pub length: u64,
    /// Connections that the other end closed in the middle of a message.
    pub cut: u64,
    /// Connections ended because the other end stalled.
    pub stalled: u64,
    /// Connections turned away because too many were open, because they were meant for another start of this process
    /// or, on `shm`, because another user's process opened them.
    pub turned_away: u64,
    /// Faults injected.
    pub faults: u64,
    /// Now: accepted connections.
    pub connections: u64,
    /// Now: open links.
    pub links: u64,
    /// Now: granted rooms.
    pub grants: u64,
    /// Now: jobs accepted and not done.
    pub jobs: u64,
    /// Now: landing slots that peers hold.
    pub slots: u64,
    /// Now: landing slots that nobody may have, because what is still on its way to them is not known.
    pub fenced: u64,
    /// Now: blocks that are packed or on their way.
    pub staged: u64,
    /// Times that the engine was started again because all slots were fenced off.
    pub renewed: u64,
}

impl TransportStats {
    /// Connections that were ended because of the other end, by cause, without those that never happened.
    pub fn ended(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("cut", self.cut),
            ("length", self.length),
            ("malformed", self.malformed),
            ("stalled", self.stalled),
            ("turned_away", self.turned_away),
        ]
        .into_iter()
        .filter(|(_, n)| *n > 0)
    }
}

/// The counters behind [`TransportStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) sent: AtomicU64,
    pub(crate) blocks: AtomicU64,
    pub(crate) landed: AtomicU64,
    pub(crate) frames: AtomicU64,
    pub(crate) legs: AtomicU64,
    pub(crate) refused: [AtomicU64; Refusal::ALL.len()],
    pub(crate) dropped: AtomicU64,
    pub(crate) malformed: AtomicU64,
    pub(crate) length: AtomicU64,
    pub(crate) cut: AtomicU64,
    pub(crate) stalled: AtomicU64,
    pub(crate) turned_away: AtomicU64,
    pub(crate) faults: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) links: AtomicU64,
    pub(crate) jobs: AtomicU64,
    pub(crate) slots: AtomicU64,
    pub(crate) fenced: AtomicU64,
    pub(crate) staged: AtomicU64,
    pub(crate) renewed: AtomicU64,
}

impl Counters {
    pub(crate) fn refuse(&self, refusal: Refusal) {
        for (counter, cause) in self.refused.iter().zip(Refusal::ALL) {
            if cause == refusal {
                add(counter, 1);
            }
        }
    }

    /// Without what is not counted here: the grants.
    pub(crate) fn snapshot(&self) -> TransportStats {
        let at = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TransportStats {
            sent: Bytes(at(&self.sent)),
            blocks: at(&self.blocks),
            landed: Bytes(at(&self.landed)),
            frames: at(&self.frames),
            legs: at(&self.legs),
            refused: Refusal::ALL
                .into_iter()
                .zip(&self.refused)
                .map(|(cause, n)| (cause, at(n)))
                .filter(|(_, n)| *n > 0)
                .collect(),
            dropped: Bytes(at(&self.dropped)),
            malformed: at(&self.malformed),
            length: at(&self.length),
            cut: at(&self.cut),
            stalled: at(&self.stalled),
            turned_away: at(&self.turned_away),
            faults: at(&self.faults),
            connections: at(&self.connections),
            links: at(&self.links),
            grants: 0,
            jobs: at(&self.jobs),
            slots: at(&self.slots),
            fenced: at(&self.fenced),
            staged: at(&self.staged),
            renewed: at(&self.renewed),
        }
    }
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// One of the things that are counted while they exist.
pub(crate) struct Gauge {
    counters: Arc<Counters>,
    of: fn(&Counters) -> &AtomicU64,
}

impl Gauge {
    pub(crate) fn new(counters: &Arc<Counters>, of: fn(&Counters) -> &AtomicU64) -> Self {
        add(of(counters), 1);
        Self { counters: Arc::clone(counters), of }
    }
}

impl Drop for Gauge {
    fn drop(&mut self) {
        (self.of)(&self.counters).fetch_sub(1, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Gauge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gauge")
    }
}
