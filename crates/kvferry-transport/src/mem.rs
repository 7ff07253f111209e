//! Both sides in one process: the source's thread writes the target's pool by the target's rules.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, LazyLock, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use kvferry_arena::PackedMut;
use kvferry_plan::{Bytes, Generation, Incarnation, RankId, RoomKey};

use crate::{
    Done, Grant, Job, Link, Mover, PeerAddr, Registration, Setup, Transport, TransportError, TransportStats,
    inbound::Inbound,
    local::{Local, lock},
    push::{Frame, Sink, push},
    queue::{Queue, Stop},
    stats::add,
    wire::LegId,
};

/// The ends of this process, by number.
static ENDS: LazyLock<Mutex<BTreeMap<u64, Weak<Local>>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(1);

/// An end of the `mem` transport.
#[derive(Debug)]
pub struct Mem {
    number: u64,
    local: Arc<Local>,
}

impl Mem {
    /// Starts an end.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let local = Arc::new(Local::new(setup));
        lock(&ENDS).insert(number, Arc::downgrade(&local));
        Self { number, local }
    }
}

impl Transport for Mem {
    fn name(&self) -> &'static str {
        "mem"
    }

    fn mover(&self) -> Mover {
        Mover::Source
    }

    fn endpoint(&self) -> String {
        format!("mem://{}", self.number)
    }

    fn register(&self, rank: RankId, memory: Registration) -> Result<(), TransportError> {
        self.local.register(rank, memory)
    }

    fn grant(&self, grant: Grant) -> Result<(), TransportError> {
        self.local.grant(grant)
    }

    fn revoke(&self, key: RoomKey, generation: Generation) {
        self.local.revoke(key, generation);
    }

    fn open(&self, peer: &PeerAddr) -> Result<Arc<dyn Link>, TransportError> {
        let endpoint = || peer.endpoint.clone();
        let number =
            peer.endpoint.strip_prefix("mem://").and_then(|n| n.parse::<u64>().ok()).ok_or_else(|| {
                TransportError::Endpoint { endpoint: endpoint(), reason: "write `mem://NUMBER`" }
            })?;
        let found = lock(&ENDS).get(&number).cloned().unwrap_or_default();
        let target =
            found.upgrade().filter(|target| target.open().is_ok()).ok_or_else(|| gone(&endpoint()))?;
        let found = target.setup.incarnation;
        if found != peer.incarnation {
            return Err(TransportError::Restarted {
                endpoint: endpoint(),
                expected: peer.incarnation,
                found,
            });
        }
        let mut sink = ToMem {
            endpoint: endpoint(),
            local: Arc::clone(&self.local),
            inbound: Inbound::new(Arc::clone(&target), self.local.setup.incarnation),
            target,
            stage: Vec::new(),
        };
        let local = Arc::clone(&self.local);
        let run = move |job: &Job, stop: &Stop| {
            let arena = local.arena(job.source)?;
            push(job, &arena, &mut sink, stop)
        };
        let limits = &self.local.setup.limits;
        let queue = Queue::start("kvferry-mem", limits, &self.local.counters, run, || ())
            .map_err(|source| TransportError::Io { action: "start a thread", source })?;
        let link: Arc<dyn Link> = Arc::new(MemLink { queue, local: Arc::clone(&self.local) });
        self.local.add_link(&link)?;
        Ok(link)
    }

    fn forget(&self, _: Incarnation) {
        // There are no connections: a link is the source's, and ends with it.
    }

    fn stats(&self) -> TransportStats {
        self.local.stats()
    }

    fn close(&self) {
        lock(&ENDS).remove(&self.number);
        self.local.close();
    }
}

impl Drop for Mem {
    fn drop(&mut self) {
        self.close();
    }
}

fn gone(endpoint: &str) -> TransportError {
    TransportError::PeerGone { endpoint: endpoint.into(), reason: "no such end in this process".into() }
}

/// A link whose jobs read local memory on a thread of their own.
#[derive(Debug)]
struct MemLink {
    queue: Queue,
    local: Arc<Local>,
}

impl Link for MemLink {
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

/// Lands frames at once.
struct ToMem {
    endpoint: String,
    local: Arc<Local>,
    target: Arc<Local>,
    inbound: Inbound,
    stage: Vec<u8>,
}

impl Sink for ToMem {
    fn stage(&mut self, len: Bytes, _: &Stop) -> Result<PackedMut<'_>, TransportError> {
        self.stage.resize(len.index(), 0);
        Ok(self.stage.as_mut_slice().into())
    }

    fn send(&mut self, frames: &[Frame], stop: &Stop) -> Result<(), TransportError> {
        for frame in frames {
            stop.check()?;
            self.target.open().map_err(|_| gone(&self.endpoint))?;
            let Some(payload) = self.stage.get(frame.at.clone()) else { continue };
            let len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
            if self.inbound.accepts(&frame.leg, &frame.units, len) {
                self.inbound.land(&frame.units, payload.into());
            }
            add(&self.local.counters.sent, u64::from(len));
        }
        Ok(())
    }

    fn end(&mut self, leg: &LegId, _: &Stop) -> Result<u64, TransportError> {
        self.target.open().map_err(|_| gone(&self.endpoint))?;
        match self.inbound.end(leg) {
            None => Ok(0),
            Some(refusal) => Err(TransportError::Refused { key: leg.key, refusal }),
        }
    }

    fn settle(&mut self, _: &Job, _: u64, _: &Stop) -> Result<(), TransportError> {
        Ok(())
    }
}
