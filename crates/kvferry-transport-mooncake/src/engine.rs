//! Mooncake's protocol as an engine that moves blocks.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use kvferry_arena::{Buffer, Span};
use kvferry_transport::{
    DeviceId, MemoryKind,
    slots::{BlockEngine, BlockSpan, EngineError, EnginePeer, Gate, Progress, WriteId},
};

use crate::{
    Address, Limits, MooncakeError, Notification, Target,
    memory::Registered,
    outcomes::Outcomes,
    sender::{Block, Sender, Thread},
};

const NAME: &str = "mooncake-tcp";
/// Invented addresses are below: engines take them for those of a process.
const ADDRESSES: u64 = 1 << 47;

/// Both roles of the protocol, for [`kvferry_transport::slots::Slots`].
#[derive(Debug)]
pub struct MooncakeEngine {
    memory: Arc<Registered>,
    target: Target,
    limits: Limits,
    /// Everything is numbered by one count.
    next: u64,
    peers: BTreeMap<EnginePeer, Sender>,
    /// Of peers that were forgotten, until they have sent everything.
    leaving: Vec<Thread>,
    outcomes: Outcomes,
}

fn failed(action: &'static str, reason: impl Into<String>) -> EngineError {
    EngineError::Failed { engine: NAME, action, reason: reason.into() }
}

impl MooncakeEngine {
    /// Listens on two free ports of a loopback address.
    ///
    /// # Errors
    /// As [`Target::start`].
    pub fn new(bind: IpAddr, limits: Limits) -> Result<Self, MooncakeError> {
        let memory = Arc::new(Registered::default());
        let ranges: Arc<Registered> = Arc::clone(&memory);
        let target = Target::start(bind, ranges, limits.clone())?;
        Ok(Self {
            memory,
            target,
            limits,
            next: 0,
            peers: BTreeMap::new(),
            leaving: Vec::new(),
            outcomes: Outcomes::default(),
        })
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn peer(&self, peer: EnginePeer, action: &'static str) -> Result<&Sender, EngineError> {
        self.peers.get(&peer).ok_or_else(|| failed(action, "it was told to forget the peer"))
    }
}

impl BlockEngine for MooncakeEngine {
    fn register(
        &mut self,
        memory: Arc<Buffer>,
        kind: MemoryKind,
        device: DeviceId,
    ) -> Result<BlockSpan, EngineError> {
        if kind != MemoryKind::Host {
            return Err(failed("register memory", format!("memory of kind {kind:?} is not host memory")));
        }
        // An address of an earlier agent, which somebody may still write to, is none of this one but by the rarest chance.
        for _ in 0..64 {
            let any = getrandom::u64().map_err(|error| failed("register memory", error.to_string()))?;
            let address = Address(((any % ADDRESSES) & !0xffff).max(0x1_0000));
            if let Some(region) = self.memory.register(address, Arc::clone(&memory)) {
                return Ok(BlockSpan { address: region.address.0, len: region.len, kind, device });
            }
        }
        Err(failed("register memory", "no address is free"))
    }

    fn metadata(&mut self) -> Result<Vec<u8>, EngineError> {
        Ok(self.target.address().to_string().into_bytes())
    }

    fn connect(&mut self, metadata: &[u8]) -> Result<EnginePeer, EngineError> {
        let address = str::from_utf8(metadata).ok().and_then(|text| text.parse::<SocketAddr>().ok());
        let address = address.filter(|address| address.ip().is_loopback());
        let address = address.ok_or_else(|| failed("connect", "the peer gives no loopback address"))?;
        self.leaving.retain(|thread| !thread.finished());
        let sender = Sender::start(address, &self.limits, self.outcomes.clone())
            .map_err(|error| failed("connect", error.to_string()))?;
        let peer = EnginePeer(self.number());
        self.peers.insert(peer, sender);
        Ok(peer)
    }

    fn disconnect(&mut self, peer: EnginePeer) {
        self.leaving.extend(self.peers.remove(&peer).map(Sender::leave));
    }

    fn write(
        &mut self,
        peer: EnginePeer,
        local: BlockSpan,
        remote: BlockSpan,
    ) -> Result<WriteId, EngineError> {
        const ACTION: &str = "write";
        let id = WriteId(self.number());
        let outside = || failed(ACTION, "the block is not in registered memory");
        let (buffer, at) = self.memory.find(local).ok_or_else(outside)?;
        if local.len != remote.len {
            return Err(failed(ACTION, "the block and its place are not equally long"));
        }
        let from = Span { offset: at, len: local.len };
        let block = Block { id, buffer, from, to: Address(remote.address) };
        let sender = self.peer(peer, ACTION)?;
        self.outcomes.begin(id);
        if !sender.write(block) {
            self.outcomes.forget(id);
            return Err(failed(ACTION, "its thread has ended"));
        }
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
        const ACTION: &str = "send a notification";
        let text = str::from_utf8(message).map_err(|_| failed(ACTION, "it is no text"))?;
        let notification = Notification { name: "kvferry".into(), message: text.into() };
        let taken = self.peer(peer, ACTION)?.notify(notification);
        if taken { Ok(()) } else { Err(failed(ACTION, "its thread has ended")) }
    }

    fn notifications(&mut self) -> Result<Vec<Vec<u8>>, EngineError> {
        Ok(self.memory.heard())
    }

    fn gate(&self) -> Option<Arc<dyn Gate>> {
        let memory: Arc<Registered> = Arc::clone(&self.memory);
        Some(memory)
    }
}

impl Drop for MooncakeEngine {
    fn drop(&mut self) {
        self.target.close();
        let peers = std::mem::take(&mut self.peers).into_values().map(Sender::leave);
        for thread in peers.chain(std::mem::take(&mut self.leaving)) {
            thread.close();
        }
    }
}
