//! What one rank holds of a part, and its pages one after the other.

use alloc::format;

use crate::Unsupported;
use crate::unsupported::unsupported;
use crate::{Axis, PageId, PageTable, Part, Placement, RankId, Replica, Token, TokenMap, TokenRange};

/// What one rank holds of a part, by position and page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holding {
    tokens: TokenMap,
    class: u32,
    page_size: u32,
}

impl Holding {
    pub(crate) fn of(placement: &Placement, part: Part, rank: RankId) -> Option<Self> {
        let layout = placement.part(part)?;
        let class = placement.class(part, rank);
        Some(Self { tokens: layout.tokens, class, page_size: layout.page_size })
    }

    /// `(ranks, interleave, class)`, with every map that deals nothing by position as `(1, 1, 0)`.
    pub(crate) fn cycle(self) -> (u64, u64, u64) {
        match self.tokens {
            TokenMap::Interleaved { ranks, interleave } if ranks > 1 => {
                (u64::from(ranks), u64::from(interleave), u64::from(self.class))
            }
            _ => (1, 1, 0),
        }
    }

    pub(crate) fn local(self, token: u64) -> Option<u64> {
        self.tokens.local(Token(token), self.class)
    }

    /// The first token of page `ordinal`; past what 64 bits count, the largest number.
    #[inline(always)]
    fn first_token(self, ordinal: u64) -> u64 {
        let local = ordinal.saturating_mul(u64::from(self.page_size));
        self.tokens.token(local, self.class).map_or(u64::MAX, |token| token.0)
    }

    /// The local page of entry `page` of a table, if this rank holds it.
    #[inline(always)]
    fn local_page(self, page: PageId) -> Option<u32> {
        match self.tokens {
            TokenMap::PageSharded { ranks } => {
                (page.0.checked_rem(ranks)? == self.class).then(|| page.0 / ranks)
            }
            TokenMap::Dense | TokenMap::Interleaved { .. } => Some(page.0),
        }
    }

    /// The pages that hold some of `tokens`, every `deal.count`-th of them.
    pub(crate) fn pages<'a>(
        self,
        side: &str,
        table: &'a PageTable,
        tokens: TokenRange,
        deal: Replica,
    ) -> Result<Pages<'a>, Unsupported> {
        let size = u64::from(self.page_size).max(1);
        let owned = |end| self.tokens.owned(end, self.class);
        let (lo, hi) = (owned(tokens.start), owned(tokens.end));
        let (first, end) = if lo < hi { (lo / size, (hi - 1) / size + 1) } else { (0, 0) };
        let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let (Some(before), Some(pages)) =
            (table.0.get(..index(first)), table.0.get(index(first)..index(end)))
        else {
            return unsupported(
                Axis::PageTable,
                format!("{side}: {} pages, but tokens {tokens} need {end}", table.0.len()),
            );
        };
        // Whose turn a page is must not depend on the chunk: count from the start of the table.
        let turn = match self.tokens {
            TokenMap::PageSharded { .. } => {
                before.iter().filter(|page| self.local_page(**page).is_some()).count() as u64
            }
            TokenMap::Dense | TokenMap::Interleaved { .. } => first,
        };
        Ok(Pages {
            holding: self,
            pages,
            ordinal: first,
            next_token: self.first_token(first),
            turn,
            tokens,
            deal,
        })
    }
}

/// How many of `tokens` a rank holds, with ownership by page ids where the map says so.
pub(crate) fn owned_rows(
    side: &str,
    holding: Holding,
    table: &PageTable,
    tokens: TokenRange,
) -> Result<u64, Unsupported> {
    let owned = |end| holding.tokens.owned(end, holding.class);
    let pages = holding.pages(side, table, tokens, Replica { index: 0, count: 1 })?;
    Ok(match holding.tokens {
        TokenMap::PageSharded { .. } => pages.map(|page| page.end.saturating_sub(page.start)).sum(),
        TokenMap::Dense | TokenMap::Interleaved { .. } => {
            owned(tokens.end).saturating_sub(owned(tokens.start))
        }
    })
}

/// Walks the pages of a rank that hold some of a token range, in token order.
pub(crate) struct Pages<'a> {
    holding: Holding,
    /// Those not yet visited.
    pages: &'a [PageId],
    /// Place in the table of the next page, and its first token.
    ordinal: u64,
    next_token: u64,
    /// Pages that the rank holds up to here, from the start of the table.
    turn: u64,
    tokens: TokenRange,
    deal: Replica,
}

/// The tokens of one page, `start .. end`, of which the rank holds those of its class.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Row in the pool minus local index; wraps, because a page may lie before its local index.
    pub(crate) shift: u64,
}

impl Pages<'_> {
    /// Entries of the table that are still to be visited.
    pub(crate) fn left(&self) -> usize {
        self.pages.len()
    }
}

impl Iterator for Pages<'_> {
    type Item = Extent;

    #[inline(always)]
    fn next(&mut self) -> Option<Extent> {
        while let Some((page, rest)) = self.pages.split_first() {
            let (ordinal, start) = (self.ordinal, self.next_token);
            self.pages = rest;
            self.ordinal += 1;
            self.next_token = self.holding.first_token(self.ordinal);
            let Some(page) = self.holding.local_page(*page) else { continue };
            let turn = self.turn;
            self.turn += 1;
            if self.deal.count > 1 && turn % u64::from(self.deal.count) != u64::from(self.deal.index) {
                continue;
            }
            let size = u64::from(self.holding.page_size);
            return Some(Extent {
                start: start.max(self.tokens.start.0),
                end: self.next_token.min(self.tokens.end.0),
                shift: u64::from(page).wrapping_sub(ordinal).wrapping_mul(size),
            });
        }
        None
    }
}
