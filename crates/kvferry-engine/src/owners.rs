//! Free pages by *owner class*: the shard rank that holds a page. With KV sharding the owners along a request's table
//! are cyclic, which deals its rows evenly and lets everybody know who has which; without there is one class, and this
//! is a free list. Every rank's table is the same, so nobody is asked. Not for who has the pages that were taken
//! (`pages`), nor for cached ones that could be free (`prefix`).

use std::collections::VecDeque;

use kvferry_plan::PageId;

/// How many ranks the logical pages are dealt over: page `l` is of class `l % ranks`. 1 without KV sharding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardRanks(u32);

impl ShardRanks {
    pub(crate) fn new(ranks: u32) -> Self {
        Self(ranks.max(1))
    }

    /// All classes.
    pub(crate) fn classes(self) -> impl DoubleEndedIterator<Item = OwnerClass> {
        (0..self.0).map(OwnerClass)
    }

    /// The class of a page.
    pub(crate) fn owner(self, page: PageId) -> OwnerClass {
        OwnerClass(page.0 % self.0)
    }

    /// The class of the page that comes `entries` entries after one of `class` in a table.
    pub(crate) fn after(self, class: OwnerClass, entries: u32) -> OwnerClass {
        OwnerClass((class.0 + entries % self.0) % self.0)
    }

    /// Entries from one of `start` to the next one of `class`.
    fn since(self, start: OwnerClass, class: OwnerClass) -> u32 {
        (class.0 + self.0 - start.0) % self.0
    }
}

/// The shard rank that holds a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnerClass(u32);

impl OwnerClass {
    /// Its place among all.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Pages that follow each other in a table and are to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    /// The class of the first, where the table says it; else it is the least full one.
    pub(crate) start: Option<OwnerClass>,
    pub(crate) pages: u32,
}

/// Numbers of pages by class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClassCounts(Vec<u32>);

impl ClassCounts {
    /// No pages.
    pub(crate) fn none(ranks: ShardRanks) -> Self {
        Self(vec![0; ranks.0 as usize])
    }

    pub(crate) fn ranks(&self) -> ShardRanks {
        ShardRanks::new(u32::try_from(self.0.len()).unwrap_or(u32::MAX))
    }

    /// One page more.
    pub(crate) fn add(&mut self, page: PageId) {
        *self.of_owner(page) += 1;
    }

    /// One page less.
    pub(crate) fn remove(&mut self, page: PageId) {
        *self.of_owner(page) -= 1;
    }

    fn of_owner(&mut self, page: PageId) -> &mut u32 {
        let class = self.ranks().owner(page);
        &mut self.0[class.index()]
    }

    /// As many pages more as `other` has.
    pub(crate) fn add_all(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(count, more)| *count += more);
    }

    /// A chain's pages more.
    pub(crate) fn add_chain(&mut self, start: OwnerClass, pages: u32) {
        let chain = Self(self.shares(start, pages).collect());
        self.add_all(&chain);
    }

    /// All pages.
    pub(crate) fn sum(&self) -> u32 {
        self.0.iter().sum()
    }

    /// The longest chain that can be had wherever it starts: as many pages as the fullest class has free, of every class.
    pub(crate) fn certain(&self) -> u32 {
        self.0.iter().copied().min().unwrap_or(0).saturating_mul(self.ranks().0)
    }

    /// The longest chain that can be had from `start` on: it ends before the first entry whose class has no page left.
    pub(crate) fn longest(&self, start: OwnerClass) -> u32 {
        let ranks = self.ranks();
        let ends = self.0.iter().zip(0..).map(|(count, class)| {
            count.saturating_mul(ranks.0).saturating_add(ranks.since(start, OwnerClass(class)))
        });
        ends.min().unwrap_or(0)
    }

    /// The class from which on most pages can be had in turn, of several the lowest.
    pub(crate) fn best(&self) -> OwnerClass {
        self.ranks().classes().rev().max_by_key(|class| self.longest(*class)).unwrap_or(OwnerClass(0))
    }

    /// The class with most pages, of several the lowest.
    pub(crate) fn least_full(&self) -> OwnerClass {
        let most = self.0.iter().max();
        let class = self.0.iter().zip(0..).find(|(count, _)| Some(*count) == most);
        OwnerClass(class.map_or(0, |(_, class)| class))
    }

    /// Takes a chain's pages away, and says where it starts.
    ///
    /// # Errors
    /// The first class that is short, if one is. Then nothing is taken.
    fn reserve(&mut self, chain: Chain) -> Result<OwnerClass, OwnerClass> {
        let start = chain.start.unwrap_or_else(|| self.least_full());
        let classes = self.0.iter().zip(self.shares(start, chain.pages)).zip(0..);
        let left = classes
            .map(|((count, share), class)| count.checked_sub(share).ok_or(OwnerClass(class)))
            .collect::<Result<_, _>>()?;
        self.0 = left;
        Ok(start)
    }

    /// What each class supplies of a chain.
    ///
    /// Source: `pages / ranks + ((class - start) mod ranks < pages mod ranks)`.
    fn shares(&self, start: OwnerClass, pages: u32) -> impl Iterator<Item = u32> + use<> {
        let ranks = self.ranks();
        let more = move |class| u32::from(ranks.since(start, OwnerClass(class)) < pages % ranks.0);
        (0..ranks.0).map(move |class| pages / ranks.0 + more(class))
    }
}

/// The free pages of one class, and which of them is taken first.
pub(crate) trait FreeList {
    fn len(&self) -> usize;
    fn put(&mut self, page: PageId);
    fn take(&mut self) -> Option<PageId>;
}

/// First in, first out: a page rests as long as possible before it has a new owner.
impl FreeList for VecDeque<PageId> {
    fn len(&self) -> usize {
        self.len()
    }

    fn put(&mut self, page: PageId) {
        self.push_back(page);
    }

    fn take(&mut self) -> Option<PageId> {
        self.pop_front()
    }
}

/// Free pages, by class.
#[derive(Debug)]
pub(crate) struct Owners<L = VecDeque<PageId>> {
    ranks: ShardRanks,
    lists: Vec<L>,
}

impl Owners {
    /// `total` free pages.
    pub(crate) fn new(total: u32, ranks: ShardRanks) -> Self {
        let pages = |class| (class..total).step_by(ranks.0 as usize).map(PageId).collect();
        Self { ranks, lists: (0..ranks.0).map(pages).collect() }
    }

    /// Every free page.
    #[cfg(test)]
    pub(crate) fn all(&self) -> Vec<PageId> {
        self.lists.iter().flatten().copied().collect()
    }
}

impl<L: FreeList> Owners<L> {
    pub(crate) fn ranks(&self) -> ShardRanks {
        self.ranks
    }

    /// Free pages.
    pub(crate) fn counts(&self) -> ClassCounts {
        ClassCounts(self.lists.iter().map(|list| u32::try_from(list.len()).unwrap_or(u32::MAX)).collect())
    }

    /// Takes the pages of all chains, one chain after the other. Each is counted before the next one chooses where to
    /// start.
    ///
    /// # Errors
    /// The first class that is short, if one is. Then nothing is taken.
    pub(crate) fn take(&mut self, chains: &[Chain]) -> Result<Vec<PageId>, OwnerClass> {
        let (ranks, mut left) = (self.ranks, self.counts());
        let starts = chains.iter().map(|chain| left.reserve(*chain)).collect::<Result<Vec<_>, _>>()?;
        let entries = starts
            .into_iter()
            .zip(chains)
            .flat_map(|(start, chain)| (0..chain.pages).map(move |entry| ranks.after(start, entry)));
        Ok(entries.filter_map(|class| self.lists[class.index()].take()).collect())
    }

    /// Takes a page back. It can be had at once.
    pub(crate) fn put(&mut self, page: PageId) {
        self.lists[self.ranks.owner(page).index()].put(page);
    }
}

#[cfg(test)]
mod tests;
