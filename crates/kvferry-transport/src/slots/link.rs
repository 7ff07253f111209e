//! The source's end of a link: packs blocks, has the engine write them to slots that the target granted, and says so
//! when a write has settled.
//!
//! One thread does all of that. While it packs a block, earlier ones are on their way.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use kvferry_arena::PackedMut;
use kvferry_plan::{Bytes, Incarnation, RoomKey};
use minicbor::bytes::ByteVec;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use super::{
    agent::{Bell, End},
    engine::EnginePeer,
    host::{Era, Host},
    staging::Block,
    wire::{BlockFrame, MAX_MESSAGE, Memory, Opening, Reply, Request, SlotRef},
    witness::ProcessId,
};
use crate::{
    Done, Job, LegReport, Link, PeerAddr, TransportError,
    local::lock,
    push::{Frame, Sink, push},
    queue::{Queue, Stop, Work},
    socket::{Lost, Socket},
    stats::add,
    wire::{self, Answer, LegId},
};

/// Between two looks at whether a link is to stop.
const LOOK: Duration = Duration::from_millis(10);

/// Makes the way through the engines, both ways, and starts the link's thread.
pub(super) fn open(
    socket: Socket,
    peer: &PeerAddr,
    host: &Arc<Host>,
) -> Result<Arc<dyn Link>, TransportError> {
    let endpoint = peer.endpoint.clone();
    if host.has_moving(peer.incarnation) {
        let reason = "blocks of an earlier link to it are still on their way: it hangs".into();
        return Err(TransportError::PeerGone { endpoint, reason });
    }
    let io = |action| move |source| TransportError::Io { action, source };
    let limits = host.local.setup.limits.clone();
    let era = host.era()?;
    let bell = Arc::new(Bell::new().map_err(io("make an eventfd"))?);
    let token = token(host, peer);
    let expected = era.agent.expect(token.clone());
    let opening = Opening {
        metadata: ByteVec::from(era.agent.metadata()?),
        token: ByteVec::from(token.clone()),
        process: ProcessId::of(std::process::id()),
    };
    let lost = |lost: Lost| lost.into_error(&endpoint);
    socket.send(&wire::tagged(&opening), &[]).map_err(lost)?;
    let memory = match hear(&socket, &endpoint)? {
        Reply::Memory(memory) => memory,
        _ => return Err(lost(Lost::Malformed("something else came first than where its slots are"))),
    };
    let remote = era.agent.connect(memory.metadata.to_vec())?;
    let socket = Arc::new(socket);
    let mut outbound = Outbound {
        socket: Arc::clone(&socket),
        endpoint: endpoint.clone(),
        peer: peer.incarnation,
        host: Arc::clone(host),
        era,
        memory,
        remote,
        bell,
        staged: None,
        flights: VecDeque::new(),
        slots: VecDeque::new(),
        asked: 0,
        withdrawing: false,
        ticket: 0,
        due: VecDeque::new(),
        answers: VecDeque::new(),
        heard: Instant::now(),
        rested: false,
        broken: false,
    };
    host.link_begins(peer.incarnation);
    outbound.era.agent.notify(remote, token)?;
    match hear(&socket, &endpoint)? {
        Reply::Ready if expected.wait(limits.connect) => {}
        Reply::Ready => {
            let reason = "what its engine sends does not arrive here; compare the engines' environment \
                          (UCX_TLS, for example) on both sides";
            return Err(TransportError::PeerGone { endpoint, reason: reason.into() });
        }
        _ => return Err(lost(Lost::Malformed("something else came first than the end of its opening"))),
    }
    outbound.heard = Instant::now();
    let counters = Arc::clone(&host.local.counters);
    let queue = Queue::start("kvferry-slots-out", &limits, &counters, outbound, move || socket.hang_up())
        .map_err(io("start a thread"))?;
    Ok(Arc::new(SlotsLink { queue, host: Arc::clone(host) }))
}

/// Bytes that no other opening sends.
fn token(host: &Host, peer: &PeerAddr) -> Vec<u8> {
    let number = host.next_opening();
    format!("kvferry {} {} {number}", host.local.setup.incarnation, peer.incarnation).into_bytes()
}

/// The next message of a target that has nothing else to do.
fn hear(socket: &Socket, endpoint: &str) -> Result<Reply, TransportError> {
    match socket.message_of(MAX_MESSAGE) {
        Ok(Reply::Failed(reason)) => Err(TransportError::PeerGone { endpoint: endpoint.into(), reason }),
        Ok(reply) => Ok(reply),
        Err(lost) => Err(lost.into_error(endpoint)),
    }
}

#[derive(Debug)]
struct SlotsLink {
    queue: Queue,
    host: Arc<Host>,
}

impl Link for SlotsLink {
    fn execute(&self, job: Job, done: Done) -> Result<(), TransportError> {
        self.host.local.arena(job.source)?;
        self.queue.execute(job, done)
    }

    fn cancel(&self, key: RoomKey) {
        self.queue.cancel(key);
    }

    fn close(&self) {
        self.queue.close();
    }
}

/// A write, as the link and the agent's thread see it.
#[derive(Debug)]
struct Flight {
    /// Taken for as long as it may be read.
    block: Option<Block>,
    end: Option<End>,
    /// The link has ended before.
    left: bool,
}

/// A block on its way, and what is to be said when it has come.
#[derive(Debug)]
struct Sent {
    flight: Arc<Mutex<Flight>>,
    slot: SlotRef,
    /// `None` when its job is over: then the slot is only given back.
    frames: Option<Vec<BlockFrame>>,
}

/// The source's end.
struct Outbound {
    socket: Arc<Socket>,
    endpoint: String,
    peer: Incarnation,
    host: Arc<Host>,
    era: Arc<Era>,
    memory: Memory,
    remote: EnginePeer,
    bell: Arc<Bell>,
    /// The block that is packed.
    staged: Option<Block>,
    flights: VecDeque<Sent>,
    /// Granted and not used.
    slots: VecDeque<SlotRef>,
    /// Asked for and not granted.
    asked: u32,
    /// That was taken back, and the target has not confirmed it.
    withdrawing: bool,
    /// Number of the next leg's end.
    ticket: u64,
    /// Legs that ended and are not answered, also of jobs that were cancelled.
    due: VecDeque<u64>,
    answers: VecDeque<Answer>,
    /// When something last went on.
    heard: Instant,
    /// That nothing of earlier links is under way was said.
    rested: bool,
    broken: bool,
}

impl Work for Outbound {
    fn run(&mut self, job: &Job, stop: &Stop) -> Result<Vec<LegReport>, TransportError> {
        let arena = self.host.local.arena(job.source)?;
        if self.broken {
            let reason = "the connection was lost before".into();
            return Err(TransportError::PeerGone { endpoint: self.endpoint.clone(), reason });
        }
        self.heard = Instant::now();
        if !self.rested
            && let Some(lost) = self.host.lost(self.peer)
        {
            self.say(&Request::Rest(lost))?;
            self.rested = true;
        }
        let outcome = push(job, &arena, self, stop);
        // Closing breaks the connection; that is not the peer's fault.
        if outcome.is_err() {
            stop.check()?;
        }
        outcome
    }

    /// After a job that failed: slots go back as soon as nothing is on its way to them.
    fn rest(&mut self, stop: &Stop) {
        self.staged = None;
        for sent in &mut self.flights {
            sent.frames = None;
        }
        if self.broken || (self.slots.is_empty() && self.asked == 0 && self.flights.is_empty()) {
            return;
        }
        self.heard = Instant::now();
        // What fails here has broken the link, which the next job will hear of.
        let _ = self.give_back(stop);
    }
}

impl Outbound {
    fn give_back(&mut self, stop: &Stop) -> Result<(), TransportError> {
        if self.asked > 0 {
            self.say(&Request::Withdraw)?;
            self.withdrawing = true;
        }
        // A slot may be granted meanwhile; what the target says after that is of the next job.
        while self.withdrawing || !self.flights.is_empty() {
            stop.closed()?;
            self.go_on()?;
        }
        let unused: Vec<_> = self.slots.drain(..).collect();
        if unused.is_empty() { Ok(()) } else { self.say(&Request::Release(unused)) }
    }

    /// Breaks the link.
    fn breaks<T>(&mut self, error: TransportError) -> Result<T, TransportError> {
        self.broken = true;
        self.socket.hang_up();
        Err(error)
    }

    fn lost<T>(&mut self, lost: Lost) -> Result<T, TransportError> {
        let error = lost.into_error(&self.endpoint);
        self.breaks(error)
    }

    fn say(&mut self, request: &Request) -> Result<(), TransportError> {
        match self.socket.send(&wire::tagged(request), &[]) {
            Ok(()) => Ok(()),
            Err(lost) => self.lost(lost),
        }
    }

    /// Waits a moment for the target or for a write, and does what is due then.
    fn go_on(&mut self) -> Result<(), TransportError> {
        let wait = Timespec::try_from(LOOK).unwrap_or_default();
        let mut fds = [
            PollFd::from_borrowed_fd(self.socket.fd(), PollFlags::IN | PollFlags::RDHUP),
            PollFd::from_borrowed_fd(self.bell.fd(), PollFlags::IN),
        ];
        let (said, ended) = match poll(&mut fds, Some(&wait)) {
            Ok(_) => (!fds[0].revents().is_empty(), !fds[1].revents().is_empty()),
            Err(Errno::INTR) => (false, false),
            Err(error) => return self.lost(Lost::Io(error.into())),
        };
        if said {
            match hear(&self.socket, &self.endpoint) {
                Ok(reply) => self.hears(reply)?,
                Err(error) => return self.breaks(error),
            }
        }
        if ended {
            self.bell.quiet();
        }
        self.forward()?;
        let silent = self.heard.elapsed();
        if silent > self.host.local.setup.limits.stall {
            return self.lost(Lost::Stalled(silent));
        }
        Ok(())
    }

    fn hears(&mut self, reply: Reply) -> Result<(), TransportError> {
        self.heard = Instant::now();
        match reply {
            Reply::Slot(slot) if self.asked > 0 => {
                self.asked -= 1;
                self.slots.push_back(slot);
            }
            Reply::Wait => {}
            Reply::Withdrawn if self.withdrawing => (self.asked, self.withdrawing) = (0, false),
            Reply::Answer(answer) => self.answers.push_back(answer),
            Reply::Memory(memory) if self.slots.is_empty() && self.flights.is_empty() => {
                self.era.agent.disconnect(self.remote);
                match self.era.agent.connect(memory.metadata.to_vec()) {
                    Ok(remote) => (self.remote, self.memory) = (remote, memory),
                    Err(error) => return self.breaks(error.into()),
                }
            }
            _ => return self.lost(Lost::Malformed("an answer to a question that was not asked")),
        }
        Ok(())
    }

    /// Tells the target of the blocks that have come, in their order.
    fn forward(&mut self) -> Result<(), TransportError> {
        loop {
            let Some(first) = self.flights.front() else { return Ok(()) };
            let Some(end) = lock(&first.flight).end.clone() else { return Ok(()) };
            if let End::Lost(reason) = end {
                // The slot is not given back: something may still be on its way.
                if let Some(Sent { slot, .. }) = self.flights.pop_front() {
                    self.host.lose(self.peer, slot);
                }
                return self.breaks(TransportError::PeerGone { endpoint: self.endpoint.clone(), reason });
            }
            let Some(Sent { slot, frames, .. }) = self.flights.pop_front() else { return Ok(()) };
            self.heard = Instant::now();
            match frames {
                Some(frames) => {
                    let bytes: u64 = frames.iter().map(|frame| u64::from(frame.len)).sum();
                    add(&self.host.local.counters.sent, bytes);
                    add(&self.host.local.counters.blocks, 1);
                    self.say(&Request::Block(slot, frames))?;
                }
                None => self.say(&Request::Release(vec![slot]))?,
            }
        }
    }

    /// Goes on until `done`.
    fn until(&mut self, stop: &Stop, done: impl Fn(&Self) -> bool) -> Result<(), TransportError> {
        self.heard = Instant::now();
        self.forward()?;
        while !done(self) {
            stop.check()?;
            self.go_on()?;
        }
        Ok(())
    }

    fn block(&mut self, stop: &Stop) -> Result<Block, TransportError> {
        let started = Instant::now();
        loop {
            if let Some(block) = self.host.block(&self.era, LOOK)? {
                return Ok(block);
            }
            stop.check()?;
            self.forward()?;
            let patience = self.host.local.setup.limits.stall;
            if started.elapsed() > patience && self.host.stuck() {
                self.host.renewed(&self.era)?;
                let reason = "peers that hang held all blocks here: the agent was started again".into();
                return self.breaks(TransportError::PeerGone { endpoint: self.endpoint.clone(), reason });
            }
        }
    }
}

impl Sink for Outbound {
    fn turn(&self) -> (Bytes, Bytes) {
        let block = self.memory.slot.min(self.host.options.slot);
        (block, block)
    }

    fn stage(&mut self, len: Bytes, stop: &Stop) -> Result<PackedMut<'_>, TransportError> {
        let window = self.host.options.window as usize;
        self.until(stop, |link| link.flights.len() < window)?;
        let block = self.block(stop)?;
        // The slot is granted while the block is packed. Only who has a block asks for one: nobody may hold a slot and wait
        // for a block while others hold the blocks and wait for slots.
        if self.slots.is_empty() && self.asked == 0 {
            self.say(&Request::Ask)?;
            self.asked += 1;
        }
        Ok(self.staged.insert(block).packed(len)?)
    }

    fn send(&mut self, frames: &[Frame], stop: &Stop) -> Result<(), TransportError> {
        self.until(stop, |link| !link.slots.is_empty())?;
        let len = Bytes(frames.last().map_or(0, |frame| frame.at.end as u64));
        let (Some(block), Some(slot)) = (self.staged.take(), self.slots.pop_front()) else { return Ok(()) };
        let (Some(local), Some(remote)) = (block.span(len), self.memory.place(slot, len)) else {
            return self.lost(Lost::Malformed("a slot that it does not have"));
        };
        let flight = Arc::new(Mutex::new(Flight { block: Some(block), end: None, left: false }));
        let frame = |frame: &Frame| BlockFrame {
            leg: frame.leg,
            units: frame.units,
            len: u32::try_from(frame.at.len()).unwrap_or(u32::MAX),
        };
        let sent =
            Sent { flight: Arc::clone(&flight), slot, frames: Some(frames.iter().map(frame).collect()) };
        self.flights.push_back(sent);
        let (bell, host, peer) = (Arc::clone(&self.bell), Arc::clone(&self.host), self.peer);
        let ended = Box::new(move |end: End| {
            let mut flight = lock(&flight);
            flight.block = None;
            if flight.left {
                if end != End::Settled {
                    host.lose(peer, slot);
                }
                host.leave_ended(peer);
            }
            flight.end = Some(end);
            bell.ring();
        });
        self.era.agent.write(self.remote, local, remote, ended);
        Ok(())
    }

    fn end(&mut self, leg: &LegId, stop: &Stop) -> Result<u64, TransportError> {
        // Everything of the job has settled before anything of it is called complete.
        self.until(stop, |link| link.flights.is_empty())?;
        let ticket = self.ticket;
        self.ticket += 1;
        self.say(&Request::End(*leg, ticket))?;
        self.due.push_back(ticket);
        Ok(ticket)
    }

    fn settle(&mut self, job: &Job, first: u64, stop: &Stop) -> Result<(), TransportError> {
        let mut refused = None;
        while let Some(&ticket) = self.due.front() {
            self.until(stop, |link| !link.answers.is_empty())?;
            let (_, answer) = (self.due.pop_front(), self.answers.pop_front());
            if answer.is_none_or(|answer| answer.ticket != ticket) {
                return self.lost(Lost::Malformed("an answer to a question that was not asked"));
            }
            if ticket >= first {
                refused = refused.or(answer.and_then(|answer| answer.refusal));
            }
        }
        match refused {
            Some(refusal) => Err(TransportError::Refused { key: job.key, refusal }),
            None => Ok(()),
        }
    }
}

impl Drop for Outbound {
    fn drop(&mut self) {
        for Sent { flight, slot, .. } in self.flights.drain(..) {
            let mut flight = lock(&flight);
            match flight.end {
                Some(End::Settled) => {}
                Some(End::Lost(_)) => self.host.lose(self.peer, slot),
                None => {
                    flight.left = true;
                    self.host.leave_moving(self.peer);
                }
            }
        }
        self.host.link_ends(self.peer);
        self.era.agent.disconnect(self.remote);
    }
}
