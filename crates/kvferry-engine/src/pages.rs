//! Which pages of the pool belong to whom. One allocator per instance: a page id is valid on every rank (mirrored
//! tables). Not for the bytes in the pages (`pool`), nor for who is let in when (`scheduler`).

use std::collections::VecDeque;

use kvferry_plan::{PageId, PageTable};

/// The pages of one request. There is no way to clone it or to give it back twice.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lease(PageTable);

impl Lease {
    /// The pages as the table that every rank uses.
    pub(crate) fn table(&self) -> &PageTable {
        &self.0
    }
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

    /// Takes `count` pages, or none.
    pub(crate) fn take(&mut self, count: u32) -> Option<Lease> {
        if count > self.free() {
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

#[cfg(test)]
mod tests {
    use super::*;
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
                    match pages.take(count) {
                        Some(lease) => {
                            prop_assert!(count <= free);
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
    }
}
