//! Where ranks exchange data in the middle of a step. Waiting blocks, it never spins: there are more ranks than cores.
//! What is exchanged lies in memory of the members and of the group that is used again, so that a meeting takes none.
//! Not for communication between instances.

use std::{
    mem::swap,
    slice,
    sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock},
};

use crate::EngineError;

/// Another rank failed: this one has nothing left to do in this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

/// Why a rank's part of a step ended early.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RankError {
    /// Another rank is the cause.
    Broken,
    /// This rank is.
    Failed(EngineError),
}

impl From<Broken> for RankError {
    fn from(_: Broken) -> Self {
        Self::Broken
    }
}

impl From<EngineError> for RankError {
    fn from(error: EngineError) -> Self {
        Self::Failed(error)
    }
}

#[derive(Debug, Default)]
struct Meeting<P> {
    /// Counts meetings held; tells a sleeper that its own is over.
    round: u64,
    /// By member; what lies here when nobody meets means nothing.
    brought: Vec<P>,
    arrived: usize,
    broken: bool,
}

/// A set of ranks that meet, each bringing a `P`, of which an `R` is made for all of them.
#[derive(Debug)]
pub(crate) struct Group<P, R> {
    size: usize,
    meeting: Mutex<Meeting<P>>,
    over: Condvar,
    result: RwLock<R>,
}

impl<P: Default, R: Default> Group<P, R> {
    /// A group of `size` members.
    pub(crate) fn new(size: usize) -> Self {
        let brought = (0..size).map(|_| P::default()).collect();
        let meeting = Meeting { round: 0, brought, arrived: 0, broken: false };
        Self { size, meeting: Mutex::new(meeting), over: Condvar::new(), result: RwLock::default() }
    }
}

impl<P, R> Group<P, R> {
    fn lock(&self) -> MutexGuard<'_, Meeting<P>> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends this and every later meeting with [`Broken`].
    pub(crate) fn disband(&self) {
        self.lock().broken = true;
        self.over.notify_all();
    }

    /// Lets meetings happen again. Nobody may be in one.
    pub(crate) fn gather(&self) {
        let mut meeting = self.lock();
        (meeting.broken, meeting.arrived) = (false, 0);
    }

    /// Prepares the memory of what comes of a meeting.
    pub(crate) fn prepare<T>(&self, with: impl FnOnce(&mut R) -> T) -> T {
        with(&mut self.result.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Brings `mine`, waits for all the others, and returns what `keep` takes of the result. All members must pass the
    /// same `combine`; the last one to arrive runs it, once, over what all have brought, in member order. It may change
    /// that too: everybody gets back what lies in their place then.
    ///
    /// # Errors
    /// [`RankError::Broken`] when another member failed; what `combine` fails with.
    pub(crate) fn meet<T>(
        &self,
        member: usize,
        mine: &mut P,
        combine: impl FnOnce(&mut [P], &mut R) -> Result<(), EngineError>,
        keep: impl FnOnce(&R) -> T,
    ) -> Result<T, RankError> {
        if self.size == 1 {
            return self.prepare(|result| {
                combine(slice::from_mut(mine), result)?;
                Ok(keep(result))
            });
        }
        let mut meeting = self.lock();
        let round = meeting.round;
        if meeting.broken || meeting.arrived >= self.size {
            return Err(RankError::Broken);
        }
        swap(meeting.brought.get_mut(member).ok_or(Broken)?, mine);
        meeting.arrived += 1;
        let mut combined = Ok(());
        if meeting.arrived == self.size {
            combined = self.prepare(|result| combine(&mut meeting.brought, result));
            match &combined {
                Ok(()) => (meeting.round, meeting.arrived) = (round + 1, 0),
                Err(_) => meeting.broken = true,
            }
            self.over.notify_all();
        }
        while meeting.round == round && !meeting.broken {
            meeting = self.over.wait(meeting).unwrap_or_else(PoisonError::into_inner);
        }
        // Also of a meeting that failed: the memory is the member's own.
        if let Some(place) = meeting.brought.get_mut(member) {
            swap(place, mine);
        }
        let held = meeting.round != round;
        drop(meeting);
        combined?;
        if !held {
            return Err(RankError::Broken);
        }
        // Nobody can change the result before this member comes to the next meeting.
        Ok(keep(&self.result.read().unwrap_or_else(PoisonError::into_inner)))
    }
}
