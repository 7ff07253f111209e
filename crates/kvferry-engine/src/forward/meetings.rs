//! Which ranks of an instance meet, and what for.

use kvferry_plan::{Placement, RankId};

use crate::{
    EngineError,
    math::{AttentionSums, Partial},
    meeting::{Broken, Group, RankError},
    shares,
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

/// Ranks that have the same heads of the same layers, and each some of the tokens to compute or of the pages to keep.
#[derive(Debug)]
pub(super) struct ShareGroup {
    /// Everybody's rows of a layer are written.
    pub(super) written: Group<(), ()>,
    /// Some rows become those of the whole step.
    pub(super) rows: Group<Vec<f32>, Vec<f32>>,
}

/// The tensor-parallel ranks of one pipeline stage and one place in context parallelism.
#[derive(Debug)]
struct Stage {
    sum: Group<Partial, Summed>,
    /// Parts of the vocabulary become the whole.
    logits: Group<Vec<f32>, Vec<f32>>,
    heads: Vec<HeadGroup>,
    /// By TP coordinate: where a rank meets the one of the next stage. Empty in the last stage.
    next: Vec<Group<Vec<f32>, ()>>,
}

/// The axes of an instance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axes {
    /// Pipeline stages.
    pub(super) stages: u32,
    /// Ranks of context-parallel prefill.
    pub(super) cp: u32,
    pub(super) tp: u32,
    /// Consecutive TP ranks that have the same heads of different tokens.
    pub(super) dcp: u32,
    /// Whether pages are dealt to ranks.
    pub(super) sharded: bool,
}

impl Axes {
    /// Those of a layout.
    pub(super) fn of(placement: &Placement) -> Self {
        Self {
            stages: u32::try_from(placement.stages.len()).unwrap_or(u32::MAX),
            cp: placement.cp,
            tp: placement.tp,
            dcp: shares::dcp(placement),
            sharded: placement.shard_ranks() > 1,
        }
    }

    /// The number of a rank's share group and its place there, if it shares with anybody.
    fn share(self, rank: RankId) -> Option<(usize, usize)> {
        let (outer, tp) = (rank.0 / self.tp.max(1), rank.0 % self.tp.max(1));
        let (stage, cp) = (outer / self.cp.max(1), outer % self.cp.max(1));
        let (group, place) = match (self.cp, self.sharded) {
            (2.., _) => (stage * self.tp + tp, cp),
            (_, true) => (stage, tp),
            _ => return None,
        };
        Some((group as usize, place as usize))
    }
}

/// All meetings of an instance.
#[derive(Debug)]
pub(super) struct Meetings {
    axes: Axes,
    /// By stage, and by place in context parallelism within it.
    stages: Vec<Stage>,
    shares: Vec<ShareGroup>,
}

/// One rank's access to the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member<'a> {
    stage: &'a Stage,
    before: Option<&'a Stage>,
    head_group: &'a HeadGroup,
    share: Option<(&'a ShareGroup, usize)>,
    tp: usize,
    in_group: usize,
}

impl Meetings {
    pub(super) fn new(axes: Axes) -> Self {
        let Axes { stages, cp, tp, sharded, .. } = axes;
        let dcp = axes.dcp.max(1);
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
            next: (0..if stage / cp + 1 < stages { tp } else { 0 }).map(|_| Group::new(2)).collect(),
        };
        let (groups, members) = match (cp, sharded) {
            (2.., _) => (stages * tp, cp),
            (_, true) => (stages, tp),
            _ => (0, 0),
        };
        let share =
            |_| ShareGroup { written: Group::new(members as usize), rows: Group::new(members as usize) };
        Self { axes, stages: (0..stages * cp).map(stage).collect(), shares: (0..groups).map(share).collect() }
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
        for ShareGroup { written, rows } in &self.shares {
            written.disband();
            rows.disband();
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
        for ShareGroup { written, rows } in &self.shares {
            written.gather();
            rows.gather();
        }
    }

    /// The access of a rank.
    pub(super) fn member(&self, rank: RankId) -> Result<Member<'_>, EngineError> {
        let Axes { cp, tp, dcp, .. } = self.axes;
        let (stage, tp) = ((rank.0 / tp.max(1)) as usize, (rank.0 % tp.max(1)) as usize);
        let dcp = dcp.max(1) as usize;
        let lost = || EngineError::Rank { rank, reason: "it is in no stage".into() };
        let before = stage.checked_sub(cp as usize).and_then(|before| self.stages.get(before));
        let stage = self.stages.get(stage).ok_or_else(lost)?;
        let head_group = stage.heads.get(tp / dcp).ok_or_else(lost)?;
        let share = self.axes.share(rank).and_then(|(group, place)| Some((self.shares.get(group)?, place)));
        Ok(Member { stage, before, head_group, share, tp, in_group: tp % dcp })
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

    /// Its share group, and its place there.
    pub(super) fn share(&self) -> Option<(&'a ShareGroup, usize)> {
        self.share
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

    const AXES: Axes = Axes { stages: 3, cp: 1, tp: 4, dcp: 2, sharded: false };

    /// Runs `work` on every rank, each on a thread.
    fn run<T: Send + 'static>(
        meetings: Meetings,
        work: impl Fn(RankId, Member<'_>) -> Result<T, RankError> + Send + Sync + Copy + 'static,
    ) -> Vec<Result<T, RankError>> {
        let ranks = meetings.axes.tp * meetings.stages.len() as u32;
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
        let seen = run(Meetings::new(AXES), |rank, member| {
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
            let results = run(Meetings::new(AXES), move |rank, member| {
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

    #[test]
    fn ranks_that_share_meet_over_cp_or_else_over_tp() {
        let together = |axes: Axes| {
            run(Meetings::new(axes), |rank, member| {
                member.share().map(|(group, place)| present(&group.rows, place, rank)).transpose()
            })
            .into_iter()
            .map(|seen| {
                seen.unwrap().map(|ranks| ranks.into_iter().map(|rank| rank as u32).collect::<Vec<_>>())
            })
            .collect::<Vec<_>>()
        };
        let axes = Axes { stages: 2, cp: 2, tp: 2, dcp: 1, sharded: false };
        // Ranks are stage, then cp, then tp.
        let [a, b, c, d] = [[0, 2], [1, 3], [4, 6], [5, 7]].map(|ranks| Some(ranks.to_vec()));
        let over_cp = [&a, &b, &a, &b, &c, &d, &c, &d].map(Clone::clone);
        assert_eq!(together(axes), over_cp);
        assert_eq!(together(Axes { sharded: true, ..axes }), over_cp);
        let over_tp = together(Axes { cp: 1, tp: 3, sharded: true, ..axes });
        assert_eq!(over_tp[..3], vec![Some(vec![0, 1, 2]); 3]);
        assert_eq!(over_tp[3..], vec![Some(vec![3, 4, 5]); 3]);
        assert_eq!(together(Axes { cp: 1, tp: 2, ..axes }), vec![None; 4]);
    }

    #[test]
    fn a_stage_hands_on_to_the_same_place_in_cp() {
        let axes = Axes { stages: 2, cp: 2, tp: 2, dcp: 1, sharded: false };
        let seen = run(Meetings::new(axes), |rank, member| {
            let mut way = Vec::new();
            assert_eq!(member.take_over(&mut way)?, rank.0 >= 4);
            way.push(rank.0 as f32);
            Ok((!member.hand_on(&mut way)?).then_some(way))
        });
        let seen: Vec<_> = seen.into_iter().map(Result::unwrap).collect();
        assert_eq!(seen[4..], [0, 1, 2, 3].map(|r| Some(vec![r as f32, (r + 4) as f32])));
    }
}
