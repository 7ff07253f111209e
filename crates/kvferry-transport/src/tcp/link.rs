//! The pushing end of a connection.

use std::{collections::VecDeque, io, sync::Arc};

use kvferry_plan::RoomKey;

use crate::{
    Done, Job, Link, TransportError,
    local::Local,
    push::{Sink, push},
    queue::{Queue, Stop},
    socket::{Lost, Socket},
    stats::add,
    wire::{self, Answer, Body, Header, LegId, Units},
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
    };
    let arenas = Arc::clone(&local);
    let mut stages = Vec::new();
    let run = move |job: &Job, stop: &Stop| {
        let arena = arenas.arena(job.source)?;
        sink.check()?;
        let outcome = push(job, &arena, &mut sink, stop, &mut stages);
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

    fn send(&mut self, leg: &LegId, body: Body, payload: &[u8]) -> Result<(), TransportError> {
        let head = wire::frame(&Header { leg: *leg, body }, payload.len());
        let sent = self.socket.send(&head, payload);
        self.sure(sent)
    }
}

impl Sink for ToTcp {
    fn units(&mut self, leg: &LegId, units: &Units, payload: &[u8]) -> Result<(), TransportError> {
        self.send(leg, Body::Units(*units), payload)?;
        add(&self.local.counters.sent, payload.len() as u64);
        Ok(())
    }

    fn end(&mut self, leg: &LegId) -> Result<u64, TransportError> {
        let ticket = self.ticket;
        self.ticket += 1;
        self.send(leg, Body::End(ticket), &[])?;
        self.due.push_back(ticket);
        Ok(ticket)
    }

    fn settle(&mut self, job: &Job, first: u64) -> Result<(), TransportError> {
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
