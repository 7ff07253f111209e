//! An engine within one process, whose writes can be held up and go on later, also when both of its ends have closed: what
//! the engines of others do to a peer that is stopped.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(dead_code, reason = "each test uses a part")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use kvferry_arena::Buffer;
use kvferry_plan::{Bytes, Incarnation};
use kvferry_transport::{
    DeviceId, MemoryKind, Setup, TransportError,
    slots::{BlockEngine, BlockSpan, EngineError, EnginePeer, Progress, SlotOptions, Slots, WriteId},
};

/// What all engines of a test share.
#[derive(Clone, Default)]
pub(crate) struct Fabric(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    next: u64,
    agents: BTreeMap<u64, Agent>,
    writes: BTreeMap<u64, Write>,
    held: BTreeSet<Incarnation>,
    failing: BTreeSet<Incarnation>,
}

struct Agent {
    owner: Incarnation,
    memory: Vec<Weak<Buffer>>,
    heard: Vec<Vec<u8>>,
}

struct Write {
    /// Whose it is, and to whom.
    between: [Incarnation; 2],
    from: (Weak<Buffer>, Bytes),
    to: (Weak<Buffer>, Bytes),
    len: Bytes,
    done: Bytes,
}

impl Write {
    /// The next half, or what is left.
    fn go_on(&mut self) {
        let left = self.len.0 - self.done.0;
        let now = if self.done.0 == 0 { left.div_ceil(2) } else { left };
        // Memory that is gone is the worst that may happen: then the test fails for its bytes.
        if let (Some(from), Some(to)) = (self.from.0.upgrade(), self.to.0.upgrade()) {
            let mut bytes = vec![0; now as usize];
            from.read(Bytes(self.from.1.0 + self.done.0), &mut bytes).unwrap();
            to.write(Bytes(self.to.1.0 + self.done.0), &bytes).unwrap();
        }
        self.done.0 += now;
    }
}

impl Fabric {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Starts an end whose writes go over this fabric.
    pub(crate) fn start(&self, setup: Setup, options: SlotOptions) -> Result<Slots, TransportError> {
        let (fabric, owner) = (self.clone(), setup.incarnation);
        let start = move || {
            let mut state = fabric.state();
            state.next += 1;
            let number = state.next;
            state.agents.insert(number, Agent { owner, memory: Vec::new(), heard: Vec::new() });
            drop(state);
            let (fabric, memory) = (fabric.clone(), Vec::new());
            let engine: Box<dyn BlockEngine> = Box::new(Engine { fabric, owner, number, memory });
            Ok(engine)
        };
        Slots::new(setup, options, ("fabric", "write `fabric://ADDRESS:PORT`"), Box::new(start))
    }

    /// Small slots, and few.
    pub(crate) fn options() -> SlotOptions {
        SlotOptions { slot: Bytes(16 << 10), slots: 3, staging: 3, window: 2, kept: 2 }
    }

    /// From now on the writes of this process and to it stop, half done.
    pub(crate) fn hold(&self, process: Incarnation) {
        self.state().held.insert(process);
    }

    /// They go on.
    pub(crate) fn go_on(&self, process: Incarnation) {
        let mut state = self.state();
        state.held.remove(&process);
        for write in state.writes.values_mut().filter(|write| write.between.contains(&process)) {
            while write.done < write.len {
                write.go_on();
            }
        }
    }

    /// From now on the writes of this process fail, half done; the other half comes with [`Fabric::go_on`].
    pub(crate) fn fail(&self, process: Incarnation) {
        self.state().failing.insert(process);
    }

    /// They do not any more.
    pub(crate) fn mend(&self, process: Incarnation) {
        self.state().failing.remove(&process);
    }

    /// Writes that have not settled.
    pub(crate) fn moving(&self) -> usize {
        self.state().writes.values().filter(|write| write.done < write.len).count()
    }
}

struct Engine {
    fabric: Fabric,
    owner: Incarnation,
    number: u64,
    memory: Vec<Arc<Buffer>>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "engine {}", self.number)
    }
}

fn failed(action: &'static str) -> EngineError {
    EngineError::Failed { engine: "fabric", action, reason: "no such memory or agent".into() }
}

/// Where a span lies.
fn find(memory: impl Iterator<Item = Arc<Buffer>>, span: BlockSpan) -> Option<(Weak<Buffer>, Bytes)> {
    memory.filter(|buffer| span.address >= buffer.address()).find_map(|buffer| {
        let at = Bytes(span.address - buffer.address());
        (at.0 + span.len.0 <= buffer.len().0).then(|| (Arc::downgrade(&buffer), at))
    })
}

impl BlockEngine for Engine {
    fn register(
        &mut self,
        memory: Arc<Buffer>,
        kind: MemoryKind,
        device: DeviceId,
    ) -> Result<BlockSpan, EngineError> {
        let span = BlockSpan { address: memory.address(), len: memory.len(), kind, device };
        self.fabric.state().agents.get_mut(&self.number).unwrap().memory.push(Arc::downgrade(&memory));
        self.memory.push(memory);
        Ok(span)
    }

    fn metadata(&mut self) -> Result<Vec<u8>, EngineError> {
        Ok(self.number.to_le_bytes().to_vec())
    }

    fn connect(&mut self, metadata: &[u8]) -> Result<EnginePeer, EngineError> {
        let number = u64::from_le_bytes(metadata.try_into().map_err(|_| failed("connect"))?);
        Ok(EnginePeer(number))
    }

    fn disconnect(&mut self, _: EnginePeer) {}

    fn write(
        &mut self,
        peer: EnginePeer,
        local: BlockSpan,
        remote: BlockSpan,
    ) -> Result<WriteId, EngineError> {
        let mut state = self.fabric.state();
        let from = find(self.memory.iter().cloned(), local).ok_or(failed("write"))?;
        let theirs = state.agents.get(&peer.0).ok_or(failed("write"))?;
        let between = [self.owner, theirs.owner];
        let to = find(theirs.memory.iter().filter_map(Weak::upgrade), remote).ok_or(failed("write"))?;
        state.next += 1;
        let id = state.next;
        let write = Write { between, from, to, len: local.len, done: Bytes(0) };
        state.writes.insert(id, write);
        Ok(WriteId(id))
    }

    fn poll(&mut self, write: WriteId) -> Result<Progress, EngineError> {
        let mut state = self.fabric.state();
        let State { writes, held, failing, .. } = &mut *state;
        let write = writes.get_mut(&write.0).ok_or(failed("poll"))?;
        if failing.contains(&self.owner) && write.done.0 > 0 && write.done < write.len {
            let reason = "the other end was lost".into();
            return Err(EngineError::Failed { engine: "fabric", action: "write", reason });
        }
        let held = write.between.iter().any(|end| held.contains(end));
        if held && write.done.0 > 0 {
            return Ok(if write.done == write.len { Progress::Settled } else { Progress::Moving });
        }
        write.go_on();
        Ok(if write.done == write.len { Progress::Settled } else { Progress::Moving })
    }

    fn release(&mut self, write: WriteId) {
        let mut state = self.fabric.state();
        // What has failed may still come.
        if state.writes.get(&write.0).is_some_and(|write| write.done == write.len) {
            state.writes.remove(&write.0);
        }
    }

    fn notify(&mut self, peer: EnginePeer, message: &[u8]) -> Result<(), EngineError> {
        let mut state = self.fabric.state();
        state.agents.get_mut(&peer.0).ok_or(failed("notify"))?.heard.push(message.to_vec());
        Ok(())
    }

    fn notifications(&mut self) -> Result<Vec<Vec<u8>>, EngineError> {
        Ok(std::mem::take(&mut self.fabric.state().agents.get_mut(&self.number).unwrap().heard))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Its writes stay: what has left goes on.
        self.fabric.state().agents.remove(&self.number);
    }
}
