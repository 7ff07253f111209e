//! Which pages of the pool belong to whom. One allocator per instance: a page id is valid on every rank (mirrored
//! tables), and with KV sharding it is a logical one, which one rank holds. A page is free, or one request's own, or in
//! the prefix cache, where several requests may read it and nobody writes it. In a model with state per request, a state
//! slot is free, or one request's own, or it holds a stored state of the prefix cache, which gives it up whenever a
//! request needs it. Not for which free page comes next (`owners`), nor for the bytes in pages and slots (`pool`), nor
//! for who is let in when (`scheduler`).

use std::collections::VecDeque;

use kvferry_plan::{PageId, PageTable, PrefixBlock, SlotId};

use crate::{
    owners::{Chain, ClassCounts, OwnerClass, Owners, ShardRanks},
    prefix::{Evicted, Found, Pin, Prefixes},
};

/// What loses its owner, and is told so before it has a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retired {
    Page(PageId),
    Slot(SlotId),
}

/// Whose place a stored state may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spare {
    /// Nobody's: only a free slot will do.
    Free,
    /// If no slot is free, that of the stored state that was used longest ago.
    Oldest,
}

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
    begins_with: Option<SlotId>,
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

    /// The stored state to copy into the slot before anything is computed, and before anything else is done with the
    /// pages. `None` when the request computes its prompt from the beginning, when its state comes from elsewhere, or when
    /// the slot holds that state already.
    pub(crate) fn begins_with(&self) -> Option<SlotId> {
        self.begins_with
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
    owners: Owners,
    cache: Option<(Prefixes, PrefixBlock)>,
    /// Free state slots, in a model that has such state.
    slots: Option<VecDeque<SlotId>>,
}

impl Pages {
    /// `total` free pages, dealt over the `ranks`. Prefixes are shared in units of `block`, if there is one.
    pub(crate) fn new(total: u32, ranks: ShardRanks, block: Option<PrefixBlock>) -> Self {
        let cache = block.and_then(|block| Some((Prefixes::new(block, ranks)?, block)));
        Self { total, owners: Owners::new(total, ranks), cache, slots: None }
    }

    /// The same with `count` state slots: one for each request, and what is left for stored states.
    pub(crate) fn with_slots(self, count: u32) -> Self {
        Self { slots: Some((0..count).map(SlotId).collect()), ..self }
    }

    /// Pages of the pool.
    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    /// Pages that any request can have: free ones, and cached ones that no request reads. With KV sharding as many as the
    /// fullest rank has left, of every rank: a request needs them of all.
    pub(crate) fn free(&self) -> u32 {
        self.available().certain()
    }

    /// Pages that requests have or read.
    pub(crate) fn held(&self) -> u32 {
        self.total - self.available().sum()
    }

    /// Pages in the prefix cache, whoever reads them.
    pub(crate) fn cached(&self) -> u32 {
        self.count(Prefixes::blocks)
    }

    /// State slots that can be had: free ones, and those that hold a stored state; 0 in a model without such state.
    pub(crate) fn slots_free(&self) -> u32 {
        let free = self.slots.as_ref().map_or(0, VecDeque::len);
        u32::try_from(free).unwrap_or(u32::MAX).saturating_add(self.slots_cached())
    }

    /// State slots that hold a stored state. A request that needs one gets it.
    pub(crate) fn slots_cached(&self) -> u32 {
        let stored = self.cache.as_ref().map_or(0, |(cache, _)| cache.states());
        u32::try_from(stored).unwrap_or(u32::MAX)
    }

    /// Pages that are free or can be evicted.
    fn available(&self) -> ClassCounts {
        let mut available = self.owners.counts();
        if let Some((cache, _)) = &self.cache {
            available.add_all(cache.evictable());
        }
        available
    }

    fn count(&self, blocks: impl Fn(&Prefixes) -> usize) -> u32 {
        let Some((cache, block)) = &self.cache else { return 0 };
        u32::try_from(blocks(cache)).unwrap_or(u32::MAX).saturating_mul(block.pages)
    }

    /// The prefix of `prompt` whose rows are here, never all of it. Good until anything else is done with the pages.
    pub(crate) fn find(&self, prompt: &[u32]) -> Found {
        self.cache.as_ref().map(|(cache, _)| cache.find(prompt)).unwrap_or_default()
    }

    /// What of it a request can begin with that computes the rest: in a model with state per request, only what ends
    /// where a state is stored.
    pub(crate) fn resumable(&self, found: Found) -> Found {
        match &self.cache {
            Some((cache, _)) if self.slots.is_some() => cache.resumable(found),
            _ => found,
        }
    }

    /// Where a prompt is cut so that its state can be stored, behind the `cached` tokens that it begins with: where the
    /// rows end that an earlier prompt left (these two have `seen` blocks in common, and others may have them too), and
    /// at the last block that a repeated prompt could begin with.
    pub(crate) fn stops(&self, prompt_tokens: u64, seen: usize, cached: u64) -> Vec<u64> {
        let Some((_, block)) = self.cache.as_ref().filter(|_| self.slots.is_some()) else {
            return Vec::new();
        };
        let last = prompt_tokens.saturating_sub(1) / block.tokens.max(1);
        let mut stops: Vec<u64> = [seen as u64, last].map(|blocks| blocks * block.tokens).into();
        stops.retain(|stop| *stop > cached);
        stops.dedup();
        stops
    }

    /// Whether states are stored, and `tokens` tokens are whole blocks.
    pub(crate) fn ends_block(&self, tokens: u64) -> bool {
        let block = self.cache.as_ref().filter(|_| self.slots.is_some());
        block.is_some_and(|(_, block)| tokens > 0 && tokens.is_multiple_of(block.tokens))
    }

    /// Pages that can be had for a request that shares what was `found`: its own part counts, also where others read
    /// it. As long as nothing else is done, so many can be taken.
    pub(crate) fn free_for(&self, found: &Found) -> u32 {
        let mut available = self.available();
        let start = found.rotation().unwrap_or_else(|| available.best());
        available.add_chain(start, self.count(|_| found.pinned()));
        available.longest(start)
    }

    /// Takes `count` pages, the first of which are those that were `found`, and a slot if requests have one; or nothing.
    /// What is evicted for them is told to `retire`, before it has its new owner.
    pub(crate) fn take(
        &mut self,
        count: u32,
        found: Found,
        mut retire: impl FnMut(Retired),
    ) -> Option<Lease> {
        if count > self.free_for(&found) || (self.slots.is_some() && self.slots_free() == 0) {
            return None;
        }
        let (mut table, mut pin, mut cached, mut state) = (Vec::new(), Pin::default(), 0, None);
        let shared = self.count(|_| found.blocks());
        let goes_on = found.rotation().map(|rotation| self.owners.ranks().after(rotation, shared));
        let start = Some(goes_on.unwrap_or_else(|| self.seed(count)));
        if let Some((cache, block)) = &mut self.cache {
            cached = block.tokens.saturating_mul(found.blocks() as u64);
            table = cache.pages(&found);
            state = cache.resume(&found);
            pin = cache.pin(found);
        }
        let own = Chain { start, pages: count.saturating_sub(shared) };
        // Enough can be had, and what was found is held now.
        let Some(pages) = self.evict_for(own, &mut retire) else {
            if let Some((cache, _)) = &mut self.cache {
                cache.unpin(pin);
            }
            return None;
        };
        // The state that it begins with is the one used last: when it has to make room, no other is left, and the
        // request takes it over as it lies.
        let slot = self.spare(Spare::Oldest, &mut retire);
        let begins_with = state.filter(|_| state != slot);
        let mut own = vec![false; table.len()];
        table.extend(pages);
        own.resize(table.len(), true);
        Some(Lease { table: PageTable(table), own, pin, cached, slot, begins_with })
    }

    /// Where the table of `pages` pages begins that goes on from nothing: at the least full class, unless its pages can only be had
    /// from another one on.
    fn seed(&self, pages: u32) -> OwnerClass {
        let (available, least_full) = (self.available(), self.owners.counts().least_full());
        if available.longest(least_full) >= pages { least_full } else { available.best() }
    }

    /// Takes a chain's pages. While a class is short it evicts what nobody reads.
    fn evict_for(&mut self, chain: Chain, retire: &mut impl FnMut(Retired)) -> Option<Vec<PageId>> {
        loop {
            let short = match self.owners.take(&[chain]) {
                Ok(pages) => return Some(pages),
                Err(short) => short,
            };
            let evicted = self.cache.as_mut()?.0.evict(short)?;
            self.accept(evicted, retire);
        }
    }

    fn accept(&mut self, evicted: Evicted, retire: &mut impl FnMut(Retired)) {
        for page in evicted.pages {
            retire(Retired::Page(page));
            self.owners.put(page);
        }
        if let (Some(slots), Some(slot)) = (&mut self.slots, evicted.state) {
            retire(Retired::Slot(slot));
            slots.push_back(slot);
        }
    }

    /// A slot for a new owner.
    fn spare(&mut self, spare: Spare, retire: &mut impl FnMut(Retired)) -> Option<SlotId> {
        let free = self.slots.as_mut()?.pop_front();
        if free.is_some() || spare == Spare::Free {
            return free;
        }
        let slot = self.cache.as_mut()?.0.evict_state()?;
        retire(Retired::Slot(slot));
        Some(slot)
    }

    /// Lets others read the blocks of a request whose cache is complete for `tokens`, from the first one on. They are
    /// not to be written any more.
    pub(crate) fn share(&mut self, lease: &mut Lease, tokens: &[u32]) {
        let Some((cache, block)) = &mut self.cache else { return };
        let pages = block.pages as usize;
        for (k, tokens) in tokens.chunks_exact(cache.block()).enumerate().skip(lease.pin.blocks()) {
            let entries = k * pages..(k + 1) * pages;
            let Some(of_block) = lease.table.0.get(entries.clone()) else { return };
            // Two requests that compute the same may have begun with different owners: one table goes on, not both.
            if of_block.first().is_some_and(|first| !cache.continues(&lease.pin, *first)) {
                return;
            }
            if cache.extend(&mut lease.pin, tokens, of_block) {
                lease.own.iter_mut().skip(entries.start).take(pages).for_each(|own| *own = false);
            }
        }
    }

    /// Shares `tokens`, which are whole blocks, and stores the state after them for later requests: `copy` puts what is in
    /// the first slot, the request's, into the second. Nothing is stored when the state is there already, or when no slot
    /// can be spared; no request ever loses its own.
    ///
    /// # Errors
    /// What `copy` says; then nothing is stored.
    pub(crate) fn store<E>(
        &mut self,
        lease: &mut Lease,
        tokens: &[u32],
        spare: Spare,
        mut retire: impl FnMut(Retired),
        copy: impl FnOnce(SlotId, SlotId) -> Result<(), E>,
    ) -> Result<(), E> {
        let stored = self.slots_cached();
        let spared = if spare == Spare::Oldest { stored } else { 0 };
        if !self.ends_block(tokens.len() as u64) || self.slots_free() - stored + spared == 0 {
            return Ok(());
        }
        self.share(lease, tokens);
        let (Some(own), Some(node), Some((cache, _))) = (lease.slot, lease.pin.last(), &mut self.cache)
        else {
            return Ok(());
        };
        if lease.pin.blocks() * cache.block() != tokens.len() || cache.touch(node).is_some() {
            return Ok(());
        }
        let Some(slot) = self.spare(spare, &mut retire) else { return Ok(()) };
        let copied = copy(own, slot);
        let unused = match (&copied, &mut self.cache) {
            (Ok(()), Some((cache, _))) => cache.keep(node, slot).err(),
            _ => Some(slot),
        };
        if let Some(slots) = &mut self.slots {
            slots.extend(unused);
        }
        copied
    }

    /// Takes a lease's pages and slot back. `retire` is called for each that loses its last owner, before it can have a
    /// new one; a page of the prefix cache keeps its content until it is evicted.
    pub(crate) fn give_back(&mut self, lease: Lease, mut retire: impl FnMut(Retired)) {
        if let Some((cache, _)) = &mut self.cache {
            cache.unpin(lease.pin);
        }
        if let (Some(slots), Some(slot)) = (&mut self.slots, lease.slot) {
            retire(Retired::Slot(slot));
            slots.push_back(slot);
        }
        for (page, own) in lease.table.0.into_iter().zip(lease.own) {
            if own {
                retire(Retired::Page(page));
                self.owners.put(page);
            }
        }
    }
}

#[cfg(test)]
mod tests;
