//! The target's side of one room.

use alloc::{
    collections::{BTreeSet, VecDeque},
    format,
    string::String,
    sync::Arc,
    vec::Vec,
};
use core::time::Duration;
use kvferry_plan::{Bytes, Pair, RankId, RoomKey, TokenRange};

use crate::{
    Abort, Action, Cause, CauseKind, Closed, Done, Head, Leg, Limits, Message, Mover, Offer, Open, Outcome,
    Received, Settled, Side, Time, Work, intake::Intake, page_span,
};

/// What a target wants to receive, and how.
#[derive(Clone, Debug)]
pub struct TargetRoom {
    /// Address of everything that we send.
    pub head: Head,
    /// Source and target placement.
    pub pair: Arc<Pair>,
    /// Tokens wanted.
    pub tokens: TokenRange,
    /// The transport, by name.
    pub transport: String,
    /// Who executes plans on it.
    pub mover: Mover,
    /// Pages of each of the source's pools.
    pub source_pages: u32,
    /// Digests are compared.
    pub digest: bool,
}

#[derive(Debug)]
enum Phase {
    Granting,
    Live,
    Ending { outcome: Outcome<Received>, granted: bool, fenced: bool, since: Time, severed: bool },
    Finished(Outcome<Received>),
}

/// The target's machine of one room: grants, takes in what lands, compares it with the manifests and decides.
/// Its pages are free, or ready to be decoded from, when every writer is fenced.
#[derive(Debug)]
pub struct Target {
    room: TargetRoom,
    limits: Limits,
    phase: Phase,
    intake: Intake,
    running: BTreeSet<(RankId, TokenRange)>,
    first_offer: Option<Time>,
    progress: Time,
    /// The connection is gone: there is nobody to tell.
    lost: bool,
    actions: VecDeque<Action>,
}

impl Target {
    /// A room to be received from a paired peer.
    #[must_use]
    pub fn new(room: TargetRoom, limits: Limits, now: Time) -> Self {
        Self {
            intake: Intake::new(&room.pair, room.tokens, room.digest),
            room,
            limits,
            phase: Phase::Granting,
            running: BTreeSet::new(),
            first_offer: None,
            progress: now,
            lost: false,
            actions: [Action::Grant].into(),
        }
    }

    /// The grant is in force (or could not be made).
    pub fn granted(&mut self, result: Result<(), Cause>, now: Time) {
        match (&mut self.phase, result) {
            (Phase::Granting, Ok(())) => {
                self.phase = Phase::Live;
                self.progress = now;
                let open = Open {
                    head: self.room.head,
                    tokens: self.room.tokens,
                    transport: self.room.transport.clone(),
                };
                self.actions.push_back(Action::Send(Message::Open(open)));
            }
            (Phase::Granting, Err(cause)) => {
                self.phase = Phase::Finished(Err(cause));
                self.actions.push_back(Action::Finish);
            }
            (Phase::Ending { granted, fenced, .. }, result) if !*granted => {
                *granted = true;
                match result {
                    Ok(()) => self.actions.push_back(Action::Fence),
                    Err(_) => *fenced = true,
                }
                self.finish_if_ended();
            }
            _ => {}
        }
    }

    /// Bytes of one leg arrived in our pool, or cannot: a report of a transport that the source executes.
    pub fn landed(&mut self, source: RankId, result: Result<Leg, Cause>, now: Time) {
        if !matches!(self.phase, Phase::Live) {
            return;
        }
        match result {
            Ok(leg) => self.take(source, leg, now),
            Err(cause) => self.fail(cause, now),
        }
        self.complete(now);
    }

    /// A piece of work that we executed is over: what landed, or why not.
    pub fn executed(
        &mut self,
        source: RankId,
        tokens: TokenRange,
        result: Result<Vec<Leg>, Cause>,
        now: Time,
    ) {
        if !self.running.remove(&(source, tokens)) {
            return;
        }
        if !matches!(self.phase, Phase::Live) {
            return self.finish_if_ended();
        }
        match result {
            Ok(legs) => {
                let settled = Settled { head: self.room.head, source, tokens };
                self.actions.push_back(Action::Send(Message::Settled(settled)));
                self.progress = now;
                for leg in legs {
                    self.take(source, leg, now);
                }
                self.complete(now);
            }
            Err(cause) => self.fail(cause, now),
        }
    }

    /// A message of the source about this room.
    pub fn message(&mut self, message: &Message, now: Time) {
        if message.head().is_none_or(|h| h.generation != self.room.head.generation) {
            return;
        }
        match (&self.phase, message) {
            (Phase::Live, Message::Offer(offer)) => self.offer(offer, now),
            (Phase::Live, Message::Final(manifest)) => {
                match self.intake.finish(manifest) {
                    Ok(true) => self.progress = now,
                    Ok(false) => {}
                    Err(finding) => self.corrupt(finding, now),
                }
                self.complete(now);
            }
            (Phase::Live | Phase::Granting, Message::Abort(Abort { cause, .. })) => {
                self.end(Err(cause.clone()), now);
            }
            (Phase::Live | Phase::Granting, Message::Closed(Closed { cause, .. })) => {
                let ended = || Cause::new(CauseKind::Unknown, Side::Source, "the room has ended there");
                self.end(Err(cause.clone().unwrap_or_else(ended)), now);
            }
            (Phase::Live | Phase::Granting, other) => {
                let text = format!("sent `{}` to a target", other.name());
                self.fail(Cause::new(CauseKind::Protocol, Side::Source, text), now);
            }
            // Whoever asks gets the answer when the room is fenced, and later from the tombstone.
            (Phase::Ending { .. } | Phase::Finished(_), _) => {}
        }
    }

    /// The client or the engine gives the room up. Safe in every state, and twice.
    pub fn abort(&mut self, cause: Cause, now: Time) {
        self.fail(cause, now);
    }

    /// The connection to the source is gone.
    pub fn peer_lost(&mut self, cause: Cause, now: Time) {
        self.lost = true;
        self.end(Err(cause), now);
    }

    /// No byte of this room can land any more, apart from work that has not reported yet.
    pub fn fenced(&mut self) {
        if let Phase::Ending { fenced, .. } = &mut self.phase {
            *fenced = true;
        }
        self.finish_if_ended();
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Time) {
        if self.deadline().is_none_or(|at| now < at) {
            return;
        }
        match &mut self.phase {
            Phase::Finished(_) => {}
            Phase::Ending { severed, .. } => {
                *severed = true;
                self.actions.push_back(Action::Sever);
            }
            Phase::Granting | Phase::Live => {
                let (at, text) = self.overdue();
                let cause = Cause::new(CauseKind::Stalled, at, text);
                self.fail(cause, now);
            }
        }
    }

    /// When [`Target::tick`] has something to do, if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        match &self.phase {
            Phase::Finished(_) | Phase::Ending { severed: true, .. } => None,
            Phase::Ending { since, .. } => Some(*since + self.limits.fence),
            Phase::Granting => Some(self.progress + self.limits.transfer),
            Phase::Live => Some(self.progress + self.patience()),
        }
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// How the room ended, once every writer is fenced.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome<Received>> {
        match &self.phase {
            Phase::Finished(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// The room.
    #[must_use]
    pub fn key(&self) -> RoomKey {
        self.room.head.key
    }

    /// What was asked for.
    #[must_use]
    pub fn room(&self) -> &TargetRoom {
        &self.room
    }

    fn offer(&mut self, offer: &Offer, now: Time) {
        match self.intake.offer(offer.source, offer.tokens) {
            Ok(true) => {}
            Ok(false) => return,
            Err(finding) => return self.protocol(finding, now),
        }
        self.progress = now;
        self.first_offer.get_or_insert(now);
        if self.room.mover == Mover::Target {
            let span = page_span(self.room.pair.src(), offer.source, offer.tokens);
            if offer.pages.len() as u64 != span.end - span.start {
                let text = format!(
                    "source rank {} offered tokens {} in {} pages instead of {}",
                    offer.source,
                    offer.tokens,
                    offer.pages.len(),
                    span.end - span.start
                );
                return self.protocol(text, now);
            }
            if let Some(bad) = offer.pages.iter().find(|p| p.page.0 >= self.room.source_pages) {
                let text = format!("source page {} of a pool of {}", bad.page, self.room.source_pages);
                return self.protocol(text, now);
            }
            self.running.insert((offer.source, offer.tokens));
            self.actions.push_back(Action::Execute(Work {
                source: offer.source,
                tokens: offer.tokens,
                pages: offer.pages.clone(),
            }));
        }
        self.complete(now);
    }

    fn take(&mut self, source: RankId, leg: Leg, now: Time) {
        self.first_offer.get_or_insert(now);
        match self.intake.landed(source, leg) {
            Ok(true) => self.progress = now,
            Ok(false) => {}
            Err(finding) => self.corrupt(finding, now),
        }
    }

    fn complete(&mut self, now: Time) {
        if !matches!(self.phase, Phase::Live) || !self.running.is_empty() {
            return;
        }
        match self.intake.complete(&self.room.pair) {
            Ok(None) => {}
            Err(finding) => self.corrupt(finding, now),
            Ok(Some(totals)) => {
                let done = Done { head: self.room.head, bytes: totals.bytes };
                self.actions.push_back(Action::Send(Message::Done(done)));
                let pair = &self.room.pair;
                let due = (0..pair.dst().ranks()).map(|r| pair.target_bytes(RankId(r), self.room.tokens).0);
                let received = Received {
                    first: totals.first,
                    bytes: totals.bytes,
                    planned: Bytes(due.fold(0, u64::saturating_add)),
                    copies: totals.copies,
                    elapsed: self.first_offer.map_or(Duration::ZERO, |at| now.since(at)),
                };
                self.end(Ok(received), now);
            }
        }
    }

    fn corrupt(&mut self, finding: String, now: Time) {
        self.fail(Cause::new(CauseKind::Corrupt, Side::Source, finding), now);
    }

    fn protocol(&mut self, finding: String, now: Time) {
        self.fail(Cause::new(CauseKind::Protocol, Side::Source, finding), now);
    }

    /// Ends the room by our own decision, which the source is told at once.
    fn fail(&mut self, cause: Cause, now: Time) {
        if matches!(self.phase, Phase::Live | Phase::Granting) {
            let abort = Abort { head: self.room.head, cause: cause.clone() };
            self.actions.push_back(Action::Send(Message::Abort(abort)));
        }
        self.end(Err(cause), now);
    }

    fn end(&mut self, outcome: Outcome<Received>, now: Time) {
        let granted = match self.phase {
            Phase::Granting => false,
            Phase::Live => true,
            Phase::Ending { .. } | Phase::Finished(_) => return,
        };
        if granted {
            self.actions.push_back(Action::Fence);
        }
        self.phase = Phase::Ending { outcome, granted, fenced: false, since: now, severed: false };
    }

    fn finish_if_ended(&mut self) {
        let Phase::Ending { outcome, granted: true, fenced: true, .. } = &self.phase else { return };
        if !self.running.is_empty() {
            return;
        }
        let cause = outcome.as_ref().err().cloned();
        self.phase = Phase::Finished(outcome.clone());
        if !self.lost {
            let closed = Closed { head: self.room.head, cause };
            self.actions.push_back(Action::Send(Message::Closed(closed)));
        }
        self.actions.push_back(Action::Finish);
    }

    fn patience(&self) -> Duration {
        if !self.running.is_empty() || self.intake.some_final() {
            self.limits.transfer
        } else {
            // Prefill may be computing or queueing; that it lives is the connection's business.
            self.limits.compute
        }
    }

    fn overdue(&self) -> (Side, String) {
        if matches!(self.phase, Phase::Granting) {
            (Side::Target, format!("the grant took more than {:?}", self.limits.transfer))
        } else if !self.running.is_empty() {
            let late = self.running.len();
            (Side::Target, format!("{late} pieces of work did not end in {:?}", self.limits.transfer))
        } else if self.intake.some_final() {
            (Side::Source, self.intake.missing())
        } else {
            (Side::Source, format!("no chunk arrived for {:?}", self.limits.compute))
        }
    }
}
