//! Pages, slots and prefix cache against a model that remembers what was written where.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// What a page holds: all tokens up to the end of its block, and which page of the block it is.
type Content = (Vec<u32>, usize);

/// A request that has its pages.
struct Reader {
    lease: Lease,
    tokens: Vec<u32>,
    /// Tokens that its state has taken in.
    filled: usize,
    /// Computes its prompt; otherwise rows and state come from elsewhere.
    computes: bool,
}

/// The pages, what was written into them, and what may be said about both.
struct World {
    pages: Pages,
    ranks: u32,
    block: PrefixBlock,
    content: BTreeMap<PageId, Content>,
    retired: BTreeMap<PageId, u32>,
    slots: u32,
    /// What the state in a slot has taken in.
    states: BTreeMap<SlotId, Vec<u32>>,
    /// All tokens of every state that was stored.
    stored: Vec<Vec<u32>>,
    /// A stored state had to make room.
    forgotten: bool,
    readers: Vec<Reader>,
    /// Every list of tokens that was shared.
    shared: Vec<Vec<u32>>,
    evicted: bool,
}

impl World {
    fn new(total: u32, block: PrefixBlock) -> Self {
        Self::with_slots(total, block, 0)
    }

    /// Of a model with state, unless there are no slots.
    fn with_slots(total: u32, block: PrefixBlock, slots: u32) -> Self {
        Self::sharded(total, 1, block, slots)
    }

    /// With pages that are dealt over ranks.
    fn sharded(total: u32, ranks: u32, block: PrefixBlock, slots: u32) -> Self {
        let pages = Pages::new(total, ShardRanks::new(ranks), Some(block));
        Self {
            pages: if slots > 0 { pages.with_slots(slots) } else { pages },
            ranks,
            block,
            slots,
            states: BTreeMap::new(),
            stored: Vec::new(),
            forgotten: false,
            content: BTreeMap::new(),
            retired: BTreeMap::new(),
            readers: Vec::new(),
            shared: Vec::new(),
            evicted: false,
        }
    }

    fn expected(&self, tokens: &[u32], entry: usize) -> Content {
        let (per, block) = (self.block.pages as usize, self.block.tokens as usize);
        let end = ((entry / per + 1) * block).min(tokens.len());
        (tokens[..end].to_vec(), entry % per)
    }

    /// Takes pages for `tokens` tokens of which `prompt` are known, and writes all of them but the found ones.
    fn admit(&mut self, prompt: usize, tokens: Vec<u32>) {
        self.admit_for(true, prompt, tokens);
    }

    /// The same for one that computes its prompt, or for one whose rows and state come from elsewhere.
    fn admit_for(&mut self, computes: bool, prompt: usize, tokens: Vec<u32>) {
        let count = (tokens.len() as u32).div_ceil(self.block.tokens as u32) * self.block.pages;
        let found = self.pages.find(&tokens[..prompt]);
        let blocks = found.blocks();
        let best = self.shared.iter().map(|other| {
            let common = other.iter().zip(&tokens[..prompt - 1]).take_while(|(a, b)| a == b).count();
            common / self.block.tokens as usize
        });
        let best = best.max().unwrap_or(0);
        assert!(blocks <= best, "more was found than was ever shared");
        assert!(self.evicted || blocks == best, "found {blocks} blocks of {best}");
        let found = if computes { self.pages.resumable(found) } else { found };
        let (blocks, free) = (found.blocks(), self.pages.free_for(&found));
        assert!(free >= self.pages.free(), "what any request can have is more than this one can");
        assert!(
            free == self.pages.total() || !self.readers.is_empty(),
            "nobody has the pages that are missing"
        );
        if computes && self.slots > 0 {
            let known = self.stored.iter().filter(|stored| tokens[..prompt - 1].starts_with(stored));
            let best = known.map(Vec::len).max().unwrap_or(0) / self.block.tokens as usize;
            assert!(blocks <= best, "a state was found that was never stored");
            assert!(self.forgotten || blocks == best, "goes on after {blocks} blocks of {best}");
        }
        let mut gone = Vec::new();
        let lease = self.pages.take(count, found, |it| gone.push(it));
        // A stored state never keeps a request out.
        let slots_held = self.slots > 0 && self.readers.len() == self.slots as usize;
        let Some(lease) = lease else {
            assert!((count > free || slots_held) && gone.is_empty());
            return;
        };
        assert!(count <= free && !slots_held);
        assert_eq!(lease.table().0.len(), count as usize);
        let owners = lease.table().0.windows(2).map(|two| [two[0], two[1]].map(|page| page.0 % self.ranks));
        assert!(
            owners.into_iter().all(|[owner, next]| next == (owner + 1) % self.ranks),
            "{:?}",
            lease.table()
        );
        assert_eq!(lease.cached(), blocks as u64 * self.block.tokens);
        assert!(lease.cached() < prompt as u64);
        self.lose(gone);
        for (entry, page) in lease.table().0.iter().enumerate() {
            if lease.own[entry] {
                // Nobody else has it, and what it held has gone.
                assert!(
                    !self.readers.iter().any(|r| r.lease.table().0.contains(page)),
                    "{page} has two writers"
                );
                let written = self.expected(&tokens, entry);
                assert!(self.content.insert(*page, written).is_none(), "{page} still held something");
            }
        }
        let mut filled = prompt;
        if computes {
            filled = lease.cached() as usize;
        }
        if let Some(own) = lease.slot() {
            if computes && filled > 0 {
                let from = lease.begins_with().unwrap_or(own);
                assert_eq!(
                    self.states[&from],
                    tokens[..filled],
                    "the state of {from} is that of another prefix"
                );
            }
            self.states.insert(own, tokens[..filled].to_vec());
        }
        assert!(lease.begins_with().is_none() || computes);
        self.readers.push(Reader { lease, tokens, filled, computes });
    }

    /// What was retired for somebody else had no reader.
    fn lose(&mut self, gone: Vec<Retired>) {
        for it in gone {
            match it {
                Retired::Page(page) => {
                    assert!(
                        !self.readers.iter().any(|r| r.lease.table().0.contains(&page)),
                        "{page} was held"
                    );
                    *self.retired.entry(page).or_default() += 1;
                    self.content.remove(&page);
                    self.evicted = true;
                }
                Retired::Slot(slot) => {
                    assert!(self.readers.iter().all(|r| r.lease.slot() != Some(slot)), "{slot} was held");
                    self.forgotten = true;
                }
            }
        }
    }

    /// A request computes up to the end of its block `to` from where it is, if it has one, and its state is stored.
    fn store(&mut self, at: usize, to: usize, spare: Spare) {
        let stored = self.pages.slots_cached();
        let free = self.pages.slots_free() - stored;
        let Reader { lease, tokens, filled, computes } = &mut self.readers[at];
        let block = self.block.tokens as usize;
        let (Some(own), end) = (lease.slot(), (*filled / block + 1 + to) * block) else { return };
        if !*computes || end > tokens.len() {
            return;
        }
        *filled = end;
        let tokens = tokens[..end].to_vec();
        self.states.insert(own, tokens.clone());
        let (mut gone, states) = (Vec::new(), &mut self.states);
        let copy = |from, to| {
            let state = states[&from].clone();
            states.insert(to, state);
            Ok::<_, ()>(())
        };
        self.pages.store(lease, &tokens, spare, |it| gone.push(it), copy).unwrap();
        assert!(gone.is_empty() || (spare == Spare::Oldest && free == 0));
        self.lose(gone);
        if (free > 0 || (spare == Spare::Oldest && stored > 0)) && self.remember(at, &tokens) {
            let (tree, _) = self.pages.cache.as_ref().unwrap();
            assert!(tree.all_states().iter().any(|(all, _)| *all == tokens), "it was not stored");
            self.stored.push(tokens);
        }
    }

    /// A request has shared its `tokens`, or those before it met a table of the same that begins with another owner.
    fn remember(&mut self, at: usize, tokens: &[u32]) -> bool {
        let (block, lease) = (self.block.tokens as usize, &self.readers[at].lease);
        let (blocks, all) = (lease.pin.blocks(), tokens.len() / block);
        if blocks < all {
            let first = self.pages.find(&[tokens, &[0]].concat()).rotation();
            let own = self.pages.owners.ranks().owner(lease.table().0[0]);
            assert!(first.is_some_and(|first| first != own), "it has shared {blocks} blocks of {all}");
        }
        self.shared.push(tokens[..blocks.min(all) * block].to_vec());
        blocks >= all
    }

    /// A request ends; a good end shares what it has.
    fn end(&mut self, at: usize, good: bool) {
        if good {
            let Reader { lease, tokens, .. } = &mut self.readers[at];
            self.pages.share(lease, tokens);
            let tokens = tokens.clone();
            self.remember(at, &tokens);
        }
        let Reader { lease, .. } = self.readers.swap_remove(at);
        let own: Vec<PageId> =
            lease.table().0.iter().zip(&lease.own).filter(|(_, own)| **own).map(|(page, _)| *page).collect();
        let slot = lease.slot().map(Retired::Slot);
        let mut gone = Vec::new();
        self.pages.give_back(lease, |it| gone.push(it));
        assert_eq!(gone, slot.into_iter().chain(own.iter().copied().map(Retired::Page)).collect::<Vec<_>>());
        for page in own {
            *self.retired.entry(page).or_default() += 1;
            self.content.remove(&page);
        }
    }

    fn check(&self) {
        let (tree, _) = self.pages.cache.as_ref().unwrap();
        let cached = tree.all_pages();
        let free = self.pages.owners.all();
        let mut all: Vec<PageId> = free.iter().copied().chain(cached.iter().copied()).collect();
        for Reader { lease, tokens, .. } in &self.readers {
            for (entry, page) in lease.table().0.iter().enumerate() {
                assert_eq!(
                    self.content[page],
                    self.expected(tokens, entry),
                    "{page} does not hold its tokens"
                );
                assert_eq!(!lease.own[entry], cached.contains(page));
                if lease.own[entry] {
                    all.push(*page);
                }
            }
        }
        all.sort_unstable();
        assert_eq!(
            all,
            (0..self.pages.total()).map(PageId).collect::<Vec<_>>(),
            "a page is lost, or owned twice"
        );
        self.check_slots();
        let mut readers: BTreeMap<_, u32> = tree.readers().into_keys().map(|node| (node, 0)).collect();
        for node in self.readers.iter().flat_map(|reader| reader.lease.pin.nodes()) {
            *readers.get_mut(node).unwrap() += 1;
        }
        assert_eq!(tree.readers(), readers);
        let read: BTreeSet<PageId> = self.readers.iter().flat_map(|r| r.lease.table().0.clone()).collect();
        assert_eq!(self.pages.cached() as usize, cached.len());
        // What can be had of each rank, and of all.
        let can_be_had = [free, tree.all_unread()].concat();
        let of = |rank| can_be_had.iter().filter(|page| page.0 % self.ranks == rank).count() as u32;
        let held = self.pages.total() - can_be_had.len() as u32;
        assert_eq!(self.pages.free(), self.ranks * (0..self.ranks).map(of).min().unwrap());
        assert_eq!(self.pages.held(), held);
        assert!(held as usize >= read.len());
        // Each request takes at most one page more of a rank than of another, and so do the blocks that it holds when
        // they are not those of its table.
        let uneven = 2 * (self.ranks - 1) * self.readers.len() as u32;
        assert!(self.pages.free() + held + uneven >= self.pages.total(), "ranks are not filled alike");
    }

    fn check_slots(&self) {
        let (tree, _) = self.pages.cache.as_ref().unwrap();
        let stored = tree.all_states();
        for (tokens, slot) in &stored {
            assert_eq!(self.states[slot], *tokens, "{slot} holds another state");
        }
        for Reader { lease, tokens, filled, .. } in &self.readers {
            if let Some(slot) = lease.slot() {
                assert_eq!(self.states[&slot], tokens[..*filled], "{slot} is not its request's");
            }
        }
        let held = self.readers.iter().filter_map(|reader| reader.lease.slot());
        let free = self.pages.slots.iter().flatten().copied();
        let mut all: Vec<SlotId> = stored.iter().map(|(_, slot)| *slot).chain(held).chain(free).collect();
        all.sort_unstable();
        assert_eq!(all, (0..self.slots).map(SlotId).collect::<Vec<_>>(), "a slot is lost, or owned twice");
        assert_eq!(self.pages.slots_cached() as usize, stored.len());
        let had = if self.slots > 0 { self.slots as usize - self.readers.len() } else { 0 };
        assert_eq!(self.pages.slots_free() as usize, had);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Admit { prompt: Vec<u32>, answer: u32, computes: bool },
    Store { at: prop::sample::Index, to: usize, oldest: bool },
    End { at: prop::sample::Index, good: bool },
}

fn steps(longest: usize) -> impl Strategy<Value = Vec<Step>> {
    // Few ids, so that prompts often begin alike.
    let prompt = prop::collection::vec(prop_oneof![9 => Just(0_u32), 1 => 1_u32..3], 1..longest);
    let step = prop_oneof![
        3 => (prompt, 0_u32..6, prop::bool::weighted(0.8))
            .prop_map(|(prompt, answer, computes)| Step::Admit { prompt, answer, computes }),
        2 => (any::<prop::sample::Index>(), 0_usize..4, any::<bool>())
            .prop_map(|(at, to, oldest)| Step::Store { at, to, oldest }),
        3 => (any::<prop::sample::Index>(), prop::bool::weighted(0.8))
            .prop_map(|(at, good)| Step::End { at, good }),
    ];
    prop::collection::vec(step, 0..60)
}

fn run(mut world: World, steps: Vec<Step>) -> World {
    for step in steps {
        match step {
            Step::Admit { prompt, answer, computes } => {
                let known = prompt.len();
                let tokens = prompt.into_iter().chain((0..answer).map(|n| n + 7)).collect();
                world.admit_for(computes, known, tokens);
            }
            Step::Store { at, to, oldest } if !world.readers.is_empty() => {
                let spare = if oldest { Spare::Oldest } else { Spare::Free };
                world.store(at.index(world.readers.len()), to, spare);
            }
            Step::End { at, good } if !world.readers.is_empty() => {
                world.end(at.index(world.readers.len()), good);
            }
            Step::Store { .. } | Step::End { .. } => {}
        }
        world.check();
    }
    world
}

proptest! {
    #[test]
    fn no_page_has_two_writers_none_is_lost_and_none_that_is_read_changes(
        total in 0_u32..30, ranks in prop_oneof![3 => Just(1_u32), 2 => 2_u32..5],
        pages in 1_u32..4, tokens in 1_u64..4, slots in 0_u32..6, steps in steps(24),
    ) {
        let (total, block) = (total / ranks * ranks, PrefixBlock { pages, tokens: tokens * u64::from(pages) });
        let mut world = run(World::sharded(total, ranks, block, slots), steps);
        while !world.readers.is_empty() {
            world.end(0, true);
            world.check();
        }
        prop_assert_eq!((world.pages.free(), world.pages.slots_free()), (total, slots));
    }

    /// The same calls have the same answers: every rank could have its own.
    #[test]
    fn mirrored_pages_stay_alike(ranks in 1_u32..5, rounds in 1_u32..9, steps in steps(24)) {
        let world = || World::sharded(ranks * rounds, ranks, PrefixBlock { pages: 1, tokens: 2 }, 0);
        let [one, other] = [run(world(), steps.clone()), run(world(), steps)];
        let tables = |world: &World| -> Vec<PageTable> {
            world.readers.iter().map(|reader| reader.lease.table().clone()).collect()
        };
        prop_assert_eq!(tables(&one), tables(&other));
        prop_assert_eq!(one.pages.owners.all(), other.pages.owners.all());
    }

    /// Without pressure everything that was shared is found.
    #[test]
    fn the_longest_prefix_is_found(steps in steps(16), ranks in 1_u32..5, stateful in any::<bool>()) {
        let slots = if stateful { 200 } else { 0 };
        let world = run(World::sharded(3600, ranks, PrefixBlock { pages: 2, tokens: 3 }, slots), steps);
        prop_assert!(!world.evicted && !world.forgotten);
    }

    #[test]
    fn without_blocks_it_is_a_free_list(total in 0_u32..40, counts in prop::collection::vec(0_u32..12, 0..40)) {
        let mut pages = Pages::new(total, ShardRanks::new(1), None);
        let mut held = Vec::new();
        for count in counts {
            let free = pages.free();
            match pages.take(count, pages.find(&[1, 2, 3]), |_| unreachable!()) {
                Some(mut lease) => {
                    prop_assert!(count <= free);
                    pages.share(&mut lease, &[1, 2, 3]);
                    held.push(lease);
                }
                None => {
                    prop_assert!(count > free);
                    let mut retired = 0;
                    if let Some(lease) = held.pop() {
                        let pages_of = lease.table().0.len();
                        pages.give_back(lease, |_| retired += 1);
                        prop_assert_eq!(retired, pages_of);
                    }
                }
            }
            prop_assert_eq!(pages.cached(), 0);
        }
    }
}

#[test]
fn what_was_read_last_stays_longest() {
    let mut world = World::new(6, PrefixBlock { pages: 1, tokens: 1 });
    for id in [1, 2, 3] {
        world.admit(1, vec![id, id + 10]);
        world.end(0, true);
    }
    assert_eq!((world.pages.free(), world.pages.cached()), (6, 6));
    // Somebody reads the first one again; then four pages are wanted.
    world.admit(2, vec![1, 11]);
    world.end(0, true);
    world.admit(1, vec![8, 9, 10, 11]);
    let found = |id| world.pages.find(&[id, id + 10, 0]).blocks();
    assert_eq!((found(1), found(2), found(3)), (2, 0, 0));
}

#[test]
fn two_that_compute_the_same_keep_their_own_pages_and_leave_one_copy() {
    let mut world = World::new(8, PrefixBlock { pages: 1, tokens: 2 });
    let tokens = vec![1, 2, 3, 4, 5];
    world.admit(5, tokens.clone());
    world.admit(5, tokens.clone());
    assert_eq!(world.readers[1].lease.cached(), 0, "the first has not finished");
    world.check();
    world.end(0, true);
    world.check();
    // The slower one goes on reading its own pages after it shared: they are not those of the cache.
    let Reader { lease, .. } = &mut world.readers[0];
    world.pages.share(lease, &tokens);
    assert_eq!(lease.own, [true, true, true]);
    assert_eq!(world.pages.cached(), 2);
    world.check();
    world.end(0, true);
    assert_eq!((world.pages.free(), world.pages.cached()), (8, 2));
}

#[test]
fn states_make_room_for_requests_the_one_used_longest_ago_first() {
    let mut world = World::with_slots(20, PrefixBlock { pages: 1, tokens: 2 }, 4);
    for id in [1, 2, 3] {
        world.admit(4, vec![id; 4]);
        world.store(0, 0, Spare::Free);
        world.end(0, true);
        world.check();
    }
    world.admit(3, vec![7; 3]);
    assert_eq!((world.pages.slots_free(), world.pages.slots_cached()), (3, 3));
    let goes_on = |world: &World, id| world.pages.resumable(world.pages.find(&[id; 3])).blocks();
    assert_eq!([1, 2, 3].map(|id| goes_on(&world, id)), [1, 1, 1]);
    // It goes on from the first, which makes the second the oldest, and needs a slot itself.
    world.admit(3, vec![1; 3]);
    assert!(world.readers[1].lease.begins_with().is_some());
    assert_eq!([1, 2, 3].map(|id| goes_on(&world, id)), [1, 0, 1]);
    // Rows outlive the state: who needs no state reads them still.
    assert_eq!(world.pages.find(&[2; 3]).blocks(), 1);
    world.admit(3, vec![8; 3]);
    // Only the state of the first is left: who goes on from it takes it over.
    world.admit(3, vec![1; 3]);
    let last = world.readers.last().unwrap();
    assert_eq!((last.lease.cached(), last.lease.begins_with()), (2, None));
    world.check();
    assert_eq!((world.pages.slots_free(), world.pages.slots_cached()), (0, 0));
    // All slots are held: nobody comes in, and nothing is stored.
    world.admit(3, vec![9; 3]);
    world.store(0, 0, Spare::Oldest);
    world.check();
    assert_eq!((world.readers.len(), world.pages.slots_cached()), (4, 0));
}

#[test]
fn a_state_that_was_not_copied_is_not_stored() {
    let mut world = World::with_slots(4, PrefixBlock { pages: 1, tokens: 2 }, 2);
    world.admit(3, vec![1; 3]);
    let lease = &mut world.readers[0].lease;
    let copied = world.pages.store(lease, &[1, 1], Spare::Oldest, |_| unreachable!(), |_, _| Err("no"));
    assert_eq!(copied, Err("no"));
    world.check();
    assert_eq!((world.pages.slots_free(), world.pages.slots_cached()), (1, 0));
}

/// A prompt is cut where another one went on differently, and at the last block that it could begin with again.
#[test]
fn prompts_are_cut_where_a_state_is_worth_a_slot() {
    let world = World::with_slots(4, PrefixBlock { pages: 1, tokens: 4 }, 1);
    let stops = |prompt, seen, cached| world.pages.stops(prompt, seen, cached);
    assert_eq!(stops(21, 0, 0), [20]);
    assert_eq!(stops(20, 0, 0), [16]);
    assert_eq!(stops(21, 2, 0), [8, 20]);
    assert_eq!(stops(21, 2, 8), [20]);
    assert_eq!(stops(21, 5, 20), [0; 0]);
    assert_eq!(stops(4, 0, 0), [0; 0]);
    assert_eq!(World::new(4, world.block).pages.stops(21, 2, 0), [0; 0]);
}

/// Pages of hand-offs stay, cached ones go, and who waits is let in as soon as every rank has its share.
#[test]
fn under_pressure_a_prompt_waits_for_the_fullest_rank_only() {
    let mut world = World::sharded(16, 4, PrefixBlock { pages: 1, tokens: 1 }, 0);
    let tokens = |id, count| vec![id; count];
    world.admit(6, tokens(1, 6));
    world.admit(5, tokens(2, 5));
    world.end(1, true);
    assert_eq!((world.pages.free(), world.pages.held(), world.pages.cached()), (8, 6, 5));
    // Two pages of each rank: free ones, and of the five cached ones those that it takes to have them.
    world.admit(8, tokens(3, 8));
    world.check();
    assert_eq!((world.readers.len(), world.pages.held(), world.pages.cached()), (2, 14, 2));
    // Two ranks have a page left each: who needs a third waits, and nothing is evicted for it.
    assert_eq!(world.pages.free_for(&Found::default()), 2);
    assert_eq!(world.pages.free(), 0);
    world.admit(3, tokens(4, 3));
    assert_eq!((world.readers.len(), world.pages.cached()), (2, 2));
    // The first hand-off is over.
    world.end(0, false);
    world.admit(3, tokens(4, 3));
    world.check();
    assert_eq!(world.readers.len(), 2);
}

/// A page of the first rank is wanted: the block that frees it goes, and not an older one on the other rank.
#[test]
fn a_block_that_frees_nothing_that_is_wanted_stays() {
    let mut world = World::sharded(8, 2, PrefixBlock { pages: 1, tokens: 1 }, 0);
    for tokens in [vec![1, 11], vec![2]] {
        world.admit(1, tokens);
        world.end(0, true);
    }
    world.admit(1, vec![3, 3, 3]);
    world.admit(1, vec![4, 4]);
    assert_eq!((world.pages.owners.counts().sum(), world.pages.cached()), (0, 3));
    world.admit(1, vec![5]);
    world.check();
    let found = |tokens: &[u32]| world.pages.find(tokens).blocks();
    assert_eq!((world.readers.len(), found(&[1, 11, 0]), found(&[2, 0])), (3, 2, 0));
}

#[test]
fn a_prefix_has_one_rotation() {
    let mut world = World::sharded(16, 2, PrefixBlock { pages: 1, tokens: 2 }, 0);
    world.admit(5, vec![1, 1, 2, 2, 3]);
    world.admit(7, vec![1, 1, 2, 2, 4, 4, 5]);
    let owner = |world: &World, at: usize| world.readers[at].lease.table().0[0].0 % 2;
    assert_eq!((owner(&world, 0), owner(&world, 1)), (0, 1), "both start where most is free");
    world.end(0, true);
    world.end(0, true);
    world.check();
    // The second one's third block would have followed pages that begin with the other owner.
    assert_eq!(world.pages.cached(), 2);
    world.admit(7, vec![1, 1, 2, 2, 4, 4, 5]);
    assert_eq!((world.readers[0].lease.cached(), owner(&world, 0)), (4, 0));
    world.end(0, true);
    assert_eq!(world.pages.cached(), 3);
}

/// Who computes a prefix again, because there is no state to go on from, stores one for the pages that are there.
#[test]
fn a_prefix_that_is_computed_again_has_the_same_rotation() {
    let mut world = World::sharded(16, 2, PrefixBlock { pages: 1, tokens: 2 }, 2);
    world.admit(7, vec![1, 1, 1, 1, 1, 1, 5]);
    world.end(0, true);
    let prompt = vec![1, 1, 1, 1, 1, 1, 6];
    let goes_on = |world: &World| world.pages.resumable(world.pages.find(&prompt)).blocks();
    assert_eq!((world.pages.find(&prompt).blocks(), goes_on(&world)), (3, 0));
    let ranks = world.pages.owners.ranks();
    assert_ne!(world.pages.owners.counts().least_full(), ranks.owner(PageId(0)), "it would start elsewhere");
    world.admit(7, prompt.clone());
    world.store(0, 2, Spare::Oldest);
    world.end(0, true);
    world.check();
    assert_eq!(goes_on(&world), 3);
}
