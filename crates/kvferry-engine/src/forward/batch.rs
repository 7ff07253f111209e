//! What one step computes: tokens of several requests, row after row.

use std::ops::Range;

use kvferry_plan::{PageTable, Part, Placement, SlotId, TokenMap, TokenRange};

use super::space::Account;
use crate::{
    EngineError,
    math::{Arith, query_block},
};

/// Consecutive tokens of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    /// Vocabulary ids.
    pub(crate) tokens: &'a [u32],
    /// Position of the first.
    pub(crate) start: u64,
    /// The request's pages, which hold the cache of everything before.
    pub(crate) table: &'a PageTable,
    /// The request's state slot, in a model that has such state: after everything before.
    pub(crate) slot: Option<SlotId>,
    /// Whether the logits after the last token are wanted.
    pub(crate) logits: bool,
}

/// What came of a piece.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome<'a> {
    /// Positions that went through the model.
    pub(crate) computed: TokenRange,
    /// Logits after the last token, if wanted.
    pub(crate) logits: Option<&'a [f32]>,
    /// False when a value of one of its rows left the range of the arithmetic: nothing here is to be used.
    pub(crate) in_range: bool,
}

/// What came of a step, piece by piece.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    pub(super) pieces: Vec<Found>,
    /// `[rows][vocabulary]`.
    pub(super) logits: Vec<f32>,
    pub(super) vocab: usize,
}

/// What came of a piece.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) computed: TokenRange,
    /// Row of the logits.
    pub(super) logits: Option<usize>,
    pub(super) in_range: bool,
}

impl Outcomes {
    /// In the order of the pieces.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Outcome<'_>> {
        self.pieces.iter().map(|found| Outcome {
            computed: found.computed,
            logits: found.logits.and_then(|row| self.logits.get(row * self.vocab..(row + 1) * self.vocab)),
            in_range: found.in_range,
        })
    }
}

/// How a step is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Form {
    /// As many rows as there are tokens, in memory that grows.
    #[default]
    Eager,
    /// Next tokens only, padded to a captured number of rows, in memory that does not grow.
    Fixed,
    /// Nothing but padding, as many rows as will ever be: takes the memory of all fixed shapes.
    Capture,
}

/// How the tokens of a step are dealt to the ranks of context-parallel prefill: page by page. Where pages are dealt, to
/// the rank that keeps the page, so that everybody writes at home.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deal {
    ranks: u32,
    page: u64,
    sharded: bool,
}

impl Deal {
    /// That of a layout for rows of `part`; `None` without context parallelism.
    pub(super) fn of(placement: &Placement, part: Part) -> Option<Self> {
        let layout = placement.part(part).filter(|_| placement.cp > 1)?;
        let sharded = matches!(layout.tokens, TokenMap::PageSharded { .. });
        Some(Self { ranks: placement.cp, page: u64::from(layout.page_size).max(1), sharded })
    }

    /// The rank that computes the tokens of page `number` of a request.
    fn rank(self, table: &PageTable, number: u64) -> u32 {
        let entry = usize::try_from(number).ok().and_then(|number| table.0.get(number));
        match entry.filter(|_| self.sharded) {
            Some(page) => page.0 % self.ranks,
            None => (number % u64::from(self.ranks)) as u32,
        }
    }

    /// The tokens of a piece that fall to `rank`, run by run.
    fn runs(self, piece: &Piece<'_>, rank: u32) -> impl Iterator<Item = Range<u64>> {
        let (start, end) = (piece.start, piece.start + piece.tokens.len() as u64);
        let table = piece.table;
        let pages = start / self.page..end.div_ceil(self.page);
        pages
            .filter(move |number| self.rank(table, *number) == rank)
            .map(move |number| (number * self.page).max(start)..((number + 1) * self.page).min(end))
    }
}

/// Consecutive rows of one request.
#[derive(Clone, Debug, Default)]
pub(super) struct Span {
    /// Number of its piece.
    pub(super) piece: usize,
    /// Batch rows.
    pub(super) rows: Range<usize>,
    /// Position of the first.
    pub(super) start: u64,
    pub(super) table: PageTable,
    pub(super) slot: Option<SlotId>,
    /// Row of the logits, if they are wanted.
    pub(super) logits: Option<usize>,
}

/// Rows of a span that attend together to one KV head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Number of the span.
    pub(super) span: usize,
    /// Batch rows.
    pub(super) rows: Range<usize>,
    /// KV head, counted from the rank's first.
    pub(super) kv: usize,
}

/// The rows of a step. Padding rows come last and belong to no span: they go through what is computed row by row, and
/// nothing is read, written, merged or told for them.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) form: Form,
    /// All rows, padding included.
    rows: usize,
    /// The first `used` are of this step; the others keep their memory.
    all: Vec<Span>,
    used: usize,
    pub(super) tokens: Vec<u32>,
    /// Position of each row that is not padding.
    pub(super) positions: Vec<u64>,
    /// Of each row of a dealt step its row in the whole step.
    pub(super) origin: Vec<usize>,
    /// Rows whose logits are computed, ascending.
    pub(super) wanted: Vec<usize>,
}

impl Batch {
    /// Takes memory for `rows` requests of `pages` pages each.
    pub(super) fn reserve(&mut self, rows: usize, pages: usize) {
        fn reserve<T>(list: &mut Vec<T>, len: usize) {
            list.reserve(len.saturating_sub(list.len()));
        }
        self.all.resize_with(self.all.len().max(rows), Span::default);
        self.all.iter_mut().for_each(|span| reserve(&mut span.table.0, pages));
        reserve(&mut self.tokens, rows);
        reserve(&mut self.positions, rows);
        reserve(&mut self.wanted, rows);
    }

    /// Begins another step, of `pieces` and as much padding as makes `rows` rows.
    pub(super) fn fill(&mut self, pieces: &[Piece<'_>], form: Form, rows: usize) {
        self.begin(form);
        for (number, piece) in pieces.iter().enumerate() {
            self.push(number, piece, piece.start..piece.start + piece.tokens.len() as u64);
        }
        self.rows = rows.max(self.tokens.len());
        if form != Form::Eager {
            self.wanted.extend(self.tokens.len()..self.rows);
        }
    }

    /// Begins another step, of what falls to `rank` of the same pieces.
    pub(super) fn fill_dealt(&mut self, pieces: &[Piece<'_>], deal: Deal, rank: u32) {
        self.begin(Form::Eager);
        let mut first = 0;
        for (number, piece) in pieces.iter().enumerate() {
            for run in deal.runs(piece, rank) {
                let before = (run.start - piece.start) as usize;
                self.origin.extend(first + before..first + before + (run.end - run.start) as usize);
                self.push(number, piece, run);
            }
            first += piece.tokens.len();
        }
        self.rows = self.tokens.len();
    }

    fn begin(&mut self, form: Form) {
        self.form = form;
        self.tokens.clear();
        self.positions.clear();
        self.origin.clear();
        self.wanted.clear();
        self.used = 0;
    }

    /// Appends tokens of a piece.
    fn push(&mut self, number: usize, piece: &Piece<'_>, run: Range<u64>) {
        let first = self.tokens.len();
        let place = |at: u64| (at - piece.start) as usize;
        self.tokens.extend_from_slice(piece.tokens.get(place(run.start)..place(run.end)).unwrap_or(&[]));
        let end = self.tokens.len();
        self.positions.extend(run.clone());
        if self.used == self.all.len() {
            self.all.push(Span::default());
        }
        let Some(span) = self.all.get_mut(self.used) else { return };
        self.used += 1;
        (span.piece, span.rows, span.start, span.slot) = (number, first..end, run.start, piece.slot);
        span.table.0.clone_from(&piece.table.0);
        let last = place(run.end) == piece.tokens.len();
        span.logits = (piece.logits && last && end > first).then_some(self.wanted.len());
        self.wanted.extend(span.logits.map(|_| end - 1));
    }

    /// Number of rows, padding included.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// What is not padding.
    pub(super) fn spans(&self) -> &[Span] {
        self.all.get(..self.used).unwrap_or(&[])
    }

    /// The blocks of rows that attend, and groups of them after each of which the ranks of a head group meet. All ranks
    /// of a head group must get the same answer, so it depends on nothing that differs between them: `held` gives the most
    /// tokens that a rank holds of a span.
    pub(super) fn meetings(
        &self,
        arith: Arith,
        (kv_heads, heads_per_kv): (usize, usize),
        dcp: usize,
        held: impl Fn(&Span) -> Result<usize, EngineError>,
        (blocks, meetings): (&mut Vec<Block>, &mut Vec<Range<usize>>),
        account: &Account,
    ) -> Result<(), EngineError> {
        let step = |tokens| (query_block(tokens, arith) / heads_per_kv.max(1)).max(1);
        let mut most = 0;
        for span in self.spans() {
            most += span.rows.len().div_ceil(step(held(span)?)) * kv_heads;
        }
        let (blocks, meetings) = (account.cleared(blocks, most)?, account.cleared(meetings, most)?);
        let mut kept = usize::MAX;
        for (number, span) in self.spans().iter().enumerate() {
            let tokens = held(span)?;
            let step = step(tokens);
            for first in span.rows.clone().step_by(step) {
                let rows = first..span.rows.end.min(first + step);
                for kv in 0..kv_heads {
                    let scores = rows.len().saturating_mul(heads_per_kv).saturating_mul(tokens);
                    // Alone, a rank waits for nobody: it finishes each block while its scores are in the cache.
                    kept = kept.saturating_add(scores);
                    let at = blocks.len();
                    match meetings.last_mut() {
                        Some(meeting) if dcp > 1 && kept <= SCORES => meeting.end = at + 1,
                        _ => {
                            meetings.push(at..at + 1);
                            kept = scores;
                        }
                    }
                    blocks.push(Block { span: number, rows: rows.clone(), kv });
                }
            }
        }
        Ok(())
    }
}

impl Span {
    /// Tokens that the cache holds after this step.
    pub(super) fn context(&self) -> u64 {
        self.start + self.rows.len() as u64
    }
}

/// Scores that are kept until the ranks have met, unless one block has more.
pub(super) const SCORES: usize = 512 << 10;
