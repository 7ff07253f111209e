//! NIXL as an engine that moves blocks.

#![forbid(unsafe_code)]

use std::{
    collections::BTreeMap,
    env,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use kvferry_arena::Buffer;
use kvferry_transport::{
    DeviceId, MemoryKind,
    slots::{BlockEngine, BlockSpan, EngineError, EnginePeer, Progress, WriteId},
};

use crate::{
    ffi::{Agent, Request},
    library,
};

/// An agent of NIXL.
#[derive(Debug)]
pub struct NixlEngine {
    agent: Agent,
    /// Everything is numbered by one count.
    next: u64,
    peers: BTreeMap<EnginePeer, Peer>,
    writes: BTreeMap<WriteId, (EnginePeer, Request)>,
}

/// Agents that nobody uses and whose connections are kept, so that they go on when they are met again. Where both ends give
/// a connection up while the other process is stopped, UCX never closes its sockets.
const IDLE: usize = 8;

/// Another agent. Metadata of one name is taken in as often as it comes.
#[derive(Debug)]
struct Peer {
    name: String,
    metadata: Vec<u8>,
    /// Connections and writes.
    users: u32,
    /// Something that was sent to it has failed.
    failed: bool,
    /// When it was left, of one that nobody uses.
    left: u64,
}

impl NixlEngine {
    /// Starts an agent under a name that none had before, so that nobody takes it for an earlier one.
    ///
    /// # Errors
    /// [`EngineError::Missing`] without the library, [`EngineError::Failed`] when its UCX does not start.
    pub fn new() -> Result<Self, EngineError> {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("kvferry-{}-{:x}-{number}", std::process::id(), since.as_nanos());
        let (_, api) = library::load()?;
        // UCX has no authentication: where nobody says otherwise it is reached over loopback only.
        let settings = env::var_os("UCX_NET_DEVICES").is_none().then_some("NET_DEVICES=lo");
        let agent = Agent::new(api, &name, settings)?;
        Ok(Self { agent, next: 0, peers: BTreeMap::new(), writes: BTreeMap::new() })
    }

    /// As [`BlockEngine::write`], of many spans with a descriptor each: what this costs is why transports pack.
    ///
    /// # Errors
    /// As there.
    pub fn write_each(
        &mut self,
        peer: EnginePeer,
        pairs: &[(BlockSpan, BlockSpan)],
    ) -> Result<WriteId, EngineError> {
        let name = self.peer(peer)?.name.clone();
        let request = self.agent.write(&name, pairs).inspect_err(|_| self.failed(peer))?;
        self.peer(peer)?.users += 1;
        let write = WriteId(self.number());
        self.writes.insert(write, (peer, request));
        Ok(write)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn peer(&mut self, peer: EnginePeer) -> Result<&mut Peer, EngineError> {
        self.peers.get_mut(&peer).ok_or(EngineError::Failed {
            engine: "NIXL",
            action: "write",
            reason: "it was told to forget the peer".into(),
        })
    }

    fn failed(&mut self, peer: EnginePeer) {
        if let Some(known) = self.peers.get_mut(&peer) {
            known.failed = true;
        }
    }

    /// One user less.
    fn leave(&mut self, peer: EnginePeer) {
        let now = self.number();
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.users = known.users.saturating_sub(1);
        if known.users > 0 {
            return;
        }
        known.left = now;
        if known.failed {
            return self.forget(peer);
        }
        let idle = || self.peers.iter().filter(|(_, known)| known.users == 0);
        if idle().count() > IDLE
            && let Some((oldest, _)) = idle().min_by_key(|(_, known)| known.left)
        {
            self.forget(*oldest);
        }
    }

    fn forget(&mut self, peer: EnginePeer) {
        if let Some(known) = self.peers.remove(&peer) {
            self.agent.invalidate(&known.name);
        }
    }
}

impl BlockEngine for NixlEngine {
    fn register(
        &mut self,
        memory: Arc<Buffer>,
        kind: MemoryKind,
        device: DeviceId,
    ) -> Result<BlockSpan, EngineError> {
        let span = BlockSpan { address: memory.address(), len: memory.len(), kind, device };
        match kind {
            MemoryKind::Host => self.agent.register(memory, span)?,
            other => {
                return Err(EngineError::Failed {
                    engine: "NIXL",
                    action: "register memory",
                    reason: format!("memory of kind {other:?} is not used yet; use host memory"),
                });
            }
        }
        Ok(span)
    }

    fn metadata(&mut self) -> Result<Vec<u8>, EngineError> {
        self.agent.metadata()
    }

    fn connect(&mut self, metadata: &[u8]) -> Result<EnginePeer, EngineError> {
        let name = self.agent.load(metadata)?;
        let known = self.peers.iter_mut().find(|(_, known)| known.name == name);
        if let Some((peer, known)) = known {
            known.users += 1;
            return Ok(*peer);
        }
        let peer = EnginePeer(self.number());
        let metadata = metadata.to_vec();
        self.peers.insert(peer, Peer { name, metadata, users: 1, failed: false, left: 0 });
        Ok(peer)
    }

    fn disconnect(&mut self, peer: EnginePeer) {
        self.leave(peer);
    }

    fn write(
        &mut self,
        peer: EnginePeer,
        local: BlockSpan,
        remote: BlockSpan,
    ) -> Result<WriteId, EngineError> {
        self.write_each(peer, &[(local, remote)])
    }

    fn poll(&mut self, write: WriteId) -> Result<Progress, EngineError> {
        let &(peer, ref request) = self.writes.get(&write).ok_or(EngineError::Failed {
            engine: "NIXL",
            action: "finish a write",
            reason: "it was told to forget it".into(),
        })?;
        match self.agent.settled(request) {
            Ok(settled) => Ok(if settled { Progress::Settled } else { Progress::Moving }),
            Err(error) => {
                self.failed(peer);
                Err(error)
            }
        }
    }

    fn release(&mut self, write: WriteId) {
        if let Some((peer, request)) = self.writes.remove(&write) {
            self.agent.release(request);
            self.leave(peer);
        }
    }

    fn notify(&mut self, peer: EnginePeer, message: &[u8]) -> Result<(), EngineError> {
        let Peer { name, metadata, users, .. } = self.peer(peer)?;
        let (name, metadata, alone) = (name.clone(), metadata.clone(), *users == 1);
        let mut sent = self.agent.notify(&name, message);
        if sent.is_err() && alone {
            // The connection may have been lost while nobody used it: the next one is made of the metadata.
            self.agent.invalidate(&name);
            self.agent.load(&metadata)?;
            sent = self.agent.notify(&name, message);
        }
        sent.inspect_err(|_| self.failed(peer))
    }

    fn notifications(&mut self) -> Result<Vec<Vec<u8>>, EngineError> {
        self.agent.notifications()
    }
}

impl Drop for NixlEngine {
    fn drop(&mut self) {
        for (_, request) in std::mem::take(&mut self.writes).into_values() {
            self.agent.release(request);
        }
    }
}
