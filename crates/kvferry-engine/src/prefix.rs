//! Which prefixes of earlier requests are still in the pool: a radix tree over token ids, one node for each block of
//! whole pages. In a model with state per request a node may also have a *stored state*: that after its last token. Not
//! for pages and slots that belong to one request only (`pages`), nor for the bytes in them (`pool`).

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use kvferry_plan::{PageId, PrefixBlock, SlotId};

use crate::owners::{ClassCounts, OwnerClass, ShardRanks};

/// A node of the tree. Numbers are not used again.
pub(crate) type NodeId = u64;

/// Where all paths begin. It has no pages.
const ROOT: NodeId = 0;

#[derive(Debug, Default)]
struct Node {
    parent: NodeId,
    /// The block's tokens; a node stands for these after those of all nodes above it.
    tokens: Arc<[u32]>,
    pages: Box<[PageId]>,
    children: HashMap<Arc<[u32]>, NodeId>,
    /// Requests whose table has these pages, or pages of a node below.
    readers: u32,
    /// When the last reader left.
    used: u64,
    state: Option<Stored>,
}

/// The state after a node's last token.
#[derive(Clone, Copy, Debug)]
struct Stored {
    slot: SlotId,
    /// When a request last began with it, or would have stored it.
    used: u64,
}

/// What an evicted block leaves to others.
#[derive(Debug)]
pub(crate) struct Evicted {
    pub(crate) pages: Box<[PageId]>,
    pub(crate) state: Option<SlotId>,
}

/// The prefix of a prompt that is in the pool. Good until anything else is done with the tree.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Nodes from the first block on.
    path: Vec<NodeId>,
    /// How many of its blocks others read now: the first ones, because who reads a block reads all above it.
    pinned: usize,
    /// Whether a request begins with the state after the last block.
    resumes: bool,
    /// Who owns the first page of a path that begins alike, though a request may not begin with any of it.
    rotation: Option<OwnerClass>,
}

impl Found {
    /// Blocks that were found.
    pub(crate) fn blocks(&self) -> usize {
        self.path.len()
    }

    /// How many of them are not among those that can be evicted.
    pub(crate) fn pinned(&self) -> usize {
        self.pinned
    }

    /// Where a table has to start whose blocks are to lie in the tree: one prefix has one rotation.
    pub(crate) fn rotation(&self) -> Option<OwnerClass> {
        self.rotation
    }
}

/// A reader's hold on a path of nodes: none of them is evicted while it lasts.
#[derive(Debug, Default)]
pub(crate) struct Pin(Vec<NodeId>);

impl Pin {
    /// Blocks that are held.
    pub(crate) fn blocks(&self) -> usize {
        self.0.len()
    }

    /// The last of them.
    pub(crate) fn last(&self) -> Option<NodeId> {
        self.0.last().copied()
    }
}

/// The tree.
#[derive(Debug)]
pub(crate) struct Prefixes {
    /// Tokens of a block.
    tokens: usize,
    nodes: HashMap<NodeId, Node>,
    next: NodeId,
    clock: u64,
    /// Leaves that nobody reads, by the class of their last page; the one that was left first in front.
    idle: Vec<BTreeSet<(u64, NodeId)>>,
    /// Pages of nodes that nobody reads: whole subtrees, so that all of them can be evicted from the leaves up.
    unread: ClassCounts,
    /// Nodes with a stored state, the one that was used longest ago in front.
    states: BTreeSet<(u64, NodeId)>,
}

impl Prefixes {
    /// An empty tree. `None` when a block is longer than any prompt.
    pub(crate) fn new(block: PrefixBlock, ranks: ShardRanks) -> Option<Self> {
        let tokens = usize::try_from(block.tokens).ok().filter(|tokens| *tokens > 0)?;
        let nodes = HashMap::from([(ROOT, Node::default())]);
        let (idle, states) = (ranks.classes().map(|_| BTreeSet::new()).collect(), BTreeSet::new());
        let unread = ClassCounts::none(ranks);
        Some(Self { tokens, nodes, next: ROOT + 1, clock: 0, idle, unread, states })
    }

    /// Tokens of a block.
    pub(crate) fn block(&self) -> usize {
        self.tokens
    }

    /// Blocks in the tree.
    pub(crate) fn blocks(&self) -> usize {
        self.nodes.len() - 1
    }

    /// Pages that can be evicted.
    pub(crate) fn evictable(&self) -> &ClassCounts {
        &self.unread
    }

    /// Stored states, all of which can be evicted: nobody reads one but to copy it at once.
    pub(crate) fn states(&self) -> usize {
        self.states.len()
    }

    /// The longest prefix of `prompt` in whole blocks that leaves at least its last token out, because something has
    /// to be computed to know what follows.
    pub(crate) fn find(&self, prompt: &[u32]) -> Found {
        let mut found = Found::default();
        let mut at = ROOT;
        let most = prompt.len().saturating_sub(1) / self.tokens;
        for block in prompt.chunks_exact(self.tokens).take(most) {
            let Some(child) = self.child(at, block) else { break };
            found.pinned += usize::from(self.nodes.get(&child).is_some_and(|node| node.readers > 0));
            found.path.push(child);
            at = child;
        }
        let first = found.path.first().and_then(|id| self.nodes.get(id)?.pages.first());
        found.rotation = first.map(|page| self.unread.ranks().owner(*page));
        found
    }

    /// What of it a request can begin with that needs a state: all up to the deepest block that has one.
    pub(crate) fn resumable(&self, mut found: Found) -> Found {
        let stored = |id: &NodeId| self.nodes.get(id).is_some_and(|node| node.state.is_some());
        found.path.truncate(found.path.iter().rposition(stored).map_or(0, |at| at + 1));
        found.pinned = found.pinned.min(found.path.len());
        found.resumes = !found.path.is_empty();
        found
    }

    /// The stored state that a request begins with, which counts as used now.
    pub(crate) fn resume(&mut self, found: &Found) -> Option<SlotId> {
        let last = found.path.last().filter(|_| found.resumes)?;
        self.touch(*last)
    }

    /// The state that a node has, which counts as used now.
    pub(crate) fn touch(&mut self, id: NodeId) -> Option<SlotId> {
        let stored = self.nodes.get_mut(&id)?.state.as_mut()?;
        self.states.remove(&(stored.used, id));
        self.clock += 1;
        stored.used = self.clock;
        self.states.insert((stored.used, id));
        Some(stored.slot)
    }

    /// Gives a node that has none the state after its last token. Gives it back when there is no such node.
    pub(crate) fn keep(&mut self, id: NodeId, slot: SlotId) -> Result<(), SlotId> {
        let Some(node) = self.nodes.get_mut(&id).filter(|node| node.state.is_none()) else {
            return Err(slot);
        };
        self.clock += 1;
        node.state = Some(Stored { slot, used: self.clock });
        self.states.insert((self.clock, id));
        Ok(())
    }

    /// Takes the state out that has not been used for the longest time. Its node stays.
    pub(crate) fn evict_state(&mut self) -> Option<SlotId> {
        let (_, id) = self.states.pop_first()?;
        Some(self.nodes.get_mut(&id)?.state.take()?.slot)
    }

    /// The pages of what was found, in order.
    pub(crate) fn pages(&self, found: &Found) -> Vec<PageId> {
        let nodes = found.path.iter().filter_map(|id| self.nodes.get(id));
        nodes.flat_map(|node| node.pages.iter().copied()).collect()
    }

    /// Holds what was found.
    pub(crate) fn pin(&mut self, found: Found) -> Pin {
        for id in &found.path {
            self.read(*id);
        }
        Pin(found.path)
    }

    /// Whether the owner of `page` comes after that of the last page that is held, as in a table.
    pub(crate) fn continues(&self, pin: &Pin, page: PageId) -> bool {
        let ranks = self.unread.ranks();
        let last = pin.last().and_then(|id| self.nodes.get(&id)?.pages.last());
        last.is_none_or(|last| ranks.after(ranks.owner(*last), 1) == ranks.owner(page))
    }

    /// Lengthens the hold by the next block of its tokens. True when its `pages` belong to the tree from now on; they
    /// do not when the tree has other pages with this prefix already.
    pub(crate) fn extend(&mut self, pin: &mut Pin, tokens: &[u32], pages: &[PageId]) -> bool {
        let parent = pin.0.last().copied().unwrap_or(ROOT);
        if let Some(child) = self.child(parent, tokens) {
            self.read(child);
            pin.0.push(child);
            return false;
        }
        let (id, tokens) = (self.next, Arc::<[u32]>::from(tokens));
        let Some(above) = self.nodes.get_mut(&parent) else { return false };
        above.children.insert(Arc::clone(&tokens), id);
        let node = Node { parent, tokens, pages: pages.into(), readers: 1, ..Node::default() };
        self.nodes.insert(id, node);
        self.next += 1;
        pin.0.push(id);
        true
    }

    /// Ends a hold.
    pub(crate) fn unpin(&mut self, pin: Pin) {
        self.clock += 1;
        for id in pin.0 {
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            node.readers = node.readers.saturating_sub(1);
            if node.readers == 0 {
                node.used = self.clock;
                node.pages.iter().for_each(|page| self.unread.add(*page));
                if node.children.is_empty() {
                    let (used, class) = (node.used, self.class(id));
                    self.idle_of(class).insert((used, id));
                }
            }
        }
    }

    /// The class of a node's last page.
    fn class(&self, id: NodeId) -> OwnerClass {
        let last = self.nodes.get(&id).and_then(|node| node.pages.last());
        self.unread.ranks().owner(last.copied().unwrap_or(PageId(0)))
    }

    fn idle_of(&mut self, class: OwnerClass) -> &mut BTreeSet<(u64, NodeId)> {
        &mut self.idle[class.index()]
    }

    /// Takes a block out so that there is, soon, a page of the class that is `short`: along a path owners take turns, so it
    /// is the leaf that is the fewest blocks below one; of several, that which has not been read for the longest time.
    /// `None` when all are held.
    pub(crate) fn evict(&mut self, short: OwnerClass) -> Option<Evicted> {
        let ranks = self.unread.ranks();
        let mut below = (0..).zip(ranks.classes()).map(|(entries, _)| ranks.after(short, entries));
        let (_, id) = below.find_map(|class| self.idle_of(class).pop_first())?;
        let node = self.nodes.remove(&id)?;
        node.pages.iter().for_each(|page| self.unread.remove(*page));
        if let Some(parent) = self.nodes.get_mut(&node.parent) {
            parent.children.remove(&node.tokens);
            if node.parent != ROOT && parent.readers == 0 && parent.children.is_empty() {
                let (used, class) = (parent.used, self.class(node.parent));
                self.idle_of(class).insert((used, node.parent));
            }
        }
        if let Some(stored) = &node.state {
            self.states.remove(&(stored.used, id));
        }
        Some(Evicted { pages: node.pages, state: node.state.map(|stored| stored.slot) })
    }

    fn child(&self, parent: NodeId, tokens: &[u32]) -> Option<NodeId> {
        self.nodes.get(&parent)?.children.get(tokens).copied()
    }

    fn read(&mut self, id: NodeId) {
        let class = self.class(id);
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.readers += 1;
        if node.readers == 1 {
            node.pages.iter().for_each(|page| self.unread.remove(*page));
            let used = node.used;
            self.idle_of(class).remove(&(used, id));
        }
    }

    /// Every page of the tree.
    #[cfg(test)]
    pub(crate) fn all_pages(&self) -> Vec<PageId> {
        self.nodes.values().flat_map(|node| node.pages.iter().copied()).collect()
    }

    /// Every page of the tree that can be evicted.
    #[cfg(test)]
    pub(crate) fn all_unread(&self) -> Vec<PageId> {
        let unread = self.nodes.iter().filter(|(id, node)| **id != ROOT && node.readers == 0);
        unread.flat_map(|(_, node)| node.pages.iter().copied()).collect()
    }

    /// Every stored state, with all tokens that it has taken in.
    #[cfg(test)]
    pub(crate) fn all_states(&self) -> Vec<(Vec<u32>, SlotId)> {
        let path = |mut at: NodeId| {
            let mut blocks = Vec::new();
            while at != ROOT {
                blocks.push(Arc::clone(&self.nodes[&at].tokens));
                at = self.nodes[&at].parent;
            }
            blocks.iter().rev().flat_map(|block| block.iter().copied()).collect()
        };
        let states = self.nodes.iter().filter_map(|(id, node)| Some((path(*id), node.state?.slot)));
        let states: Vec<_> = states.collect();
        assert_eq!(states.len(), self.states.len());
        states
    }

    /// Readers of each node, and for a block whose tokens are known the path above it.
    #[cfg(test)]
    pub(crate) fn readers(&self) -> std::collections::BTreeMap<NodeId, u32> {
        self.nodes.iter().filter(|(id, _)| **id != ROOT).map(|(id, node)| (*id, node.readers)).collect()
    }
}

#[cfg(test)]
impl Pin {
    /// The nodes that are held.
    pub(crate) fn nodes(&self) -> &[NodeId] {
        &self.0
    }
}
