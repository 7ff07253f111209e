//! Which ranks of an instance meet, and what for.

use kvferry_plan::RankId;

use crate::{
    EngineError,
    math::{AttentionSums, Partial},
    meeting::{Broken, Group, RankError},
};

/// The sum of the partial results of a stage's ranks.
#[derive(Debug, Default)]
pub(super) struct Summed {
    /// `[rows][hidden]`.
    pub(super) x: Vec<f32>,
    /// Rows that left the range of the arithmetic.
    pub(super) bad: Vec<usize>,
}

/// Attention of some score rows: one rank's, or that of all.
#[derive(Debug, Default)]
pub(super) struct Attended {
    /// `[score rows][value_dim]`.
    pub(super) out: Vec<f32>,
    /// Log-sum-exps, in fast mode.
    pub(super) lse: Vec<f32>,
    /// Score rows that left the range of the arithmetic.
    pub(super) bad: Vec<usize>,
}

/// Ranks that hold the same heads of different tokens.
#[derive(Debug)]
pub(super) struct HeadGroup {
    /// Queries of a rank's own heads become those of all the group's.
    pub(super) queries: Group<Vec<f32>, Vec<f32>>,
    /// Largest scores; the result lies in what each has brought.
    pub(super) largest: Group<Vec<f32>, ()>,
    pub(super) sums: Group<AttentionSums, Attended>,
    pub(super) weighted: Group<Attended, Attended>,
}

/// The ranks of one pipeline stage.
#[derive(Debug)]
struct Stage {
    sum: Group<Partial, Summed>,
    /// Parts of the vocabulary become the whole.
    logits: Group<Vec<f32>, Vec<f32>>,
    heads: Vec<HeadGroup>,
    /// By TP coordinate: where a rank meets the one of the next stage. Empty in the last stage.
    next: Vec<Group<Vec<f32>, ()>>,
}

/// All meetings of an instance.
#[derive(Debug)]
pub(super) struct Meetings {
    tp: u32,
    dcp: u32,
    stages: Vec<Stage>,
}

/// One rank's access to the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member<'a> {
    stage: &'a Stage,
    before: Option<&'a Stage>,
    head_group: &'a HeadGroup,
    tp: usize,
    in_group: usize,
}

impl Meetings {
    /// `stages` stages of `tp` ranks each, in head groups of `dcp` consecutive ranks.
    pub(super) fn new(stages: u32, tp: u32, dcp: u32) -> Self {
        let dcp = dcp.max(1);
        let group = |_| HeadGroup {
            queries: Group::new(dcp as usize),
            largest: Group::new(dcp as usize),
            sums: Group::new(dcp as usize),
            weighted: Group::new(dcp as usize),
        };
        let stage = |stage| Stage {
            sum: Group::new(tp as usize),
            logits: Group::new(tp as usize),
            heads: (0..tp / dcp).map(group).collect(),
            next: (0..if stage + 1 < stages { tp } else { 0 }).map(|_| Group::new(2)).collect(),
        };
        Self { tp, dcp, stages: (0..stages).map(stage).collect() }
    }

    /// Ends all meetings, those to come included.
    pub(super) fn disband(&self) {
        for Stage { sum, logits, heads, next } in &self.stages {
            sum.disband();
            logits.disband();
            for HeadGroup { queries, largest, sums, weighted } in heads {
                queries.disband();
                largest.disband();
                sums.disband();
                weighted.disband();
            }
            next.iter().for_each(Group::disband);
        }
    }

    /// Lets meetings happen again.
    pub(super) fn gather(&self) {
        for Stage { sum, logits, heads, next } in &self.stages {
            sum.gather();
            logits.gather();
            for HeadGroup { queries, largest, sums, weighted } in heads {
                queries.gather();
                largest.gather();
                sums.gather();
                weighted.gather();
            }
            next.iter().for_each(Group::gather);
        }
    }

    /// The stage of a rank, counted over all stages, and its place there.
    pub(super) fn place(&self, rank: RankId) -> (usize, usize) {
        let tp = self.tp.max(1);
        ((rank.0 / tp) as usize, (rank.0 % tp) as usize)
    }

    /// The access of a rank.
    pub(super) fn member(&self, rank: RankId) -> Result<Member<'_>, EngineError> {
        let (stage, tp) = self.place(rank);
        let dcp = self.dcp as usize;
        let lost = || EngineError::Rank { rank, reason: "it is in no stage".into() };
        let before = stage.checked_sub(1).and_then(|before| self.stages.get(before));
        let stage = self.stages.get(stage).ok_or_else(lost)?;
        let head_group = stage.heads.get(tp / dcp).ok_or_else(lost)?;
        Ok(Member { stage, before, head_group, tp, in_group: tp % dcp })
    }
}

impl<'a> Member<'a> {
    /// This rank within its stage.
    pub(super) fn tp(&self) -> usize {
        self.tp
    }

    /// This rank within its head group.
    pub(super) fn in_group(&self) -> usize {
        self.in_group
    }

    /// Its head group.
    pub(super) fn group(&self) -> &'a HeadGroup {
        self.head_group
    }

    /// Where the stage's ranks add up.
    pub(super) fn sum(&self) -> &'a Group<Partial, Summed> {
        &self.stage.sum
    }

    /// Where the stage's ranks put the vocabulary together.
    pub(super) fn logits(&self) -> &'a Group<Vec<f32>, Vec<f32>> {
        &self.stage.logits
    }

    /// Takes over into `x` what this rank's predecessor in the stage before hands on. False in the first stage.
    pub(super) fn take_over(&self, x: &mut Vec<f32>) -> Result<bool, RankError> {
        let Some(before) = self.before else { return Ok(false) };
        let link = before.next.get(self.tp).ok_or(Broken)?;
        link.meet(1, x, exchange, |()| true)
    }

    /// Waits until this rank's successor in the next stage takes `x`, and gets other memory for it. False in the last
    /// stage.
    pub(super) fn hand_on(&self, x: &mut Vec<f32>) -> Result<bool, RankError> {
        let Some(link) = self.stage.next.get(self.tp) else { return Ok(false) };
        link.meet(0, x, exchange, |()| true)
    }
}

fn exchange(both: &mut [Vec<f32>], (): &mut ()) -> Result<(), EngineError> {
    both.reverse();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, thread};

    /// Runs `work` on every rank, each on a thread.
    fn run<T: Send + 'static>(
        meetings: Meetings,
        work: impl Fn(RankId, Member<'_>) -> Result<T, RankError> + Send + Sync + Copy + 'static,
    ) -> Vec<Result<T, RankError>> {
        let ranks = meetings.tp * meetings.stages.len() as u32;
        let meetings = Arc::new(meetings);
        let threads: Vec<_> = (0..ranks)
            .map(RankId)
            .map(|rank| {
                let meetings = Arc::clone(&meetings);
                thread::spawn(move || {
                    let result = work(rank, meetings.member(rank).unwrap());
                    result.inspect_err(|_| meetings.disband())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    /// The ranks that bring something to a meeting.
    fn present(
        group: &Group<Vec<f32>, Vec<f32>>,
        member: usize,
        rank: RankId,
    ) -> Result<Vec<f32>, RankError> {
        let combine = |all: &mut [Vec<f32>], result: &mut Vec<f32>| {
            *result = all.concat();
            Ok(())
        };
        group.meet(member, &mut vec![rank.0 as f32], combine, Vec::clone)
    }

    #[test]
    fn stages_hand_on_to_the_rank_of_the_same_place_and_meet_among_themselves() {
        let seen = run(Meetings::new(3, 4, 2), |rank, member| {
            let mut way = Vec::new();
            assert_eq!(member.take_over(&mut way)?, rank.0 >= 4);
            way.push(rank.0 as f32);
            let first = (rank.0 / 4 * 4) as f32;
            assert_eq!(present(member.logits(), member.tp(), rank)?, [0.0, 1.0, 2.0, 3.0].map(|r| r + first));
            let first = (rank.0 / 2 * 2) as f32;
            assert_eq!(present(&member.group().queries, member.in_group(), rank)?, [first, first + 1.0]);
            Ok((!member.hand_on(&mut way)?).then_some(way))
        });
        let seen: Vec<_> = seen.into_iter().map(Result::unwrap).collect();
        let ends: Vec<_> = (0..4).map(|tp| Some([0, 4, 8].map(|r| (tp + r) as f32).to_vec())).collect();
        assert_eq!(seen[8..], ends);
        assert!(seen[..8].iter().all(Option::is_none));
    }

    #[test]
    fn a_failure_frees_the_head_group_and_the_stages_before_and_after() {
        for failing in 0..12 {
            let results = run(Meetings::new(3, 4, 2), move |rank, member| {
                let mut x = Vec::new();
                member.take_over(&mut x)?;
                if rank == RankId(failing % 12) {
                    return Err(EngineError::Range { what: "a test" }.into());
                }
                present(&member.group().queries, member.in_group(), rank)?;
                present(member.logits(), member.tp(), rank)?;
                member.hand_on(&mut x)?;
                Ok(())
            });
            let failed = RankError::Failed(EngineError::Range { what: "a test" });
            assert_eq!(results[failing as usize], Err(failed));
            let last = results[8..].iter().filter(|result| result.is_ok()).count();
            assert_eq!(last, 0, "nobody gets to the end without it");
        }
    }
}
