//! The target's end of a connection: grants slots, and scatters the blocks that have come into the pool.

use std::sync::Arc;

use kvferry_arena::Span;
use kvferry_plan::{Bytes, Incarnation};

use super::{
    bank::{Bank, Taken},
    engine::EnginePeer,
    host::{Era, Host, LinkId},
    wire::{BlockFrame, MAX_MESSAGE, Opening, Reply, Request, SlotRef},
    witness::Witness,
};
use crate::{
    TransportError,
    inbound::Inbound,
    socket::{Lost, Socket},
    stats::add,
    wire::{self, Answer},
};

/// Slots that one connection may ask for at a time; more than any source does.
const ASKED: u32 = 1024;

/// Serves one connection until it ends.
pub(super) fn serve(host: &Arc<Host>, socket: &Socket) -> Result<(), Lost> {
    let local = &host.local;
    let setup = &local.setup;
    let Some(peer) = socket.welcome(setup.incarnation, None, setup.limits.connect)? else {
        add(&local.counters.turned_away, 1);
        return Ok(());
    };
    let opening: Opening = socket.message_of(MAX_MESSAGE)?;
    let mut serving = match Serving::start(host, socket, peer, &opening) {
        Ok(serving) => serving,
        Err(error) => return serving_failed(socket, &error),
    };
    let lost = loop {
        if let Err(lost) = serving.step() {
            break lost;
        }
    };
    serving.inbound.lost(|| match &lost {
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

/// Tells the source why it is not served.
fn serving_failed(socket: &Socket, error: &TransportError) -> Result<(), Lost> {
    tracing::warn!(%error, "a link is refused");
    say(socket, &Reply::Failed(error.to_string()))
}

fn say(socket: &Socket, reply: &Reply) -> Result<(), Lost> {
    socket.send(&wire::tagged(reply), &[])
}

struct Serving<'a> {
    host: &'a Host,
    socket: &'a Socket,
    peer: Incarnation,
    link: LinkId,
    opening: &'a Opening,
    witness: Option<Arc<Witness>>,
    inbound: Inbound,
    era: Arc<Era>,
    bank: Arc<Bank>,
    remote: EnginePeer,
    /// Granted on this connection.
    held: Vec<SlotRef>,
    /// Asked for and not granted.
    asked: u32,
}

impl<'a> Serving<'a> {
    /// Meets the source through the engines, both ways.
    fn start(
        host: &'a Arc<Host>,
        socket: &'a Socket,
        peer: Incarnation,
        opening: &'a Opening,
    ) -> Result<Self, TransportError> {
        let era = host.era()?;
        let expected = era.agent.expect(opening.token.to_vec());
        let memory = host.memory(&era)?;
        let remote = era.agent.connect(opening.metadata.to_vec())?;
        let serving = Self {
            host,
            socket,
            peer,
            link: host.next_served(),
            opening,
            witness: Witness::new(&opening.process).map(Arc::new),
            inbound: Inbound::new(Arc::clone(&host.local), peer),
            bank: Arc::clone(host.bank(&era)?),
            era,
            remote,
            held: Vec::new(),
            asked: 0,
        };
        let gone = |lost: Lost| lost.into_error(&peer.to_string());
        say(socket, &Reply::Memory(memory)).map_err(gone)?;
        if !expected.wait(host.local.setup.limits.connect) {
            let reason = "what its engine sends does not arrive here; compare the engines' environment \
                          (UCX_TLS, for example) on both sides";
            return Err(TransportError::PeerGone { endpoint: peer.to_string(), reason: reason.into() });
        }
        serving.era.agent.notify(remote, opening.token.to_vec())?;
        say(socket, &Reply::Ready).map_err(gone)?;
        Ok(serving)
    }

    fn step(&mut self) -> Result<(), Lost> {
        self.grant()?;
        // Who holds a slot has something to say soon.
        match self.socket.message_after(self.held.is_empty(), MAX_MESSAGE)? {
            Request::Ask if self.asked < ASKED => self.asked += 1,
            Request::Ask => return Err(Lost::Malformed("more slots asked for than anybody uses")),
            Request::Withdraw => {
                self.asked = 0;
                self.say(&Reply::Withdrawn)?;
            }
            Request::Block(slot, frames) => {
                self.gives_up(slot).ok_or(Lost::Malformed("a block in a slot that was not granted"))?;
                let landed = self.land(slot, &frames);
                self.bank.settle(slot, self.peer);
                landed.ok_or(Lost::Malformed("a block that is longer than its slot"))?;
            }
            Request::Release(slots) => {
                for slot in slots {
                    self.gives_up(slot);
                    self.host.settle(slot, self.peer);
                }
            }
            Request::Rest(lost) => self.host.rest(self.peer, self.link, lost),
            Request::End(leg, ticket) => {
                let refusal = self.inbound.end(&leg);
                self.say(&Reply::Answer(Answer { ticket, refusal }))?;
            }
        }
        Ok(())
    }

    fn say(&self, reply: &Reply) -> Result<(), Lost> {
        say(self.socket, reply)
    }

    fn gives_up(&mut self, slot: SlotRef) -> Option<SlotRef> {
        let at = self.held.iter().position(|held| *held == slot)?;
        Some(self.held.swap_remove(at))
    }

    /// Scatters a block into the pool, frame after frame.
    fn land(&mut self, slot: SlotRef, frames: &[BlockFrame]) -> Option<()> {
        let from = self.bank.each.0.checked_mul(u64::from(slot.index))?;
        let mut used = 0_u64;
        for BlockFrame { leg, units, len } in frames {
            let span = Span { offset: Bytes(from.checked_add(used)?), len: Bytes(u64::from(*len)) };
            used = used.checked_add(u64::from(*len)).filter(|used| *used <= self.bank.each.0)?;
            if self.inbound.accepts(leg, units, *len) {
                self.inbound.land(units, self.bank.buffer.packed(span).ok()?);
            }
        }
        Some(())
    }

    /// Grants what was asked for. Who has no slot waits here, and is told so, for as long as it is there and says nothing.
    fn grant(&mut self) -> Result<(), Lost> {
        let wait = self.host.local.setup.limits.stall / 4;
        if self.asked > 0
            && let Err(error) = self.host.check_peer(self.peer)
        {
            return self.fail(&error.into());
        }
        while self.asked > 0 {
            match self.bank.take((self.peer, self.link), !self.held.is_empty(), wait) {
                Taken::Slot(slot) => {
                    self.asked -= 1;
                    self.held.push(slot);
                    self.say(&Reply::Slot(slot))?;
                }
                Taken::None if self.held.is_empty() && self.socket.quiet() => self.say(&Reply::Wait)?,
                Taken::None => break,
                Taken::Spent if self.held.is_empty() => self.renew()?,
                // Not all can be fenced off while it holds one: this end is closing.
                Taken::Spent => return Err(Lost::Closed),
            }
        }
        Ok(())
    }

    /// Goes on with the next agent.
    fn renew(&mut self) -> Result<(), Lost> {
        self.say(&Reply::Wait)?;
        let (host, opening) = (self.host, self.opening);
        let next = || {
            let era = host.renewed(&self.era)?;
            let remote = era.agent.connect(opening.metadata.to_vec())?;
            Ok((host.memory(&era)?, Arc::clone(host.bank(&era)?), era, remote))
        };
        let next: Result<_, TransportError> = next();
        match next {
            Ok((memory, bank, era, remote)) => {
                (self.bank, self.era, self.remote) = (bank, era, remote);
                self.say(&Reply::Memory(memory))
            }
            Err(error) => self.fail(&error),
        }
    }

    fn fail(&self, error: &TransportError) -> Result<(), Lost> {
        serving_failed(self.socket, error)?;
        Err(Lost::Closed)
    }
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        self.host.ended((self.peer, self.link), &self.bank, &self.held, self.witness.as_ref());
        self.era.agent.disconnect(self.remote);
    }
}
