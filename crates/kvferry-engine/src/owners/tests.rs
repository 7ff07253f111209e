//! The recorded trace of another implementation, and properties against a model that counts by hand.

use std::collections::BTreeSet;

use proptest::prelude::*;
use serde::Deserialize;

use super::*;

/// What the recorded allocator does with a class: what comes back is in front of what is free, or it waits and is
/// sorted in when a class has too little without it.
#[derive(Debug)]
struct Recorded {
    free: VecDeque<PageId>,
    released: Option<VecDeque<PageId>>,
}

impl Recorded {
    fn sort_in(&mut self) {
        self.free.extend(self.released.iter_mut().flat_map(|released| released.drain(..)));
        self.free.make_contiguous().sort_unstable();
    }
}

impl FreeList for Recorded {
    fn len(&self) -> usize {
        self.free.len() + self.released.as_ref().map_or(0, VecDeque::len)
    }

    fn put(&mut self, page: PageId) {
        self.released.as_mut().unwrap_or(&mut self.free).push_front(page);
    }

    fn take(&mut self) -> Option<PageId> {
        self.free.pop_front()
    }
}

#[derive(Deserialize)]
struct Traces {
    traces: Vec<Trace>,
}

#[derive(Deserialize)]
struct Trace {
    shard_size: u32,
    page_size: u32,
    tokens_per_rank: u32,
    need_sort: bool,
    ops: Vec<Recording>,
}

#[derive(Deserialize)]
struct Recording {
    #[serde(flatten)]
    op: Op,
    class_free: Vec<u32>,
    available: u32,
    aggregate: u32,
    least_full: u32,
}

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Op {
    AllocExtend {
        prefix_lens: Vec<u32>,
        seq_lens: Vec<u32>,
        bases_in: Vec<Option<u32>>,
        bases_out: Vec<u32>,
        out: Option<Vec<u32>>,
    },
    Free {
        out_of: Vec<u32>,
    },
}

impl Trace {
    fn allocator(&self) -> Owners<Recorded> {
        let ranks = ShardRanks::new(self.shard_size);
        // The first page of each class is for what nobody wants to read.
        let pages = self.shard_size..self.shard_size * (1 + self.tokens_per_rank / self.page_size);
        let list = |class| Recorded {
            free: pages.clone().map(PageId).filter(|page| ranks.owner(*page) == class).collect(),
            released: self.need_sort.then(VecDeque::new),
        };
        Owners { ranks, lists: (0..self.shard_size).map(|class| list(OwnerClass(class))).collect() }
    }

    fn free(&self, owners: &mut Owners<Recorded>, tokens: &[u32]) {
        let pages: BTreeSet<PageId> = tokens.iter().map(|token| PageId(token / self.page_size)).collect();
        // Each goes before those that are there: the lowest last.
        pages.into_iter().rev().for_each(|page| owners.put(page));
    }

    /// The tokens of the pages that it takes, and the class that each request begins with.
    fn extend(
        &self,
        owners: &mut Owners<Recorded>,
        prefix_lens: &[u32],
        seq_lens: &[u32],
        bases: &[Option<u32>],
    ) -> Option<(Vec<u32>, Vec<u32>)> {
        let page = self.page_size;
        let requests = || prefix_lens.iter().zip(seq_lens).map(|(prefix, seq)| (prefix / page, *seq));
        let chains: Vec<Chain> = requests()
            .zip(bases)
            .map(|((before, seq), base)| Chain {
                start: base.map(|base| owners.ranks.after(OwnerClass(base), before)),
                pages: seq.div_ceil(page) - before,
            })
            .collect();
        let mut left = owners.counts();
        if chains.iter().all(|chain| left.reserve(*chain).is_ok()) {
            let wanted = owners.counts().0.into_iter().zip(left.0).map(|(had, left)| (had - left) as usize);
            if owners.lists.iter().zip(wanted).any(|(list, wanted)| wanted > list.free.len()) {
                owners.lists.iter_mut().for_each(Recorded::sort_in);
            }
        }
        let mut pages = owners.take(&chains).ok()?.into_iter();
        let (mut tokens, mut begins) = (Vec::new(), Vec::new());
        for ((before, seq), chain) in requests().zip(chains) {
            let own: Vec<PageId> = pages.by_ref().take(chain.pages as usize).collect();
            begins.push((own[0].0 + self.shard_size * before - before) % self.shard_size);
            let rows = own.iter().flat_map(|own| own.0 * page..(own.0 + 1) * page);
            tokens.extend(rows.take((seq - before * page) as usize));
        }
        assert_eq!(pages.next(), None);
        Some((tokens, begins))
    }
}

/// Every operation, and every number after it.
#[test]
fn recorded_traces_are_ours() {
    let Traces { traces } =
        serde_json::from_str(include_str!("../../tests/data/vectors/allocator_trace.json")).unwrap();
    assert!(traces.len() == 4 && traces.iter().any(|trace| trace.need_sort));
    let mut refused = 0;
    for trace in traces {
        let mut owners = trace.allocator();
        for (number, Recording { op, class_free, available, aggregate, least_full }) in
            trace.ops.iter().enumerate()
        {
            let at = format!("operation {number} of {} ranks", trace.shard_size);
            match op {
                Op::AllocExtend { prefix_lens, seq_lens, bases_in, bases_out, out } => {
                    let (tokens, begins) = trace.extend(&mut owners, prefix_lens, seq_lens, bases_in).unzip();
                    assert_eq!(&tokens, out, "{at}");
                    assert!(begins.is_none_or(|begins| begins == *bases_out), "{at}");
                    refused += u32::from(out.is_none());
                }
                Op::Free { out_of } => trace.free(&mut owners, out_of),
            }
            let counts = owners.counts();
            assert_eq!(&counts.0, class_free, "{at}");
            assert_eq!(counts.certain() * trace.page_size, *available, "{at}");
            assert_eq!(counts.sum() * trace.page_size, *aggregate, "{at}");
            assert_eq!(counts.least_full(), OwnerClass(*least_full), "{at}");
        }
    }
    assert_eq!(refused, 5);
}

/// Takes and gives back. Requests and entries are chosen by number, modulo what is there.
#[derive(Clone, Debug)]
enum Step {
    /// New chains, of so many pages each.
    New(Vec<u32>),
    /// A chain grows.
    Extend(usize, u32),
    End(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => prop::collection::vec(0_u32..12, 1..4).prop_map(Step::New),
        2 => (any::<usize>(), 0_u32..6).prop_map(|(at, pages)| Step::Extend(at, pages)),
        3 => any::<usize>().prop_map(Step::End),
    ];
    prop::collection::vec(step, 0..60)
}

/// Free pages by class, counted one by one.
fn by_hand(free: &BTreeSet<PageId>, ranks: u32) -> Vec<u32> {
    (0..ranks).map(|class| free.iter().filter(|page| page.0 % ranks == class).count() as u32).collect()
}

/// Takes a chain page by page out of what is left. False when it ends early.
fn walk(left: &mut [u32], start: usize, pages: u32) -> bool {
    (0..pages as usize).all(|entry| {
        let count = &mut left[(start + entry) % left.len()];
        count.checked_sub(1).map(|less| *count = less).is_some()
    })
}

fn least_full(left: &[u32]) -> usize {
    left.iter().position(|count| Some(count) == left.iter().max()).unwrap()
}

proptest! {
    /// Owners in a chain are cyclic, a call takes all or nothing and nothing that could be had is refused, no page is
    /// lost, and who comes back can be had at once. A second instance that is asked the same answers the same.
    #[test]
    fn chains_are_cyclic_and_no_page_is_lost(ranks in 1_u32..9, rounds in 0_u32..9, steps in steps()) {
        let total = ranks * rounds;
        let new = || Owners::new(total, ShardRanks::new(ranks));
        let (mut owners, mut mirrored) = (new(), new());
        let mut free: BTreeSet<PageId> = (0..total).map(PageId).collect();
        let mut held: Vec<Vec<PageId>> = Vec::new();
        for step in steps {
            let mut left = by_hand(&free, ranks);
            match step {
                Step::New(chains) => {
                    let fits = chains.iter().all(|pages| {
                        let start = least_full(&left);
                        walk(&mut left, start, *pages)
                    });
                    let chains: Vec<Chain> = chains.iter().map(|pages| Chain { start: None, pages: *pages }).collect();
                    let taken = owners.take(&chains);
                    prop_assert_eq!(&taken, &mirrored.take(&chains));
                    prop_assert_eq!(taken.is_ok(), fits);
                    let mut taken = taken.unwrap_or_default().into_iter();
                    for Chain { pages, .. } in chains.into_iter().filter(|_| fits) {
                        held.push(taken.by_ref().take(pages as usize).collect());
                        prop_assert!(held.last().unwrap().iter().all(|page| free.remove(page)));
                        prop_assert_eq!(held.last().unwrap().len(), pages as usize);
                    }
                }
                Step::Extend(at, pages) if !held.is_empty() => {
                    let at = at % held.len();
                    let chain = &mut held[at];
                    let Some(first) = chain.first() else { continue };
                    let start = owners.ranks().after(owners.ranks().owner(*first), chain.len() as u32);
                    let more = Chain { start: Some(start), pages };
                    let taken = owners.take(&[more]);
                    prop_assert_eq!(&taken, &mirrored.take(&[more]));
                    prop_assert_eq!(taken.is_ok(), walk(&mut left, start.0 as usize, pages));
                    let taken = taken.unwrap_or_default();
                    prop_assert!(taken.iter().all(|page| free.remove(page)));
                    chain.extend(taken);
                }
                Step::End(at) if !held.is_empty() => {
                    let at = at % held.len();
                    for page in held.swap_remove(at) {
                        owners.put(page);
                        mirrored.put(page);
                        free.insert(page);
                    }
                }
                Step::Extend(..) | Step::End(_) => {}
            }
            prop_assert_eq!(owners.counts().0, by_hand(&free, ranks));
            for chain in &held {
                prop_assert!(chain.windows(2).all(|two| (two[0].0 + 1) % ranks == two[1].0 % ranks));
                let own = by_hand(&chain.iter().copied().collect(), ranks);
                prop_assert_eq!(own.iter().sum::<u32>() as usize, chain.len());
                prop_assert!(own.iter().max().unwrap() - own.iter().min().unwrap() <= 1);
            }
        }
        // All that are free can be had, class by class, those that rested longest first.
        for class in 0..ranks {
            let mine = owners.counts().0[class as usize];
            for _ in 0..mine {
                let taken = owners.take(&[Chain { start: Some(OwnerClass(class)), pages: 1 }]).unwrap();
                prop_assert!(free.remove(&taken[0]));
            }
        }
        prop_assert!(free.is_empty());
    }

    #[test]
    fn a_promise_is_kept_and_not_too_small(counts in prop::collection::vec(0_u32..9, 1..9)) {
        let counts = ClassCounts(counts);
        let can = |start: usize, pages| walk(&mut counts.0.clone(), start, pages);
        let ranks = counts.0.len();
        prop_assert!((0..ranks).all(|start| can(start, counts.certain())));
        // One page more is refused somewhere, unless it is of a class that others do not need.
        let least = (0..ranks).map(|start| counts.longest(OwnerClass(start as u32))).min();
        prop_assert_eq!(least, Some(counts.certain()));
        for start in 0..ranks {
            let longest = counts.longest(OwnerClass(start as u32));
            for pages in [longest, longest + 1] {
                let chain = Chain { start: Some(OwnerClass(start as u32)), pages };
                let mut left = counts.clone();
                let reserved = left.reserve(chain);
                prop_assert_eq!(reserved.is_ok(), can(start, pages));
                prop_assert_eq!(reserved.is_ok(), pages == longest);
                if let Err(short) = reserved {
                    prop_assert!(left == counts && left.0[short.0 as usize] == *left.0.iter().min().unwrap());
                } else {
                    left.add_chain(OwnerClass(start as u32), pages);
                    prop_assert_eq!(&left, &counts);
                }
            }
        }
    }
}

#[test]
fn a_page_rests_as_long_as_possible() {
    let mut owners = Owners::new(6, ShardRanks::new(2));
    let chain = |start, pages| [Chain { start: Some(OwnerClass(start)), pages }];
    assert_eq!(owners.take(&chain(1, 3)), Ok([1, 0, 3].map(PageId).into()));
    [3, 1].into_iter().for_each(|page| owners.put(PageId(page)));
    assert_eq!(owners.take(&chain(1, 1)), Ok(vec![PageId(5)]));
    assert_eq!(owners.take(&chain(1, 3)), Ok([3, 2, 1].map(PageId).into()));
    assert_eq!(owners.take(&chain(0, 2)), Err(OwnerClass(1)));
    assert_eq!(owners.take(&chain(0, 1)), Ok(vec![PageId(4)]));
}
