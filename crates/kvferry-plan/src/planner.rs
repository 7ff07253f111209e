//! The planner: from two placements and two page tables, the factored copy of one (source rank, target rank).
//!
//! Not for choosing transports or sizes of frames; a plan says what goes where and nothing about how.

use alloc::{format, string::String, vec::Vec};
use core::{fmt, ops::Range};

use crate::{
    Bytes, CacheShape, LayerId, PageTable, Part, PartLayout, PartShape, Placement, RankId, Region, Row,
    Token, TokenMap, TokenRange,
};

/// The axis on which two layouts cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Axis {
    /// A side's placement makes no sense by itself.
    Placement,
    /// The element types differ.
    Dtype,
    /// A page table is too short or names pages that do not fit.
    PageTable,
    /// The rank does not exist.
    Rank,
    /// A number overflows.
    Size,
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Placement => "placement",
            Self::Dtype => "dtype",
            Self::PageTable => "page table",
            Self::Rank => "rank",
            Self::Size => "size",
        })
    }
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsupported {
    /// The axis at fault.
    pub axis: Axis,
    /// What is wrong with it, with the numbers.
    pub reason: String,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unsupported {}: {}", self.axis, self.reason)
    }
}

impl core::error::Error for Unsupported {}

fn unsupported<T>(axis: Axis, reason: String) -> Result<T, Unsupported> {
    Err(Unsupported { axis, reason })
}

fn too_large() -> Unsupported {
    Unsupported { axis: Axis::Size, reason: "a row or token number overflows 64 bits".into() }
}

/// One end of a plan: a rank and the pages that the request owns there.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// The rank.
    pub rank: RankId,
    /// Its pages. An end whose rows are not wanted (a receiver does not know the sender's pages) passes
    /// [`PageTable::identity`].
    pub table: &'a PageTable,
}

/// Rows to copy, in token order: `blocks` blocks of `block` consecutive tokens. Block `b`, row `i` is token
/// `token + b * token_step + i`, source row `src_row + b * src_step + i` and target row
/// `dst_row + b * dst_step + i`. A run never leaves one source page and one target page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First token.
    pub token: Token,
    /// Tokens from block to block.
    pub token_step: u64,
    /// First source row.
    pub src_row: Row,
    /// Source rows from block to block.
    pub src_step: u64,
    /// First target row.
    pub dst_row: Row,
    /// Target rows from block to block.
    pub dst_step: u64,
    /// Consecutive rows of a block.
    pub block: u64,
    /// Number of blocks.
    pub blocks: u64,
}

impl Run {
    /// Rows of the run.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.block * self.blocks
    }

    /// The (token, source row, target row) triples of the run, in token order.
    pub fn expand(&self) -> impl Iterator<Item = (Token, Row, Row)> + use<> {
        let run = *self;
        (0..run.blocks).flat_map(move |b| {
            (0..run.block).map(move |i| {
                (
                    Token(run.token.0 + b * run.token_step + i),
                    Row(run.src_row.0 + b * run.src_step + i),
                    Row(run.dst_row.0 + b * run.dst_step + i),
                )
            })
        })
    }
}

/// The bytes of a row that go over: the heads that both ranks hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Offset in the source row.
    pub src_offset: Bytes,
    /// Offset in the target row.
    pub dst_offset: Bytes,
    /// Length.
    pub len: Bytes,
}

/// The layers of one part; all of them move the same rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The part.
    pub part: Part,
    /// Layers that both ranks hold, ascending.
    pub layers: Vec<LayerId>,
    /// Bytes of each row.
    pub slice: Slice,
    /// Index range into [`Plan::runs`].
    pub runs: Range<usize>,
    /// Index range into the plan's cuts: one per target page.
    cuts: Range<usize>,
}

/// What one source rank owes one target rank for a range of tokens: layers x bytes x token runs. Its size grows
/// with pages, not with tokens or layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    groups: Vec<Group>,
    runs: Vec<Run>,
    /// Runs of each target page, as index ranges.
    cuts: Vec<Range<usize>>,
}

/// All that a plan moves for one (layer, part, target page): the unit of digests and of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit<'a> {
    /// The layer.
    pub layer: LayerId,
    /// The part.
    pub part: Part,
    /// Its runs, in token order.
    pub runs: &'a [Run],
    /// Bytes of each row.
    pub slice: Slice,
}

impl Unit<'_> {
    /// First token of the unit.
    #[must_use]
    pub fn first_token(&self) -> Token {
        self.runs.first().map_or(Token(0), |r| r.token)
    }

    /// Bytes that the unit moves.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.runs.iter().map(Run::rows).sum::<u64>() * self.slice.len.0)
    }

    /// The unit as strided byte moves between two regions, in token order, as few and as long as the strides
    /// allow.
    pub fn moves(&self, src: &Region, dst: &Region) -> impl Iterator<Item = StridedMove> + use<'_> {
        let (slice, src, dst) = (self.slice, *src, *dst);
        self.runs.iter().map(move |run| {
            StridedMove {
                src: Strides {
                    offset: Bytes(src.offset.0 + run.src_row.0 * src.row_bytes.0 + slice.src_offset.0),
                    row: src.row_bytes,
                    block: Bytes(run.src_step * src.row_bytes.0),
                },
                dst: Strides {
                    offset: Bytes(dst.offset.0 + run.dst_row.0 * dst.row_bytes.0 + slice.dst_offset.0),
                    row: dst.row_bytes,
                    block: Bytes(run.dst_step * dst.row_bytes.0),
                },
                len: slice.len,
                rows: run.block,
                blocks: run.blocks,
            }
            .merged()
        })
    }
}

/// Where the rows of a [`StridedMove`] lie in one arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// Offset of the first byte.
    pub offset: Bytes,
    /// From row to row inside a block.
    pub row: Bytes,
    /// From block to block.
    pub block: Bytes,
}

impl Strides {
    /// Offset of row `i` of block `b`.
    #[must_use]
    pub fn at(&self, b: u64, i: u64) -> Bytes {
        Bytes(self.offset.0 + b * self.block.0 + i * self.row.0)
    }
}

/// `blocks` x `rows` pieces of `len` bytes, strided on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedMove {
    /// Where they come from.
    pub src: Strides,
    /// Where they go.
    pub dst: Strides,
    /// Bytes of each piece.
    pub len: Bytes,
    /// Pieces of a block.
    pub rows: u64,
    /// Blocks.
    pub blocks: u64,
}

impl StridedMove {
    /// Bytes moved in all.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.len.0 * self.rows * self.blocks)
    }

    /// Joins pieces that touch on both sides.
    fn merged(mut self) -> Self {
        if self.rows > 1 && self.src.row == self.len && self.dst.row == self.len {
            self.len = Bytes(self.len.0 * self.rows);
            self.rows = 1;
        }
        if self.rows == 1 && self.blocks > 1 {
            // One piece per block: the blocks are the rows.
            (self.src.row, self.dst.row) = (self.src.block, self.dst.block);
            (self.rows, self.blocks) = (self.blocks, 1);
            if self.src.row == self.len && self.dst.row == self.len {
                self.len = Bytes(self.len.0 * self.rows);
                self.rows = 1;
            }
        }
        self
    }
}

impl Plan {
    /// The groups, in the order of the cache shape's parts.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The runs that the groups refer to.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The runs of a group.
    #[must_use]
    pub fn group_runs(&self, group: &Group) -> &[Run] {
        self.runs.get(group.runs.clone()).unwrap_or_default()
    }

    /// Every unit in the order in which both sides visit them: part, layer, target page.
    pub fn units(&self) -> impl Iterator<Item = Unit<'_>> {
        self.groups.iter().flat_map(move |group| {
            group.layers.iter().flat_map(move |&layer| {
                self.cuts[group.cuts.clone()].iter().map(move |cut| Unit {
                    layer,
                    part: group.part,
                    runs: &self.runs[cut.clone()],
                    slice: group.slice,
                })
            })
        })
    }

    /// Bytes that the plan moves.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(
            self.groups
                .iter()
                .map(|g| {
                    let rows: u64 = self.group_runs(g).iter().map(Run::rows).sum();
                    rows * g.slice.len.0 * g.layers.len() as u64
                })
                .sum(),
        )
    }

    /// Strided copies that the plan needs: runs x layers.
    #[must_use]
    pub fn copies(&self) -> u64 {
        self.groups.iter().map(|g| (g.runs.len() * g.layers.len()) as u64).sum()
    }

    /// True when the pair of ranks has nothing to move for the range.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }
}

/// Two placements that have been found to fit: what a pair of peers keeps after pairing.
#[derive(Clone, Debug)]
pub struct Pair {
    shape: CacheShape,
    src: Placement,
    dst: Placement,
}

impl Pair {
    /// Checks both placements against the shape and against each other, once.
    ///
    /// # Errors
    /// Names the axis on which they do not fit.
    pub fn new(shape: CacheShape, src: Placement, dst: Placement) -> Result<Self, Unsupported> {
        for (side, placement) in [("source", &src), ("target", &dst)] {
            if let Err(e) = placement.check(&shape) {
                return unsupported(Axis::Placement, format!("{side}: {e}"));
            }
        }
        for part in &shape.parts {
            let (Some(s), Some(d)) = (src.part(part.part), dst.part(part.part)) else { continue };
            if s.dtype != d.dtype {
                return unsupported(
                    Axis::Dtype,
                    format!(
                        "part `{}` is {} at the source and {} at the target",
                        part.part, s.dtype, d.dtype
                    ),
                );
            }
        }
        Ok(Self { shape, src, dst })
    }

    /// What both sides cache.
    #[must_use]
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// The source's placement.
    #[must_use]
    pub fn src(&self) -> &Placement {
        &self.src
    }

    /// The target's placement.
    #[must_use]
    pub fn dst(&self) -> &Placement {
        &self.dst
    }

    /// Bytes that target rank `rank` holds of `tokens`, over all parts and layers: what must have arrived, from
    /// all sources together, when a hand-off of these tokens is complete.
    #[must_use]
    pub fn target_bytes(&self, rank: RankId, tokens: TokenRange) -> Bytes {
        let mut sum = 0_u64;
        for part in &self.shape.parts {
            let Some(layout) = self.dst.part(part.part) else { continue };
            let class = self.dst.class(part.part, rank);
            let end = layout.tokens.owned(tokens.end, class);
            let rows = end.saturating_sub(layout.tokens.owned(tokens.start, class));
            let row = self.dst.row_bytes(part, rank).0;
            let layers = self.dst.layers(part, rank).len() as u64;
            sum = sum.saturating_add(rows.saturating_mul(row).saturating_mul(layers));
        }
        Bytes(sum)
    }

    /// What source rank `src.rank` owes target rank `dst.rank` for `tokens`. When several source ranks hold the
    /// same bytes, each owes every n-th of its pages.
    ///
    /// # Errors
    /// [`Unsupported`] when a rank does not exist, a page table is too short for the range, or a number
    /// overflows. Never panics.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, End, PageTable, Pair, Placement, RankId, TokenMap, TokenRange};
    /// // Dense latent rows to DCP4: rank 1 takes tokens 1, 5, 9, ... as one strided run per page.
    /// let shape = CacheShape::mla(61, 576);
    /// let dense = Placement::single(&shape, 64, Dtype::Bf16);
    /// let mut dcp4 = dense.clone();
    /// dcp4.tp = 4;
    /// dcp4.parts[0].tokens = TokenMap::Interleaved { ranks: 4, interleave: 1 };
    /// let pair = Pair::new(shape, dense, dcp4).unwrap();
    /// let table = PageTable::identity(4);
    /// let plan = pair
    ///     .plan(
    ///         End { rank: RankId(0), table: &table },
    ///         End { rank: RankId(1), table: &table },
    ///         TokenRange::new(0, 256),
    ///     )
    ///     .unwrap();
    /// assert_eq!(plan.runs().len(), 4);
    /// assert_eq!((plan.runs()[0].src_step, plan.runs()[0].dst_step), (4, 1));
    /// assert_eq!(plan.bytes().0, 64 * 1152 * 61);
    /// ```
    pub fn plan(&self, src: End<'_>, dst: End<'_>, tokens: TokenRange) -> Result<Plan, Unsupported> {
        for (side, placement, end) in [("source", &self.src, src), ("target", &self.dst, dst)] {
            if end.rank.0 >= placement.ranks() {
                return unsupported(
                    Axis::Rank,
                    format!("{side} rank {} of an instance with {} ranks", end.rank, placement.ranks()),
                );
            }
        }
        let mut plan = Plan::default();
        let mut shared: Vec<(RunKey, Range<usize>, Range<usize>)> = Vec::new();
        if tokens.is_empty() {
            return Ok(plan);
        }
        for part in &self.shape.parts {
            let Some((layers, slice)) = self.overlap(part, src.rank, dst.rank) else { continue };
            let (Some(s), Some(d)) = (self.src.part(part.part), self.dst.part(part.part)) else { continue };
            let replica = self.src.replica(part, src.rank);
            let key = RunKey {
                src: (s.tokens, s.page_size, self.src.class(part.part, src.rank)),
                dst: (d.tokens, d.page_size, self.dst.class(part.part, dst.rank)),
                deal: (u64::from(replica.index), u64::from(replica.count)),
            };
            let (runs, cuts) = match shared.iter().find(|(k, ..)| *k == key) {
                Some((_, runs, cuts)) => (runs.clone(), cuts.clone()),
                None => {
                    let (runs, cuts) = plan.add_runs(&key, s, d, src.table, dst.table, tokens)?;
                    shared.push((key, runs.clone(), cuts.clone()));
                    (runs, cuts)
                }
            };
            if !runs.is_empty() {
                plan.groups.push(Group { part: part.part, layers, slice, runs, cuts });
            }
        }
        Ok(plan)
    }

    /// Layers and bytes of a row that both ranks hold.
    fn overlap(&self, part: &PartShape, src: RankId, dst: RankId) -> Option<(Vec<LayerId>, Slice)> {
        let (s, d) = (self.src.heads(part, src), self.dst.heads(part, dst));
        let heads = s.start.max(d.start)..s.end.min(d.end);
        if heads.is_empty() {
            return None;
        }
        let held = self.dst.layers(part, dst);
        let layers: Vec<_> =
            self.src.layers(part, src).into_iter().filter(|l| held.binary_search(l).is_ok()).collect();
        let head = u64::from(part.head_elems) * self.src.part(part.part)?.dtype.size().0;
        let slice = Slice {
            src_offset: Bytes(u64::from(heads.start - s.start) * head),
            dst_offset: Bytes(u64::from(heads.start - d.start) * head),
            len: Bytes(heads.len() as u64 * head),
        };
        (!layers.is_empty()).then_some((layers, slice))
    }
}

/// What the runs of a part depend on besides the page tables; parts with equal keys share their runs.
#[derive(Clone, PartialEq)]
struct RunKey {
    src: (TokenMap, u32, u32),
    dst: (TokenMap, u32, u32),
    deal: (u64, u64),
}

/// The tokens of one page of one rank: `start .. end`, of which the rank holds those of its class.
#[derive(Clone, Copy)]
struct Extent {
    start: u64,
    end: u64,
    /// Row in the pool minus local index; wraps, because a page may lie before its local index.
    shift: u64,
    ordinal: u64,
}

/// The tokens that both ranks hold, as far as a closed form goes.
enum Pattern {
    /// Blocks of `block` tokens at `offset`, `offset + step`, ...; from block to block the local indices of the
    /// source grow by `src_step`, those of the target by `dst_step`.
    Periodic { offset: u64, step: u64, block: u64, src_step: u64, dst_step: u64 },
    /// No common token.
    Never,
    /// Two different interleaves: block by block.
    Irregular,
}

/// `(ranks, interleave, class)`, with every map that deals nothing as `(1, 1, 0)`.
fn cycle(map: TokenMap, class: u32) -> (u64, u64, u64) {
    match map {
        TokenMap::Interleaved { ranks, interleave } if ranks > 1 => {
            (u64::from(ranks), u64::from(interleave), u64::from(class))
        }
        _ => (1, 1, 0),
    }
}

fn pattern(src: TokenMap, src_class: u32, dst: TokenMap, dst_class: u32) -> Pattern {
    let (sn, sil, sc) = cycle(src, src_class);
    let (dn, dil, dc) = cycle(dst, dst_class);
    if sn == 1 {
        return Pattern::Periodic {
            offset: dc * dil,
            step: dn * dil,
            block: dil,
            src_step: dn * dil,
            dst_step: dil,
        };
    }
    if dn == 1 {
        return Pattern::Periodic {
            offset: sc * sil,
            step: sn * sil,
            block: sil,
            src_step: sil,
            dst_step: sn * sil,
        };
    }
    if (sn, sil) == (dn, dil) {
        if sc != dc {
            return Pattern::Never;
        }
        return Pattern::Periodic {
            offset: sc * sil,
            step: sn * sil,
            block: sil,
            src_step: sil,
            dst_step: sil,
        };
    }
    if (sil, dil) != (1, 1) {
        return Pattern::Irregular;
    }
    // Two residue classes meet in one class modulo the least common multiple, or never.
    match (0..dn).map(|k| sc + k * sn).find(|t| t % dn == dc) {
        Some(t) => {
            let step = sn / gcd(sn, dn) * dn;
            Pattern::Periodic { offset: t % step, step, block: 1, src_step: step / sn, dst_step: step / dn }
        }
        None => Pattern::Never,
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Plan {
    fn add_runs(
        &mut self,
        key: &RunKey,
        src: &PartLayout,
        dst: &PartLayout,
        src_table: &PageTable,
        dst_table: &PageTable,
        tokens: TokenRange,
    ) -> Result<(Range<usize>, Range<usize>), Unsupported> {
        let (first_run, first_cut) = (self.runs.len(), self.cuts.len());
        let (src_class, dst_class) = (key.src.2, key.dst.2);
        let deal = |e: &Extent| e.ordinal % key.deal.1 == key.deal.0;
        let pattern = pattern(src.tokens, src_class, dst.tokens, dst_class);
        let mut sources = extents("source", src, src_class, src_table, tokens)?;
        sources.retain(deal);
        let targets = extents("target", dst, dst_class, dst_table, tokens)?;
        let mut from = 0;
        for target in targets {
            let cut = self.runs.len();
            while sources.get(from).is_some_and(|s| s.end <= target.start) {
                from += 1;
            }
            for source in sources[from..].iter().take_while(|s| s.start < target.end) {
                let cell = Cell {
                    start: source.start.max(target.start),
                    end: source.end.min(target.end),
                    src: (src.tokens, src_class, source.shift),
                    dst: (dst.tokens, dst_class, target.shift),
                };
                cell.emit(&pattern, &mut self.runs).ok_or_else(too_large)?;
            }
            if self.runs.len() > cut {
                self.cuts.push(cut..self.runs.len());
            }
        }
        Ok((first_run..self.runs.len(), first_cut..self.cuts.len()))
    }
}

/// The pages of a rank that hold some of `tokens`, in token order.
fn extents(
    side: &str,
    layout: &PartLayout,
    class: u32,
    table: &PageTable,
    tokens: TokenRange,
) -> Result<Vec<Extent>, Unsupported> {
    let (map, size) = (layout.tokens, u64::from(layout.page_size));
    let (lo, hi) = (map.owned(tokens.start, class), map.owned(tokens.end, class));
    if lo >= hi {
        return Ok(Vec::new());
    }
    let pages = lo / size..(hi - 1) / size + 1;
    if pages.end > table.0.len() as u64 {
        return unsupported(
            Axis::PageTable,
            format!("{side}: {} pages, but tokens {tokens} reach page {}", table.0.len(), pages.end),
        );
    }
    let mut extents = Vec::with_capacity((pages.end - pages.start) as usize);
    for ordinal in pages {
        let mut page = u64::from(table.0[ordinal as usize].0);
        if let TokenMap::PageSharded { ranks } = map {
            let n = u64::from(ranks.max(1));
            if page % n != u64::from(class) {
                continue;
            }
            page /= n;
        }
        let token = |local: u64| map.token(local, class).map(|t| t.0);
        let start = token(ordinal * size).ok_or_else(too_large)?.max(tokens.start.0);
        // The last page may end past what 64 bits can count; the range ends before that.
        let end = token((ordinal + 1) * size).unwrap_or(u64::MAX).min(tokens.end.0);
        extents.push(Extent { start, end, shift: (page * size).wrapping_sub(ordinal * size), ordinal });
    }
    Ok(extents)
}

/// Tokens `start .. end` that lie on one source page and one target page.
struct Cell {
    start: u64,
    end: u64,
    src: (TokenMap, u32, u64),
    dst: (TokenMap, u32, u64),
}

impl Cell {
    fn row((map, class, shift): (TokenMap, u32, u64), token: u64) -> Option<Row> {
        map.local(Token(token), class).map(|local| Row(local.wrapping_add(shift)))
    }

    /// One block: consecutive tokens that both ranks hold.
    fn block(&self, start: u64, end: u64) -> Option<Run> {
        Some(Run {
            token: Token(start),
            token_step: 0,
            src_row: Self::row(self.src, start)?,
            src_step: 0,
            dst_row: Self::row(self.dst, start)?,
            dst_step: 0,
            block: end - start,
            blocks: 1,
        })
    }

    /// Appends the runs of the cell; `None` on overflow.
    fn emit(&self, pattern: &Pattern, out: &mut Vec<Run>) -> Option<()> {
        match *pattern {
            Pattern::Never => {}
            Pattern::Irregular => self.emit_blocks(out)?,
            Pattern::Periodic { offset, step, block, src_step, dst_step } => {
                // Blocks k = first ..= last touch the cell.
                let first = (self.start + 1).saturating_sub(offset + block).div_ceil(step);
                let Some(last) = (self.end - 1).checked_sub(offset).map(|d| d / step) else {
                    return Some(());
                };
                let bounds = |k: u64| {
                    let at = offset + k * step;
                    (at.max(self.start), (at + block).min(self.end))
                };
                let mut k = first;
                while k <= last {
                    let (start, end) = bounds(k);
                    let mut run = self.block(start, end)?;
                    // Whole blocks are one run; only the first and the last of a cell may be cut.
                    let whole = if run.block < block {
                        1
                    } else {
                        last - k + u64::from(bounds(last).1 == offset + last * step + block)
                    };
                    if whole > 1 {
                        run = Run { token_step: step, src_step, dst_step, blocks: whole, ..run };
                    }
                    out.push(run);
                    k += whole.max(1);
                }
            }
        }
        Some(())
    }

    /// Walks the common blocks one by one and joins those that repeat with equal distances.
    fn emit_blocks(&self, out: &mut Vec<Run>) -> Option<()> {
        let from = out.len();
        let mut at = self.start;
        while at < self.end {
            let (s, d) = (next_block(self.src, at)?, next_block(self.dst, at)?);
            let (start, end) = (s.0.max(d.0), s.1.min(d.1).min(self.end));
            if start < end {
                let new = self.block(start, end)?;
                let joined = out[from..].last_mut().is_some_and(|last| joins(last, &new));
                if !joined {
                    out.push(new);
                }
            }
            at = s.1.min(d.1);
        }
        Some(())
    }
}

/// The block of tokens of a class that ends after `at`.
fn next_block((map, class, _): (TokenMap, u32, u64), at: u64) -> Option<(u64, u64)> {
    let (n, il, c) = cycle(map, class);
    let step = n * il;
    let k = (at + 1).saturating_sub(c * il + il).div_ceil(step);
    let start = k.checked_mul(step)?.checked_add(c * il)?;
    Some((start, start.checked_add(il)?))
}

/// Makes `new` the next block of `run` if the distances agree (the second block sets them).
fn joins(run: &mut Run, new: &Run) -> bool {
    let steps = (
        new.token.0 - run.token.0,
        new.src_row.0.wrapping_sub(run.src_row.0),
        new.dst_row.0.wrapping_sub(run.dst_row.0),
    );
    if run.block != new.block {
        return false;
    }
    if run.blocks == 1 {
        (run.token_step, run.src_step, run.dst_step) = steps;
    } else if steps != (run.token_step * run.blocks, run.src_step * run.blocks, run.dst_step * run.blocks) {
        return false;
    }
    run.blocks += 1;
    true
}
