//! Mooncake's own engine as one that moves blocks.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use kvferry_arena::Buffer;
use kvferry_plan::Bytes;
use kvferry_transport::{
    DeviceId, MemoryKind,
    slots::{BlockEngine, BlockSpan, EngineError, EnginePeer, Progress, WriteId},
};
use serde::{Deserialize, Serialize};

use super::{
    packets::Order,
    process::{Sidecar, failed, hex},
    python::NAME,
    python::Tuned,
};
use crate::{Address, outcomes::Outcomes};

/// Addresses are in this part of an address space, where processes have nothing by themselves.
const FIRST: u64 = 1 << 44;
const LAST: u64 = 1 << 46;
/// Between them.
const GRID: u64 = 1 << 21;

/// The engine of the Python package, in processes of their own: one that others write to, and one for each peer that is
/// written to. All of them have memory at the same addresses, which are not those of this process.
#[derive(Debug)]
pub struct SidecarEngine {
    tuned: Tuned,
    outcomes: Outcomes,
    /// By address.
    memories: BTreeMap<Address, Arc<Buffer>>,
    /// Others write to it, and it sends and hears notifications. When it has ended, the next one has the same memory.
    target: Sidecar,
    /// Everything is numbered by one count.
    next: u64,
    peers: BTreeMap<EnginePeer, Peer>,
    /// That finish what they have.
    leaving: Vec<Sidecar>,
}

/// What others are told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Contact {
    /// The control port of an engine.
    engine: SocketAddr,
    /// Where it takes what notifications ride on.
    mailbox: Address,
}

#[derive(Debug)]
struct Peer {
    contact: Contact,
    /// Started for the first write, with the memory that it has been lent.
    source: Option<(Sidecar, BTreeSet<Address>)>,
}

impl SidecarEngine {
    /// Starts a process with an engine that others can write to.
    ///
    /// # Errors
    /// [`EngineError::Missing`] without the package, or with another version; [`EngineError::Failed`] when its engine does
    /// not start.
    pub fn new(tuned: Tuned) -> Result<Self, EngineError> {
        let outcomes = Outcomes::default();
        let target = Sidecar::start(tuned, &outcomes)?;
        target.ready()?;
        Ok(Self {
            tuned,
            outcomes,
            memories: BTreeMap::new(),
            target,
            next: 0,
            peers: BTreeMap::new(),
            leaving: Vec::new(),
        })
    }

    /// As [`BlockEngine::write`], of many spans in one request: what this costs is why transports pack. The engine's call for
    /// them waits by spinning, so a peer has one such request under way at a time; others wait their turn.
    ///
    /// # Errors
    /// As there.
    pub fn write_each(
        &mut self,
        peer: EnginePeer,
        pairs: &[(BlockSpan, BlockSpan)],
    ) -> Result<WriteId, EngineError> {
        const ACTION: &str = "write";
        if let [(local, remote)] = pairs {
            return self.write(peer, *local, *remote);
        }
        let lists = [
            pairs.iter().map(|(from, _)| from.address).collect::<Vec<_>>(),
            pairs.iter().map(|(_, to)| to.address).collect(),
            pairs.iter().map(|(from, _)| from.len.0).collect(),
        ];
        if pairs.iter().any(|(from, to)| from.len != to.len) {
            return Err(failed(ACTION, "a block and its place are not equally long"));
        }
        let words: Vec<u8> = lists.iter().flatten().flat_map(|word| word.to_ne_bytes()).collect();
        let memory = Buffer::new("kvferry-descriptors", Bytes(words.len() as u64))
            .and_then(|memory| memory.write(Bytes(0), &words).map(|()| memory))
            .map_err(|error| failed(ACTION, error.to_string()))?;
        let locals: BTreeSet<_> = pairs.iter().map(|(from, _)| self.home(*from)).collect::<Result<_, _>>()?;
        let id = WriteId(self.number());
        let (source, contact) = self.source(peer, &locals)?;
        let order = Order::Batch { id: id.0, peer: &contact.engine.to_string(), count: pairs.len() };
        source.write(id, &order, Some(&memory))?;
        Ok(id)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The process that others write to, or the next one.
    fn target(&mut self) -> Result<&Sidecar, EngineError> {
        if self.target.ended() {
            tracing::warn!("the process with Mooncake's engine has ended and is started again");
            self.target = Sidecar::start(self.tuned, &self.outcomes)?;
            for (address, memory) in &self.memories {
                self.target.open(*address, memory)?;
            }
        }
        Ok(&self.target)
    }

    /// The memory in which a span lies.
    fn home(&self, span: BlockSpan) -> Result<Address, EngineError> {
        let found = self.memories.range(..=Address(span.address)).next_back();
        let inside = |(address, memory): &(&Address, &Arc<Buffer>)| {
            let end = (span.address - address.0).checked_add(span.len.0);
            span.len.0 > 0 && end.is_some_and(|end| end <= memory.len().0)
        };
        let found = found.filter(inside).map(|(address, _)| *address);
        found.ok_or_else(|| failed("write", "the block is not in registered memory"))
    }

    /// The process that writes to a peer, which knows this memory.
    fn source(
        &mut self,
        peer: EnginePeer,
        memories: &BTreeSet<Address>,
    ) -> Result<(&Sidecar, &Contact), EngineError> {
        let Some(Peer { contact, source }) = self.peers.get_mut(&peer) else {
            return Err(failed("write", "it was told to forget the peer"));
        };
        let (sidecar, lent) = match source {
            Some(source) => source,
            None => source.insert((Sidecar::start(self.tuned, &self.outcomes)?, BTreeSet::new())),
        };
        for address in memories {
            if lent.insert(*address)
                && let Some(memory) = self.memories.get(address)
            {
                sidecar.lend(*address, memory)?;
            }
        }
        Ok((sidecar, contact))
    }

    /// An address for memory, of which nobody can know.
    fn place(&self, len: Bytes) -> Result<Address, EngineError> {
        const ACTION: &str = "register memory";
        for _ in 0..64 {
            let any = getrandom::u64().map_err(|error| failed(ACTION, error.to_string()))?;
            let address = FIRST + any % (LAST - FIRST) / GRID * GRID;
            let free = self
                .memories
                .iter()
                .all(|(other, memory)| address + len.0 <= other.0 || other.0 + memory.len().0 <= address);
            if free && len.0 < FIRST {
                return Ok(Address(address));
            }
        }
        Err(failed(ACTION, "no address is free"))
    }
}

impl BlockEngine for SidecarEngine {
    fn register(
        &mut self,
        memory: Arc<Buffer>,
        kind: MemoryKind,
        device: DeviceId,
    ) -> Result<BlockSpan, EngineError> {
        if kind != MemoryKind::Host {
            return Err(failed("register memory", format!("memory of kind {kind:?} is not host memory")));
        }
        let address = self.place(memory.len())?;
        let span = BlockSpan { address: address.0, len: memory.len(), kind, device };
        self.target()?.open(address, &memory)?;
        self.memories.insert(address, memory);
        Ok(span)
    }

    fn metadata(&mut self) -> Result<Vec<u8>, EngineError> {
        let ready = self.target()?.ready()?;
        let contact =
            Contact { engine: SocketAddr::from(([127, 0, 0, 1], ready.port)), mailbox: ready.mailbox };
        serde_json::to_vec(&contact).map_err(|error| failed("describe itself", error.to_string()))
    }

    fn connect(&mut self, metadata: &[u8]) -> Result<EnginePeer, EngineError> {
        let contact = serde_json::from_slice::<Contact>(metadata).ok();
        let contact = contact.filter(|contact| contact.engine.ip().is_loopback());
        let contact = contact.ok_or_else(|| failed("connect", "the peer gives no engine on loopback"))?;
        let peer = EnginePeer(self.number());
        self.peers.insert(peer, Peer { contact, source: None });
        Ok(peer)
    }

    fn disconnect(&mut self, peer: EnginePeer) {
        if let Some((sidecar, _)) = self.peers.remove(&peer).and_then(|peer| peer.source) {
            sidecar.leave();
            self.leaving.push(sidecar);
        }
    }

    fn write(
        &mut self,
        peer: EnginePeer,
        local: BlockSpan,
        remote: BlockSpan,
    ) -> Result<WriteId, EngineError> {
        let home = self.home(local)?;
        if local.len != remote.len {
            return Err(failed("write", "the block and its place are not equally long"));
        }
        let id = WriteId(self.number());
        let (source, contact) = self.source(peer, &BTreeSet::from([home]))?;
        let order = Order::Write {
            id: id.0,
            peer: &contact.engine.to_string(),
            source: Address(local.address),
            target: Address(remote.address),
            length: local.len.0,
        };
        source.write(id, &order, None)?;
        Ok(id)
    }

    fn poll(&mut self, write: WriteId) -> Result<Progress, EngineError> {
        self.outcomes.progress(write, NAME)
    }

    fn release(&mut self, write: WriteId) {
        self.outcomes.forget(write);
    }

    fn writes_alone(&self) -> bool {
        true
    }

    fn notify(&mut self, peer: EnginePeer, message: &[u8]) -> Result<(), EngineError> {
        let contact = self.peers.get(&peer).map(|peer| peer.contact.clone());
        let Some(Contact { engine, mailbox }) = contact else {
            return Err(failed("send a notification", "it was told to forget the peer"));
        };
        self.target()?.notify(&engine.to_string(), mailbox, &hex(message))
    }

    fn notifications(&mut self) -> Result<Vec<Vec<u8>>, EngineError> {
        // Called now and then also when nothing happens.
        self.leaving.retain(|sidecar| !sidecar.ended());
        self.target.heard()
    }
}

impl Drop for SidecarEngine {
    fn drop(&mut self) {
        // All are told first, so that nobody waits for one after the other.
        let sources = self.peers.values().filter_map(|peer| peer.source.as_ref()).map(|(source, _)| source);
        for sidecar in sources.chain(&self.leaving).chain([&self.target]) {
            sidecar.end();
        }
    }
}
