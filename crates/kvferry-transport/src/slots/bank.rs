//! The target's landing slots: who may write which, and when one may be written by somebody else.
//!
//! A slot that was granted is free again when its writer says that nothing is on its way to it any more. When the
//! connection ends before, the slot is *fenced off*: until the writer says so on another connection, or its process is
//! seen to have ended, or the agent is closed, which ends the bank. Time frees nothing.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kvferry_arena::Buffer;
use kvferry_plan::{Bytes, Incarnation};

use super::{
    engine::{BlockSpan, Gate},
    host::LinkId,
    wire::SlotRef,
    witness::Witness,
};
use crate::{
    local::lock,
    stats::{Counters, Gauge},
};

/// What asking for a slot gives.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    Slot(SlotRef),
    /// None now.
    None,
    /// None ever: all are fenced off, or the bank is closed.
    Spent,
}

#[derive(Debug)]
enum Slot {
    Free,
    Held(Holder),
    Fenced(Holder, Option<Arc<Witness>>),
}

#[derive(Debug)]
struct Holder {
    peer: Incarnation,
    link: LinkId,
    serial: u64,
    _gauge: Gauge,
}

impl Slot {
    fn holder(&self) -> Option<&Holder> {
        match self {
            Self::Free => None,
            Self::Held(holder) | Self::Fenced(holder, _) => Some(holder),
        }
    }

    fn is_of(&self, peer: Incarnation, serial: u64) -> bool {
        self.holder().is_some_and(|holder| (holder.peer, holder.serial) == (peer, serial))
    }

    /// True for one whose writer has ended.
    fn orphaned(&self) -> bool {
        matches!(self, Self::Fenced(_, Some(witness)) if witness.gone())
    }
}

#[derive(Debug)]
struct State {
    slots: Vec<Slot>,
    /// Peers without a slot that wait for one; they come first.
    waiting: u32,
    serial: u64,
    closed: bool,
}

/// The landing slots of an agent.
#[derive(Debug)]
pub(super) struct Bank {
    era: u64,
    pub(super) buffer: Arc<Buffer>,
    pub(super) span: BlockSpan,
    pub(super) each: Bytes,
    gate: Option<Arc<dyn Gate>>,
    state: Mutex<State>,
    freed: Condvar,
    counters: Arc<Counters>,
}

impl Bank {
    /// `buffer` is registered as `span`, with an engine that has this gate.
    pub(super) fn new(
        era: u64,
        buffer: Arc<Buffer>,
        (span, gate): (BlockSpan, Option<Arc<dyn Gate>>),
        each: Bytes,
        counters: &Arc<Counters>,
    ) -> Self {
        let count = buffer.len().0 / each.0.max(1);
        let slots = (0..count).map(|_| Slot::Free).collect();
        let state = Mutex::new(State { slots, waiting: 0, serial: 0, closed: false });
        Self { era, buffer, span, each, gate, state, freed: Condvar::new(), counters: Arc::clone(counters) }
    }

    /// A slot for a peer, on a connection. Who has none waits for as long as `wait`; who has some gets another one only when
    /// nobody waits.
    pub(super) fn take(&self, by: (Incarnation, LinkId), has_some: bool, wait: Duration) -> Taken {
        let mut state = lock(&self.state);
        if !has_some && !state.closed && self.free(&mut state).is_none() {
            state.waiting += 1;
            let none = |state: &mut State| !state.closed && self.free(state).is_none() && !spent(state);
            (state, _) =
                self.freed.wait_timeout_while(state, wait, none).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        let first_come = !has_some || state.waiting == 0;
        if state.closed {
            return Taken::Spent;
        }
        match self.free(&mut state).filter(|_| first_come) {
            Some(index) => self.hold(&mut state, index, by),
            None if spent(&state) => Taken::Spent,
            None => Taken::None,
        }
    }

    fn hold(
        &self,
        state: &mut MutexGuard<'_, State>,
        index: usize,
        (peer, link): (Incarnation, LinkId),
    ) -> Taken {
        state.serial += 1;
        let serial = state.serial;
        if let Some(slot) = state.slots.get_mut(index) {
            let gauge = Gauge::new(&self.counters, |c| &c.slots);
            *slot = Slot::Held(Holder { peer, link, serial, _gauge: gauge });
        }
        let slot = SlotRef { era: self.era, index: u32::try_from(index).unwrap_or(u32::MAX), serial };
        self.at_gate(slot.index, |gate, place| gate.open(place));
        Taken::Slot(slot)
    }

    fn at_gate(&self, index: u32, f: impl FnOnce(&dyn Gate, BlockSpan)) {
        let at = Bytes(self.each.0.saturating_mul(u64::from(index)));
        if let (Some(gate), Some(place)) = (&self.gate, self.span.part(at, self.each)) {
            f(&**gate, place);
        }
    }

    /// `peer` says that nothing is on its way to a slot of its own. Without effect on any other.
    pub(super) fn settle(&self, slot: SlotRef, peer: Incarnation) {
        let mut state = lock(&self.state);
        if let Some(free) = self.at(&mut state, slot, peer) {
            self.at_gate(slot.index, |gate, place| gate.shut(place));
            *free = Slot::Free;
            self.freed.notify_all();
        }
    }

    /// `peer` says on `link` that nothing is on its way to a slot of its earlier connections, but for `lost`. Those of them
    /// that have not ended keep what they hold until they have.
    pub(super) fn settle_rest(&self, peer: Incarnation, link: LinkId, lost: &[SlotRef]) {
        let mut state = lock(&self.state);
        for (index, slot) in (0..).zip(&mut state.slots) {
            if let Slot::Fenced(holder, _) = slot
                && holder.peer == peer
                && holder.link < link
                && !lost.contains(&SlotRef { era: self.era, index, serial: holder.serial })
            {
                self.at_gate(index, |gate, place| gate.shut(place));
                *slot = Slot::Free;
            }
        }
        self.freed.notify_all();
    }

    /// True when a slot is fenced off for `peer`.
    pub(super) fn fenced_for(&self, peer: Incarnation) -> bool {
        let fenced = |slot: &Slot| matches!(slot, Slot::Fenced(holder, _) if holder.peer == peer);
        lock(&self.state).slots.iter().any(fenced)
    }

    /// The connection of `peer` has ended, and what it still writes nobody knows.
    pub(super) fn fence(&self, slots: &[SlotRef], peer: Incarnation, witness: Option<&Arc<Witness>>) {
        let mut state = lock(&self.state);
        for slot in slots {
            if let Some(slot) = self.at(&mut state, *slot, peer)
                && matches!(slot, Slot::Held(_))
                && let Slot::Held(Holder { peer, link, serial, .. }) = std::mem::replace(slot, Slot::Free)
            {
                let gauge = Gauge::new(&self.counters, |c| &c.fenced);
                *slot = Slot::Fenced(Holder { peer, link, serial, _gauge: gauge }, witness.cloned());
            }
        }
        // Maybe all of them are now.
        self.freed.notify_all();
    }

    fn at<'a>(
        &self,
        state: &'a mut MutexGuard<'_, State>,
        slot: SlotRef,
        peer: Incarnation,
    ) -> Option<&'a mut Slot> {
        let found = state.slots.get_mut(slot.index as usize)?;
        (slot.era == self.era && found.is_of(peer, slot.serial)).then_some(found)
    }

    /// Ends the bank with its agent. True when no writer can reach its memory.
    pub(super) fn close(&self) -> bool {
        let mut state = lock(&self.state);
        state.closed = true;
        self.freed.notify_all();
        drop(state);
        self.unreachable()
    }

    /// True when no writer can reach its memory.
    pub(super) fn unreachable(&self) -> bool {
        let mut state = lock(&self.state);
        self.reclaim(&mut state);
        state.slots.iter().all(|slot| matches!(slot, Slot::Free))
    }

    /// A free slot, after a look at whose writers have ended.
    fn free(&self, state: &mut State) -> Option<usize> {
        let any = |state: &State| state.slots.iter().position(|slot| matches!(slot, Slot::Free));
        any(state).or_else(|| {
            self.reclaim(state);
            any(state)
        })
    }

    fn reclaim(&self, state: &mut State) {
        for (index, slot) in (0..).zip(&mut state.slots).filter(|(_, slot)| slot.orphaned()) {
            self.at_gate(index, |gate, place| gate.shut(place));
            *slot = Slot::Free;
        }
    }
}

/// True when all are fenced off.
fn spent(state: &State) -> bool {
    state.slots.iter().all(|slot| matches!(slot, Slot::Fenced(..)))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::{super::witness::ProcessId, *};
    use crate::{DeviceId, MemoryKind};

    const A: Incarnation = Incarnation { started_ms: 1, nonce: 1 };
    const B: Incarnation = Incarnation { started_ms: 2, nonce: 2 };
    const NOW: Duration = Duration::ZERO;
    const FIRST: LinkId = LinkId(1);
    const SECOND: LinkId = LinkId(2);

    /// The addresses that are open.
    #[derive(Debug, Default)]
    struct Opened(Mutex<std::collections::BTreeSet<u64>>);

    impl Gate for Opened {
        fn open(&self, slot: BlockSpan) {
            assert_eq!(slot.len, Bytes(4096));
            lock(&self.0).insert(slot.address);
        }

        fn shut(&self, slot: BlockSpan) {
            assert!(lock(&self.0).remove(&slot.address));
        }
    }

    fn bank(slots: u64) -> Bank {
        gated(slots, None)
    }

    fn gated(slots: u64, gate: Option<Arc<dyn Gate>>) -> Bank {
        let buffer = Arc::new(Buffer::new("test", Bytes(slots * 4096)).unwrap());
        let span = BlockSpan {
            address: buffer.address(),
            len: buffer.len(),
            kind: MemoryKind::Host,
            device: DeviceId(0),
        };
        Bank::new(1, buffer, (span, gate), Bytes(4096), &Arc::default())
    }

    fn slot(taken: Taken) -> SlotRef {
        match taken {
            Taken::Slot(slot) => slot,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_the_writer_settles_a_slot() {
        let bank = bank(1);
        let held = slot(bank.take((A, FIRST), false, NOW));
        let wrong = [
            (held, B),
            (SlotRef { serial: held.serial + 1, ..held }, A),
            (SlotRef { era: 2, ..held }, A),
            (SlotRef { index: 7, ..held }, A),
        ];
        for (slot, peer) in wrong {
            bank.settle(slot, peer);
            assert_eq!(bank.take((B, FIRST), false, NOW), Taken::None);
        }
        bank.settle(held, A);
        let next = slot(bank.take((B, FIRST), false, NOW));
        // What came twice is of no effect.
        bank.settle(held, A);
        assert_eq!((next.index, bank.take((A, FIRST), false, NOW)), (held.index, Taken::None));
    }

    /// A slot is open from its grant until its writer has settled, also while it is fenced off.
    #[test]
    fn the_gate_is_open_for_the_writer_of_a_slot() {
        let gate = Arc::new(Opened::default());
        let theirs: Arc<Opened> = Arc::clone(&gate);
        let bank = gated(2, Some(theirs));
        let open = || lock(&gate.0).iter().map(|at| at - bank.span.address).collect::<Vec<_>>();
        assert!(open().is_empty());
        let held = [slot(bank.take((A, FIRST), false, NOW)), slot(bank.take((A, FIRST), true, NOW))];
        assert_eq!(open(), [0, 4096]);
        bank.settle(held[1], B);
        bank.fence(&held[..1], A, None);
        assert_eq!(open(), [0, 4096]);
        bank.settle(held[1], A);
        assert_eq!(open(), [0]);
        bank.settle(held[0], A);
        bank.settle(held[0], A);
        assert!(open().is_empty());
        // Nor is it open any more when its writer has ended instead.
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let witness = Witness::new(&ProcessId::of(child.id())).map(Arc::new);
        let held = slot(bank.take((A, FIRST), false, NOW));
        bank.fence(&[held], A, witness.as_ref());
        assert_eq!(open(), [u64::from(held.index) * 4096]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(bank.unreachable());
        assert!(open().is_empty());
    }

    #[test]
    fn a_fence_lasts_until_the_writer_says_so_or_is_dead() {
        let bank = bank(2);
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let witness = Witness::new(&ProcessId::of(child.id())).map(Arc::new);
        assert!(witness.is_some());
        let held = [slot(bank.take((A, FIRST), false, NOW)), slot(bank.take((A, FIRST), true, NOW))];
        bank.fence(&held[..1], A, witness.as_ref());
        assert_eq!(bank.take((B, FIRST), false, NOW), Taken::None);
        bank.fence(&held[1..], A, None);
        assert_eq!(bank.take((B, FIRST), false, NOW), Taken::Spent);
        assert!(!bank.unreachable());
        bank.settle(held[1], A);
        let got = slot(bank.take((B, FIRST), false, NOW));
        assert_eq!(bank.take((B, FIRST), true, NOW), Taken::None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(slot(bank.take((B, FIRST), true, NOW)).index, held[0].index);
        assert!(!bank.close());
        bank.settle(got, B);
        assert_eq!(bank.take((A, FIRST), false, NOW), Taken::Spent);
    }

    /// What a writer says of its earlier connections frees what they held, also slots that it has never heard of.
    #[test]
    fn a_later_connection_settles_what_earlier_ones_held() {
        let gate = Arc::new(Opened::default());
        let theirs: Arc<Opened> = Arc::clone(&gate);
        let bank = gated(4, Some(theirs));
        let [a, b] = [(); 2].map(|()| slot(bank.take((A, FIRST), true, NOW)));
        let other = slot(bank.take((B, FIRST), true, NOW));
        let later = slot(bank.take((A, SECOND), true, NOW));
        bank.fence(&[a, b], A, None);
        bank.fence(&[other], B, None);
        bank.settle_rest(A, SECOND, &[b]);
        // `a` alone: `b` is lost, one is of another writer, one of the later connection.
        assert_eq!(slot(bank.take((B, SECOND), false, NOW)).index, a.index);
        assert_eq!(bank.take((B, SECOND), false, NOW), Taken::None);
        assert_eq!(lock(&gate.0).len(), 4);
        bank.settle(later, A);
        bank.settle_rest(A, SECOND, &[]);
        assert_eq!(lock(&gate.0).len(), 2);
    }

    /// Who has a slot waits for nobody, and takes nothing from who has none.
    #[test]
    fn who_has_none_comes_first() {
        let bank = Arc::new(bank(1));
        let held = slot(bank.take((A, FIRST), false, NOW));
        let theirs = Arc::clone(&bank);
        let waits = std::thread::spawn(move || theirs.take((B, FIRST), false, Duration::from_secs(30)));
        while lock(&bank.state).waiting == 0 {
            std::thread::yield_now();
        }
        bank.settle(held, A);
        assert!(matches!(bank.take((A, FIRST), true, NOW), Taken::None));
        assert!(matches!(waits.join().unwrap(), Taken::Slot(_)));
    }
}
