//! What an engine that moves blocks must be able to do.

use std::{fmt, sync::Arc};

use kvferry_arena::Buffer;
use kvferry_plan::Bytes;
use minicbor::{Decode, Encode};

use crate::{DeviceId, MemoryKind};

/// Why an engine could not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Its library is not there, or is not one that is known.
    #[error("{engine} cannot be loaded: {reason}; {remedy}")]
    Missing {
        /// The engine.
        engine: &'static str,
        /// What was looked for, and what was found.
        reason: String,
        /// How it is installed.
        remedy: &'static str,
    },
    /// It refused or failed.
    #[error("{engine} could not {action}: {reason}")]
    Failed {
        /// The engine.
        engine: &'static str,
        /// What it was asked.
        action: &'static str,
        /// What it said.
        reason: String,
    },
}

/// Memory in one piece, as engines name it: in this process or, for a target of writes, in another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct BlockSpan {
    /// The first byte, in the address space of its process.
    #[n(0)]
    pub address: u64,
    /// Bytes.
    #[n(1)]
    pub len: Bytes,
    /// The kind of memory.
    #[n(2)]
    pub kind: MemoryKind,
    /// The device that it belongs to.
    #[n(3)]
    pub device: DeviceId,
}

impl BlockSpan {
    /// `len` bytes from byte `at` on, if they are inside.
    #[must_use]
    pub fn part(&self, at: Bytes, len: Bytes) -> Option<Self> {
        let end = at.0.checked_add(len.0)?;
        let address = self.address.checked_add(at.0)?;
        (end <= self.len.0).then_some(Self { address, len, ..*self })
    }
}

/// A process that an engine may write to, by the engine's own number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EnginePeer(pub u64);

/// A write under way, by the engine's own number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteId(pub u64);

/// How far a write is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Bytes may still be read here and written there.
    Moving,
    /// All bytes are there. Nothing is read or written for it any more.
    Settled,
}

/// Moves blocks from registered memory of this process into registered memory of others, on behalf of [`super::Slots`].
///
/// An engine is used by one thread, which calls nothing else while one call runs. Its writes go on by themselves, here
/// and at the other process, whether or not anybody calls. Dropping an engine closes it: no thread of its own touches
/// registered memory of this process afterwards. What other processes have sent to it may still come, by means
/// that the engine does not control; that is why memory is not given back before its writers are fenced, unless
/// [`Self::writes_alone`].
pub trait BlockEngine: Send + fmt::Debug {
    /// Makes memory known, as a source and as a target of writes, and keeps it.
    ///
    /// # Errors
    /// [`EngineError`], also when it cannot use this kind of memory.
    fn register(
        &mut self,
        memory: Arc<Buffer>,
        kind: MemoryKind,
        device: DeviceId,
    ) -> Result<BlockSpan, EngineError>;

    /// What others must know to write to what is registered now.
    ///
    /// # Errors
    /// [`EngineError`].
    fn metadata(&mut self) -> Result<Vec<u8>, EngineError>;

    /// Learns of a process by its metadata. It may be this one.
    ///
    /// # Errors
    /// [`EngineError`].
    fn connect(&mut self, metadata: &[u8]) -> Result<EnginePeer, EngineError>;

    /// Forgets a process.
    fn disconnect(&mut self, peer: EnginePeer);

    /// Starts to write `local` to `remote`, which are equally long.
    ///
    /// # Errors
    /// [`EngineError`]; then nothing was or will be written.
    fn write(
        &mut self,
        peer: EnginePeer,
        local: BlockSpan,
        remote: BlockSpan,
    ) -> Result<WriteId, EngineError>;

    /// How far a write is.
    ///
    /// # Errors
    /// [`EngineError`] when it failed: nothing is read here for it any more, but what has left may still arrive.
    fn poll(&mut self, write: WriteId) -> Result<Progress, EngineError>;

    /// Forgets a write, once it has settled or failed.
    fn release(&mut self, write: WriteId);

    /// Its gate, for an engine that can keep others out of registered memory: landing slots are open to writes only
    /// from a grant until its writer has settled.
    fn gate(&self) -> Option<Arc<dyn Gate>> {
        None
    }

    /// True when registered memory is written by threads and processes of this engine only, whoever sends: once it is dropped,
    /// nobody writes it.
    fn writes_alone(&self) -> bool {
        false
    }

    /// Sends a short message that stands by itself. It is not ordered with writes that have not settled.
    ///
    /// # Errors
    /// [`EngineError`]. Success is not delivery.
    fn notify(&mut self, peer: EnginePeer, message: &[u8]) -> Result<(), EngineError>;

    /// Messages that have come since the last call.
    ///
    /// # Errors
    /// [`EngineError`].
    fn notifications(&mut self) -> Result<Vec<Vec<u8>>, EngineError>;
}

/// Lets writes of others into registered memory, and keeps them out. Called on any thread.
pub trait Gate: Send + Sync + fmt::Debug {
    /// From now on `slot` may be written; maybe it could before.
    fn open(&self, slot: BlockSpan);

    /// From now on it may not. Waits for bytes that are being copied.
    fn shut(&self, slot: BlockSpan);
}

/// Starts an engine, under a name that none had before.
pub type StartEngine = Box<dyn Fn() -> Result<Box<dyn BlockEngine>, EngineError> + Send + Sync>;
