//! A request small enough to draw: the same layouts with few tokens on small pages, planned by the same planner.

use std::collections::BTreeMap;

use kvferry_plan::{
    End, LayerId, PageTable, Pair, Part, PartShape, Placement, Plan, RankId, Run, Slot, SlotId, Token,
    TokenMap, TokenRange, Unsupported,
};

use super::super::answer::Answer;
use super::super::request::Request;

/// Tokens that are drawn.
const TOKENS: u64 = 24;
/// Of which decode holds these already, when the request says that it holds some.
const PREFIX: u64 = 3;
/// Rows of the largest page that is drawn.
const PAGE: u32 = 4;
/// Heads that are drawn at most.
const HEADS: u32 = 6;

/// A row of the picture: the tokens of one head in one layer, or the heads of one layer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Band {
    pub(super) part: Part,
    pub(super) layer: LayerId,
    /// The head; 0 for state.
    head: u32,
}

/// A cell of a band: a token, or a head of state.
type Cell = (Band, u64);

/// What there is to draw.
pub(super) struct Schematic {
    pair: Pair,
    pub(super) tokens: TokenRange,
    /// Who sends each cell of a decode rank.
    sent: BTreeMap<(RankId, Cell), RankId>,
    rows: Vec<Band>,
    state: Vec<Band>,
}

impl Schematic {
    pub(super) fn new(request: &Request, answer: &Answer) -> Result<Self, Unsupported> {
        let (src, dst) = (answer.pair.src(), answer.pair.dst());
        let base = request.shape.parts.iter().find(|p| !p.part.is_draft() && p.state.is_none());
        let pages = |side: &Placement| base.and_then(|p| side.part(p.part)).map_or(1, |l| l.page_size);
        let largest = pages(src).max(pages(dst));
        let (src, dst) = (small(src, largest), small(dst, largest));
        let pair = Pair::with(request.shape.clone(), src, dst, request.dtypes)?;
        let count = request.tokens.len().min(TOKENS);
        let start = if request.tokens.start > Token(0) { PREFIX } else { 0 };
        let tokens = TokenRange::new(start, (start + count).min(TOKENS.max(start + 1)));
        let layers = layers(&pair);
        // Values lie where keys lie.
        let drawn = |p: &&PartShape| !matches!(p.part, Part::Value | Part::DraftValue | Part::Conv);
        let mut schematic = Self { pair, tokens, sent: BTreeMap::new(), rows: Vec::new(), state: Vec::new() };
        for part in request.shape.parts.iter().filter(drawn) {
            for &layer in layers.iter().filter(|l| part.layers.contains(l)) {
                let band = |head| Band { part: part.part, layer, head };
                match part.state {
                    Some(_) => schematic.state.push(band(0)),
                    None => schematic.rows.extend(some(part.heads, HEADS).map(band)),
                }
            }
        }
        schematic.state.truncate(2);
        schematic.plan()?;
        Ok(schematic)
    }

    fn plan(&mut self) -> Result<(), Unsupported> {
        let pair = &self.pair;
        let table = PageTable::identity(TOKENS as u32);
        for src in (0..pair.src().ranks()).map(RankId) {
            for dst in (0..pair.dst().ranks()).map(RankId) {
                let (from, to) = (End { rank: src, table: &table }, End { rank: dst, table: &table });
                let rows = pair.plan(from, to, self.tokens)?;
                let slot = |rank| Slot { rank, slot: SlotId(0) };
                let state = pair.state(slot(src), slot(dst))?;
                for cell in cells(pair, src, &rows).chain(cells(pair, src, &state)) {
                    self.sent.insert((dst, cell), src);
                }
            }
        }
        Ok(())
    }

    pub(super) fn src(&self) -> &Placement {
        self.pair.src()
    }

    pub(super) fn dst(&self) -> &Placement {
        self.pair.dst()
    }

    /// The bands of tokens that `rank` of a side holds.
    pub(super) fn rows(&self, side: &Placement, rank: RankId) -> Vec<Band> {
        self.held(side, rank, &self.rows)
    }

    /// The bands of state that `rank` of a side holds.
    pub(super) fn state(&self, side: &Placement, rank: RankId) -> Vec<Band> {
        self.held(side, rank, &self.state)
    }

    fn held(&self, side: &Placement, rank: RankId, bands: &[Band]) -> Vec<Band> {
        let held = |band: &&Band| {
            self.pair.shape().part(band.part).is_some_and(|p| {
                side.layers(p, rank).contains(&band.layer)
                    && (p.state.is_some() || side.heads(p, rank).contains(&band.head))
            })
        };
        bands.iter().filter(held).copied().collect()
    }

    pub(super) fn has_state(&self) -> bool {
        !self.state.is_empty()
    }

    /// The heads of state that are drawn.
    pub(super) fn state_heads(&self, band: Band) -> Vec<u64> {
        let heads = self.pair.shape().part(band.part).map_or(0, |p| p.heads);
        some(heads, 2 * HEADS).map(u64::from).collect()
    }

    /// True if `rank` of a side holds a cell.
    pub(super) fn holds(&self, side: &Placement, rank: RankId, band: Band, at: u64) -> bool {
        let (Some(shape), Some(layout)) = (self.pair.shape().part(band.part), side.part(band.part)) else {
            return false;
        };
        let class = side.class(band.part, rank);
        match layout.tokens {
            _ if shape.state.is_some() => side.heads(shape, rank).contains(&(at as u32)),
            TokenMap::PageSharded { ranks } => {
                at / u64::from(layout.page_size.max(1)) % u64::from(ranks.max(1)) == u64::from(class)
            }
            map => map.local(Token(at), class).is_some(),
        }
    }

    /// Who sends a cell to a decode rank.
    pub(super) fn sender(&self, dst: RankId, band: Band, at: u64) -> Option<RankId> {
        self.sent.get(&(dst, (band, at))).copied()
    }

    /// True if a prefill rank sends a cell to anybody.
    pub(super) fn sends(&self, src: RankId, band: Band, at: u64) -> bool {
        (0..self.dst().ranks()).any(|dst| self.sender(RankId(dst), band, at) == Some(src))
    }

    /// Tokens after which a rank of a side begins a new page.
    pub(super) fn page_tokens(&self, side: &Placement, band: Band) -> u64 {
        side.part(band.part).map_or(u64::MAX, |layout| match layout.tokens {
            TokenMap::Interleaved { ranks, .. } => u64::from(layout.page_size) * u64::from(ranks),
            _ => u64::from(layout.page_size),
        })
    }
}

/// The placement with pages and interleaves in proportion to [`PAGE`] for the largest.
fn small(side: &Placement, largest: u32) -> Placement {
    let mut small = side.clone();
    for part in small.parts.iter_mut().filter(|part| !part.part.is_state()) {
        let scaled = |n: u32| {
            let scaled = u64::from(n) * u64::from(PAGE) / u64::from(largest.max(1));
            scaled.clamp(1, TOKENS) as u32
        };
        part.page_size = scaled(part.page_size);
        if let TokenMap::Interleaved { interleave, .. } = &mut part.tokens {
            *interleave = scaled(*interleave);
        }
    }
    small
}

/// One layer of each kind: of each (prefill stage, decode stage) and each set of parts.
fn layers(pair: &Pair) -> Vec<LayerId> {
    let stage = |side: &Placement, layer: LayerId| side.stages.iter().position(|s| s.contains(&layer));
    let mut all: Vec<LayerId> = pair.src().stages.concat();
    all.sort_unstable();
    let mut kinds = BTreeMap::new();
    for layer in all {
        let parts: Vec<_> = pair.shape().parts.iter().map(|p| p.layers.contains(&layer)).collect();
        kinds.entry((stage(pair.src(), layer), stage(pair.dst(), layer), parts)).or_insert(layer);
    }
    let mut layers: Vec<_> = kinds.into_values().collect();
    layers.sort_unstable();
    layers
}

/// At most `most` of `0..count`, evenly.
fn some(count: u32, most: u32) -> impl Iterator<Item = u32> {
    let shown = count.min(most);
    (0..shown).map(move |i| (u64::from(i) * u64::from(count) / u64::from(shown)) as u32)
}

/// Every cell that a plan moves.
fn cells<'a>(pair: &'a Pair, src: RankId, plan: &'a Plan) -> impl Iterator<Item = Cell> + 'a {
    plan.groups().iter().flat_map(move |group| {
        let shape = pair.shape().part(group.part);
        let size = pair.src().part(group.part).map_or(1, |l| l.dtype.size().0);
        let head = shape.map_or(1, |s| u64::from(s.head_elems)) * size;
        let first = shape.map_or(0, |s| pair.src().heads(s, src).start);
        let heads = (group.slice.src_offset.0 / head
            ..(group.slice.src_offset.0 + group.slice.src_len().0) / head)
            .map(move |h| first + h as u32);
        let state = group.part.is_state();
        let tokens: Vec<u64> =
            plan.group_runs(group).iter().flat_map(Run::expand).map(|(t, ..)| t.0).collect();
        group.layers.iter().flat_map(move |&layer| {
            let tokens = tokens.clone();
            heads.clone().flat_map(move |head| {
                let band = Band { part: group.part, layer, head: if state { 0 } else { head } };
                let at = if state { vec![u64::from(head)] } else { tokens.clone() };
                at.into_iter().map(move |at| (band, at))
            })
        })
    })
}
