//! Two nodes in one process, with pools full of coordinates instead of a model's cache.
#![allow(dead_code, unreachable_pub, reason = "each test file includes this module and uses a part of it")]

use std::{sync::Arc, time::Duration};

use kvferry_arena::{Arena, Memory};
use kvferry_node::{
    FirstToken, Inject, Limits, Node, NodeConfig, PeerAddr, Receipt, Receive, ReceiveHandle, RoomError,
    SourceFault, SourceHandle, SourceReceipt, SourceRoom, TransportKind,
};
use kvferry_plan::{
    Attempt, Bytes, CacheShape, Descriptor, Dtype, InstanceId, LayerId, LayoutSpec, PROTOCOL, PageId,
    PageTable, Part, PartShape, Placement, PoolLayout, PoolSize, RankId, RoomId, RoomKey, Rotation, Row,
    SlotId, Token, TokenMap, TokenRange,
};

pub const FIRST: FirstToken = FirstToken { token: 7, logprob: -1.25 };
/// State slots of each pool, in shapes that have state.
const SLOTS: u32 = 4;

pub const EVERY: [TransportKind; 4] =
    [TransportKind::Mem, TransportKind::Tcp, TransportKind::Shm, TransportKind::MooncakeTcp];

/// What a node of these tests is made of.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub name: &'static str,
    pub shape: CacheShape,
    pub spec: &'static str,
    /// The ranks that live in this process.
    pub hosts: Option<Vec<RankId>>,
    pub kv: Dtype,
    /// Pages in host memory, which no engine here has.
    pub host_pages: Option<u32>,
    pub model: &'static str,
    pub transports: Vec<TransportKind>,
    pub pages: u32,
    pub digest: bool,
    pub inject: Option<Inject>,
    pub fault: Option<SourceFault>,
    /// Who owns the first page of every request, where pages are sharded.
    pub rotation: Rotation,
    pub limits: Limits,
}

impl Recipe {
    pub fn new(name: &'static str, shape: &CacheShape, spec: &'static str, transport: TransportKind) -> Self {
        Self {
            name,
            shape: shape.clone(),
            spec,
            hosts: None,
            kv: Dtype::Bf16,
            host_pages: None,
            model: "model",
            transports: vec![transport],
            pages: 64,
            digest: true,
            inject: None,
            fault: None,
            rotation: Rotation(0),
            limits: Limits::default(),
        }
    }
}

/// A node and its pools.
pub struct Instance {
    pub node: Arc<Node>,
    pub shape: CacheShape,
    pub placement: Placement,
    pub rotation: Rotation,
    pub ranks: Vec<RankId>,
    pub arenas: Vec<Arc<Arena>>,
}

fn ranks(recipe: &Recipe, placement: &Placement) -> Vec<RankId> {
    recipe.hosts.clone().unwrap_or_else(|| (0..placement.ranks()).map(RankId).collect())
}

pub fn config(recipe: &Recipe) -> NodeConfig {
    let shape = recipe.shape.clone();
    let mut placement = recipe.spec.parse::<LayoutSpec>().unwrap().placement(&shape, recipe.kv).unwrap();
    placement.host_pages = recipe.host_pages;
    let arenas = ranks(recipe, &placement)
        .into_iter()
        .map(|rank| {
            let slots = if shape.has_state() { SLOTS } else { 0 };
            let layout =
                PoolLayout::with_slots(&shape, &placement, rank, PoolSize { pages: recipe.pages, slots })
                    .unwrap();
            Arc::new(Arena::new(recipe.name, layout).unwrap())
        })
        .collect();
    NodeConfig {
        instance: InstanceId(recipe.name.into()),
        incarnation: None,
        bind: "127.0.0.1:0".parse().unwrap(),
        descriptor: Descriptor {
            protocol: PROTOCOL,
            model: recipe.model.into(),
            shape,
            placement,
            converts: false,
        },
        hosts: recipe.hosts.clone(),
        arenas,
        transports: recipe.transports.clone(),
        digest: recipe.digest,
        inject: recipe.inject,
        fault: recipe.fault,
        limits: recipe.limits.clone(),
    }
}

pub fn start(recipe: &Recipe) -> Instance {
    let config = config(recipe);
    let (shape, placement) = (config.descriptor.shape.clone(), config.descriptor.placement.clone());
    let (arenas, ranks) = (config.arenas.clone(), ranks(recipe, &placement));
    Instance {
        node: Node::start(config).unwrap(),
        shape,
        placement,
        rotation: recipe.rotation,
        ranks,
        arenas,
    }
}

/// The byte that a model would have computed.
fn stamp(room: RoomKey, layer: LayerId, part: Part, head: u32, token: Token, byte: u64) -> u8 {
    let mut x = room.room.0 as u64 ^ u64::from(room.attempt.0) << 50;
    for n in [u64::from(layer.0), u64::from(part.code()), u64::from(head), token.0, byte] {
        x = (x ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 29;
    }
    x as u8
}

impl Instance {
    /// The slot of every request here: one that differs between instances with names of different length.
    pub fn slot(&self) -> Option<SlotId> {
        let name = self.node.addr().instance.0;
        self.shape.has_state().then_some(SlotId(name.len() as u32 % SLOTS))
    }

    /// Where a token of a part lies, or of state a row of its window.
    fn row(&self, part: &PartShape, rank: RankId, table: &PageTable, token: Token) -> Option<Row> {
        let layout = self.placement.part(part.part).unwrap();
        match self.slot() {
            Some(slot) if part.state.is_some() => Some(Row(layout.slot_row(slot).0 + token.0)),
            _ => {
                let class = self.placement.class(part.part, rank);
                let local = layout.tokens.local(token, class)?;
                let TokenMap::PageSharded { ranks } = layout.tokens else {
                    return table.row(local, layout.page_size);
                };
                let size = u64::from(layout.page_size);
                let page = table.0[(token.0 / size) as usize].0;
                (page % ranks == class).then(|| Row(u64::from(page / ranks) * size + token.0 % size))
            }
        }
    }

    /// The image of every rank's pool in which exactly these tokens are cached, and the state after a prompt if it is
    /// wanted, by the definition of a placement: row by row, head by head, with nothing of the planner.
    fn images(&self, room: RoomKey, table: &PageTable, tokens: TokenRange, state: bool) -> Vec<Vec<u8>> {
        let mut images = Vec::new();
        for (rank, arena) in self.ranks.iter().copied().zip(&self.arenas) {
            let mut image = vec![0_u8; arena.layout().len().0 as usize];
            for part in &self.shape.parts {
                let layout = *self.placement.part(part.part).unwrap();
                let rows = match &part.state {
                    Some(_) if !state => continue,
                    Some(state) => 0..u64::from(state.window),
                    None => tokens.start.0..tokens.end.0,
                };
                for layer in self.placement.layers(part, rank) {
                    // A rank may hold none of a state's heads.
                    let Some(region) = arena.layout().region(layer, part.part) else { continue };
                    for token in rows.clone().map(Token) {
                        let Some(row) = self.row(part, rank, table, token) else { continue };
                        let mut at = region.row_offset(row).unwrap().0 as usize;
                        let head_bytes = u64::from(part.head_elems) * layout.dtype.size().0;
                        for head in self.placement.shares(part, rank).flatten() {
                            for byte in 0..head_bytes {
                                image[at] = stamp(room, layer, part.part, head, token, byte);
                                at += 1;
                            }
                        }
                    }
                }
            }
            images.push(image);
        }
        images
    }

    /// Everything of a pool but the generation words.
    fn contents(arena: &Arena) -> (usize, Vec<u8>) {
        let skip = (arena.layout().pages() + arena.layout().slots()) as usize * 8;
        let mut found = vec![0; arena.layout().len().0 as usize - skip];
        arena.read(Bytes(skip as u64), &mut found).unwrap();
        (skip, found)
    }

    /// Pretends to compute `tokens`, on pages that were empty.
    pub fn compute(&self, room: RoomKey, table: &PageTable, tokens: TokenRange) {
        self.write(self.images(room, table, tokens, false));
    }

    /// Pretends to have computed a whole prompt: its state is there, on a slot that was empty.
    pub fn compute_state(&self, room: RoomKey) {
        self.write(self.images(room, &PageTable::default(), TokenRange::new(0, 0), true));
    }

    /// Empties the pools, for the next request on the same pages.
    pub fn clear(&self) {
        for arena in &self.arenas {
            let (skip, old) = Self::contents(arena);
            arena.write(Bytes(skip as u64), &vec![0; old.len()]).unwrap();
        }
    }

    fn write(&self, images: Vec<Vec<u8>>) {
        for (arena, image) in self.arenas.iter().zip(images) {
            let (skip, old) = Self::contents(arena);
            let new: Vec<_> = old.iter().zip(&image[skip..]).map(|(o, n)| o | n).collect();
            arena.write(Bytes(skip as u64), &new).unwrap();
        }
    }

    /// The number of bytes, over all pools, that are not as they must be when exactly these tokens are cached.
    pub fn wrong_bytes(&self, room: RoomKey, table: &PageTable, tokens: TokenRange) -> usize {
        let mut wrong = 0;
        for (arena, image) in self.arenas.iter().zip(self.images(room, table, tokens, true)) {
            let (skip, found) = Self::contents(arena);
            wrong += found.iter().zip(&image[skip..]).filter(|(f, i)| f != i).count();
        }
        wrong
    }

    /// A table for `tokens` tokens on any rank, in an order that is not the pool's.
    pub fn table(&self, tokens: u64) -> PageTable {
        let pages = self.arenas[0].layout().pages();
        let parts = self.placement.parts.iter().filter(|p| !p.part.is_state());
        let size = parts.map(|p| p.page_size).min().unwrap();
        let needed = tokens.div_ceil(u64::from(size)) as u32;
        let ranks = self.placement.shard_ranks();
        assert!(needed <= pages * ranks);
        // 37 is coprime to the number of pages.
        let page = |k| {
            let owner = (self.rotation.0 + k) % ranks;
            ((k / ranks * 37 + 11 + owner * 5) % pages) * ranks + owner
        };
        PageTable((0..needed).map(|k| PageId(page(k))).collect())
    }

    pub fn send(&self, key: RoomKey, tokens: u64) -> SourceHandle {
        self.node.send(SourceRoom {
            key,
            table: self.table(tokens),
            slot: self.slot(),
            tokens: TokenRange::new(0, tokens),
            prompt: None,
        })
    }

    pub fn receive(&self, key: RoomKey, tokens: u64, from: &Instance) -> ReceiveHandle {
        self.receive_from(key, tokens, vec![from.node.addr()])
    }

    pub fn receive_from(&self, key: RoomKey, tokens: u64, peers: Vec<PeerAddr>) -> ReceiveHandle {
        self.node.receive(Receive {
            key,
            peers,
            table: self.table(tokens),
            slot: self.slot(),
            tokens: TokenRange::new(0, tokens),
            transport: None,
            prompt: None,
        })
    }
}

/// Latent rows in one layer, per-request state in two others.
pub fn hybrid() -> CacheShape {
    let [conv, recurrent] = CacheShape::kda([LayerId(0), LayerId(2)].into(), 5, 4, 4);
    let latent = PartShape::rows(Part::Latent, [LayerId(1)].into(), 1, 20);
    CacheShape { parts: [latent, conv, recurrent].into() }
}

pub fn room(n: u128) -> RoomKey {
    RoomKey { room: RoomId(n), attempt: Attempt(1) }
}

/// Of what is told, and not found out by waiting: far below the limits of a room.
pub const BOUND: Duration = Duration::from_secs(4);

/// Waits, but not for ever.
pub async fn soon<T>(what: impl Future<Output = T>) -> T {
    within(Duration::from_secs(20), what).await
}

pub async fn within<T>(bound: Duration, what: impl Future<Output = T>) -> T {
    tokio::time::timeout(bound, what).await.unwrap_or_else(|_| panic!("not done within {bound:?}"))
}

/// Computes and hands over a whole request, chunk by chunk; both outcomes.
pub async fn hand_over(
    source: &Instance,
    target: &Instance,
    key: RoomKey,
    tokens: u64,
    chunk: u64,
) -> (Result<SourceReceipt, RoomError>, Result<Receipt, RoomError>) {
    let sending = source.send(key, tokens);
    let receiving = target.receive(key, tokens, source);
    compute_and_send(source, &sending, tokens, chunk);
    soon(async { tokio::join!(sending.outcome(), receiving.outcome()) }).await
}

/// The source's half: every chunk, then the first token.
pub fn compute_and_send(source: &Instance, sending: &SourceHandle, tokens: u64, chunk: u64) {
    let table = source.table(tokens);
    let mut start = 0;
    while start < tokens {
        let range = TokenRange::new(start, (start + chunk).min(tokens));
        source.compute(sending.key(), &table, range);
        if range.end.0 == tokens {
            source.compute_state(sending.key());
        }
        sending.chunk(range);
        start = range.end.0;
    }
    sending.finish(FIRST);
}

/// Waits until nothing of any room is left.
pub async fn quiet(instance: &Instance) {
    soon(async {
        while !instance.node.ledger().is_quiet() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}
