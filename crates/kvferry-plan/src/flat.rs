//! A plan without its strides: what transports that know only contiguous pieces are given, and what such a plan costs.

use crate::moves::src_len;
use crate::{Bytes, Cast, Group, Plan, PoolLayout, Region, Row, Run, StridedMove, Unit};

/// Consecutive rows that stay consecutive: `rows` rows from `src` on go to `dst` and on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowRun {
    /// First source row.
    pub src: Row,
    /// First target row.
    pub dst: Row,
    /// Number of rows.
    pub rows: u64,
}

/// A contiguous piece between two arenas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flat {
    /// Offset in the source's arena.
    pub src: Bytes,
    /// Offset in the target's arena.
    pub dst: Bytes,
    /// Length at the target.
    pub len: Bytes,
    /// What becomes of the source's bytes, if they do not stay as they are.
    pub cast: Option<Cast>,
}

impl Flat {
    /// Length at the source.
    #[must_use]
    pub fn src_len(&self) -> Bytes {
        src_len(self.len, self.cast)
    }

    /// Joins pieces with those behind them that continue them on both sides.
    pub fn joined(pieces: impl IntoIterator<Item = Self>) -> impl Iterator<Item = Self> {
        join(pieces.into_iter(), Self::extend)
    }

    /// Takes in `next` if it continues this one on both sides.
    fn extend(&mut self, next: &Self) -> bool {
        let follows = self.cast == next.cast
            && self.src.0.checked_add(self.src_len().0) == Some(next.src.0)
            && self.dst.0.checked_add(self.len.0) == Some(next.dst.0);
        if follows {
            self.len.0 = self.len.0.saturating_add(next.len.0);
        }
        follows
    }
}

/// Joins runs of rows that continue one another on both sides, in the order in which they come. Numbers that 64 bits
/// cannot count never continue anything.
///
/// ```
/// use kvferry_plan::{Row, RowRun, coalesce};
/// let row = |(src, dst)| RowRun { src: Row(src), dst: Row(dst), rows: 1 };
/// let joined: Vec<_> = coalesce([(0, 4), (1, 5), (9, 6), (10, 7)].map(row)).collect();
/// assert_eq!(joined, [RowRun { src: Row(0), dst: Row(4), rows: 2 }, RowRun { src: Row(9), dst: Row(6), rows: 2 }]);
/// ```
pub fn coalesce(runs: impl IntoIterator<Item = RowRun>) -> impl Iterator<Item = RowRun> {
    let extend = |run: &mut RowRun, next: &RowRun| {
        let follows = run.src.0.checked_add(run.rows) == Some(next.src.0)
            && run.dst.0.checked_add(run.rows) == Some(next.dst.0);
        if follows {
            run.rows = run.rows.saturating_add(next.rows);
        }
        follows
    };
    join(runs.into_iter(), extend)
}

/// Joins pieces with those behind them that `extend` takes in.
fn join<T>(pieces: impl Iterator<Item = T>, extend: impl Fn(&mut T, &T) -> bool) -> impl Iterator<Item = T> {
    let mut pieces = pieces.peekable();
    core::iter::from_fn(move || {
        let mut piece = pieces.next()?;
        while pieces.next_if(|next| extend(&mut piece, next)).is_some() {}
        Some(piece)
    })
}

impl Plan {
    /// The rows of a group, as few and as long consecutive runs as there are. Without strides a DCP relayout is one
    /// run per row.
    pub fn row_runs(&self, group: &Group) -> impl Iterator<Item = RowRun> + '_ {
        let blocks = |run: &Run| {
            let run = *run;
            let at = |row: Row, step: u64, b: u64| Row(row.0.saturating_add(step.saturating_mul(b)));
            (0..run.blocks).map(move |b| RowRun {
                src: at(run.src_row, run.src_step, b),
                dst: at(run.dst_row, run.dst_step, b),
                rows: run.block,
            })
        };
        coalesce(self.group_runs(group).iter().flat_map(blocks))
    }

    /// The plan as contiguous pieces between two pools, in the order of [`Plan::units`]. Pieces that would leave a
    /// pool are left out: the tables name pages that it does not have.
    pub fn flat<'a>(&'a self, src: &'a PoolLayout, dst: &'a PoolLayout) -> impl Iterator<Item = Flat> + 'a {
        let pieces = self.units().flat_map(move |unit| {
            let regions = src.region(unit.layer, unit.part).zip(dst.region(unit.layer, unit.part));
            regions.into_iter().flat_map(move |(from, to)| {
                let moves = unit.runs.iter().map(move |run| StridedMove::new(run, unit.slice, from, to));
                moves.flat_map(pieces)
            })
        });
        Flat::joined(pieces)
    }

    /// How many pieces [`Plan::flat`] has, pieces of different layers never joined: one layer of each group is looked
    /// at, because its other layers have as many.
    #[must_use]
    pub fn flat_count(&self, src: &PoolLayout, dst: &PoolLayout) -> u64 {
        let group = |group: &Group| {
            let first = group.layers.first().copied();
            let regions = first.and_then(|l| src.region(l, group.part).zip(dst.region(l, group.part)));
            let per_layer = regions.map_or(0, |(from, to)| {
                let moves = self.group_runs(group).iter().map(|r| StridedMove::new(r, group.slice, from, to));
                join(moves.flat_map(pieces), Flat::extend).count() as u64
            });
            per_layer.saturating_mul(group.layers.len() as u64)
        };
        self.groups().iter().map(group).fold(0, u64::saturating_add)
    }
}

impl<'a> Unit<'a> {
    /// A piece for each row, in token order, also where rows lie side by side. Rows that would leave a region are left out.
    ///
    /// ```
    /// use kvferry_plan::*;
    /// let shape = CacheShape::mla(1, 576);
    /// let dense = Placement::single(&shape, 64, Dtype::Bf16);
    /// let pool = PoolLayout::new(&shape, &dense, RankId(0), 4).unwrap();
    /// let region = pool.region(LayerId(0), Part::Latent).unwrap();
    /// let pair = Pair::new(shape, dense.clone(), dense).unwrap();
    /// let table = PageTable([PageId(2)].into());
    /// let end = End { rank: RankId(0), table: &table };
    /// let plan = pair.plan(end, end, TokenRange::new(0, 10)).unwrap();
    /// let rows = plan.units().next().unwrap();
    /// assert!(rows.pieces(region, region).all(|piece| piece.len.0 == 1152));
    /// let joined: Vec<_> = Flat::joined(rows.pieces(region, region)).collect();
    /// assert_eq!((rows.pieces(region, region).count(), joined.len()), (10, 1));
    /// assert_eq!(joined[0].len.0, 10 * 1152);
    /// ```
    pub fn pieces(&self, src: &Region, dst: &Region) -> impl Iterator<Item = Flat> + use<'a> {
        let (slice, src, dst) = (self.slice, *src, *dst);
        self.runs.iter().flat_map(Run::expand).filter_map(move |(token, src_row, dst_row)| {
            let one =
                Run { token, token_step: 0, src_row, src_step: 0, dst_row, dst_step: 0, block: 1, blocks: 1 };
            pieces(StridedMove::new(&one, slice, &src, &dst)).next()
        })
    }
}

/// The contiguous pieces of a move; none if it lies nowhere.
fn pieces(m: StridedMove) -> impl Iterator<Item = Flat> {
    let nowhere = m.src.offset.0 == u64::MAX || m.dst.offset.0 == u64::MAX;
    let blocks = if nowhere { 0 } else { m.blocks };
    (0..blocks).flat_map(move |b| {
        (0..m.rows).map(move |i| Flat { src: m.src.at(b, i), dst: m.dst.at(b, i), len: m.len, cast: m.cast })
    })
}
