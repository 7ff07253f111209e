//! From what two ranks hold and two page tables to runs.
//!
//! A *cell* is the tokens that lie on one source page and one target page. Inside a cell both row numbers are a
//! constant away from the ranks' local indices, so the common tokens are found once, as a [`Pattern`], and every
//! cell takes its piece of it.

use alloc::{format, vec::Vec};
use core::ops::Range;

use crate::holding::{Extent, Holding};
use crate::unsupported::unsupported;
use crate::{Axis, PageTable, Plan, Replica, Row, Run, Token, TokenRange, Unsupported};

/// Blocks that a plan may visit one by one, which only two different interleaves make it do.
const MAX_BLOCKS: u64 = 1 << 20;

/// What the runs of a part depend on besides the page tables: parts with equal relations share their runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Relation {
    pub(crate) src: Holding,
    pub(crate) dst: Holding,
    /// Whose turn it is among the source ranks that hold the same.
    pub(crate) deal: Replica,
}

impl Relation {
    /// Appends the runs for `tokens` to `plan`, and for each target page that has some a cut: their index range.
    pub(crate) fn emit(
        &self,
        src_table: &PageTable,
        dst_table: &PageTable,
        tokens: TokenRange,
        plan: &mut Plan,
    ) -> Result<(), Unsupported> {
        let sources = self.src.pages("source", src_table, tokens, self.deal)?;
        let expected = sources.left() / (self.deal.count as usize).max(1);
        self.meet(sources, expected, dst_table, tokens, plan)
    }

    /// [`Relation::emit`] for a receiver, which knows what tokens a source covers and nothing about its pages: source
    /// rows come out as the source's local indices.
    pub(crate) fn land(
        &self,
        covered: &[TokenRange],
        dst_table: &PageTable,
        tokens: TokenRange,
        plan: &mut Plan,
    ) -> Result<(), Unsupported> {
        let extent = |run: &TokenRange| Extent { start: run.start.0, end: run.end.0, shift: 0 };
        self.meet(covered.iter().map(extent), covered.len(), dst_table, tokens, plan)
    }

    /// `sources` are the source's pages, in token order and disjoint; about `expected` of them.
    fn meet(
        &self,
        mut sources: impl Iterator<Item = Extent>,
        expected: usize,
        dst_table: &PageTable,
        tokens: TokenRange,
        plan: &mut Plan,
    ) -> Result<(), Unsupported> {
        let (runs, cuts) = (&mut plan.runs, &mut plan.cuts);
        let targets = self.dst.pages("target", dst_table, tokens, Replica { index: 0, count: 1 })?;
        let pattern = Pattern::of(self.src, self.dst);
        if matches!(pattern, Pattern::Never) {
            return Ok(());
        }
        cuts.reserve(targets.left());
        runs.reserve(targets.left().max(expected));
        let mut budget = MAX_BLOCKS;
        let mut ahead = Ahead { token: u64::MAX, block: 0 };
        let mut source = sources.next();
        for target in targets {
            let first = runs.len();
            while let Some(page) = source.filter(|page| page.start < target.end) {
                let cell = Cell {
                    start: page.start.max(target.start),
                    end: page.end.min(target.end),
                    src_shift: page.shift,
                    dst_shift: target.shift,
                };
                if cell.start < cell.end {
                    match &pattern {
                        Pattern::All => runs.push(cell.whole()),
                        Pattern::Never => {}
                        Pattern::Periodic(blocks) => cell.take(blocks, &mut ahead, runs),
                        Pattern::Irregular => cell.walk(self, runs, &mut budget)?,
                    }
                }
                if page.end > target.end {
                    break;
                }
                source = sources.next();
            }
            if runs.len() > first {
                cuts.push(first..runs.len());
            }
        }
        Ok(())
    }
}

/// The tokens that both ranks hold, as far as a closed form goes.
enum Pattern {
    /// Every token.
    All,
    /// No token.
    Never,
    /// Blocks at equal distances.
    Periodic(Blocks),
    /// Two different interleaves: block by block.
    Irregular,
}

/// Block `k` is the `block` tokens from `token + k * token_step` on; they begin at local index `src + k * src_step`
/// of the source and `dst + k * dst_step` of the target.
struct Blocks {
    block: u64,
    token: u64,
    token_step: u64,
    src: u64,
    src_step: u64,
    dst: u64,
    dst_step: u64,
}

/// The first block that ends after `token`: what the next cell begins with if it begins at `token`.
struct Ahead {
    token: u64,
    block: u64,
}

impl Pattern {
    fn of(src: Holding, dst: Holding) -> Self {
        let ((sn, sil, sc), (dn, dil, dc)) = (src.cycle(), dst.cycle());
        let (block, first, step) = match (sn, dn) {
            (1, 1) => return Self::All,
            (1, _) => (dil, dc * dil, dn * dil),
            (_, 1) => (sil, sc * sil, sn * sil),
            _ if (sn, sil, sc) == (dn, dil, dc) => (sil, sc * sil, sn * sil),
            _ if (sn, sil) == (dn, dil) => return Self::Never,
            // Two residue classes meet in one class modulo the least common multiple, or never.
            _ if (sil, dil) == (1, 1) => match (0..dn).map(|k| sc + k * sn).find(|t| t % dn == dc) {
                Some(first) => (1, first, sn / gcd(sn, dn) * dn),
                None => return Self::Never,
            },
            _ => return Self::Irregular,
        };
        Blocks::new(src, dst, block, first, step).map_or(Self::Irregular, Self::Periodic)
    }
}

impl Blocks {
    fn new(src: Holding, dst: Holding, block: u64, token: u64, token_step: u64) -> Option<Self> {
        let (src_0, src_1) = (src.local(token)?, src.local(token + token_step)?);
        let (dst_0, dst_1) = (dst.local(token)?, dst.local(token + token_step)?);
        let (src_step, dst_step) = (src_1 - src_0, dst_1 - dst_0);
        Some(Self { block, token, token_step, src: src_0, src_step, dst: dst_0, dst_step })
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The tokens `start .. end`, which lie on one source page and one target page.
struct Cell {
    start: u64,
    end: u64,
    src_shift: u64,
    dst_shift: u64,
}

impl Cell {
    /// All tokens of the cell, where both ranks hold all.
    fn whole(&self) -> Run {
        self.block(self.start, self.start, self.start, self.end - self.start)
    }

    /// One block: `len` tokens from `token` on, which begin at these local indices.
    fn block(&self, token: u64, src: u64, dst: u64, len: u64) -> Run {
        Run {
            token: Token(token),
            token_step: 0,
            src_row: Row(src.wrapping_add(self.src_shift)),
            src_step: 0,
            dst_row: Row(dst.wrapping_add(self.dst_shift)),
            dst_step: 0,
            block: len,
            blocks: 1,
        }
    }

    /// Appends the blocks that touch the cell: at most three runs, because only its first and its last block can
    /// be cut.
    #[inline(always)]
    fn take(&self, b: &Blocks, ahead: &mut Ahead, runs: &mut Vec<Run>) {
        let Some(reach) = (self.end - 1).checked_sub(b.token) else { return };
        let last = reach / b.token_step;
        let within = reach - last * b.token_step;
        let mut first = match ahead.token == self.start {
            true => ahead.block,
            false => (self.start + 1).saturating_sub(b.token + b.block).div_ceil(b.token_step),
        };
        *ahead = Ahead { token: self.end, block: last + u64::from(within + 1 >= b.block) };
        if first > last {
            return;
        }
        let piece = |k: u64, skip: u64, len: u64| {
            self.block(
                b.token + k * b.token_step + skip,
                b.src + k * b.src_step + skip,
                b.dst + k * b.dst_step + skip,
                len,
            )
        };
        let head = self.start.saturating_sub(b.token + first * b.token_step);
        // What the last block has beyond the end of the cell.
        let tail = b.block.saturating_sub(within + 1);
        if head == 0 && tail == 0 && first < last {
            // The common case: pages of whole steps.
            return runs.push(Run {
                token_step: b.token_step,
                src_step: b.src_step,
                dst_step: b.dst_step,
                blocks: last - first + 1,
                ..piece(first, 0, b.block)
            });
        }
        if first == last {
            return runs.push(piece(first, head, b.block - head - tail));
        }
        if head > 0 {
            runs.push(piece(first, head, b.block - head));
            first += 1;
        }
        match last - first + u64::from(tail == 0) {
            0 => {}
            1 => runs.push(piece(first, 0, b.block)),
            blocks => runs.push(Run {
                token_step: b.token_step,
                src_step: b.src_step,
                dst_step: b.dst_step,
                blocks,
                ..piece(first, 0, b.block)
            }),
        }
        if tail > 0 {
            runs.push(piece(last, 0, b.block - tail));
        }
    }

    /// Walks the common blocks one by one and joins those that repeat with equal distances.
    fn walk(&self, of: &Relation, runs: &mut Vec<Run>, budget: &mut u64) -> Result<(), Unsupported> {
        let from = runs.len();
        let mut at = self.start;
        while at < self.end {
            let Some(left) = budget.checked_sub(1) else {
                return unsupported(
                    Axis::Size,
                    format!(
                        "two interleaves that meet in more than {MAX_BLOCKS} blocks; plan smaller chunks"
                    ),
                );
            };
            *budget = left;
            let (Some(s), Some(d)) = (next_block(of.src, at), next_block(of.dst, at)) else { break };
            let start = s.start.max(d.start).max(at);
            let end = s.end.min(d.end).min(self.end);
            if start < end
                && let (Some(src), Some(dst)) = (of.src.local(start), of.dst.local(start))
            {
                let new = self.block(start, src, dst, end - start);
                let open = runs.get_mut(from..).and_then(<[Run]>::last_mut);
                if !open.is_some_and(|open| join(open, &new)) {
                    runs.push(new);
                }
            }
            at = s.end.min(d.end);
        }
        Ok(())
    }
}

/// The first block of tokens of a rank that ends after `at`; `None` past what 64 bits count.
fn next_block(holding: Holding, at: u64) -> Option<Range<u64>> {
    let (n, il, class) = holding.cycle();
    let step = n * il;
    let k = (at + 1).saturating_sub(class * il + il).div_ceil(step);
    let start = k.checked_mul(step)?.checked_add(class * il)?;
    Some(start..start.checked_add(il)?)
}

/// Makes `new` the next block of `run` if the distances agree (the second block sets them).
fn join(run: &mut Run, new: &Run) -> bool {
    // Tokens and rows of a cell ascend.
    let (token, src, dst) =
        (new.token.0 - run.token.0, new.src_row.0 - run.src_row.0, new.dst_row.0 - run.dst_row.0);
    if run.block != new.block {
        return false;
    }
    if run.blocks == 1 {
        (run.token_step, run.src_step, run.dst_step) = (token, src, dst);
    }
    let joins = (token, src, dst)
        == (run.token_step * run.blocks, run.src_step * run.blocks, run.dst_step * run.blocks);
    run.blocks += u64::from(joins);
    joins
}
