//! Which pages of the pool belong to whom. One allocator per instance: a page id is valid on every rank (mirrored
//! tables). A page is free, or one request's own, or in the prefix cache, where several requests may read it and nobody
//! writes it. In a model with state per request, a request also has one state slot, on every rank the same. Not for the bytes in the pages (`pool`), nor for who is let in when (`scheduler`).

use std::collections::VecDeque;

use kvferry_plan::{PageId, PageTable, PrefixBlock, SlotId};

use crate::prefix::{Found, Pin, Prefixes};

/// The pages of one request. There is no way to clone it or to give it back twice.
#[derive(Debug)]
pub(crate) struct Lease {
    table: PageTable,
    /// By entry of the table: whether the page is this request's own.
    own: Vec<bool>,
    /// The blocks of its prefix that are in the cache. Not all of their pages need to be in the table: when two requests
    /// compute the same block, the pages of the slower one stay its own.
    pin: Pin,
    cached: u64,
    slot: Option<SlotId>,
}

impl Lease {
    /// The pages as the table that every rank uses.
    pub(crate) fn table(&self) -> &PageTable {
        &self.table
    }

    /// The state slot, in a model that has such state.
    pub(crate) fn slot(&self) -> Option<SlotId> {
        self.slot
    }

    /// Tokens at the beginning whose cache lay in the pages when they were taken.
    pub(crate) fn cached(&self) -> u64 {
        self.cached
    }
}

/// The pool's pages.
#[derive(Debug)]
pub(crate) struct Pages {
    total: u32,
    // First in, first out: a page rests as long as possible before it has a new owner.
    free: VecDeque<PageId>,
    cache: Option<(Prefixes, PrefixBlock)>,
    /// Free state slots, in a model that has such state.
    slots: Option<VecDeque<SlotId>>,
}

impl Pages {
    /// `total` free pages. Prefixes are shared in units of `block`, if there is one.
    pub(crate) fn new(total: u32, block: Option<PrefixBlock>) -> Self {
        let cache = block.and_then(|block| Some((Prefixes::new(block)?, block)));
        Self { total, free: (0..total).map(PageId).collect(), cache, slots: None }
    }

    /// The same with a state slot for each of up to `count` requests.
    pub(crate) fn with_slots(self, count: u32) -> Self {
        Self { slots: Some((0..count).map(SlotId).collect()), ..self }
    }

    /// Pages of the pool.
    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    /// Pages that can be had: free ones, and cached ones that no request reads.
    pub(crate) fn free(&self) -> u32 {
        self.count(Prefixes::evictable).saturating_add(self.unused()).min(self.total)
    }

    /// Pages in the prefix cache, whoever reads them.
    pub(crate) fn cached(&self) -> u32 {
        self.count(Prefixes::blocks)
    }

    fn unused(&self) -> u32 {
        u32::try_from(self.free.len()).unwrap_or(self.total)
    }

    fn count(&self, blocks: impl Fn(&Prefixes) -> usize) -> u32 {
        let Some((cache, block)) = &self.cache else { return 0 };
        u32::try_from(blocks(cache)).unwrap_or(u32::MAX).saturating_mul(block.pages)
    }

    /// The prefix of `prompt` that is here, never all of it. Good until anything else is done with the pages.
    pub(crate) fn find(&self, prompt: &[u32]) -> Found {
        self.cache.as_ref().map(|(cache, _)| cache.find(prompt)).unwrap_or_default()
    }

    /// Pages that can be had for a request that shares what was `found`: its own part counts, also where others read
    /// it.
    pub(crate) fn free_for(&self, found: &Found) -> u32 {
        self.free().saturating_add(self.count(|_| found.pinned()))
    }

    /// Takes `count` pages, the first of which are those that were `found`, and a slot if requests have one; or nothing. What is evicted for them is told to
    /// `retire`, before it has its new owner.
    pub(crate) fn take(&mut self, count: u32, found: Found, mut retire: impl FnMut(PageId)) -> Option<Lease> {
        if count > self.free_for(&found) || self.slots.as_ref().is_some_and(VecDeque::is_empty) {
            return None;
        }
        let slot = self.slots.as_mut().and_then(VecDeque::pop_front);
        let (mut table, mut pin, mut cached) = (Vec::new(), Pin::default(), 0);
        if let Some((cache, block)) = &mut self.cache {
            cached = block.tokens.saturating_mul(found.blocks() as u64);
            table = cache.pages(&found);
            pin = cache.pin(found);
        }
        let shared = table.len();
        let wanted = (count as usize).saturating_sub(shared);
        while self.free.len() < wanted {
            // Enough can be had, and what was found is held now.
            let Some(pages) = self.cache.as_mut().and_then(|(cache, _)| cache.evict()) else { break };
            for page in pages {
                retire(page);
                self.free.push_back(page);
            }
        }
        table.extend(self.free.drain(..wanted.min(self.free.len())));
        let own = (0..table.len()).map(|entry| entry >= shared).collect();
        Some(Lease { table: PageTable(table), own, pin, cached, slot })
    }

    /// Lets others read the blocks of a request whose cache is complete for `tokens`, from the first one on. They are
    /// not to be written any more.
    pub(crate) fn share(&mut self, lease: &mut Lease, tokens: &[u32]) {
        let Some((cache, block)) = &mut self.cache else { return };
        let pages = block.pages as usize;
        for (k, tokens) in tokens.chunks_exact(cache.block()).enumerate().skip(lease.pin.blocks()) {
            let entries = k * pages..(k + 1) * pages;
            let Some(of_block) = lease.table.0.get(entries.clone()) else { return };
            if cache.extend(&mut lease.pin, tokens, of_block) {
                lease.own.iter_mut().skip(entries.start).take(pages).for_each(|own| *own = false);
            }
        }
    }

    /// Takes a lease's pages back. `retire` is called for each page that loses its last owner, before it can have a new
    /// one; a page of the prefix cache keeps its content until it is evicted.
    pub(crate) fn give_back(&mut self, lease: Lease, mut retire: impl FnMut(PageId)) {
        if let Some((cache, _)) = &mut self.cache {
            cache.unpin(lease.pin);
        }
        if let (Some(slots), Some(slot)) = (&mut self.slots, lease.slot) {
            slots.push_back(slot);
        }
        for (page, own) in lease.table.0.into_iter().zip(lease.own) {
            if own {
                retire(page);
                self.free.push_back(page);
            }
        }
    }
}

#[cfg(test)]
mod tests;
