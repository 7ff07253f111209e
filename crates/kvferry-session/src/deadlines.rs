//! When which room has to be looked at: a heap, so that an expiry is found without visiting every room.

use alloc::collections::BinaryHeap;
use core::cmp::Reverse;

use crate::Time;

/// Moments at which something named `K` is due. Entries are not taken back: whoever pops one asks its room whether
/// it is still due, and pushes the room's new deadline.
#[derive(Debug)]
pub struct Deadlines<K: Ord> {
    heap: BinaryHeap<Reverse<(Time, K)>>,
}

impl<K: Ord> Default for Deadlines<K> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new() }
    }
}

impl<K: Ord> Deadlines<K> {
    /// Adds a moment.
    pub fn push(&mut self, at: Time, what: K) {
        self.heap.push(Reverse((at, what)));
    }

    /// Takes something that is due at `now`.
    pub fn pop_due(&mut self, now: Time) -> Option<K> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, what))| what)
    }

    /// The earliest moment.
    #[must_use]
    pub fn next(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }
}
