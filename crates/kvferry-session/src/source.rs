//! The source's side of one room.

use alloc::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    format,
    sync::Arc,
    vec::Vec,
};
use core::time::Duration;
use kvferry_plan::{Bytes, Pair, RankId, RoomKey, Rotation, Token, TokenRange};

use crate::{
    Abort, Action, Cause, CauseKind, Closed, Final, FirstToken, Head, Leg, Limits, Message, Mover, Offer,
    Open, Outcome, PageRef, Prompt, Sent, Side, SlotRef, Time, Work,
};

/// A computed chunk and where each source rank keeps it.
#[derive(Clone, Debug)]
struct Chunk {
    tokens: TokenRange,
    pages: Vec<Vec<PageRef>>,
}

/// What the target's open settled.
#[derive(Clone, Debug)]
struct Reader {
    head: Head,
    tokens: TokenRange,
    mover: Mover,
    pair: Arc<Pair>,
    lease: Time,
}

#[derive(Clone, Debug)]
enum Phase {
    Running,
    /// Over for us. `verdict` is what the target said, if it has spoken; otherwise `cause` is ours.
    Ending {
        cause: Cause,
        verdict: Option<Outcome<Time>>,
        since: Time,
        severed: bool,
    },
    Finished(Outcome<Sent>),
}

/// The source's machine of one room: offers chunks as they are computed, has them moved or digested, declares
/// manifests, and keeps the pages pinned until nobody reads them.
///
/// The target decides whether the room was completed. A source that gives up asks it, so both have one end.
///
/// One machine serves one process of the target. A target in several processes is served by as many machines: copies
/// of one that nobody has opened yet.
#[derive(Clone, Debug)]
pub struct Source {
    key: RoomKey,
    tokens: TokenRange,
    prompt: Option<Prompt>,
    /// Those that live here.
    ranks: Vec<RankId>,
    /// Where they keep the request's state; empty in a model without.
    state: Vec<SlotRef>,
    /// Which rank owns the first page, where pages are sharded.
    rotation: Rotation,
    limits: Limits,
    phase: Phase,
    reader: Option<Reader>,
    chunks: Vec<Chunk>,
    first: Option<(FirstToken, Time)>,
    running: BTreeSet<(RankId, TokenRange)>,
    /// Legs by source rank, once their chunk is executed.
    legs: BTreeMap<RankId, Vec<Leg>>,
    finals_sent: bool,
    progress: Time,
    actions: VecDeque<Action>,
}

impl Source {
    /// A room for `tokens` of a request, held by the source ranks `ranks`, which live in this process.
    #[must_use]
    pub fn new(key: RoomKey, tokens: TokenRange, ranks: Vec<RankId>, limits: Limits, now: Time) -> Self {
        Self {
            key,
            tokens,
            prompt: None,
            ranks,
            state: Vec::new(),
            rotation: Rotation(0),
            limits,
            phase: Phase::Running,
            reader: None,
            chunks: Vec::new(),
            first: None,
            running: BTreeSet::new(),
            legs: BTreeMap::new(),
            finals_sent: false,
            progress: now,
            actions: VecDeque::new(),
        }
    }

    /// The same room, opened only by a target that was told this prompt, or does not say which.
    #[must_use]
    pub fn with_prompt(self, prompt: Option<Prompt>) -> Self {
        Self { prompt, ..self }
    }

    /// The same room with the request's state slot on each of our ranks, in a model that has such state.
    #[must_use]
    pub fn with_state(self, state: Vec<SlotRef>) -> Self {
        Self { state, ..self }
    }

    /// The same room of a request with this rotation, on a side that shards its pages.
    #[must_use]
    pub fn with_rotation(self, rotation: Rotation) -> Self {
        Self { rotation, ..self }
    }

    /// The target opened the room over a transport whose mover is `mover`. A repeat changes nothing.
    pub fn open(&mut self, open: &Open, mover: Mover, pair: Arc<Pair>, now: Time) {
        if !matches!(self.phase, Phase::Running) || self.reader.is_some() {
            return;
        }
        self.progress = now;
        let tokens = open.tokens;
        let lease = now + self.limits.lease;
        self.reader = Some(Reader { head: open.head.reply(), tokens, mover, pair, lease });
        // First: of two different prompts the longer one has tokens that this room has not.
        if let (Some(ours), Some(theirs)) = (self.prompt, open.prompt)
            && ours != theirs
        {
            let text = format!(
                "field `prompt`: prefill was told {ours}, decode {theirs}; send both the same token ids"
            );
            return self.fail(Cause::new(CauseKind::Mismatch, Side::Target, text), now);
        }
        if tokens.is_empty() || tokens.start < self.tokens.start || tokens.end > self.tokens.end {
            let text = format!("wants tokens {tokens} of a room with {}", self.tokens);
            return self.fail(Cause::new(CauseKind::Protocol, Side::Target, text), now);
        }
        let stateful = self.reader.as_ref().is_some_and(|reader| reader.pair.shape().has_state());
        if stateful && tokens.end != self.tokens.end {
            let text = format!(
                "wants tokens {tokens} of a room with {}: the state of a request exists only after its last token",
                self.tokens
            );
            return self.fail(Cause::new(CauseKind::Protocol, Side::Target, text), now);
        }
        for at in 0..self.chunks.len() {
            self.start(at);
        }
        self.finish_if_due();
    }

    /// A chunk is computed; `pages` are, for each of our ranks, its pages of it, as an [`Offer`] lists them.
    pub fn chunk(&mut self, tokens: TokenRange, pages: Vec<Vec<PageRef>>, now: Time) {
        if !matches!(self.phase, Phase::Running) {
            return;
        }
        self.progress = now;
        let overlaps = |c: &Chunk| c.tokens.start < tokens.end && tokens.start < c.tokens.end;
        let inside = tokens.start >= self.tokens.start && tokens.end <= self.tokens.end;
        if tokens.is_empty() || !inside || self.chunks.iter().any(overlaps) || self.first.is_some() {
            let text = format!("chunk {tokens} is empty, repeated, late or outside of {}", self.tokens);
            return self.fail(Cause::new(CauseKind::Aborted, Side::Source, text), now);
        }
        self.chunks.push(Chunk { tokens, pages });
        self.start(self.chunks.len() - 1);
    }

    /// The prompt is computed and its first token sampled.
    pub fn finish(&mut self, first: FirstToken, now: Time) {
        if !matches!(self.phase, Phase::Running) || self.first.is_some() {
            return;
        }
        self.progress = now;
        let computed: u64 = self.chunks.iter().map(|c| c.tokens.len()).sum();
        if computed != self.tokens.len() {
            let text = format!("finished after {computed} of {} tokens", self.tokens.len());
            return self.fail(Cause::new(CauseKind::Aborted, Side::Source, text), now);
        }
        self.first = Some((first, now));
        self.finish_if_due();
    }

    /// A piece of work is over: its legs, or why not.
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
        self.progress = now;
        match (&self.phase, result) {
            (Phase::Running, Ok(legs)) => {
                let moved = legs.into_iter().filter(|l| l.bytes() > Bytes(0));
                self.legs.entry(source).or_default().extend(moved);
                self.finish_if_due();
            }
            (Phase::Running, Err(cause)) => self.fail(cause, now),
            _ => self.finish_if_ended(),
        }
    }

    /// A message of the target about this room.
    pub fn message(&mut self, message: &Message, now: Time) {
        let Some(reader) = &self.reader else {
            // A target that gave up before it opened the room.
            if let Message::Abort(abort) = message {
                self.end(abort.cause.clone(), now);
            }
            return;
        };
        if message.head().is_none_or(|h| h.generation != reader.head.generation) {
            return;
        }
        self.renew(now);
        match message {
            Message::Settled(_) => self.progress = now,
            Message::Done(_) | Message::Closed(Closed { cause: None, .. }) => self.verdict(Ok(now), now),
            Message::Closed(Closed { cause: Some(cause), .. }) => self.verdict(Err(cause.clone()), now),
            Message::Abort(abort) => self.end(abort.cause.clone(), now),
            other => {
                let text = format!("sent `{}` to a source", other.name());
                self.fail(Cause::new(CauseKind::Protocol, Side::Target, text), now);
            }
        }
    }

    /// The reader gave a sign of life: its lease is renewed.
    pub fn renew(&mut self, now: Time) {
        if let Some(reader) = &mut self.reader {
            reader.lease = now + self.limits.lease;
        }
    }

    /// The client or the engine gives the room up. Safe in every state, and twice.
    pub fn abort(&mut self, cause: Cause, now: Time) {
        self.fail(cause, now);
    }

    /// The connection to the target is gone: nobody will answer.
    pub fn peer_lost(&mut self, cause: Cause, now: Time) {
        if self.reader.is_none() {
            return;
        }
        self.end(cause, now);
        if let Phase::Ending { cause, verdict, .. } = &mut self.phase {
            verdict.get_or_insert_with(|| Err(cause.clone()));
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
            Phase::Ending { cause, verdict, severed, since } => {
                if !self.running.is_empty() && !*severed && now >= *since + self.limits.fence {
                    *severed = true;
                    self.actions.push_back(Action::Sever);
                }
                if now >= *since + Self::answer(&self.limits) {
                    verdict.get_or_insert_with(|| Err(cause.clone()));
                }
                self.finish_if_ended();
            }
            Phase::Running => {
                let cause = self.overdue(now);
                self.fail(cause, now);
            }
        }
    }

    /// When [`Source::tick`] has something to do, if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        match &self.phase {
            Phase::Finished(_) => None,
            Phase::Ending { verdict, severed, since, .. } => {
                let sever = !self.running.is_empty() && !severed;
                let sever = sever.then(|| *since + self.limits.fence);
                let answer = verdict.is_none().then(|| *since + Self::answer(&self.limits));
                sever.into_iter().chain(answer).min()
            }
            Phase::Running => {
                let at = self.progress + self.patience();
                let lease = self.reader.as_ref().filter(|r| r.mover == Mover::Target).map(|r| r.lease);
                Some(lease.map_or(at, |lease| lease.min(at)))
            }
        }
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// How the room ended, once nobody reads its pages any more.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome<Sent>> {
        match &self.phase {
            Phase::Finished(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// Why the room has failed, as soon as that is certain; its pages may still be read.
    #[must_use]
    pub fn failure(&self) -> Option<&Cause> {
        match &self.phase {
            Phase::Ending { verdict: Some(Err(cause)), .. } | Phase::Finished(Err(cause)) => Some(cause),
            _ => None,
        }
    }

    /// The room.
    #[must_use]
    pub fn key(&self) -> RoomKey {
        self.key
    }

    /// The head of what we send, once the target has opened the room.
    #[must_use]
    pub fn head(&self) -> Option<Head> {
        self.reader.as_ref().map(|r| r.head)
    }

    /// True while a reader may read the pages by itself.
    #[must_use]
    pub fn leased(&self) -> bool {
        !matches!(self.phase, Phase::Finished(_))
            && self.reader.as_ref().is_some_and(|r| r.mover == Mover::Target)
    }

    /// Offers a chunk on every rank and has it executed, if the target wants any of it.
    fn start(&mut self, at: usize) {
        let (Some(reader), Some(chunk)) = (&self.reader, self.chunks.get(at)) else { return };
        let start: Token = chunk.tokens.start.max(reader.tokens.start);
        let end: Token = chunk.tokens.end.min(reader.tokens.end);
        let tokens = TokenRange { start, end };
        if tokens.is_empty() {
            return;
        }
        let rotation = self.rotation;
        for (place, &source) in self.ranks.iter().enumerate() {
            let entries = |tokens| reader.pair.src().entries(source, tokens, rotation);
            let cut = entries(tokens);
            let pages = match reader.mover {
                Mover::Source => Vec::new(),
                Mover::Target => {
                    // The target may want less than the chunk: cut its pages out of the chunk's.
                    let skip = usize::try_from(entries(chunk.tokens).before(&cut)).unwrap_or(usize::MAX);
                    let take = usize::try_from(cut.count()).unwrap_or(usize::MAX);
                    let all = chunk.pages.get(place).map(Vec::as_slice).unwrap_or_default();
                    all.iter().skip(skip).take(take).copied().collect()
                }
            };
            let state = self.state.get(place).copied().filter(|_| tokens.end == self.tokens.end);
            let slot = state.filter(|_| reader.mover == Mover::Target);
            let offer = Offer { head: reader.head, source, tokens, pages, slot, rotation };
            self.actions.push_back(Action::Send(Message::Offer(offer)));
            // A rank that owns none of the chunk's pages has said so, and has nothing to do.
            if !cut.is_empty() || state.is_some() {
                self.running.insert((source, tokens));
                let work = Work { source, tokens, pages: Vec::new(), rotation, slot: None };
                self.actions.push_back(Action::Execute(work));
            }
        }
    }

    /// Sends every rank's manifest once all of its legs are known.
    fn finish_if_due(&mut self) {
        let (Some(reader), Some((first, _))) = (&self.reader, self.first) else { return };
        if self.finals_sent || !self.running.is_empty() {
            return;
        }
        self.finals_sent = true;
        for &source in &self.ranks {
            let legs = self.legs.get(&source).cloned().unwrap_or_default();
            let message = Final { head: reader.head, source, legs, first };
            self.actions.push_back(Action::Send(Message::Final(message)));
        }
    }

    /// Ends the room from our side. The target may have completed it meanwhile, so it has the last word.
    fn fail(&mut self, cause: Cause, now: Time) {
        if !matches!(self.phase, Phase::Running) {
            return;
        }
        if let Some(reader) = &self.reader {
            let abort = Abort { head: reader.head, cause: cause.clone() };
            self.actions.push_back(Action::Send(Message::Abort(abort)));
        }
        self.end(cause, now);
    }

    /// Ends the room: nothing new starts, what moves is stopped.
    fn end(&mut self, cause: Cause, now: Time) {
        if !matches!(self.phase, Phase::Running) {
            return;
        }
        // Nobody has read anything: nobody is to be asked.
        let verdict = self.reader.is_none().then(|| Err(cause.clone()));
        self.phase = Phase::Ending { cause, verdict, since: now, severed: false };
        if self.reader.is_some() {
            self.actions.push_back(Action::Fence);
        }
        self.finish_if_ended();
    }

    /// The target has decided.
    fn verdict(&mut self, said: Outcome<Time>, now: Time) {
        if said.is_ok() && !self.finals_sent {
            let text = "called the room complete before the manifests were sent";
            return self.fail(Cause::new(CauseKind::Protocol, Side::Target, text), now);
        }
        let cause = match &said {
            Ok(_) => Cause::new(CauseKind::Other, Side::Target, "completed"),
            Err(cause) => cause.clone(),
        };
        self.end(cause, now);
        if let Phase::Ending { verdict, .. } = &mut self.phase {
            verdict.get_or_insert(said);
        }
        self.finish_if_ended();
    }

    fn finish_if_ended(&mut self) {
        let Phase::Ending { verdict: Some(verdict), .. } = &self.phase else { return };
        if !self.running.is_empty() {
            return;
        }
        let outcome = match verdict {
            Ok(done) => {
                let legs = self.legs.values().flatten();
                Ok(Sent {
                    bytes: Bytes(legs.clone().fold(0, |n, l| n.saturating_add(l.bytes().0))),
                    copies: legs.fold(0, |n, l| n.saturating_add(l.copies)),
                    exposed: self.first.map_or(Duration::ZERO, |(_, at)| done.since(at)),
                })
            }
            Err(cause) => Err(cause.clone()),
        };
        self.phase = Phase::Finished(outcome);
        self.actions.push_back(Action::Finish);
    }

    /// How long the target has to say how the room ended; longer than its own fence, which comes before the answer.
    fn answer(limits: &Limits) -> Duration {
        limits.fence.saturating_mul(2)
    }

    /// How long the responsible side has.
    fn patience(&self) -> Duration {
        match (&self.reader, &self.first) {
            (Some(_), _) if !self.running.is_empty() => self.limits.transfer,
            // The target's own bound, which names what is missing, comes first.
            (Some(_), _) if self.finals_sent => self.limits.transfer.saturating_mul(2),
            (None, Some(_)) => self.limits.join,
            _ => self.limits.compute,
        }
    }

    /// Who is late, and with what.
    fn overdue(&self, now: Time) -> Cause {
        let (at, text) = match &self.reader {
            Some(reader) if reader.mover == Mover::Target && reader.lease <= now => {
                (Side::Target, format!("its lease of {:?} on our pages expired", self.limits.lease))
            }
            Some(reader) if !self.running.is_empty() => {
                let late = match reader.mover {
                    Mover::Source => Side::Target,
                    Mover::Target => Side::Source,
                };
                (
                    late,
                    format!(
                        "{} pieces of work did not end in {:?}",
                        self.running.len(),
                        self.limits.transfer
                    ),
                )
            }
            Some(_) if self.finals_sent => {
                (Side::Target, format!("no verdict {:?} after the manifests", self.patience()))
            }
            None if self.first.is_some() => {
                (Side::Target, format!("the room was not opened within {:?}", self.limits.join))
            }
            _ => (Side::Source, format!("no chunk was computed for {:?}", self.limits.compute)),
        };
        Cause::new(CauseKind::Stalled, at, text)
    }
}
