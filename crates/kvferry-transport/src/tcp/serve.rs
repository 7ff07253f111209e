//! The landing end of a connection.

use std::sync::Arc;

use crate::{
    TransportError,
    inbound::{Inbound, Left},
    local::Local,
    socket::{Lost, Socket},
    stats::add,
    wire::{self, Answer, Body, Header},
};

/// Payload of refused frames is read into this much memory and forgotten.
const DRAIN: usize = 64 << 10;

/// Serves one connection until it ends.
pub(super) fn serve(local: &Arc<Local>, socket: &Socket) -> Result<(), Lost> {
    let setup = &local.setup;
    let Some(peer) = socket.welcome(setup.incarnation, None, setup.limits.connect)? else {
        add(&local.counters.turned_away, 1);
        return Ok(());
    };
    let mut inbound = Inbound::new(Arc::clone(local), peer);
    let lost = frames(socket, &mut inbound);
    inbound.lost(|| match &lost {
        Lost::Stalled(waited) => TransportError::Stalled { endpoint: peer.to_string(), waited: *waited },
        Lost::Malformed(what) | Lost::Length(what) => {
            TransportError::Protocol { endpoint: peer.to_string(), reason: (*what).into() }
        }
        Lost::Closed | Lost::Cut | Lost::Io(_) => TransportError::PeerGone {
            endpoint: peer.to_string(),
            reason: "its connection ended in the middle of a leg".into(),
        },
    });
    Err(lost)
}

/// Lands frames until something ends the connection.
fn frames(socket: &Socket, inbound: &mut Inbound) -> Lost {
    let mut stage = Vec::new();
    loop {
        if let Err(lost) = frame(socket, inbound, &mut stage) {
            return lost;
        }
    }
}

fn frame(socket: &Socket, inbound: &mut Inbound, stage: &mut Vec<u8>) -> Result<(), Lost> {
    let mut prefix = [0; 8];
    socket.fill(&mut prefix, true)?;
    let (head, payload) = wire::frame_lens(prefix).ok_or(Lost::Length("a frame of an impossible length"))?;
    let mut bytes = [0; wire::MAX_HEADER as usize];
    let bytes = &mut bytes[..head];
    socket.fill(bytes, false)?;
    let header: Header =
        wire::decode(bytes).ok_or(Lost::Malformed("a frame header that cannot be decoded"))?;
    match header.body {
        Body::Units(units) if inbound.accepts(&header.leg, &units, payload) => {
            match inbound.land_from(socket, &units, payload as usize)? {
                Left::ToLand => {
                    let payload = room(stage, payload as usize);
                    socket.fill(payload, false)?;
                    inbound.land(&units, (&*payload).into());
                }
                Left::Dropped(left) => drain(socket, left, stage)?,
            }
        }
        Body::Units(_) => drain(socket, payload as usize, stage)?,
        Body::End(_) if payload > 0 => return Err(Lost::Malformed("an end of a leg with a payload")),
        Body::End(ticket) => {
            let refusal = inbound.end(&header.leg);
            socket.send(&wire::tagged(&Answer { ticket, refusal }), &[])?;
        }
    }
    Ok(())
}

fn drain(socket: &Socket, mut left: usize, stage: &mut Vec<u8>) -> Result<(), Lost> {
    while left > 0 {
        let part = room(stage, left.min(DRAIN));
        left -= part.len();
        socket.fill(part, false)?;
    }
    Ok(())
}

/// The first `len` bytes of a buffer that only grows.
fn room(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}
