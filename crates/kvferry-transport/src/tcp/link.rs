//! The pushing end of a connection.

use std::{collections::VecDeque, io, ops::Range, sync::Arc};

use kvferry_arena::PackedMut;
use kvferry_plan::{Bytes, RoomKey};

use crate::{
    Done, Job, Link, TransportError,
    local::Local,
    push::{Frame, Sink, push},
    queue::{Queue, Stop},
    socket::{Lost, Socket},
    stats::add,
    wire::{self, Answer, Body, Header, LegId},
};

/// Starts the link's thread.
pub(super) fn open(socket: Socket, endpoint: String, local: Arc<Local>) -> io::Result<Arc<dyn Link>> {
    let socket = Arc::new(socket);
    let limits = local.setup.limits.clone();
    let counters = Arc::clone(&local.counters);
    let mut sink = ToTcp {
        socket: Arc::clone(&socket),
        endpoint,
        local: Arc::clone(&local),
        ticket: 0,
        due: VecDeque::new(),
        broken: false,
        stage: Vec::new(),
    };
    let arenas = Arc::clone(&local);
    let run = move |job: &Job, stop: &Stop| {
        let arena = arenas.arena(job.source)?;
        sink.check()?;
        let outcome = push(job, &arena, &mut sink, stop);
        // Closing breaks the connection; that is not the peer's fault.
        if outcome.is_err() {
            stop.check()?;
        }
        outcome
    };
    let queue = Queue::start("kvferry-tcp-out", &limits, &counters, run, move || socket.hang_up())?;
    Ok(Arc::new(TcpLink { queue, local }))
}

#[derive(Debug)]
struct TcpLink {
    queue: Queue,
    local: Arc<Local>,
}

impl Link for TcpLink {
    fn execute(&self, job: Job, done: Done) -> Result<(), TransportError> {
        self.local.arena(job.source)?;
        self.queue.execute(job, done)
    }

    fn cancel(&self, key: RoomKey) {
        self.queue.cancel(key);
    }

    fn close(&self) {
        self.queue.close();
    }
}

/// Sends frames.
struct ToTcp {
    socket: Arc<Socket>,
    endpoint: String,
    local: Arc<Local>,
    /// Number of the next leg's end.
    ticket: u64,
    /// Legs that ended and are not answered, also of jobs that were cancelled.
    due: VecDeque<u64>,
    /// After a failure nobody knows where in a frame the peer is.
    broken: bool,
    /// The frames of a turn; only grows.
    stage: Vec<u8>,
}

impl ToTcp {
    fn check(&self) -> Result<(), TransportError> {
        if self.broken {
            let reason = "the connection was lost before".into();
            return Err(TransportError::PeerGone { endpoint: self.endpoint.clone(), reason });
        }
        Ok(())
    }

    fn sure<T>(&mut self, outcome: Result<T, Lost>) -> Result<T, TransportError> {
        outcome.map_err(|lost| {
            self.broken = true;
            self.socket.hang_up();
            lost.into_error(&self.endpoint)
        })
    }

    fn frame(&mut self, header: &Header, at: Range<usize>) -> Result<(), TransportError> {
        let payload = self.stage.get(at).unwrap_or_default();
        let sent = self.socket.send(&wire::frame(header, payload.len()), payload);
        self.sure(sent)
    }
}

impl Sink for ToTcp {
    fn stage(&mut self, len: Bytes, _: &Stop) -> Result<PackedMut<'_>, TransportError> {
        if self.stage.len() < len.index() {
            self.stage.resize(len.index(), 0);
        }
        Ok(self.stage[..len.index()].as_mut().into())
    }

    fn send(&mut self, frames: &[Frame], stop: &Stop) -> Result<(), TransportError> {
        for Frame { leg, units, at, .. } in frames {
            stop.check()?;
            self.frame(&Header { leg: *leg, body: Body::Units(*units) }, at.clone())?;
            add(&self.local.counters.sent, at.len() as u64);
        }
        Ok(())
    }

    fn end(&mut self, leg: &LegId, _: &Stop) -> Result<u64, TransportError> {
        let ticket = self.ticket;
        self.ticket += 1;
        self.frame(&Header { leg: *leg, body: Body::End(ticket) }, 0..0)?;
        self.due.push_back(ticket);
        Ok(ticket)
    }

    fn settle(&mut self, job: &Job, first: u64, _: &Stop) -> Result<(), TransportError> {
        let mut refused = None;
        while let Some(ticket) = self.due.pop_front() {
            let answer = self.socket.message::<Answer>();
            let answer = self.sure(answer)?;
            if answer.ticket != ticket {
                return self.sure(Err(Lost::Malformed("an answer to a question that was not asked")));
            }
            if ticket >= first {
                refused = refused.or(answer.refusal);
            }
        }
        match refused {
            Some(refusal) => Err(TransportError::Refused { key: job.key, refusal }),
            None => Ok(()),
        }
    }
}
