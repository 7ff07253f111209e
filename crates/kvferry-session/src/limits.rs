//! How long who may take, and how much is kept.

use core::time::Duration;

/// Bounds of a room. Each runs on the progress of whoever is responsible at that moment; none runs on the age of
/// the room, so a long prompt or a queue is not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// For the other side to join: a room whose decode never opens it, an open for a room that prefill does not
    /// know yet. The last resort: a decode that will not open a room says so.
    pub join: Duration,
    /// For the engine to compute the next chunk, its queue included.
    pub compute: Duration,
    /// For bytes that are due to move, and for the verdict once everything was sent.
    pub transfer: Duration,
    /// For which a reader may read a source's pages after its last sign of life.
    pub lease: Duration,
    /// For movers to stop after a room has ended; then their link is closed.
    pub fence: Duration,
    /// For which an ended room is remembered, so that late messages are answered.
    pub tombstone: Duration,
    /// How many ended rooms are remembered; the oldest goes first.
    pub tombstones: usize,
    /// How many opens of one peer may wait for rooms that prefill does not know yet.
    pub waiting: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            join: Duration::from_secs(10),
            compute: Duration::from_secs(600),
            transfer: Duration::from_secs(10),
            lease: Duration::from_secs(5),
            fence: Duration::from_secs(2),
            tombstone: Duration::from_secs(120),
            tombstones: 4096,
            waiting: 1024,
        }
    }
}
