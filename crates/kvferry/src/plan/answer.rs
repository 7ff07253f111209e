//! The planner's answer for every pair of ranks.

use kvferry_plan::{
    Axis, Bytes, End, PageTable, Pair, Placement, Plan, PoolLayout, PoolSize, RankId, Slot, Unsupported,
};

use super::request::{Request, Side};
use crate::terminal::number;

/// Pairs of ranks that are planned at most.
const MAX_PAIRS: u64 = 1 << 16;
/// Pages times pairs, which is what planning takes its time for.
const MAX_VISITS: u64 = 1 << 28;
/// Runs, which is what an answer needs its memory for.
const MAX_RUNS: u64 = 1 << 24;

/// What crosses between two instances.
pub(super) struct Answer {
    pub(super) pair: Pair,
    /// Pairs of ranks that move something, by source and target rank.
    pub(super) moves: Vec<Move>,
}

/// What crosses between two ranks.
pub(super) struct Move {
    pub(super) src: RankId,
    pub(super) dst: RankId,
    pub(super) cost: Cost,
    /// Rows of tokens, and rows of state.
    pub(super) plans: [Plan; 2],
}

/// What a plan is made of.
#[derive(Clone, Copy, Default)]
pub(super) struct Cost {
    pub(super) bytes: u64,
    /// Runs of rows, the same for all layers.
    pub(super) runs: u64,
    /// Strided copies: runs x layers.
    pub(super) copies: u64,
    /// Contiguous pieces, for a transport that knows no strides.
    pub(super) flat: u64,
}

impl Cost {
    fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            runs: self.runs.saturating_add(other.runs),
            copies: self.copies.saturating_add(other.copies),
            flat: self.flat.saturating_add(other.flat),
        }
    }

    fn of(plan: &Plan, src: &PoolLayout, dst: &PoolLayout) -> Self {
        Self {
            bytes: plan.bytes().0,
            runs: plan.runs().len() as u64,
            copies: plan.copies(),
            flat: plan.flat_count(src, dst),
        }
    }
}

/// A side with everything that plans need.
struct Ready {
    table: PageTable,
    pools: Vec<PoolLayout>,
}

impl Ready {
    fn new(request: &Request, side: &Side, placement: &Placement) -> Result<Self, Unsupported> {
        let table = side.pages.table(placement, request.tokens)?;
        // Nothing is allocated: the pools only have to reach the last page.
        let pages = table.0.iter().map(|page| page.0).max().unwrap_or(0).saturating_add(1);
        table.check(pages)?;
        let pool = |rank| {
            PoolLayout::with_slots(
                &request.shape,
                placement,
                RankId(rank),
                PoolSize { pages, slots: side.slot.0.saturating_add(1) },
            )
            .map_err(|e| Unsupported { axis: Axis::Size, reason: e.to_string() })
        };
        Ok(Self { table, pools: (0..placement.ranks()).map(pool).collect::<Result<_, _>>()? })
    }
}

impl Answer {
    pub(super) fn to(request: &Request) -> Result<Self, Unsupported> {
        let placement = |name: &str, side: &Side| {
            side.placement
                .clone()
                .map_err(|e| Unsupported { axis: Axis::Placement, reason: format!("{name}: {e}") })
        };
        let (src, dst) = (placement("prefill", &request.prefill)?, placement("decode", &request.decode)?);
        let pair = Pair::with(request.shape.clone(), src, dst, request.dtypes)?;
        let pairs = u64::from(pair.src().ranks()) * u64::from(pair.dst().ranks());
        if pairs > MAX_PAIRS {
            let reason =
                format!("{} pairs of ranks; {} are planned at most", number(pairs), number(MAX_PAIRS));
            return Err(Unsupported { axis: Axis::Size, reason });
        }
        let from = Ready::new(request, &request.prefill, pair.src())?;
        let to = Ready::new(request, &request.decode, pair.dst())?;
        let pages = (from.table.0.len() + to.table.0.len()) as u64;
        let visits = pairs.saturating_mul(pages);
        if visits > MAX_VISITS {
            let reason = format!(
                "{} pairs of ranks and {} pages; {} pages times pairs are planned at most: use larger pages or \
                 fewer tokens",
                number(pairs),
                number(pages),
                number(MAX_VISITS)
            );
            return Err(Unsupported { axis: Axis::Size, reason });
        }
        let mut moves = Vec::new();
        let mut runs = 0;
        for (s, src_pool) in (0..).zip(&from.pools) {
            for (d, dst_pool) in (0..).zip(&to.pools) {
                let (src, dst) = (RankId(s), RankId(d));
                let rows = pair.plan(
                    End { rank: src, table: &from.table },
                    End { rank: dst, table: &to.table },
                    request.tokens,
                )?;
                let state = pair.state(
                    Slot { rank: src, slot: request.prefill.slot },
                    Slot { rank: dst, slot: request.decode.slot },
                )?;
                let plans = [rows, state];
                let cost =
                    plans.iter().map(|p| Cost::of(p, src_pool, dst_pool)).fold(Cost::default(), Cost::plus);
                runs += cost.runs;
                if runs > MAX_RUNS {
                    let most = number(MAX_RUNS);
                    let reason = format!("more than {most} runs of rows; use larger pages or fewer tokens");
                    return Err(Unsupported { axis: Axis::Size, reason });
                }
                if cost.bytes > 0 {
                    moves.push(Move { src, dst, cost, plans });
                }
            }
        }
        Ok(Self { pair, moves })
    }

    pub(super) fn total(&self) -> Cost {
        self.moves.iter().map(|m| m.cost).fold(Cost::default(), Cost::plus)
    }

    /// Rows that cross, counted in every layer.
    pub(super) fn rows(&self) -> u64 {
        let plans = self.moves.iter().flat_map(|m| &m.plans);
        plans.flat_map(Plan::units).map(|unit| unit.rows()).fold(0, u64::saturating_add)
    }

    /// Bytes that a target rank receives.
    pub(super) fn received(&self, dst: RankId) -> Bytes {
        Bytes(self.moves.iter().filter(|m| m.dst == dst).map(|m| m.cost.bytes).sum())
    }
}
