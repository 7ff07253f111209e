//! The thread of a link and the bounded queue in front of it.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle, ThreadId},
    time::{Duration, Instant},
};

use kvferry_plan::{Bytes, RoomKey};

use crate::{
    Done, Job, LegReport, Limits, TransportError,
    local::lock,
    stats::{Counters, Gauge},
};

/// Tells a job that is being executed to stop.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    cancelled: AtomicBool,
    closed: AtomicBool,
}

impl Stop {
    /// Asked where cancelling does not matter.
    pub(crate) fn closed(&self) -> Result<(), TransportError> {
        if self.closed.load(Ordering::Acquire) { Err(TransportError::Closed) } else { Ok(()) }
    }

    /// Asked between frames.
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        self.closed()?;
        if self.cancelled.load(Ordering::Acquire) {
            return Err(TransportError::Cancelled);
        }
        Ok(())
    }
}

/// What a link's thread does.
pub(crate) trait Work {
    /// Executes one job, and asks its [`Stop`] often.
    fn run(&mut self, job: &Job, stop: &Stop) -> Result<Vec<LegReport>, TransportError>;
    /// Puts in order what a job that failed has left, when that has been told.
    fn rest(&mut self, _: &Stop) {}
}

impl<F: FnMut(&Job, &Stop) -> Result<Vec<LegReport>, TransportError>> Work for F {
    fn run(&mut self, job: &Job, stop: &Stop) -> Result<Vec<LegReport>, TransportError> {
        self(job, stop)
    }
}

/// Between two looks at a [`Stop`] while a link waits for its rate.
const LOOK: Duration = Duration::from_millis(2);

/// Keeps a link at a rate: a job starts when what was moved before it would be through.
struct Pace {
    rate: Option<Bytes>,
    free: Instant,
}

impl Pace {
    fn wait(&mut self, job: &Job, stop: &Stop) -> Result<(), TransportError> {
        let Some(rate) = self.rate else { return Ok(()) };
        loop {
            stop.check()?;
            match self.free.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => thread::sleep(left.min(LOOK)),
                _ => break,
            }
        }
        let bytes: u64 = job.legs.iter().map(|leg| leg.plan.bytes().0).sum();
        // A bound of an hour keeps absurd rates from overflowing a time.
        let micros = bytes.saturating_mul(1_000_000) / rate.0.max(1);
        self.free = Instant::now() + Duration::from_micros(micros.min(3_600_000_000));
        Ok(())
    }
}

struct Waiting {
    job: Job,
    done: Done,
    gauge: Gauge,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    running: Option<RoomKey>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    stop: Stop,
}

/// Executes the jobs of a link one after the other on its own thread.
pub(crate) struct Queue {
    shared: Arc<Shared>,
    limit: usize,
    counters: Arc<Counters>,
    thread: ThreadId,
    handle: Mutex<Option<JoinHandle<()>>>,
    /// Ends blocking calls of the thread.
    hang_up: Box<dyn Fn() + Send + Sync>,
    _link: Gauge,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl Queue {
    /// Starts the thread. `hang_up` makes `work` return soon.
    pub(crate) fn start(
        name: &str,
        limits: &Limits,
        counters: &Arc<Counters>,
        mut work: impl Work + Send + 'static,
        hang_up: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let shared =
            Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), stop: Stop::default() });
        let theirs = Arc::clone(&shared);
        let mut pace = Pace { rate: limits.rate, free: Instant::now() };
        let handle = thread::Builder::new().name(name.into()).spawn(move || {
            while let Some(next) = theirs.next() {
                let paced = pace.wait(&next.job, &theirs.stop);
                let outcome = paced.and_then(|()| work.run(&next.job, &theirs.stop));
                // Closing hangs up: what a job meets then is our own doing and not the peer's.
                let closed = || theirs.stop.closed.load(Ordering::Acquire);
                let outcome = outcome.map_err(|error| if closed() { TransportError::Closed } else { error });
                let failed = outcome.is_err();
                theirs.finished();
                drop(next.gauge);
                (next.done)(outcome);
                if failed {
                    work.rest(&theirs.stop);
                }
            }
        })?;
        Ok(Self {
            shared,
            limit: limits.jobs,
            counters: Arc::clone(counters),
            thread: handle.thread().id(),
            handle: Mutex::new(Some(handle)),
            hang_up: Box::new(hang_up),
            _link: Gauge::new(counters, |c| &c.links),
        })
    }

    pub(crate) fn execute(&self, job: Job, done: Done) -> Result<(), TransportError> {
        let mut state = lock(&self.shared.state);
        if self.shared.stop.closed.load(Ordering::Acquire) {
            return Err(TransportError::Closed);
        }
        if state.waiting.len() >= self.limit {
            return Err(TransportError::Busy { queued: state.waiting.len() });
        }
        let gauge = Gauge::new(&self.counters, |c| &c.jobs);
        state.waiting.push_back(Waiting { job, done, gauge });
        drop(state);
        self.shared.changed.notify_all();
        Ok(())
    }

    pub(crate) fn cancel(&self, key: RoomKey) {
        let mut state = lock(&self.shared.state);
        let (dropped, kept) =
            std::mem::take(&mut state.waiting).into_iter().partition(|waiting| waiting.job.key == key);
        state.waiting = kept;
        if thread::current().id() != self.thread {
            while state.running == Some(key) {
                // Set again each time: a second job of the room may have been taken meanwhile.
                self.shared.stop.cancelled.store(true, Ordering::Release);
                state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        drop(state);
        finish(dropped, || TransportError::Cancelled);
    }

    pub(crate) fn close(&self) {
        let dropped = {
            let mut state = lock(&self.shared.state);
            self.shared.stop.closed.store(true, Ordering::Release);
            std::mem::take(&mut state.waiting)
        };
        self.shared.changed.notify_all();
        (self.hang_up)();
        // Also when somebody else closes at the same time: the lock is held until the thread has ended. From a
        // callback on the thread itself there is nothing to wait for: the job is over.
        if thread::current().id() != self.thread {
            let mut handle = lock(&self.handle);
            if let Some(handle) = handle.take() {
                let _ = handle.join();
            }
        }
        finish(dropped, || TransportError::Closed);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}

fn finish(dropped: VecDeque<Waiting>, error: impl Fn() -> TransportError) {
    for Waiting { done, gauge, .. } in dropped {
        drop(gauge);
        done(Err(error()));
    }
}

impl Shared {
    /// The next job, or `None` once closed.
    fn next(&self) -> Option<Waiting> {
        let mut state = lock(&self.state);
        loop {
            if self.stop.closed.load(Ordering::Acquire) {
                return None;
            }
            if let Some(next) = state.waiting.pop_front() {
                state.running = Some(next.job.key);
                self.stop.cancelled.store(false, Ordering::Release);
                return Some(next);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn finished(&self) {
        lock(&self.state).running = None;
        self.changed.notify_all();
    }
}
