//! Which pages of the pool belong to whom. One allocator per instance: a page id is valid on every rank (mirrored
//! tables). Not for the bytes in the pages (`pool`), nor for who is let in when (`scheduler`).

use std::collections::VecDeque;

use kvferry_plan::{PageId, PageTable, Placement, Token};

/// The pages of one request. There is no way to clone it or to give it back twice.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lease(PageTable);

impl Lease {
    /// The pages as the table that every rank uses.
    pub(crate) fn table(&self) -> &PageTable {
        &self.0
    }
}

/// When a number of pages can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// They are free.
    Now,
    /// They are there, but others hold them.
    Later,
    /// There are not so many.
    Never,
}

/// The free list.
#[derive(Debug)]
pub(crate) struct Pages {
    total: u32,
    // First in, first out: a page rests as long as possible before it has a new owner.
    free: VecDeque<PageId>,
}

impl Pages {
    /// `total` free pages.
    pub(crate) fn new(total: u32) -> Self {
        Self { total, free: (0..total).map(PageId).collect() }
    }

    /// Pages of the pool.
    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    /// Pages that nobody holds.
    pub(crate) fn free(&self) -> u32 {
        self.total.min(u32::try_from(self.free.len()).unwrap_or(self.total))
    }

    /// When `count` pages can be had: the one capacity question, for intake and scheduling alike.
    pub(crate) fn fit(&self, count: u32) -> Fit {
        if count > self.total {
            Fit::Never
        } else if count > self.free() {
            Fit::Later
        } else {
            Fit::Now
        }
    }

    /// Takes `count` pages, or none.
    pub(crate) fn take(&mut self, count: u32) -> Option<Lease> {
        if self.fit(count) != Fit::Now {
            return None;
        }
        Some(Lease(PageTable(self.free.drain(..count as usize).collect())))
    }

    /// Takes a lease's pages back. `retire` is called for each page before it can have a new owner.
    pub(crate) fn give_back(&mut self, lease: Lease, mut retire: impl FnMut(PageId)) {
        for page in lease.0.0 {
            retire(page);
            self.free.push_back(page);
        }
    }
}

/// Pages that `tokens` tokens need on every rank: those of the fullest rank, which is always the first of a token
/// class. `None` when the number overflows.
pub(crate) fn pages_for(placement: &Placement, tokens: u64) -> Option<u32> {
    placement
        .parts
        .iter()
        .map(|part| {
            let rows = part.tokens.owned(Token(tokens), 0);
            u32::try_from(rows.div_ceil(u64::from(part.page_size.max(1)))).ok()
        })
        .try_fold(0, |most, pages| pages.map(|pages| pages.max(most)))
}

/// Tokens that `pages` pages hold for certain: the inverse of [`pages_for`].
pub(crate) fn tokens_for(placement: &Placement, pages: u32) -> u64 {
    placement
        .parts
        .iter()
        .map(|part| {
            // The fullest rank is class 0: the first token that does not fit is the one after its last row.
            let rows = u64::from(pages) * u64::from(part.page_size);
            part.tokens.token(rows, 0).map_or(u64::MAX, |token| token.0)
        })
        .min()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_plan::{CacheShape, Dtype, LayoutSpec};
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    proptest! {
        /// Against a naive model: a set of free pages and who holds the others.
        #[test]
        fn no_page_has_two_owners_and_none_is_lost(
            total in 0_u32..40,
            steps in proptest::collection::vec((any::<bool>(), 0_u32..12, any::<u16>()), 0..80),
        ) {
            let mut pages = Pages::new(total);
            let mut leases: Vec<Lease> = Vec::new();
            let mut generation: BTreeMap<PageId, u32> = BTreeMap::new();
            for (take, count, pick) in steps {
                if take {
                    let free = pages.free();
                    let expected = if count > total { Fit::Never } else if count > free { Fit::Later } else { Fit::Now };
                    prop_assert_eq!(pages.fit(count), expected);
                    match pages.take(count) {
                        Some(lease) => {
                            prop_assert_eq!(lease.table().0.len(), count as usize);
                            leases.push(lease);
                        }
                        None => prop_assert!(count > free),
                    }
                } else if !leases.is_empty() {
                    let lease = leases.swap_remove(usize::from(pick) % leases.len());
                    let table = lease.table().clone();
                    let before = generation.clone();
                    pages.give_back(lease, |page| *generation.entry(page).or_default() += 1);
                    for page in table.0 {
                        prop_assert_eq!(generation[&page], before.get(&page).copied().unwrap_or(0) + 1);
                    }
                }
                let held: Vec<PageId> = leases.iter().flat_map(|l| l.table().0.clone()).collect();
                let distinct: BTreeSet<PageId> = held.iter().copied().collect();
                prop_assert_eq!(held.len(), distinct.len());
                prop_assert!(distinct.iter().all(|page| page.0 < total));
                prop_assert_eq!(pages.free() as usize + held.len(), total as usize);
            }
        }

        /// Every row of every rank has a page, and one page less would not do.
        #[test]
        fn a_table_is_exactly_long_enough_for_the_fullest_rank(
            dcp in 1_u32..5, interleave in 1_u32..7, page in 1_u32..9, tokens in 0_u64..300,
        ) {
            let text = if dcp > 1 {
                format!("tp={dcp},dcp={dcp},interleave={interleave},page={page}")
            } else {
                format!("tp=1,page={page}")
            };
            let placement = text
                .parse::<LayoutSpec>().unwrap().placement(&CacheShape::mla(1, 8), Dtype::F32).unwrap();
            let map = placement.parts[0].tokens;
            let pages = pages_for(&placement, tokens).unwrap();
            let fullest = (0..dcp)
                .map(|class| (0..tokens).filter_map(|t| map.local(Token(t), class)).map(|l| l + 1).max().unwrap_or(0))
                .max().unwrap_or(0);
            prop_assert!(u64::from(pages) * u64::from(page) >= fullest);
            prop_assert!(pages == 0 || u64::from(pages - 1) * u64::from(page) < fullest);
            prop_assert!(tokens <= tokens_for(&placement, pages));
            prop_assert_eq!(pages_for(&placement, tokens_for(&placement, pages)), Some(pages));
            prop_assert!(pages_for(&placement, tokens_for(&placement, pages) + 1).unwrap() > pages);
        }
    }
}
