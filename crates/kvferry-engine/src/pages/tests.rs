//! Pages and prefix cache against a model that remembers what was written where.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// What a page holds: all tokens up to the end of its block, and which page of the block it is.
type Content = (Vec<u32>, usize);

/// A request that has its pages.
struct Reader {
    lease: Lease,
    tokens: Vec<u32>,
}

/// The pages, what was written into them, and what may be said about both.
struct World {
    pages: Pages,
    block: PrefixBlock,
    content: BTreeMap<PageId, Content>,
    retired: BTreeMap<PageId, u32>,
    readers: Vec<Reader>,
    /// Every list of tokens that was shared.
    shared: Vec<Vec<u32>>,
    evicted: bool,
}

impl World {
    fn new(total: u32, block: PrefixBlock) -> Self {
        Self {
            pages: Pages::new(total, Some(block)),
            block,
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
        let count = (tokens.len() as u32).div_ceil(self.block.tokens as u32) * self.block.pages;
        let found = self.pages.find(&tokens[..prompt]);
        let (blocks, free) = (found.blocks(), self.pages.free_for(&found));
        let best = self.shared.iter().map(|other| {
            let common = other.iter().zip(&tokens[..prompt - 1]).take_while(|(a, b)| a == b).count();
            common / self.block.tokens as usize
        });
        let best = best.max().unwrap_or(0);
        assert!(blocks <= best, "more was found than was ever shared");
        assert!(self.evicted || blocks == best, "found {blocks} blocks of {best}");
        let mut gone = Vec::new();
        let lease = self.pages.take(count, found, |page| gone.push(page));
        let Some(lease) = lease else {
            assert!(count > free && gone.is_empty());
            return;
        };
        assert!(count <= free);
        assert_eq!(lease.table().0.len(), count as usize);
        assert_eq!(lease.cached(), blocks as u64 * self.block.tokens);
        assert!(lease.cached() < prompt as u64);
        self.evicted |= !gone.is_empty();
        for page in gone {
            *self.retired.entry(page).or_default() += 1;
            assert!(!self.readers.iter().any(|r| r.lease.table().0.contains(&page)), "{page} was held");
            self.content.remove(&page);
        }
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
        self.readers.push(Reader { lease, tokens });
    }

    /// A request ends; a good end shares what it has.
    fn end(&mut self, at: usize, good: bool) {
        let Reader { mut lease, tokens } = self.readers.swap_remove(at);
        if good {
            self.pages.share(&mut lease, &tokens);
            self.shared.push(tokens);
        }
        let own: Vec<PageId> =
            lease.table().0.iter().zip(&lease.own).filter(|(_, own)| **own).map(|(page, _)| *page).collect();
        let mut gone = Vec::new();
        self.pages.give_back(lease, |page| gone.push(page));
        assert_eq!(gone, own);
        for page in gone {
            *self.retired.entry(page).or_default() += 1;
            self.content.remove(&page);
        }
    }

    fn check(&self) {
        let (tree, _) = self.pages.cache.as_ref().unwrap();
        let cached = tree.all_pages();
        let mut all: Vec<PageId> = self.pages.free.iter().copied().chain(cached.iter().copied()).collect();
        for Reader { lease, tokens } in &self.readers {
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
        let mut readers: BTreeMap<_, u32> = tree.readers().into_keys().map(|node| (node, 0)).collect();
        for node in self.readers.iter().flat_map(|reader| reader.lease.pin.nodes()) {
            *readers.get_mut(node).unwrap() += 1;
        }
        assert_eq!(tree.readers(), readers);
        let read: BTreeSet<PageId> = self.readers.iter().flat_map(|r| r.lease.table().0.clone()).collect();
        assert_eq!(self.pages.cached() as usize, cached.len());
        let unread = readers.values().filter(|count| **count == 0).count() as u32 * self.block.pages;
        assert_eq!(self.pages.free(), self.pages.free.len() as u32 + unread);
        assert!(self.pages.free() as usize + read.len() <= self.pages.total() as usize);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Admit { prompt: Vec<u32>, answer: u32 },
    End { at: prop::sample::Index, good: bool },
}

fn steps(longest: usize) -> impl Strategy<Value = Vec<Step>> {
    // Few ids, so that prompts often begin alike.
    let prompt = prop::collection::vec(prop_oneof![9 => Just(0_u32), 1 => 1_u32..3], 1..longest);
    let step = prop_oneof![
        (prompt, 0_u32..6).prop_map(|(prompt, answer)| Step::Admit { prompt, answer }),
        (any::<prop::sample::Index>(), prop::bool::weighted(0.8))
            .prop_map(|(at, good)| Step::End { at, good }),
    ];
    prop::collection::vec(step, 0..60)
}

fn run(total: u32, block: PrefixBlock, steps: Vec<Step>) -> World {
    let mut world = World::new(total, block);
    for step in steps {
        match step {
            Step::Admit { prompt, answer } => {
                let known = prompt.len();
                let tokens = prompt.into_iter().chain((0..answer).map(|n| n + 7)).collect();
                world.admit(known, tokens);
            }
            Step::End { at, good } if !world.readers.is_empty() => {
                world.end(at.index(world.readers.len()), good);
            }
            Step::End { .. } => {}
        }
        world.check();
    }
    world
}

proptest! {
    #[test]
    fn no_page_has_two_writers_none_is_lost_and_none_that_is_read_changes(
        total in 0_u32..30, pages in 1_u32..4, tokens in 1_u64..4, steps in steps(24),
    ) {
        let mut world = run(total, PrefixBlock { pages, tokens: tokens * u64::from(pages) }, steps);
        while !world.readers.is_empty() {
            world.end(0, true);
            world.check();
        }
        prop_assert_eq!(world.pages.free(), total);
    }

    /// Without pressure everything that was shared is found.
    #[test]
    fn the_longest_prefix_is_found(steps in steps(16)) {
        let world = run(4000, PrefixBlock { pages: 2, tokens: 3 }, steps);
        prop_assert!(!world.evicted);
    }

    #[test]
    fn without_blocks_it_is_a_free_list(total in 0_u32..40, counts in prop::collection::vec(0_u32..12, 0..40)) {
        let mut pages = Pages::new(total, None);
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
