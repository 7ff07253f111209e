//! The target's side of one room.

use alloc::{
    collections::{BTreeSet, VecDeque},
    format,
    string::String,
    sync::Arc,
    vec::Vec,
};
use core::time::Duration;
use kvferry_plan::{Bytes, Generation, Incarnation, Pair, RankId, RoomKey, Rotation, TokenRange};

use crate::{
    Abort, Action, Cause, CauseKind, Closed, Done, Head, Leg, Limits, Message, Mover, Offer, Open, Outcome,
    Prompt, Received, Settled, Side, Time, Work,
    intake::{Intake, due},
};

/// One process of the source instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceProcess {
    /// Its start.
    pub incarnation: Incarnation,
    /// The source ranks that live in it.
    pub ranks: Vec<RankId>,
    /// Pages that requests can own there: of each of its pools, or of all of them together where pages are sharded.
    pub pages: u32,
    /// State slots of each of its pools.
    pub slots: u32,
}

/// What a target wants to receive, and how.
///
/// A target in several processes has a room in each, and each room verifies the ranks of its own process, because
/// only they can read those pools. Whether the *request* was received is decided once, by whoever asked the processes
/// (the instance's scheduler, which has to tell them anyway what to do with the pages): it joins their outcomes. A
/// process that fails is heard of by the others through the sources, which give up every room of the request.
#[derive(Clone, Debug)]
pub struct TargetRoom {
    /// The room and the try.
    pub key: RoomKey,
    /// Our reservation.
    pub generation: Generation,
    /// Our start.
    pub from: Incarnation,
    /// Every process of the source; together they have all of its ranks, each once.
    pub sources: Vec<SourceProcess>,
    /// The target ranks that live here.
    pub targets: Vec<RankId>,
    /// Source and target placement.
    pub pair: Arc<Pair>,
    /// Tokens wanted.
    pub tokens: TokenRange,
    /// The transport, by name.
    pub transport: String,
    /// Who executes plans on it.
    pub mover: Mover,
    /// Digests are compared.
    pub digest: bool,
    /// The prompt whose cache it is, where the caller says it.
    pub prompt: Option<Prompt>,
}

impl TargetRoom {
    /// The head of what we send to one of the source's processes.
    #[must_use]
    pub fn head(&self, to: Incarnation) -> Head {
        Head { key: self.key, generation: self.generation, from: self.from, to }
    }

    fn host(&self, source: RankId) -> Option<&SourceProcess> {
        self.sources.iter().find(|s| s.ranks.contains(&source))
    }
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
    /// Of the source's page table: what the first offer says.
    rotation: Option<Rotation>,
    progress: Time,
    /// Whose connection is gone: they cannot be told.
    lost: Vec<Incarnation>,
    actions: VecDeque<Action>,
}

impl Target {
    /// A room to be received from paired peers.
    #[must_use]
    pub fn new(room: TargetRoom, limits: Limits, now: Time) -> Self {
        Self {
            intake: Intake::new(&room.pair, room.targets.clone(), room.tokens, room.digest),
            room,
            limits,
            phase: Phase::Granting,
            running: BTreeSet::new(),
            first_offer: None,
            rotation: None,
            progress: now,
            lost: Vec::new(),
            actions: [Action::Grant].into(),
        }
    }

    /// The grant is in force (or could not be made).
    pub fn granted(&mut self, result: Result<(), Cause>, now: Time) {
        match (&mut self.phase, result) {
            (Phase::Granting, Ok(())) => {
                self.phase = Phase::Live;
                self.progress = now;
                let (tokens, transport, prompt) =
                    (self.room.tokens, self.room.transport.clone(), self.room.prompt);
                self.tell(None, |head| {
                    Message::Open(Open { head, tokens, transport: transport.clone(), prompt })
                });
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
                if let Some(host) = self.room.host(source) {
                    let settled = Settled { head: self.room.head(host.incarnation), source, tokens };
                    self.actions.push_back(Action::Send(Message::Settled(settled)));
                }
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
        let Some(head) = message.head().filter(|h| h.generation == self.room.generation) else { return };
        let from = head.from;
        let Some(process) = self.room.sources.iter().find(|s| s.incarnation == from) else { return };
        let speaks_for = match message {
            Message::Offer(offer) => Some(offer.source),
            Message::Final(manifest) => Some(manifest.source),
            _ => None,
        };
        // A rank that does not exist at all is found by the intake.
        if let Some(rank) = speaks_for.filter(|r| r.0 < self.room.pair.src().ranks())
            && !process.ranks.contains(&rank)
        {
            return self.protocol(format!("source rank {rank} does not live in the process {from}"), now);
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
                self.give_up(Some(from), cause.clone(), now);
            }
            (Phase::Live | Phase::Granting, Message::Closed(Closed { cause, .. })) => {
                let ended = || Cause::new(CauseKind::Unknown, Side::Source, "the room has ended there");
                self.give_up(Some(from), cause.clone().unwrap_or_else(ended), now);
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

    /// The connection to one of the source's processes is gone, and with it the room.
    pub fn peer_lost(&mut self, process: Incarnation, cause: Cause, now: Time) {
        self.lost.push(process);
        self.give_up(None, cause, now);
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
        self.room.key
    }

    /// What was asked for.
    #[must_use]
    pub fn room(&self) -> &TargetRoom {
        &self.room
    }

    fn offer(&mut self, offer: &Offer, now: Time) {
        if let Err(finding) = self.check_rotation(offer) {
            return self.protocol(finding, now);
        }
        match self.intake.offer(offer.source, offer.tokens) {
            Ok(true) => {}
            Ok(false) => return,
            Err(finding) => return self.protocol(finding, now),
        }
        self.progress = now;
        self.first_offer.get_or_insert(now);
        if self.room.mover == Mover::Target {
            let entries = self.room.pair.src().entries(offer.source, offer.tokens, offer.rotation);
            if offer.pages.len() as u64 != entries.count() {
                let text = format!(
                    "source rank {} offered tokens {} in {} pages instead of {}",
                    offer.source,
                    offer.tokens,
                    offer.pages.len(),
                    entries.count()
                );
                return self.protocol(text, now);
            }
            let pages = self.room.host(offer.source).map_or(0, |host| host.pages);
            let pool = pages.div_ceil(self.room.pair.src().shard_ranks());
            if let Some(bad) = offer.pages.iter().find(|p| p.page.0 >= pool) {
                let text = format!("source page {} of a pool of {pool}", bad.page);
                return self.protocol(text, now);
            }
            let last = offer.tokens.end == self.room.tokens.end && self.room.pair.shape().has_state();
            let slots = self.room.host(offer.source).map_or(0, |host| host.slots);
            if offer.slot.map(|s| s.slot.0 < slots) != last.then_some(true) {
                let text = format!(
                    "source rank {} offered tokens {} with state slot {:?}, of {slots}",
                    offer.source,
                    offer.tokens,
                    offer.slot.map(|s| s.slot.0)
                );
                return self.protocol(text, now);
            }
            if !offer.pages.is_empty() || offer.slot.is_some() {
                self.running.insert((offer.source, offer.tokens));
                self.actions.push_back(Action::Execute(Work {
                    source: offer.source,
                    tokens: offer.tokens,
                    pages: offer.pages.clone(),
                    rotation: offer.rotation,
                    slot: offer.slot,
                }));
            }
        }
        self.complete(now);
    }

    /// Where pages are sharded, ranks own each token once only if all of them count from the same page.
    fn check_rotation(&mut self, offer: &Offer) -> Result<(), String> {
        let Offer { source, rotation, .. } = *offer;
        if let Err(e) = self.room.pair.src().check_rotation(rotation) {
            return Err(format!("source rank {source} offered {}", e.reason));
        }
        let known = *self.rotation.get_or_insert(rotation);
        if known != rotation {
            return Err(format!("source rank {source} offered rotation {rotation} of a room with {known}"));
        }
        Ok(())
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
                self.tell(None, |head| Message::Done(Done { head, bytes: totals.bytes }));
                let TargetRoom { pair, targets, tokens, .. } = &self.room;
                let due = targets.iter().map(|rank| due(pair, *rank, *tokens).0);
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

    /// Ends the room by our own decision, which every source process is told at once.
    fn fail(&mut self, cause: Cause, now: Time) {
        self.give_up(None, cause, now);
    }

    /// Ends the room; all source processes but the one that said so are told at once.
    fn give_up(&mut self, said: Option<Incarnation>, cause: Cause, now: Time) {
        if matches!(self.phase, Phase::Live | Phase::Granting) {
            self.tell(said, |head| Message::Abort(Abort { head, cause: cause.clone() }));
        }
        self.end(Err(cause), now);
    }

    fn tell(&mut self, except: Option<Incarnation>, message: impl Fn(Head) -> Message) {
        for SourceProcess { incarnation, .. } in &self.room.sources {
            if Some(*incarnation) != except && !self.lost.contains(incarnation) {
                self.actions.push_back(Action::Send(message(self.room.head(*incarnation))));
            }
        }
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
        self.tell(None, |head| Message::Closed(Closed { head, cause: cause.clone() }));
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
