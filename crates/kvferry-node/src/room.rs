//! What is asked of a node, and what it answers.

use std::{fmt, time::Instant};

use kvferry_plan::{Bytes, Incarnation, InstanceId, PageTable, RoomKey, SlotId, TokenRange};
use kvferry_session::{Cause, CauseKind, FirstToken, Prompt, Side};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

use crate::{RoomError, TransportKind, core::Event};

/// A node as others address it: what a registry hands out.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PeerAddr {
    /// Its name.
    pub instance: InstanceId,
    /// The start that is meant; another one at the same address is refused.
    pub incarnation: Incarnation,
    /// [`crate::Node::endpoint`].
    pub endpoint: String,
}

/// What moves the bytes between this node and a peer that it is connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerTransport {
    /// The peer.
    pub peer: InstanceId,
    /// Which side of rooms this node is on that connection.
    pub side: Side,
    /// What moved the last room that has begun; before the first one, what both want most.
    pub transport: TransportKind,
    /// Why that one, of those that both have.
    pub why: String,
}

/// A request whose cache this node computes and hands to whoever opens the room.
#[derive(Clone, Debug)]
pub struct SourceRoom {
    /// The room and the try.
    pub key: RoomKey,
    /// The request's pages, the same on every rank; logical ones, with cyclic owners, where pages are sharded. They stay
    /// pinned until the outcome is there.
    pub table: PageTable,
    /// The request's state slot, the same on every rank; `None` for a model without state per request.
    pub slot: Option<SlotId>,
    /// The tokens that will be computed.
    pub tokens: TokenRange,
    /// The prompt; a target that was told another one is refused before anything moves. Absent: not compared.
    pub prompt: Option<Prompt>,
}

/// A request whose cache this node wants.
#[derive(Clone, Debug)]
pub struct Receive {
    /// The room and the try.
    pub key: RoomKey,
    /// Who computes it: every process of the prefill instance, in any order.
    pub peers: Vec<PeerAddr>,
    /// Where it goes, the same on every rank. The pages belong to the room until the outcome is there.
    pub table: PageTable,
    /// Where its state goes, likewise; `None` for a model without state per request.
    pub slot: Option<SlotId>,
    /// The tokens wanted.
    pub tokens: TokenRange,
    /// The prompt, which must be the source's. Absent: not compared.
    pub prompt: Option<Prompt>,
    /// The transport to use; the best that both have when absent.
    pub transport: Option<TransportKind>,
}

/// A room that was handed over, seen from the source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SourceReceipt {
    /// Bytes sent to all target ranks.
    pub bytes: Bytes,
    /// Strided copies made here; 0 when the target moves.
    pub copies: u64,
    /// Seconds from the end of the computation ([`SourceHandle::finish`]) to the target's verdict: the part of the
    /// transfer that no computation hid.
    pub exposed_seconds: f64,
}

/// A room that was received: every byte of the ranks that live in this process is there and verified.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    /// The token that prefill sampled.
    pub first: FirstToken,
    /// Bytes that landed.
    pub bytes: Bytes,
    /// Bytes that the planner says are due.
    pub planned_bytes: Bytes,
    /// Strided copies.
    pub copies: u64,
    /// Seconds from the first offered chunk to the verdict.
    pub seconds: f64,
    /// What moved them.
    pub transport: TransportKind,
    /// Why that one, of those that both have.
    pub why: String,
}

impl Receipt {
    /// The receipt of a request whose target ranks live in several processes, from the outcomes of all of them: the
    /// group's one decision, taken by whoever asked the processes. Bytes and copies add up; seconds are those of the
    /// slowest.
    ///
    /// # Errors
    /// The first process's error, when one failed: then the request was not received, and its pages are free in every
    /// process, also where they had landed. [`RoomError::Rejected`] for no outcomes, or first tokens that differ.
    pub fn join(
        key: RoomKey,
        outcomes: impl IntoIterator<Item = Result<Self, RoomError>>,
    ) -> Result<Self, RoomError> {
        let rejected = |reason: &str| RoomError::Rejected { key, reason: reason.into() };
        let mut joined: Option<Self> = None;
        for outcome in outcomes {
            let part = outcome?;
            joined = Some(match joined {
                None => part,
                Some(sum) if sum.first != part.first => {
                    return Err(rejected("its processes were told different first tokens"));
                }
                Some(sum) => Self {
                    bytes: Bytes(sum.bytes.0.saturating_add(part.bytes.0)),
                    planned_bytes: Bytes(sum.planned_bytes.0.saturating_add(part.planned_bytes.0)),
                    copies: sum.copies.saturating_add(part.copies),
                    seconds: sum.seconds.max(part.seconds),
                    ..sum
                },
            });
        }
        joined.ok_or_else(|| rejected("no process received it"))
    }
}

pub(crate) type Slot<T> = watch::Sender<Option<Result<T, RoomError>>>;
type Answer<T> = watch::Receiver<Option<Result<T, RoomError>>>;

async fn wait<T: Clone>(answer: &Answer<T>) -> Result<T, RoomError> {
    let mut answer = answer.clone();
    let outcome = answer.wait_for(Option::is_some).await.map_err(|_| RoomError::ShutDown)?;
    outcome.clone().unwrap_or(Err(RoomError::ShutDown))
}

fn aborted(side: Side, reason: impl fmt::Display) -> Cause {
    Cause::new(CauseKind::Aborted, side, reason)
}

/// The source's hold on a room. All calls return at once and may come from any thread. Dropping it before
/// [`SourceHandle::finish`] aborts the room.
#[derive(Debug)]
pub struct SourceHandle {
    key: RoomKey,
    serial: u64,
    epoch: Instant,
    events: mpsc::UnboundedSender<Event>,
    answer: Answer<SourceReceipt>,
    finished: std::sync::atomic::AtomicBool,
}

impl SourceHandle {
    pub(crate) fn new(
        key: RoomKey,
        serial: u64,
        epoch: Instant,
        events: mpsc::UnboundedSender<Event>,
    ) -> (Self, Slot<SourceReceipt>) {
        let (slot, answer) = watch::channel(None);
        (Self { key, serial, epoch, events, answer, finished: false.into() }, slot)
    }

    /// The room.
    #[must_use]
    pub fn key(&self) -> RoomKey {
        self.key
    }

    /// These tokens are computed on every rank: hand them over while the next ones are computed.
    pub fn chunk(&self, tokens: TokenRange) {
        self.tell(Event::Chunk { key: self.key, serial: self.serial, tokens });
    }

    /// The whole prompt is computed. Chunks must have covered it.
    pub fn finish(&self, first: FirstToken) {
        self.finished.store(true, std::sync::atomic::Ordering::Relaxed);
        let at = kvferry_session::Time(self.epoch.elapsed());
        self.tell(Event::Finish { key: self.key, serial: self.serial, first, at });
    }

    /// Gives the room up. Safe in every state, and twice; the outcome tells how the room ended, which may be
    /// success when the target was faster.
    pub fn abort(&self, reason: impl fmt::Display) {
        let cause = aborted(Side::Source, reason);
        self.tell(Event::Abort { side: Side::Source, key: self.key, serial: self.serial, cause });
    }

    /// Waits for the room's end. When it resolves nobody reads the room's pages any more. May be awaited again.
    ///
    /// # Errors
    /// [`RoomError`]; the pages are free all the same.
    pub async fn outcome(&self) -> Result<SourceReceipt, RoomError> {
        wait(&self.answer).await
    }

    fn tell(&self, event: Event) {
        // A node that is gone has ended the room already, which the outcome says.
        self.events.send(event).ok();
    }
}

impl Drop for SourceHandle {
    fn drop(&mut self) {
        if !*self.finished.get_mut() && self.answer.borrow().is_none() {
            self.abort("the prefill request was dropped");
        }
    }
}

/// The target's hold on a room. Dropping it aborts the room.
#[derive(Debug)]
pub struct ReceiveHandle {
    key: RoomKey,
    serial: u64,
    events: mpsc::UnboundedSender<Event>,
    answer: Answer<Receipt>,
}

impl ReceiveHandle {
    pub(crate) fn new(
        key: RoomKey,
        serial: u64,
        events: mpsc::UnboundedSender<Event>,
    ) -> (Self, Slot<Receipt>) {
        let (slot, answer) = watch::channel(None);
        (Self { key, serial, events, answer }, slot)
    }

    /// The room.
    #[must_use]
    pub fn key(&self) -> RoomKey {
        self.key
    }

    /// Gives the room up. Safe in every state, and twice.
    pub fn abort(&self, reason: impl fmt::Display) {
        let cause = aborted(Side::Target, reason);
        let event = Event::Abort { side: Side::Target, key: self.key, serial: self.serial, cause };
        self.events.send(event).ok();
    }

    /// Waits for the room's end. When it resolves no byte of the room can land any more, so the pages may be
    /// decoded from, or given to somebody else. May be awaited again.
    ///
    /// # Errors
    /// [`RoomError`]; the pages are free all the same.
    pub async fn outcome(&self) -> Result<Receipt, RoomError> {
        wait(&self.answer).await
    }
}

impl Drop for ReceiveHandle {
    fn drop(&mut self) {
        if self.answer.borrow().is_none() {
            self.abort("the decode request was dropped");
        }
    }
}
