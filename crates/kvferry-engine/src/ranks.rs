//! A step of work done by all ranks at once: one thread per rank, started once and asleep between steps. A rank that
//! fails ends every meeting of the step, so that nobody waits for it. Not for what ranks exchange (`meeting`).

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
};

use kvferry_plan::RankId;

use crate::{EngineError, meeting::RankError};

/// What ranks do in a step.
pub(crate) trait Work: Send + Sync + 'static {
    /// What a rank keeps from step to step.
    type Seat: Send + 'static;

    /// One rank's part of a step.
    fn run(&self, rank: RankId, seat: &mut Self::Seat) -> Result<(), RankError>;

    /// A rank has failed: ends all meetings, those to come included.
    fn disband(&self);

    /// All ranks are about to begin: meetings can be held.
    fn gather(&self);
}

/// The ranks of an instance. Dropping it ends their threads.
pub(crate) struct Ranks<W: Work> {
    table: Arc<Table<W>>,
    /// None for a rank that is alone: it works on the thread that asks.
    threads: Vec<JoinHandle<()>>,
}

struct Table<W: Work> {
    work: Arc<W>,
    seats: Vec<Mutex<W::Seat>>,
    round: Mutex<Round>,
    /// A step begins, or all ends.
    begin: Condvar,
    /// The last rank is done.
    done: Condvar,
}

#[derive(Debug)]
struct Round {
    /// Counts steps.
    step: u64,
    /// Ranks at work.
    running: usize,
    /// By rank, of the last step.
    results: Vec<Result<(), RankError>>,
    stop: bool,
}

impl<W: Work> Ranks<W> {
    /// Starts a rank for each seat.
    ///
    /// # Errors
    /// [`EngineError::Thread`].
    pub(crate) fn start(work: Arc<W>, seats: Vec<W::Seat>) -> Result<Self, EngineError> {
        let count = seats.len();
        let results = vec![Ok(()); count];
        let table = Table {
            work,
            seats: seats.into_iter().map(Mutex::new).collect(),
            round: Mutex::new(Round { step: 0, running: 0, results, stop: false }),
            begin: Condvar::new(),
            done: Condvar::new(),
        };
        let mut ranks = Self { table: Arc::new(table), threads: Vec::new() };
        if count > 1 {
            for rank in (0..count as u32).map(RankId) {
                let table = Arc::clone(&ranks.table);
                let thread = thread::Builder::new()
                    .name(format!("rank-{rank}"))
                    .spawn(move || table.serve(rank))
                    .map_err(|error| EngineError::Thread(error.to_string()))?;
                ranks.threads.push(thread);
            }
        }
        Ok(ranks)
    }

    /// Runs a step on every rank and waits for all of them.
    ///
    /// # Errors
    /// The failure of the first rank that failed by itself; a panic is one.
    pub(crate) fn run(&mut self) -> Result<(), EngineError> {
        let Table { work, round, begin, done, .. } = self.table.as_ref();
        work.gather();
        let round = if self.threads.is_empty() {
            let result = self.table.guarded(RankId(0));
            let mut round = lock(round);
            round.results.iter_mut().for_each(|place| *place = result.clone());
            round
        } else {
            let mut round = lock(round);
            round.step += 1;
            round.running = self.threads.len();
            begin.notify_all();
            while round.running > 0 {
                round = done.wait(round).unwrap_or_else(PoisonError::into_inner);
            }
            round
        };
        let failed = |result: &Result<(), RankError>| match result {
            Err(RankError::Failed(error)) => Some(error.clone()),
            _ => None,
        };
        match round.results.iter().find_map(failed) {
            Some(error) => Err(error),
            None if round.results.iter().all(Result::is_ok) => Ok(()),
            None => Err(EngineError::Rank { rank: RankId(0), reason: "the ranks lost each other".into() }),
        }
    }

    /// A rank's seat. Waits until the rank is done with its step.
    pub(crate) fn seat(&self, rank: RankId) -> Option<MutexGuard<'_, W::Seat>> {
        self.table.seats.get(rank.index()).map(lock)
    }
}

impl<W: Work> Drop for Ranks<W> {
    fn drop(&mut self) {
        lock(&self.table.round).stop = true;
        self.table.begin.notify_all();
        for thread in self.threads.drain(..) {
            // A rank's panics are caught where they can happen.
            let _ = thread.join();
        }
    }
}

impl<W: Work> Table<W> {
    /// A rank's thread.
    fn serve(&self, rank: RankId) {
        let mut seen = 0;
        loop {
            let mut round = lock(&self.round);
            while round.step == seen && !round.stop {
                round = self.begin.wait(round).unwrap_or_else(PoisonError::into_inner);
            }
            if round.stop {
                return;
            }
            seen = round.step;
            drop(round);
            let result = self.guarded(rank);
            let mut round = lock(&self.round);
            if let Some(place) = round.results.get_mut(rank.index()) {
                *place = result;
            }
            round.running -= 1;
            if round.running == 0 {
                self.done.notify_one();
            }
        }
    }

    /// A rank's part of a step; if it fails, nobody waits for it.
    fn guarded(&self, rank: RankId) -> Result<(), RankError> {
        let work = || match self.seats.get(rank.index()) {
            Some(seat) => self.work.run(rank, &mut lock(seat)),
            None => Err(EngineError::Rank { rank, reason: "it has no seat".into() }.into()),
        };
        let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
            let reason = panic_text(panic.as_ref());
            Err(RankError::Failed(EngineError::Rank { rank, reason }))
        });
        if result.is_err() {
            self.work.disband();
        }
        result
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "it panicked".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meeting::Group;
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        time::Duration,
    };

    type Step = Box<dyn Fn(&Crew, RankId, &mut Vec<String>) -> Result<(), RankError> + Send + Sync>;

    /// A few ranks that meet in one world, do what a test says, and note what they see.
    struct Crew {
        world: Group<String, String>,
        step: Step,
    }

    impl Work for Crew {
        type Seat = Vec<String>;

        fn run(&self, rank: RankId, seat: &mut Vec<String>) -> Result<(), RankError> {
            (self.step)(self, rank, seat)
        }

        fn disband(&self) {
            self.world.disband();
        }

        fn gather(&self) {
            self.world.gather();
        }
    }

    impl Crew {
        fn start(
            size: usize,
            step: impl Fn(&Self, RankId, &mut Vec<String>) -> Result<(), RankError> + Send + Sync + 'static,
        ) -> Ranks<Self> {
            let crew = Self { world: Group::new(size), step: Box::new(step) };
            Ranks::start(Arc::new(crew), vec![Vec::new(); size]).unwrap()
        }

        /// What all bring, in one string.
        fn meet(&self, rank: RankId, mine: &mut String) -> Result<String, RankError> {
            let join = |all: &mut [String], result: &mut String| {
                *result = all.join(",");
                Ok(())
            };
            self.world.meet(rank.index(), mine, join, String::clone)
        }
    }

    #[test]
    fn meetings_combine_in_rank_order_whoever_comes_first() {
        for size in [1, 4] {
            let mut ranks = Crew::start(size, |crew, rank, seen| {
                for round in 0..50_u32 {
                    thread::sleep(Duration::from_micros(u64::from((rank.0 * 7 + round * 3) % 5) * 20));
                    let mut mine = format!("{rank}/{round}");
                    seen.push(crew.meet(rank, &mut mine)?);
                    assert_eq!(mine, format!("{rank}/{round}"), "everybody gets back what is theirs");
                }
                Ok(())
            });
            for step in 1..=3 {
                ranks.run().unwrap();
                for rank in (0..size as u32).map(RankId) {
                    let seen = ranks.seat(rank).unwrap();
                    assert_eq!(seen.len(), 50 * step);
                    for (round, all) in (0..50).cycle().zip(seen.iter()) {
                        let expected: Vec<String> = (0..size).map(|r| format!("{r}/{round}")).collect();
                        assert_eq!(*all, expected.join(","));
                    }
                }
            }
        }
    }

    #[test]
    fn a_panic_on_one_rank_frees_all_the_others_and_is_reported() {
        for unwell in (0..5).map(RankId) {
            let reached = Arc::new(AtomicU64::new(0));
            let count = Arc::clone(&reached);
            let mut ranks = Crew::start(5, move |crew, rank, seen| {
                crew.meet(rank, &mut String::new())?;
                seen.push(String::new());
                assert!(rank != unwell || seen.len() != 2, "a rank is unwell");
                crew.meet(rank, &mut String::new())?;
                count.fetch_add(1, Ordering::SeqCst);
                Ok(())
            });
            ranks.run().unwrap();
            let error = ranks.run().unwrap_err();
            assert_eq!(error, EngineError::Rank { rank: unwell, reason: "a rank is unwell".into() });
            assert_eq!(reached.load(Ordering::SeqCst), 5, "nobody goes on in the step that failed");
            ranks.run().unwrap();
            assert_eq!(reached.load(Ordering::SeqCst), 10, "the next step is a new one");
        }
    }

    #[test]
    fn a_failure_to_combine_is_told_once_and_takes_nothing_from_anybody() {
        let mut ranks = Crew::start(3, |crew, rank, seen| {
            let mut mine = format!("of {rank}");
            let fail = |_: &mut [String], _: &mut String| Err(EngineError::Range { what: "a test" });
            let result = crew.world.meet(rank.index(), &mut mine, fail, |_| ());
            seen.push(mine);
            result
        });
        assert_eq!(ranks.run().unwrap_err(), EngineError::Range { what: "a test" });
        for rank in (0..3).map(RankId) {
            assert_eq!(*ranks.seat(rank).unwrap(), [format!("of {rank}")]);
        }
    }

    #[test]
    fn a_rank_alone_works_on_the_thread_that_asks() {
        let here = thread::current().id();
        let mut ranks = Crew::start(1, move |_, _, _| {
            assert_eq!(thread::current().id(), here);
            Err(EngineError::Range { what: "a test" }.into())
        });
        assert_eq!(ranks.run().unwrap_err(), EngineError::Range { what: "a test" });
    }
}
