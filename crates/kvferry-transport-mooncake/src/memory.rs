//! The memory of an engine: staging that it reads, and landing slots that peers write while they are open.

use std::{
    io,
    ops::Range,
    os::fd::BorrowedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use kvferry_arena::{ArenaError, Buffer, Span, Wait};
use kvferry_plan::Bytes;
use kvferry_transport::slots::{BlockSpan, Gate};

use crate::{Access, Address, Notification, Ranges, Received, Region};

/// Notifications that nobody has heard; more are not taken.
const UNHEARD: usize = 1024;

/// Bytes that are received while nobody can shut a slot.
const PIECE: u64 = 512 << 10;

/// What an engine has registered. Its addresses are invented, and nobody who asks is told of them: a peer hears of its slots
/// from the transport.
#[derive(Debug, Default)]
pub(crate) struct Registered {
    state: RwLock<State>,
    heard: Mutex<Vec<Vec<u8>>>,
}

#[derive(Debug, Default)]
struct State {
    buffers: Vec<(Region, Arc<Buffer>)>,
    /// What may be written now.
    open: Vec<Region>,
}

impl State {
    /// The buffer in which `region` lies, and where.
    fn find(&self, region: Region) -> Option<(&Arc<Buffer>, Bytes)> {
        self.buffers.iter().find_map(|(all, buffer)| Some((buffer, all.offset(region.address, region.len)?)))
    }

    fn is_open(&self, region: Region) -> bool {
        self.open.iter().any(|open| open.offset(region.address, region.len).is_some())
    }
}

fn region(span: BlockSpan) -> Region {
    Region { address: Address(span.address), len: span.len }
}

impl Registered {
    /// Makes memory known at `address`, unless that is taken.
    pub(crate) fn register(&self, address: Address, buffer: Arc<Buffer>) -> Option<Region> {
        let new = Region { address, len: buffer.len() };
        let end = |region: &Region| region.address.0.checked_add(region.len.0);
        let range = |region: &Region| Some(Range { start: region.address.0, end: end(region)? });
        let wanted = range(&new)?;
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let taken = |(other, _): &(Region, _)| {
            range(other).is_none_or(|other| other.start < wanted.end && wanted.start < other.end)
        };
        if state.buffers.iter().any(taken) {
            return None;
        }
        state.buffers.push((new, buffer));
        Some(new)
    }

    /// The buffer in which a span lies, and where.
    pub(crate) fn find(&self, span: BlockSpan) -> Option<(Arc<Buffer>, Bytes)> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.find(region(span)).map(|(buffer, at)| (Arc::clone(buffer), at))
    }

    /// What has come since it was asked last.
    pub(crate) fn heard(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.notifications())
    }

    fn notifications(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gate for Registered {
    fn open(&self, slot: BlockSpan) {
        let slot = region(slot);
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if !state.open.contains(&slot) {
            state.open.push(slot);
        }
    }

    fn shut(&self, slot: BlockSpan) {
        let slot = region(slot);
        self.state.write().unwrap_or_else(PoisonError::into_inner).open.retain(|open| *open != slot);
    }
}

impl Ranges for Registered {
    fn advertised(&self) -> Vec<Region> {
        Vec::new()
    }

    fn grants(&self, access: Access, region: Region) -> bool {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        access == Access::Write && state.is_open(region)
    }

    fn land(&self, at: Address, piece: &[u8]) -> bool {
        let region = Region { address: at, len: Bytes(piece.len() as u64) };
        // Held while bytes are copied: who shuts a slot waits for that.
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let place = state.find(region).filter(|_| state.is_open(region));
        place.is_some_and(|(buffer, at)| buffer.write(at, piece).is_ok())
    }

    fn receive(&self, rest: Region, socket: BorrowedFd<'_>) -> io::Result<Received> {
        let piece = Region { len: Bytes(rest.len.0.min(PIECE)), ..rest };
        // As above. It does not wait for bytes to come.
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let Some((buffer, offset)) = state.find(piece).filter(|_| state.is_open(piece)) else {
            return Ok(Received::Refused);
        };
        match buffer.receive_from(socket, Span { offset, len: piece.len }, Wait::Never) {
            Ok(landed) => Ok(Received::Landed(Bytes(landed as u64))),
            Err(ArenaError::Socket(error)) => Err(error),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn serve(&self, _: Address, _: &mut [u8]) -> bool {
        false
    }

    fn notified(&self, notification: Notification) -> bool {
        let mut heard = self.notifications();
        let room = heard.len() < UNHEARD;
        if room {
            heard.push(notification.message.into_bytes());
        }
        room
    }
}
