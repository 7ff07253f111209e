//! The naive copier that plans are compared with: it asks, for one coordinate at a time, where its bytes lie.
//!
//! It knows nothing of runs, patterns or cells. Pools are vectors with one *cell* per byte; a cell holds the name of
//! the coordinate whose byte it is, so that a byte in the wrong place is always seen. A conversion turns the names of
//! all bytes of an element into those of all bytes of the same element in another type.

use std::{collections::BTreeSet, ops::Range};

use kvferry_plan::*;

/// Everything that one hand-off is made of.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) shape: CacheShape,
    pub(crate) src: Placement,
    pub(crate) dst: Placement,
    pub(crate) src_table: PageTable,
    pub(crate) dst_table: PageTable,
    /// What crosses, in the consecutive chunks in which it crosses.
    pub(crate) chunks: Vec<TokenRange>,
}

/// The slots of a request's state on the two sides, of pools with [`SLOTS`].
const SRC_SLOT: SlotId = SlotId(1);
const DST_SLOT: SlotId = SlotId(2);
const SLOTS: u32 = 3;

/// A table with as many pages as `end` tokens need under `placement`, of ids in no order and with gaps.
pub(crate) fn table(placement: &Placement, end: u64, seed: u64) -> PageTable {
    let pages = |p: &PartLayout| {
        let owned = (0..p.tokens.classes()).map(|class| p.tokens.owned(Token(end), class));
        owned.max().unwrap_or(0).div_ceil(u64::from(p.page_size))
    };
    let rows = placement.parts.iter().filter(|p| !p.part.is_state());
    let pages = rows.map(pages).max().unwrap_or(0) as usize;
    let mut ids: Vec<PageId> = (0..2 * pages as u32 + 1).map(PageId).collect();
    let mut state = seed;
    for i in (1..ids.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ids.swap(i, (state >> 33) as usize % (i + 1));
    }
    ids.truncate(pages);
    PageTable(ids)
}

/// The row of a token on a rank, if the rank holds the token and the table reaches it.
pub(crate) fn row(
    placement: &Placement,
    part: Part,
    rank: RankId,
    table: &PageTable,
    token: u64,
) -> Option<Row> {
    let layout = placement.part(part)?;
    let size = u64::from(layout.page_size);
    let class = placement.class(part, rank);
    match layout.tokens {
        TokenMap::PageSharded { ranks } => {
            let logical = table.0.get((token / size) as usize)?.0;
            (logical % ranks == class).then(|| Row(u64::from(logical / ranks) * size + token % size))
        }
        map => table.row(map.local(Token(token), class)?, layout.page_size),
    }
}

/// The heads of a part that a rank holds, in the order of its rows: asked head by head.
fn held_heads(placement: &Placement, part: &PartShape, rank: RankId) -> Vec<u32> {
    let Some(state) = &part.state else { return placement.heads(part, rank).collect() };
    let tp = placement.coords(rank).unwrap().tp;
    let mut held = Vec::new();
    let mut first = 0;
    for count in &state.groups {
        for head in 0..*count {
            // The last rank whose share begins at or before the head, and has not ended.
            let owner = (0..placement.tp)
                .find(|r| (r * count / placement.tp..(r + 1) * count / placement.tp).contains(&head));
            if owner == Some(tp) {
                held.push(first + head);
            }
        }
        first += count;
    }
    if state.groups.is_empty() { (0..part.heads).collect() } else { held }
}

/// The name of one byte of content, the `byte`-th of element `elem` of a head; never 0.
fn name(layer: LayerId, part: Part, head: u32, token: u64, (elem, byte): (u64, u64)) -> u64 {
    let place = u64::from(part.code()) << 24 | u64::from(layer.0) << 16 | u64::from(head) << 8 | elem << 2;
    (place | byte) << 32 | (token + 1)
}

/// Byte `byte` of the element that `cells`, all its bytes in the source's type, become.
fn cast(cells: &[u64], byte: u64) -> u64 {
    for (i, cell) in (0..).zip(cells) {
        assert_eq!(*cell, cells[0] + (i << 32), "the bytes of one element, in order");
    }
    cells[0] + (byte << 32)
}

/// The pools of all ranks of a side, holding `tokens` and nothing else.
fn filled(
    shape: &CacheShape,
    placement: &Placement,
    pools: &[PoolLayout],
    (table, slot): (&PageTable, SlotId),
    tokens: TokenRange,
) -> Vec<Vec<u64>> {
    let mut arenas: Vec<Vec<u64>> = pools.iter().map(|pool| vec![0; pool.len().0 as usize]).collect();
    for (rank, arena) in arenas.iter_mut().enumerate() {
        let id = RankId(rank as u32);
        for part in &shape.parts {
            let size = placement.part(part.part).unwrap().dtype.size().0;
            let head_bytes = u64::from(part.head_elems) * size;
            for region in pools[rank].regions().iter().filter(|region| region.part == part.part) {
                // State has rows instead of tokens.
                let window = part.state.as_ref().map(|state| u64::from(state.window));
                let rows = window.map_or(tokens.start.0..tokens.end.0, |window| 0..window);
                for token in rows {
                    let row = match window {
                        Some(window) => Some(Row(u64::from(slot.0) * window + token)),
                        None => row(placement, part.part, id, table, token),
                    };
                    let Some(row) = row else { continue };
                    let mut at = region.row_offset(row).expect("the pool has the page").0;
                    for head in held_heads(placement, part, id) {
                        for byte in 0..head_bytes {
                            arena[at as usize] =
                                name(region.layer, part.part, head, token, (byte / size, byte % size));
                            at += 1;
                        }
                    }
                }
            }
        }
    }
    arenas
}

fn pools(shape: &CacheShape, placement: &Placement, table: &PageTable) -> Vec<PoolLayout> {
    // The local pages of a sharded table are fewer than its logical ones.
    let pages = table.0.iter().map(|page| page.0 + 1).max().unwrap_or(0);
    (0..placement.ranks())
        .map(|r| {
            PoolLayout::with_slots(shape, placement, RankId(r), PoolSize { pages, slots: SLOTS }).unwrap()
        })
        .collect()
}

impl Case {
    /// The tokens that cross, chunks joined.
    pub(crate) fn tokens(&self) -> TokenRange {
        TokenRange { start: self.chunks.first().unwrap().start, end: self.chunks.last().unwrap().end }
    }

    fn pair(&self) -> Pair {
        Pair::with(self.shape.clone(), self.src.clone(), self.dst.clone(), Dtypes::Converted).unwrap()
    }

    fn plan(&self, pair: &Pair, src: u32, dst: u32, chunk: TokenRange) -> Plan {
        let src = End { rank: RankId(src), table: &self.src_table };
        let dst = End { rank: RankId(dst), table: &self.dst_table };
        pair.plan(src, dst, chunk).unwrap_or_else(|e| panic!("{e} for {self:?}"))
    }

    fn state(&self, pair: &Pair, src: u32, dst: u32) -> Plan {
        let src = Slot { rank: RankId(src), slot: SRC_SLOT };
        pair.state(src, Slot { rank: RankId(dst), slot: DST_SLOT })
            .unwrap_or_else(|e| panic!("{e} for {self:?}"))
    }

    /// Runs every plan of the hand-off on pools of names and compares with the naive copier: each byte that the
    /// target wants is written once with the right content, nothing else changes, and what the plans say about
    /// themselves is true.
    pub(crate) fn check_bytes(&self) {
        let (pair, tokens) = (self.pair(), self.tokens());
        let src_pools = pools(&self.shape, &self.src, &self.src_table);
        let dst_pools = pools(&self.shape, &self.dst, &self.dst_table);
        // The source also holds what does not cross: earlier tokens, and the rest of its last page.
        let held = TokenRange::new(0, tokens.end.0 + 8);
        let sources = filled(&self.shape, &self.src, &src_pools, (&self.src_table, SRC_SLOT), held);
        let wanted = filled(&self.shape, &self.dst, &dst_pools, (&self.dst_table, DST_SLOT), tokens);
        let sharded = self.dst.parts.iter().any(|p| matches!(p.tokens, TokenMap::PageSharded { .. }));

        for (d, wanted) in wanted.iter().enumerate() {
            let mut got = vec![0; wanted.len()];
            let mut planned = 0;
            for (s, source) in sources.iter().enumerate() {
                let rows = self.chunks.iter().map(|chunk| self.plan(&pair, s as u32, d as u32, *chunk));
                for plan in rows.chain([self.state(&pair, s as u32, d as u32)]) {
                    self.check_units(&plan);
                    planned += plan.bytes().0;
                    for unit in plan.units() {
                        let from =
                            src_pools[s].region(unit.layer, unit.part).expect("the source has the layer");
                        let to =
                            dst_pools[d].region(unit.layer, unit.part).expect("the target has the layer");
                        for (from, to, byte) in bytes_of(&unit, from, to) {
                            assert_eq!(got[to as usize], 0, "byte {to} of rank {d} written twice: {self:?}");
                            got[to as usize] = cast(&source[from.start as usize..from.end as usize], byte);
                        }
                    }
                }
            }
            assert!(got == *wanted, "target rank {d} of {self:?}");
            let bytes = wanted.iter().filter(|cell| **cell != 0).count() as u64;
            let end = End { rank: RankId(d as u32), table: &self.dst_table };
            assert_eq!(planned, bytes, "planned bytes of {self:?}");
            let state = pair.state_bytes(end.rank).0;
            let granted = pair.granted_bytes(end, tokens).unwrap().0 + state;
            assert_eq!(granted, bytes, "granted bytes of {self:?}");
            assert!(
                sharded || pair.target_bytes(end.rank, tokens).0 + state == bytes,
                "target bytes of {self:?}"
            );
        }
    }

    /// Units come by part, layer and target page; each lies on one target page, its tokens ascend.
    fn check_units(&self, plan: &Plan) {
        let order = |part| self.shape.parts.iter().position(|p| p.part == part);
        let (mut last, mut bytes, mut runs) = (None, 0, 0);
        for unit in plan.units() {
            let place = Some((order(unit.part), unit.channels, unit.layer, unit.first_token()));
            assert!(last < place, "units of {self:?}");
            (last, bytes, runs) = (place, bytes + unit.bytes().0, runs + unit.runs.len() as u64);
            let rows: Vec<_> = unit.runs.iter().flat_map(Run::expand).collect();
            assert!(rows.is_sorted_by(|a, b| a.0 < b.0), "tokens of a unit of {self:?}");
            let size = u64::from(self.dst.part(unit.part).unwrap().page_size);
            let pages: BTreeSet<_> = rows.iter().map(|(.., dst)| dst.0 / size).collect();
            assert_eq!(pages.len(), 1, "pages of a unit of {self:?}");
        }
        assert_eq!((plan.bytes().0, plan.copies()), (bytes, runs), "sums of {self:?}");
    }

    /// A receiver that knows only what the sources say that they cover plans the same units to the same rows, and
    /// what they say adds up to every token once.
    pub(crate) fn check_covers(&self) {
        let pair = self.pair();
        let mut assembly = Assembly::new(&pair, self.tokens());
        for chunk in &self.chunks {
            for s in 0..self.src.ranks() {
                let source = RankId(s);
                let cover = pair.cover(End { rank: source, table: &self.src_table }, *chunk).unwrap();
                for d in 0..self.dst.ranks() {
                    let dst = End { rank: RankId(d), table: &self.dst_table };
                    let landing = pair.landing(source, &cover, dst, *chunk).unwrap();
                    assert_eq!(
                        landed(&landing),
                        landed(&self.plan(&pair, s, d, *chunk)),
                        "{s} to {d} of {self:?}"
                    );
                }
                let listed = cover.0.iter().any(|c| !c.runs.is_empty());
                let verdict = if listed { Accepted::New } else { Accepted::Repeat };
                assert_eq!(assembly.accept(&pair, source, *chunk, &cover), Ok(verdict), "{self:?}");
                assert_eq!(assembly.accept(&pair, source, *chunk, &cover), Ok(Accepted::Repeat), "{self:?}");
            }
        }
        assert_eq!(assembly.gap(&pair), None, "{self:?}");
    }

    /// Where owners are cyclic, a receiver that knows only from which rank on plans the same units to the same rows, and
    /// what a rank reads are the entries that it owns.
    pub(crate) fn check_rotation(&self, rotation: Rotation) {
        let ranks = self.src.shard_ranks();
        if ranks == 1 {
            return;
        }
        let rotation = Rotation(rotation.0 % ranks);
        let owners = (0..ranks).cycle().skip(rotation.0 as usize);
        let page = |(page, owner): (&PageId, u32)| PageId(page.0 * ranks + owner);
        let src_table = PageTable(self.src_table.0.iter().zip(owners).map(page).collect());
        assert_eq!(self.src.rotation(&src_table), Ok(rotation));
        assert_eq!(self.src.check_rotation(rotation), Ok(()));
        let told = PageTable::rotated(rotation, src_table.0.len() as u32);
        let case = Self { src_table, ..self.clone() };
        let pair = case.pair();
        for chunk in &case.chunks {
            for s in 0..case.src.ranks() {
                let entries = case.src.entries(RankId(s), *chunk, rotation);
                let own = entries.iter().map(|k| case.src_table.0[k as usize]);
                let own: BTreeSet<_> = own.map(|page| case.src.local_page(page)).collect();
                assert_eq!(own.len() as u64, entries.count());
                for d in 0..case.dst.ranks() {
                    let plan = case.plan(&pair, s, d, *chunk);
                    let src = End { rank: RankId(s), table: &told };
                    let dst = End { rank: RankId(d), table: &case.dst_table };
                    let receiver = pair.plan(src, dst, *chunk).unwrap();
                    assert_eq!(landed(&receiver), landed(&plan), "{s} to {d} from {rotation} of {case:?}");
                    for group in plan.groups() {
                        let layout = case.src.part(group.part).unwrap();
                        let read = plan.group_runs(group).iter().map(|run| layout.page(run.src_row));
                        assert!(read.into_iter().all(|page| own.contains(&page)), "{s} to {d} of {case:?}");
                    }
                }
            }
        }
    }

    /// Compares the (layer, head, token, source row, target row) of every plan with point queries, and how evenly
    /// sources of the same bytes share. Cheaper than [`Case::check_bytes`], and blind to offsets in pools.
    pub(crate) fn check_rows(&self) {
        let pair = self.pair();
        let rows = self.shape.parts.iter().filter(|part| part.state.is_none());
        rows.for_each(|part| self.check_part(&pair, part));
    }

    fn check_part(&self, pair: &Pair, part: &PartShape) {
        let tokens = self.tokens();
        let [src_head, dst_head] = [&self.src, &self.dst]
            .map(|side| u64::from(part.head_elems) * side.part(part.part).unwrap().dtype.size().0);
        let src_page = u64::from(self.src.part(part.part).unwrap().page_size);
        let mut sent: Vec<BTreeSet<u64>> = vec![BTreeSet::new(); self.src.ranks() as usize];
        for d in 0..self.dst.ranks() {
            let heads = self.dst.heads(part, RankId(d));
            // Times that (layer, head, token) was sent; layers by position in the part.
            let at = |layer: usize, head: u32, token: u64| {
                (layer * part.heads as usize + head as usize) * tokens.len() as usize
                    + (token - tokens.start.0) as usize
            };
            let mut times = vec![0_u8; part.layers.len() * part.heads as usize * tokens.len() as usize];
            for s in 0..self.src.ranks() {
                let first_head = self.src.heads(part, RankId(s)).start;
                for chunk in &self.chunks {
                    let plan = self.plan(pair, s, d, *chunk);
                    let Some(group) = plan.groups().iter().find(|g| g.part == part.part) else { continue };
                    let slice = group.slice;
                    let from = first_head + (slice.src_offset.0 / src_head) as u32;
                    let to = heads.start + (slice.dst_offset.0 / dst_head) as u32;
                    let count = (slice.len.0 / dst_head) as u32;
                    assert_eq!(slice.src_len().0, u64::from(count) * src_head, "lengths of {self:?}");
                    assert_eq!(from, to, "heads of {self:?}");
                    let mut before = None;
                    for (token, src_row, dst_row) in plan.group_runs(group).iter().flat_map(Run::expand) {
                        assert!(before < Some(token), "order of {self:?}");
                        assert!((chunk.start..chunk.end).contains(&token), "range of {self:?}");
                        before = Some(token);
                        let point = (
                            row(&self.src, part.part, RankId(s), &self.src_table, token.0),
                            row(&self.dst, part.part, RankId(d), &self.dst_table, token.0),
                        );
                        assert_eq!(point, (Some(src_row), Some(dst_row)), "rank {s} to {d} of {self:?}");
                        sent[s as usize].insert(src_row.0 / src_page);
                        for layer in &group.layers {
                            let layer = part.layers.binary_search(layer).unwrap();
                            (from..from + count).for_each(|head| times[at(layer, head, token.0)] += 1);
                        }
                    }
                }
            }
            let held = self.dst.layers(part, RankId(d));
            for (layer, id) in part.layers.iter().enumerate() {
                for token in tokens.start.0..tokens.end.0 {
                    let row = row(&self.dst, part.part, RankId(d), &self.dst_table, token);
                    for head in 0..part.heads {
                        let wanted = held.contains(id) && heads.contains(&head) && row.is_some();
                        let sent = times[at(layer, head, token)];
                        assert_eq!(sent, u8::from(wanted), "rank {d} layer {id} token {token} of {self:?}");
                    }
                }
            }
        }
        self.check_shares(part, &sent);
    }

    /// Source ranks that hold the same bytes send page counts that differ by one at most.
    fn check_shares(&self, part: &PartShape, sent: &[BTreeSet<u64>]) {
        let holds = |r: u32| {
            let stage = self.src.coords(RankId(r)).unwrap().stage;
            (stage, self.src.heads(part, RankId(r)), self.src.class(part.part, RankId(r)))
        };
        for r in 0..self.src.ranks() {
            let same: Vec<u32> = (0..self.src.ranks()).filter(|o| holds(*o) == holds(r)).collect();
            let replica = self.src.replica(part, RankId(r));
            assert_eq!((replica.count, same[replica.index as usize]), (same.len() as u32, r));
            let counts: Vec<_> = same.iter().map(|o| sent[*o as usize].len()).collect();
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            assert!(most - least <= 1, "shares {counts:?} of {self:?}");
        }
    }
}

/// What the two ends of a transport must agree on: units, their bytes, and tokens at target rows.
type Landed = Vec<(LayerId, Part, Token, Bytes, Vec<(Token, Row)>)>;

fn landed(plan: &Plan) -> Landed {
    let unit = |unit: Unit<'_>| {
        let rows = unit.runs.iter().flat_map(Run::expand).map(|(token, _, dst)| (token, dst)).collect();
        (unit.layer, unit.part, unit.first_token(), unit.bytes(), rows)
    };
    plan.units().map(unit).collect()
}

/// Every target byte of a unit in order: the source's element that it comes from, its offset, and its number in the
/// target's element; row by row, and checked against its moves. What is not converted has elements of a byte.
fn bytes_of(unit: &Unit<'_>, src: &Region, dst: &Region) -> Vec<(Range<u64>, u64, u64)> {
    let slice = unit.slice;
    let (before, after) = slice.cast.map_or((1, 1), |cast| (cast.from().size().0, cast.to().size().0));
    let byte = move |from: u64, to: u64, i: u64| {
        let from = from + i / after * before;
        (from..from + before, to + i, i % after)
    };
    let by_row: Vec<_> = (unit.runs.iter().flat_map(Run::expand))
        .flat_map(|(_, from, to)| {
            let from = src.row_offset(from).unwrap().0 + slice.src_offset.0;
            let to = dst.row_offset(to).unwrap().0 + slice.dst_offset.0;
            (0..slice.len.0).map(move |i| byte(from, to, i))
        })
        .collect();
    let by_move: Vec<_> = (unit.moves(src, dst))
        .flat_map(|m| {
            let pieces = (0..m.blocks).flat_map(move |b| (0..m.rows).map(move |i| (b, i)));
            pieces.flat_map(move |(b, i)| {
                (0..m.len.0).map(move |n| byte(m.src.at(b, i).0, m.dst.at(b, i).0, n))
            })
        })
        .collect();
    assert_eq!(by_move, by_row, "moves and runs of a unit disagree");
    let bytes: u64 = unit.moves(src, dst).map(|m| m.bytes().0).sum();
    assert_eq!(bytes, unit.bytes().0);
    by_row
}
