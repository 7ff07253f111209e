//! The source's blocks: packed here, read from here by the engine.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

use kvferry_arena::{ArenaError, Buffer, PackedMut, Span};
use kvferry_plan::Bytes;

use super::engine::BlockSpan;
use crate::{
    local::lock,
    stats::{Counters, Gauge},
};

/// All blocks of an agent.
#[derive(Debug)]
pub(super) struct Staging {
    buffer: Arc<Buffer>,
    span: BlockSpan,
    each: Bytes,
    /// What was used last is taken first: it may still be in the processor's cache.
    free: Mutex<Vec<u32>>,
    freed: Condvar,
    counters: Arc<Counters>,
}

impl Staging {
    /// `buffer` is registered as `span`.
    pub(super) fn new(buffer: Arc<Buffer>, span: BlockSpan, each: Bytes, counters: &Arc<Counters>) -> Self {
        let count = u32::try_from(buffer.len().0 / each.0.max(1)).unwrap_or(u32::MAX);
        let counters = Arc::clone(counters);
        Self { buffer, span, each, free: Mutex::new((0..count).collect()), freed: Condvar::new(), counters }
    }

    /// A block, if one is free within `wait`.
    pub(super) fn take(self: &Arc<Self>, wait: Duration) -> Option<Block> {
        let free = lock(&self.free);
        let (mut free, _) = self
            .freed
            .wait_timeout_while(free, wait, |free| free.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        let index = free.pop()?;
        let gauge = Gauge::new(&self.counters, |c| &c.staged);
        Some(Block { staging: Arc::clone(self), index, _gauge: gauge })
    }
}

/// A block that is packed or on its way. It is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Block {
    staging: Arc<Staging>,
    index: u32,
    _gauge: Gauge,
}

impl Block {
    fn at(&self) -> Bytes {
        Bytes(self.staging.each.0 * u64::from(self.index))
    }

    /// Its first bytes.
    pub(super) fn packed(&self, len: Bytes) -> Result<PackedMut<'_>, ArenaError> {
        self.staging.buffer.packed_mut(Span { offset: self.at(), len })
    }

    /// Its first bytes, as the engine knows them.
    pub(super) fn span(&self, len: Bytes) -> Option<BlockSpan> {
        (len <= self.staging.each).then(|| self.staging.span.part(self.at(), len))?
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        lock(&self.staging.free).push(self.index);
        self.staging.freed.notify_one();
    }
}
