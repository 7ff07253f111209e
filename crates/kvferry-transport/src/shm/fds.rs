//! Arenas over a socket: per rank, its number, its pages, its state slots, and the descriptor.

use std::{
    collections::BTreeMap,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
};

use kvferry_arena::{Arena, ArenaView, Memory};
use kvferry_plan::{PoolLayout, PoolSize, RankId};
use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    },
};

use crate::{
    PeerAddr, TransportError,
    socket::{Lost, Socket},
    wire::Hello,
};

/// Rank, pages and slots.
pub(super) const RECORD: usize = 12;

/// Passes the arena of `rank`.
pub(super) fn send(socket: &Socket, rank: RankId, arena: &Arena) -> Result<(), Lost> {
    let mut record = [0; RECORD];
    record[..4].copy_from_slice(&rank.0.to_le_bytes());
    record[4..8].copy_from_slice(&arena.layout().pages().to_le_bytes());
    record[8..].copy_from_slice(&arena.layout().slots().to_le_bytes());
    let fds = [arena.fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    // A record is far smaller than any socket buffer, so it goes whole or not at all.
    match sendmsg(socket.fd(), &[IoSlice::new(&record)], &mut control, SendFlags::NOSIGNAL) {
        Ok(RECORD) => Ok(()),
        Ok(_) => Err(Lost::Cut),
        Err(error) => Err(Lost::Io(error.into())),
    }
}

/// Maps the arenas that follow a source's `hello`, by the layouts that its descriptor gives.
pub(super) fn receive(
    socket: &Socket,
    hello: &Hello,
    peer: &PeerAddr,
) -> Result<BTreeMap<RankId, ArenaView>, TransportError> {
    let lost = |lost: Lost| lost.into_error(&peer.endpoint);
    let placement = &peer.descriptor.placement;
    let protocol = |reason: String| TransportError::Protocol { endpoint: peer.endpoint.clone(), reason };
    let ranks = hello.ranks.unwrap_or(0);
    if ranks > placement.ranks() {
        return Err(protocol(format!("it has {ranks} ranks, but its layout {}", placement.ranks())));
    }
    let mut views = BTreeMap::new();
    for _ in 0..ranks {
        let (record, fd) = record(socket).map_err(lost)?;
        let [rank, pages, slots] = std::array::from_fn(|at| {
            let [a, b, c, d] = std::array::from_fn(|byte| record[4 * at + byte]);
            u32::from_le_bytes([a, b, c, d])
        });
        let rank = RankId(rank);
        // A rank passes its own pool, of its share of the pages.
        let size = PoolSize { pages: pages.saturating_mul(placement.shard_ranks()), slots };
        let layout = PoolLayout::with_slots(&peer.descriptor.shape, placement, rank, size)
            .map_err(|e| protocol(format!("rank {rank} with {pages} pages and {slots} slots: {e}")))?;
        views.insert(rank, ArenaView::map(fd.as_fd(), layout)?);
    }
    Ok(views)
}

fn record(socket: &Socket) -> Result<([u8; RECORD], OwnedFd), Lost> {
    let mut record = [0; RECORD];
    let mut fd = None;
    let mut filled = 0;
    while filled < RECORD {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut record[filled..])];
        match recvmsg(socket.fd(), &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) if message.bytes == 0 => return Err(Lost::Cut),
            Ok(message) => filled += message.bytes,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(socket.stalled()),
            Err(error) => return Err(Lost::Io(error.into())),
        }
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                // A second descriptor is closed right here.
                fd = fds.last().or(fd);
            }
        }
    }
    fd.map(|fd| (record, fd)).ok_or(Lost::Malformed("a rank without a descriptor"))
}
