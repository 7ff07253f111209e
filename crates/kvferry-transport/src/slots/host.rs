//! An instance's agent with the memory that it knows, and the next one when nothing of that can be used any more.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kvferry_arena::Buffer;
use kvferry_plan::{Bytes, Incarnation};
use minicbor::bytes::ByteVec;

use super::{
    SlotOptions,
    agent::Agent,
    bank::Bank,
    engine::{EngineError, StartEngine},
    staging::{Block, Staging},
    wire::{Memory, SlotRef},
    witness::Witness,
};
use crate::{
    TransportError,
    local::{Local, lock},
    stats::add,
};

/// Landing areas of closed agents that are kept for one peer; then it gets no more slots.
const KEPT_FOR_ONE: usize = 2;

/// An agent, its landing slots and its staging. Memory is taken when a role needs it.
#[derive(Debug)]
pub(super) struct Era {
    pub(super) number: u64,
    pub(super) agent: Agent,
    bank: OnceLock<Arc<Bank>>,
    staging: OnceLock<Arc<Staging>>,
    /// Held by whoever takes memory.
    taking: Mutex<()>,
}

/// The links to a peer, and what earlier ones have left: writes that have not ended, and slots to which something may be
/// on its way for ever.
#[derive(Debug, Default)]
struct Left {
    links: u32,
    moving: u32,
    lost: Vec<SlotRef>,
}

/// Said by a peer on one of its connections: nothing is on its way to slots of earlier ones, but for some.
#[derive(Debug)]
struct Rested {
    link: LinkId,
    lost: Vec<SlotRef>,
}

/// Counts the connections that are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LinkId(pub(super) u64);

/// The agents of an instance, one at a time.
pub(super) struct Host {
    pub(super) local: Arc<Local>,
    pub(super) options: SlotOptions,
    scheme: &'static str,
    start: StartEngine,
    /// `None` once closed.
    current: Mutex<Option<Arc<Era>>>,
    /// Landing slots of closed agents.
    retired: Mutex<Vec<Arc<Bank>>>,
    left: Mutex<BTreeMap<Incarnation, Left>>,
    /// For as long as the connection is there on which it was said.
    rested: Mutex<BTreeMap<Incarnation, Rested>>,
    openings: AtomicU64,
    served: AtomicU64,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Host {
    pub(super) fn new(
        local: Arc<Local>,
        options: SlotOptions,
        scheme: &'static str,
        start: StartEngine,
    ) -> Result<Self, TransportError> {
        let host = Self {
            local,
            options,
            scheme,
            start,
            current: Mutex::default(),
            retired: Mutex::default(),
            left: Mutex::default(),
            rested: Mutex::default(),
            openings: AtomicU64::new(0),
            served: AtomicU64::new(0),
        };
        *lock(&host.current) = Some(host.era_of(1)?);
        Ok(host)
    }

    fn era_of(&self, number: u64) -> Result<Arc<Era>, TransportError> {
        let engine = (self.start)()?;
        let agent = Agent::start(&format!("kvferry-{}", self.scheme), engine)
            .map_err(|source| TransportError::Io { action: "start a thread", source })?;
        Ok(Arc::new(Era {
            number,
            agent,
            bank: OnceLock::new(),
            staging: OnceLock::new(),
            taking: Mutex::default(),
        }))
    }

    /// The agent of now.
    pub(super) fn era(&self) -> Result<Arc<Era>, TransportError> {
        lock(&self.current).clone().ok_or(TransportError::Closed)
    }

    /// The agent after `spent`, which is closed: a new one, unless somebody has asked already.
    pub(super) fn renewed(&self, spent: &Era) -> Result<Arc<Era>, TransportError> {
        let mut current = lock(&self.current);
        let now = current.clone().ok_or(TransportError::Closed)?;
        if now.number != spent.number {
            return Ok(now);
        }
        let kept = self.reachable().len();
        if kept >= self.options.kept as usize {
            return Err(EngineError::Failed {
                engine: self.scheme,
                action: "be started again",
                reason: format!(
                    "{kept} earlier landing areas are still reachable for writers that neither settled nor \
                     ended; end the processes that hang, or restart this instance"
                ),
            }
            .into());
        }
        let next = self.era_of(now.number + 1)?;
        tracing::warn!(
            engine = self.scheme,
            "all slots are fenced off: the agent starts again with other memory"
        );
        *current = Some(Arc::clone(&next));
        self.retire(&now);
        add(&self.local.counters.renewed, 1);
        Ok(next)
    }

    /// Closes an agent and keeps its memory for as long as somebody may write it.
    fn retire(&self, era: &Era) {
        era.agent.close();
        if let Some(bank) = era.bank.get()
            && !bank.close()
            && !era.agent.writes_alone()
        {
            lock(&self.retired).push(Arc::clone(bank));
        }
    }

    /// Landing memory of closed agents that somebody may still write.
    fn reachable(&self) -> MutexGuard<'_, Vec<Arc<Bank>>> {
        let mut retired = lock(&self.retired);
        retired.retain(|bank| !bank.unreachable());
        retired
    }

    /// Ends the agent. Memory that somebody may still write stays with the process.
    pub(super) fn close(&self) {
        let era = lock(&self.current).take();
        if let Some(era) = era {
            self.retire(&era);
        }
        for bank in self.reachable().drain(..) {
            Arc::clone(&bank.buffer).keep();
        }
    }

    fn area(&self, count: u32, era: &Era) -> Result<(Arc<Buffer>, super::engine::BlockSpan), TransportError> {
        let len = Bytes(self.options.slot.0.saturating_mul(u64::from(count)));
        let buffer = Arc::new(Buffer::new(&format!("kvferry-{}", self.scheme), len)?);
        let span = era.agent.register(Arc::clone(&buffer))?;
        Ok((buffer, span))
    }

    /// The landing slots of an agent.
    pub(super) fn bank<'a>(&self, era: &'a Era) -> Result<&'a Arc<Bank>, TransportError> {
        let _taking = lock(&era.taking);
        if let Some(bank) = era.bank.get() {
            return Ok(bank);
        }
        let (buffer, span) = self.area(self.options.slots, era)?;
        let bank =
            Bank::new(era.number, buffer, (span, era.agent.gate()), self.options.slot, &self.local.counters);
        Ok(era.bank.get_or_init(|| Arc::new(bank)))
    }

    /// `peer` says that nothing is on its way to a slot, of this agent or an earlier one.
    pub(super) fn settle(&self, slot: SlotRef, peer: Incarnation) {
        self.banks(|bank| bank.settle(slot, peer));
    }

    fn banks(&self, f: impl FnMut(&Arc<Bank>)) {
        let era = lock(&self.current).clone();
        lock(&self.retired).iter().chain(era.iter().filter_map(|era| era.bank.get())).for_each(f);
    }

    /// Numbers the connections that are served.
    pub(super) fn next_served(&self) -> LinkId {
        LinkId(self.served.fetch_add(1, Ordering::Relaxed))
    }

    /// `peer` says on `link` that nothing is on its way to slots of its earlier connections, but for `lost`.
    pub(super) fn rest(&self, peer: Incarnation, link: LinkId, lost: Vec<SlotRef>) {
        let mut rested = lock(&self.rested);
        self.banks(|bank| bank.settle_rest(peer, link, &lost));
        rested.insert(peer, Rested { link, lost });
    }

    /// Gives no more slots to a peer that several areas are kept for: it would use up one after the other, and nobody else
    /// would have any.
    pub(super) fn check_peer(&self, peer: Incarnation) -> Result<(), EngineError> {
        let kept = lock(&self.retired).iter().filter(|bank| bank.fenced_for(peer)).count();
        if kept < KEPT_FOR_ONE {
            return Ok(());
        }
        Err(EngineError::Failed {
            engine: self.scheme,
            action: "take more blocks from this process",
            reason: "earlier ones were lost, and may still come: restart it".into(),
        })
    }

    /// A connection has ended that held slots. What the peer has said meanwhile, on a later one, is true of these too.
    pub(super) fn ended(
        &self,
        (peer, link): (Incarnation, LinkId),
        bank: &Bank,
        held: &[SlotRef],
        witness: Option<&Arc<Witness>>,
    ) {
        let mut rested = lock(&self.rested);
        bank.fence(held, peer, witness);
        match rested.get(&peer) {
            Some(said) if said.link > link => bank.settle_rest(peer, said.link, &said.lost),
            Some(said) if said.link == link => drop(rested.remove(&peer)),
            _ => {}
        }
    }

    /// What a peer must know of them.
    pub(super) fn memory(&self, era: &Era) -> Result<Memory, TransportError> {
        let bank = self.bank(era)?;
        let metadata = ByteVec::from(era.agent.metadata()?);
        Ok(Memory { era: era.number, metadata, span: bank.span, slot: bank.each })
    }

    /// A block of an agent's staging, if one is free within `wait`.
    pub(super) fn block(&self, era: &Era, wait: Duration) -> Result<Option<Block>, TransportError> {
        let taking = lock(&era.taking);
        let staging = match era.staging.get() {
            Some(staging) => staging,
            None => {
                let (buffer, span) = self.area(self.options.staging, era)?;
                let staging = Staging::new(buffer, span, self.options.slot, &self.local.counters);
                era.staging.get_or_init(|| Arc::new(staging))
            }
        };
        drop(taking);
        Ok(staging.take(wait))
    }

    /// True when earlier links have left writes under way from all of the staging.
    pub(super) fn stuck(&self) -> bool {
        let moving: u32 = lock(&self.left).values().map(|left| left.moving).sum();
        moving >= self.options.staging
    }

    /// Numbers the links that are opened.
    pub(super) fn next_opening(&self) -> u64 {
        self.openings.fetch_add(1, Ordering::Relaxed)
    }

    fn leave(&self, peer: Incarnation, change: impl FnOnce(&mut Left)) {
        let mut left = lock(&self.left);
        let entry = left.entry(peer).or_default();
        change(entry);
        if entry.links == 0 && entry.moving == 0 && entry.lost.is_empty() {
            left.remove(&peer);
        }
    }

    /// A link to `peer` begins.
    pub(super) fn link_begins(&self, peer: Incarnation) {
        self.leave(peer, |left| left.links += 1);
    }

    /// A link to `peer` has ended.
    pub(super) fn link_ends(&self, peer: Incarnation) {
        self.leave(peer, |left| left.links = left.links.saturating_sub(1));
    }

    /// A link leaves a write to `peer` under way.
    pub(super) fn leave_moving(&self, peer: Incarnation) {
        self.leave(peer, |left| left.moving += 1);
    }

    /// Such a write has ended.
    pub(super) fn leave_ended(&self, peer: Incarnation) {
        self.leave(peer, |left| left.moving = left.moving.saturating_sub(1));
    }

    /// Nobody knows what still comes to a slot of `peer`.
    pub(super) fn lose(&self, peer: Incarnation, slot: SlotRef) {
        self.leave(peer, |left| left.lost.push(slot));
    }

    /// True while writes of earlier links to `peer` have not ended.
    pub(super) fn has_moving(&self, peer: Incarnation) -> bool {
        lock(&self.left).get(&peer).is_some_and(|left| left.moving > 0)
    }

    /// Slots of earlier links to `peer` to which something may be on its way; `None` while such a link is there, or a write
    /// of one.
    pub(super) fn lost(&self, peer: Incarnation) -> Option<Vec<SlotRef>> {
        let left = lock(&self.left);
        let entry = left.get(&peer)?;
        (entry.links == 1 && entry.moving == 0).then(|| entry.lost.clone())
    }
}
