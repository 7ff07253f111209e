//! A step of work done by all ranks at once: one thread per rank, and the meetings where they exchange data.
//! Waiting blocks, it never spins: there are more ranks than cores. A rank that fails ends every meeting of the
//! step, so that nobody waits for it. Not for communication between instances.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use kvferry_plan::RankId;

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

#[derive(Default)]
struct Meeting {
    /// Counts meetings held; tells a sleeper that its own is over.
    round: u64,
    brought: Vec<Option<Box<dyn Any + Send>>>,
    arrived: usize,
    result: Option<Arc<dyn Any + Send + Sync>>,
    broken: bool,
}

/// A set of ranks that meet.
pub(crate) struct Group {
    size: usize,
    meeting: Mutex<Meeting>,
    over: Condvar,
}

impl Group {
    /// A group of `size` members.
    pub(crate) fn new(size: usize) -> Self {
        let brought = (0..size).map(|_| None).collect();
        Self { size, meeting: Mutex::new(Meeting { brought, ..Meeting::default() }), over: Condvar::new() }
    }

    /// Members.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    fn lock(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends this and every later meeting with [`Broken`].
    pub(crate) fn disband(&self) {
        self.lock().broken = true;
        self.over.notify_all();
    }

    /// Brings `mine`, waits for all the others, and returns what `combine` made of all contributions, in member
    /// order. All members must pass the same `combine`; the last one to arrive runs it, once.
    ///
    /// # Errors
    /// [`Broken`] when a member failed.
    pub(crate) fn meet<T, U>(
        &self,
        member: usize,
        mine: T,
        combine: impl FnOnce(Vec<T>) -> U,
    ) -> Result<Arc<U>, Broken>
    where
        T: Any + Send,
        U: Any + Send + Sync,
    {
        if self.size == 1 {
            return Ok(Arc::new(combine(vec![mine])));
        }
        let mut meeting = self.lock();
        let round = meeting.round;
        if meeting.broken {
            return Err(Broken);
        }
        match meeting.brought.get_mut(member) {
            Some(slot @ None) => *slot = Some(Box::new(mine)),
            _ => return Err(Broken),
        }
        meeting.arrived += 1;
        if meeting.arrived < self.size {
            while meeting.round == round && !meeting.broken {
                meeting = self.over.wait(meeting).unwrap_or_else(PoisonError::into_inner);
            }
            if meeting.round == round {
                return Err(Broken);
            }
        } else {
            let all: Vec<T> = meeting
                .brought
                .iter_mut()
                .filter_map(|slot| slot.take()?.downcast::<T>().ok().map(|brought| *brought))
                .collect();
            if all.len() != self.size {
                meeting.broken = true;
                self.over.notify_all();
                return Err(Broken);
            }
            meeting.result = Some(Arc::new(combine(all)));
            meeting.arrived = 0;
            meeting.round += 1;
            self.over.notify_all();
        }
        // Nobody can overwrite the result before this member comes to the next meeting.
        meeting.result.clone().and_then(|result| result.downcast::<U>().ok()).ok_or(Broken)
    }
}

/// The ranks of one pipeline stage.
struct Stage {
    world: Group,
    heads: Vec<Group>,
    /// By TP coordinate: where a rank meets the one of the next stage. Empty in the last stage.
    next: Vec<Group>,
}

/// All ranks of an instance for one step.
pub(crate) struct Ranks {
    tp: u32,
    stages: Vec<Stage>,
}

/// One rank's access to the others.
#[derive(Clone, Copy)]
pub(crate) struct Member<'a> {
    ranks: &'a Ranks,
    stage: &'a Stage,
    rank: RankId,
}

impl Ranks {
    /// `stages` stages of `tp` ranks each, in head groups of `dcp` consecutive ranks.
    pub(crate) fn new(stages: u32, tp: u32, dcp: u32) -> Self {
        let dcp = dcp.max(1);
        let groups = |count: u32, size: u32| (0..count).map(|_| Group::new(size as usize)).collect();
        let stage = |stage| Stage {
            world: Group::new(tp as usize),
            heads: groups(tp / dcp, dcp),
            next: groups(if stage + 1 < stages { tp } else { 0 }, 2),
        };
        Self { tp, stages: (0..stages).map(stage).collect() }
    }

    fn disband(&self) {
        for Stage { world, heads, next } in &self.stages {
            world.disband();
            heads.iter().chain(next).for_each(Group::disband);
        }
    }

    /// Runs `work` on every rank, each on its own thread (one rank alone runs on this one), and returns the
    /// results in rank order.
    ///
    /// # Errors
    /// The failure of the first rank that failed by itself; a panic is one.
    pub(crate) fn run<T: Send>(
        &self,
        work: impl Fn(Member<'_>) -> Result<T, RankError> + Sync,
    ) -> Result<Vec<T>, EngineError> {
        let guarded = |stage: &Stage, rank: RankId| {
            let result = catch_unwind(AssertUnwindSafe(|| work(Member { ranks: self, stage, rank })))
                .unwrap_or_else(|panic| {
                    let reason = panic_text(panic.as_ref());
                    Err(RankError::Failed(EngineError::Rank { rank, reason }))
                });
            if result.is_err() {
                self.disband();
            }
            result
        };
        let all = self.stages.iter().flat_map(|stage| (0..self.tp).map(move |_| stage));
        let all = all.zip((0..).map(RankId));
        let results: Vec<Result<T, RankError>> = if let ([stage], 1) = (self.stages.as_slice(), self.tp) {
            vec![guarded(stage, RankId(0))]
        } else {
            thread::scope(|scope| {
                let threads: Vec<_> = all
                    .map(|(stage, rank)| {
                        let guarded = &guarded;
                        thread::Builder::new()
                            .name(format!("rank-{rank}"))
                            .spawn_scoped(scope, move || guarded(stage, rank))
                            .inspect_err(|_| self.disband())
                    })
                    .collect();
                threads
                    .into_iter()
                    .map(|thread| match thread {
                        Ok(thread) => thread.join().unwrap_or(Err(RankError::Broken)),
                        Err(error) => Err(RankError::Failed(EngineError::Thread(error.to_string()))),
                    })
                    .collect()
            })
        };
        let cause = results.iter().find_map(|result| match result {
            Err(RankError::Failed(error)) => Some(error.clone()),
            _ => None,
        });
        let done: Option<Vec<T>> = results.into_iter().map(Result::ok).collect();
        match (done, cause) {
            (Some(done), None) => Ok(done),
            (_, Some(error)) => Err(error),
            (None, None) => {
                Err(EngineError::Rank { rank: RankId(0), reason: "the ranks lost each other".into() })
            }
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "it panicked".into())
}

impl Member<'_> {
    /// This rank, counted over all stages.
    pub(crate) fn rank(&self) -> RankId {
        self.rank
    }

    /// This rank within its stage.
    pub(crate) fn tp(&self) -> usize {
        (self.rank.0 % self.ranks.tp.max(1)) as usize
    }

    /// This rank's pipeline stage.
    pub(crate) fn stage(&self) -> usize {
        (self.rank.0 / self.ranks.tp.max(1)) as usize
    }

    /// What `combine` makes of the contributions of all ranks of this stage, in rank order.
    pub(crate) fn all<T, U>(&self, mine: T, combine: impl FnOnce(Vec<T>) -> U) -> Result<Arc<U>, Broken>
    where
        T: Any + Send,
        U: Any + Send + Sync,
    {
        self.stage.world.meet(self.tp(), mine, combine)
    }

    /// What `combine` makes of the contributions of this rank's head group, in rank order.
    pub(crate) fn group<T, U>(&self, mine: T, combine: impl FnOnce(Vec<T>) -> U) -> Result<Arc<U>, Broken>
    where
        T: Any + Send,
        U: Any + Send + Sync,
    {
        let size = self.stage.heads.first().map_or(1, Group::size);
        let group = self.stage.heads.get(self.tp() / size).ok_or(Broken)?;
        group.meet(self.tp() % size, mine, combine)
    }

    /// What this rank's predecessor in the stage before has handed on; `None` in the first stage.
    pub(crate) fn taken_over<T>(&self) -> Result<Option<T>, Broken>
    where
        T: Any + Clone + Send + Sync,
    {
        let Some(before) = self.stage().checked_sub(1).and_then(|before| self.ranks.stages.get(before))
        else {
            return Ok(None);
        };
        let link = before.next.get(self.tp()).ok_or(Broken)?;
        let both = link.meet(1, None::<T>, |both| both.into_iter().flatten().next())?;
        both.as_ref().clone().ok_or(Broken).map(Some)
    }

    /// Waits until this rank's successor in the next stage takes `mine`. Gives it back in the last stage.
    pub(crate) fn hand_on<T>(&self, mine: T) -> Result<Option<T>, Broken>
    where
        T: Any + Clone + Send + Sync,
    {
        let Some(link) = self.stage.next.get(self.tp()) else { return Ok(Some(mine)) };
        link.meet(0, Some(mine), |both: Vec<Option<T>>| both.into_iter().flatten().next())?;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    #[test]
    fn meetings_combine_in_rank_order_whoever_comes_first() {
        let ranks = Ranks::new(1, 4, 2);
        let seen = ranks
            .run(|member| {
                let r = member.rank().0;
                let mut seen = Vec::new();
                for round in 0..50_u32 {
                    thread::sleep(Duration::from_micros(u64::from((r * 7 + round * 3) % 5) * 20));
                    let all = member.all(format!("{r}/{round}"), |all| all.join(","))?;
                    let group = member.group(r, |all| all)?;
                    seen.push((all.as_ref().clone(), group.as_ref().clone()));
                }
                Ok(seen)
            })
            .unwrap();
        for (r, rounds) in seen.iter().enumerate() {
            for (round, (all, group)) in rounds.iter().enumerate() {
                assert_eq!(*all, (0..4).map(|r| format!("{r}/{round}")).collect::<Vec<_>>().join(","));
                let first = r as u32 / 2 * 2;
                assert_eq!(*group, [first, first + 1]);
            }
        }
    }

    #[test]
    fn a_panic_on_one_rank_frees_all_the_others_and_is_reported() {
        let reached = AtomicU64::new(0);
        let error = Ranks::new(1, 5, 1)
            .run(|member| {
                member.all((), |_| ())?;
                assert!(member.rank() != RankId(3), "rank three is unwell");
                member.all((), |_| ())?;
                reached.fetch_add(1, Ordering::SeqCst);
                Ok(())
            })
            .unwrap_err();
        assert_eq!(error, EngineError::Rank { rank: RankId(3), reason: "rank three is unwell".into() });
        assert_eq!(reached.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn an_error_on_one_rank_frees_its_head_group() {
        let error = Ranks::new(1, 4, 2)
            .run(|member| {
                if member.rank() == RankId(2) {
                    return Err(EngineError::Range { what: "a test" }.into());
                }
                member.group((), |_| ())?;
                member.all((), |_| ())?;
                Ok(())
            })
            .unwrap_err();
        assert_eq!(error, EngineError::Range { what: "a test" });
    }

    #[test]
    fn stages_hand_on_to_the_rank_of_the_same_place_and_meet_among_themselves() {
        let seen = Ranks::new(3, 4, 2)
            .run(|member| {
                let from: Option<Vec<u32>> = member.taken_over()?;
                let mut way = from.unwrap_or_default();
                way.push(member.rank().0);
                let stage = member.all(member.rank().0, |all| all)?;
                assert_eq!(stage.as_ref(), &[0, 1, 2, 3].map(|r| r + 4 * member.stage() as u32));
                let group = member.group(member.tp(), |all| all)?;
                assert_eq!(group[0], member.tp() / 2 * 2);
                Ok(member.hand_on(way)?)
            })
            .unwrap();
        let ends: Vec<_> = (0..4_u32).map(|tp| Some(vec![tp, tp + 4, tp + 8])).collect();
        assert_eq!(seen[8..], ends);
        assert!(seen[..8].iter().all(Option::is_none));
    }

    #[test]
    fn a_failure_in_one_stage_frees_the_stages_before_and_after() {
        for failing in 0..6 {
            let error = Ranks::new(3, 2, 1)
                .run(|member| {
                    let from: Option<u32> = member.taken_over()?;
                    if member.rank() == RankId(failing) {
                        return Err(EngineError::Range { what: "a test" }.into());
                    }
                    member.all((), |_| ())?;
                    member.hand_on(from.unwrap_or_default())?;
                    Ok(())
                })
                .unwrap_err();
            assert_eq!(error, EngineError::Range { what: "a test" });
        }
    }
}
