//! The one thread that owns pages and requests. It takes commands between steps; a step is the next token of every
//! request that generates, together with chunks of as many prompts as a budget of tokens allows. Not for numbers (`forward`, `sampler`).

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use kvferry_plan::{Capacity, Fit, RoomKey, TokenRange};

use crate::{
    EngineConfig, EngineError, EngineStats, Event, FirstToken, HandOff, Request, RoomLease, Rows, StopReason,
    batching::Turns,
    forward::{Forward, Outcome, Piece},
    job::{Job, Kind, State},
    limits::Place,
    mailbox::{Receiver, Sender},
    owners::ShardRanks,
    pages::{Pages, Spare},
    prefix::Found,
    request::Sink,
    sampler::{most_probable, sample},
};

/// An answer that is awaited as [`crate::Answer`].
pub(crate) type Reply<T> = Sender<Result<T, EngineError>>;

/// What the scheduler is told.
#[derive(Debug)]
pub(crate) enum Command {
    Generate {
        request: Request,
        place: Place,
        sink: Sink,
    },
    Prefill {
        key: RoomKey,
        request: Request,
        place: Place,
        granted: Reply<RoomLease>,
    },
    Reserve {
        key: RoomKey,
        request: Request,
        place: Place,
        /// Without the prefix cache.
        apart: bool,
        granted: Reply<RoomLease>,
    },
    /// What this request has is not for others.
    SetApart {
        id: JobId,
    },
    Decode {
        id: JobId,
        key: RoomKey,
        first: FirstToken,
        sink: Sink,
    },
    /// Of a request that is held under a key.
    Release {
        key: RoomKey,
    },
    /// The lease of a request is over.
    Return {
        id: JobId,
    },
    Rows {
        key: RoomKey,
        reply: Reply<Rows>,
    },
    /// Somebody gave up a request, or has enough of one: time to look who.
    ReaderSpoke,
    Stop,
}

/// Number of a request, in order of arrival.
pub(crate) type JobId = u64;

/// The scheduler.
pub(crate) struct Scheduler {
    forward: Forward,
    capacity: Capacity,
    /// Prompt tokens of a step.
    chunk: u32,
    handoff: Arc<dyn HandOff>,
    /// For leases, which come back this way.
    commands: Sender<Command>,
    inbox: Receiver<Command>,
    stats: Arc<Mutex<EngineStats>>,
    pages: Pages,
    jobs: BTreeMap<JobId, Job>,
    rooms: HashMap<RoomKey, JobId>,
    queue: VecDeque<JobId>,
    next: JobId,
    turns: Turns,
}

impl Scheduler {
    pub(crate) fn new(
        forward: Forward,
        capacity: Capacity,
        config: &EngineConfig,
        handoff: Arc<dyn HandOff>,
        (commands, inbox): (Sender<Command>, Receiver<Command>),
        stats: Arc<Mutex<EngineStats>>,
    ) -> Self {
        let block = if config.prefix_cache { forward.placement().prefix_block() } else { None };
        if config.prefix_cache && block.is_none() {
            let reason = "no run of pages holds consecutive tokens on every rank";
            tracing::info!(reason, "prefixes are not shared");
        }
        let ranks = ShardRanks::new(forward.placement().shard_ranks());
        let pages = Pages::new(forward.pages(), ranks, block);
        let pages = if forward.slots() > 0 { pages.with_slots(forward.slots()) } else { pages };
        let scheduler = Self {
            forward,
            capacity,
            chunk: config.chunk,
            handoff,
            commands,
            inbox,
            stats,
            pages,
            jobs: BTreeMap::new(),
            rooms: HashMap::new(),
            queue: VecDeque::new(),
            next: 1,
            turns: Turns::default(),
        };
        scheduler.publish();
        scheduler
    }

    /// Works until it is told to stop.
    pub(crate) fn run(mut self) {
        // Here, not where the engine is started: a rank alone works on this thread. A step would try again.
        match self.forward.capture() {
            Ok(0) => {}
            Ok(rows) => {
                tracing::info!(rows, bytes = self.forward.workspace(), "decode steps have captured shapes");
            }
            Err(error) => tracing::error!(%error, "the shapes of decode steps were not captured"),
        }
        self.publish();
        loop {
            let working =
                self.jobs.values().any(|job| matches!(job.state, State::Prefilling | State::Decoding));
            let mut command = if working { self.inbox.try_recv() } else { self.inbox.recv() };
            if command.is_none() && !working {
                break;
            }
            let mut stop = false;
            while let Some(this) = command {
                stop |= matches!(this, Command::Stop);
                self.obey(this);
                command = self.inbox.try_recv();
            }
            if stop {
                break;
            }
            self.drop_abandoned();
            self.finish_enough();
            self.admit();
            self.publish();
            self.step();
            self.publish();
        }
        for id in self.jobs.keys().copied().collect::<Vec<_>>() {
            self.fail(id, &EngineError::Stopped);
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Generate { request, place, sink } => {
                let key = request.hold;
                let job = Job { sink: Some(sink), ..Job::new(Kind::Generate, key, request, place) };
                self.enqueue(job);
            }
            Command::Prefill { key, request, place, granted } => {
                let job = Job::new(Kind::Prefill, Some(key), request, place);
                let job = Job { granted: Some(granted), ..job };
                self.enqueue(job);
            }
            Command::Reserve { key, request, place, apart, granted } => {
                let job = Job::new(Kind::Decode, Some(key), request, place);
                let job = Job { granted: Some(granted), apart, ..job };
                self.enqueue(job);
            }
            Command::Decode { id, key, first, sink } => {
                if let Err(error) = self.decode(id, key, first, &sink) {
                    sink.tell(Event::Failed(error));
                }
            }
            Command::Release { key } => {
                let id = self.rooms.get(&key).copied();
                let kind = id.and_then(|id| self.jobs.get(&id)).map(|job| job.kind);
                if let (Some(id), Some(Kind::Generate)) = (id, kind) {
                    self.end(id);
                }
            }
            Command::SetApart { id } => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.apart = true;
                }
            }
            Command::Return { id } => self.end(id),
            Command::Rows { key, reply } => {
                reply.send(self.rows(key));
            }
            Command::ReaderSpoke | Command::Stop => {}
        }
    }

    fn enqueue(&mut self, job: Job) {
        if let Some(key) = job.key {
            if self.rooms.contains_key(&key) {
                refuse(job, EngineError::RoomInUse(key));
                return;
            }
            self.rooms.insert(key, self.next);
        }
        self.jobs.insert(self.next, job);
        self.queue.push_back(self.next);
        self.next += 1;
    }

    fn decode(&mut self, id: JobId, key: RoomKey, first: FirstToken, sink: &Sink) -> Result<(), EngineError> {
        let job = self.jobs.get_mut(&id).ok_or(EngineError::UnknownRoom(key))?;
        if job.kind != Kind::Decode || job.state != State::Reserved {
            let reason = "it does not wait for a prompt's cache".into();
            return Err(EngineError::RoomState { key, reason });
        }
        job.filled = job.prompt_tokens;
        Self::keep_state(&self.forward, job)?;
        job.sink = Some(sink.clone());
        job.state = State::Decoding;
        if let Some(reason) = job.push(first, self.forward.eos()) {
            self.finish(id, reason);
        }
        Ok(())
    }

    fn rows(&self, key: RoomKey) -> Result<Rows, EngineError> {
        let job =
            self.rooms.get(&key).and_then(|id| self.jobs.get(id)).ok_or(EngineError::UnknownRoom(key))?;
        let Some(lease) = &job.lease else {
            return Err(EngineError::RoomState { key, reason: "it waits for pages".into() });
        };
        let rows = self.forward.rows(key, lease, job.prompt_tokens, job.filled)?;
        Ok(match &job.kept {
            Some(kept) => rows.with_state(Arc::clone(kept)),
            None => rows,
        })
    }

    /// Copies the state of a request that is to be held, which has its whole prompt and goes on from there.
    fn keep_state(forward: &Forward, job: &mut Job) -> Result<(), EngineError> {
        let (Some(key), Some(lease), true) = (job.key, &job.lease, job.keep) else { return Ok(()) };
        if lease.slot().is_some() {
            let rows = forward.rows(key, lease, job.prompt_tokens, job.filled)?;
            job.kept = Some(Arc::new(rows.copy_state()?));
        }
        Ok(())
    }

    /// Nobody wants the results of these any more.
    fn drop_abandoned(&mut self) {
        let abandoned: Vec<JobId> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.state != State::Finished && job.abandoned())
            .map(|(id, _)| *id)
            .collect();
        for id in abandoned {
            if self.jobs.get(&id).is_some_and(|job| job.state == State::Queued) {
                self.remove(id);
            } else {
                self.fail(id, &EngineError::Aborted);
            }
        }
    }

    /// Nobody wants more of these.
    fn finish_enough(&mut self) {
        let enough: Vec<JobId> =
            self.jobs.iter().filter(|(_, job)| job.is_enough()).map(|(id, _)| *id).collect();
        enough.into_iter().for_each(|id| self.finish(id, StopReason::Enough));
    }

    /// Lets waiting requests in, in order of arrival: nobody overtakes, so nobody waits for ever.
    fn admit(&mut self) {
        while let Some(id) = self.queue.front().copied() {
            let Some(job) = self.jobs.get_mut(&id) else {
                self.queue.pop_front();
                continue;
            };
            let found = if job.apart { Found::default() } else { self.pages.find(&job.prompt) };
            let seen = found.blocks();
            // Whoever computes goes on from a state; a prompt that was computed elsewhere comes with its own.
            let computes = job.kind != Kind::Decode;
            let mut found = if computes { self.pages.resumable(found) } else { found };
            let fit = |found: &Found| self.capacity.fit(job.need(&self.capacity), self.pages.free_for(found));
            let mut fits = fit(&found);
            if matches!(fits, Fit::Later { .. }) {
                // Where a cached prefix lies says who owns the pages after it. When these ranks are full and others are
                // not, all of the prompt is computed, and nobody waits.
                let anew = Found::default();
                let otherwise = fit(&anew);
                if matches!(otherwise, Fit::Now { .. }) {
                    (found, fits) = (anew, otherwise);
                }
            }
            let pages = match fits {
                Fit::Now { pages, .. } => pages,
                Fit::Later { .. } => break,
                // Intake asks the same question: it lets none of these in.
                Fit::Never(limit) => {
                    self.fail(id, &limit.into());
                    continue;
                }
            };
            // Every slot is some request's own.
            let Some(lease) = self.pages.take(pages, found, |it| self.forward.retire(it)) else { break };
            self.queue.pop_front();
            let (table, slot, cached) = (lease.table().clone(), lease.slot(), lease.cached());
            let begun = match lease.begins_with().zip(slot) {
                Some((stored, own)) => self.forward.copy_state(stored, own),
                None => Ok(()),
            };
            job.stops = if computes { self.pages.stops(job.prompt_tokens, seen, cached) } else { Vec::new() };
            (job.lease, job.place) = (Some(lease), None);
            (job.cached, job.filled) = (cached, cached);
            if let Err(error) = begun {
                tracing::error!(%error, "a stored state was not copied");
                self.fail(id, &error);
                self.remove(id);
                continue;
            }
            job.state = if job.kind == Kind::Decode { State::Reserved } else { State::Prefilling };
            if job.state == State::Prefilling {
                self.turns.join(id);
            }
            if let Some(granted) = job.granted.take()
                && let Some(key) = job.key
            {
                let prefill = job.kind == Kind::Prefill;
                // One that nobody waits for any more comes back at once.
                granted.send(Ok(RoomLease::new((key, id), table, slot, cached, self.commands.clone())));
                if prefill {
                    self.hand_over_cached(key, cached);
                }
            }
        }
    }

    /// What lies in the pages already is handed over as if it had been computed, in pieces of the same size.
    fn hand_over_cached(&self, key: RoomKey, cached: u64) {
        let mut start = 0;
        while start < cached {
            let end = cached.min(start.saturating_add(self.chunk.into()));
            self.handoff.chunk(key, TokenRange::new(start, end));
            start = end;
        }
    }

    /// The next token of all that generate, and chunks of the prompts whose turn it is.
    fn step(&mut self) {
        let needed = |id| self.jobs.get(&id).map_or(0, Job::prompt_left);
        let prompts = self.turns.deal(self.chunk.into(), needed);
        let decoding =
            self.jobs.iter().filter(|(_, job)| job.state == State::Decoding).map(|(id, _)| (*id, 1));
        let (ids, pieces): (Vec<JobId>, Vec<Piece<'_>>) = decoding
            .chain(prompts)
            .filter_map(|(id, count)| {
                let job = self.jobs.get(&id)?;
                let (tokens, start) = job.next_tokens(count);
                let end = start + tokens.len() as u64;
                let lease = job.lease.as_ref()?;
                let (table, slot) = (lease.table(), lease.slot());
                Some((id, Piece { tokens, start, table, slot, logits: end >= job.prompt_tokens }))
            })
            .unzip();
        if pieces.is_empty() {
            return;
        }
        match self.forward.step(&pieces) {
            Ok(outcomes) => {
                ids.into_iter().zip(outcomes.iter()).for_each(|(id, outcome)| self.take(id, &outcome));
                self.forward.reuse(outcomes);
            }
            Err(error) => {
                tracing::error!(%error, requests = ids.len(), "a step failed");
                ids.into_iter().for_each(|id| self.fail(id, &error));
            }
        }
    }

    /// Takes what a step brought for one request.
    fn take(&mut self, id: JobId, outcome: &Outcome<'_>) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if !outcome.in_range {
            self.fail(id, &EngineError::Range { what: "this model's activations" });
            return;
        }
        job.advance(outcome.computed);
        let prefill = job.key.filter(|_| job.kind == Kind::Prefill);
        if let Some(key) = prefill {
            self.handoff.chunk(key, outcome.computed);
        }
        Self::store(&mut self.pages, &self.forward, job);
        let Some(logits) = outcome.logits else { return };
        let token = match sample(logits, &job.sampling, job.generated.len() as u64) {
            Ok(choice) => FirstToken {
                id: choice.id,
                logprob: choice.logprob,
                top: most_probable(logits, job.top_logprobs as usize),
            },
            Err(error) => {
                self.fail(id, &error);
                return;
            }
        };
        if job.state == State::Prefilling {
            // Others need not wait for the end of the answer.
            Self::share(&mut self.pages, job);
            if let Err(error) = Self::keep_state(&self.forward, job) {
                self.fail(id, &error);
                return;
            }
        }
        if let Some(key) = prefill {
            job.state = State::Finished;
            self.handoff.finished(key, token);
            return;
        }
        job.state = State::Decoding;
        if let Some(reason) = job.push(token, self.forward.eos()) {
            self.finish(id, reason);
        }
    }

    /// Lets later requests begin with what this one has complete. Only for what is right: never after a failure.
    fn share(pages: &mut Pages, job: &mut Job) {
        if job.apart {
            return;
        }
        let tokens = job.complete();
        if let Some(lease) = &mut job.lease {
            pages.share(lease, &tokens);
        }
    }

    /// Stores the state of a request that has come to the end of a block, for later ones to go on from. A prompt was cut
    /// for it in places that are worth an older state; elsewhere, at the end of a chunk or in an answer, it takes
    /// only what nobody uses.
    fn store(pages: &mut Pages, forward: &Forward, job: &mut Job) {
        if job.kind == Kind::Decode || !pages.ends_block(job.filled) {
            return;
        }
        let spare = if job.stops.contains(&job.filled) { Spare::Oldest } else { Spare::Free };
        let tokens = job.complete();
        let Some(lease) = &mut job.lease else { return };
        let copy = |from, to| forward.copy_state(from, to);
        if let Err(error) = pages.store(lease, &tokens, spare, |it| forward.retire(it), copy) {
            tracing::error!(%error, "a state was not stored");
        }
    }

    /// A request has ended well.
    fn finish(&mut self, id: JobId, reason: StopReason) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        Self::share(&mut self.pages, job);
        job.tell(Event::Done {
            reason,
            prompt_tokens_computed: job.prompt_computed,
            prompt_tokens_cached: job.cached,
        });
        job.sink = None;
        job.state = State::Finished;
        if job.key.is_none() {
            self.remove(id);
        }
    }

    /// A request has ended otherwise. Pages that another process may be reading or writing wait for the release.
    fn fail(&mut self, id: JobId, error: &EngineError) {
        self.tell_failed(id, error);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.kind == Kind::Generate || job.lease.is_none() {
            self.remove(id);
        } else {
            job.state = State::Finished;
        }
    }

    /// A request is over by its owner's decision, whatever its state.
    fn end(&mut self, id: JobId) {
        self.tell_failed(id, &EngineError::Aborted);
        self.remove(id);
    }

    /// Tells everybody who waits for something of this request.
    fn tell_failed(&mut self, id: JobId, error: &EngineError) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if let Some(granted) = job.granted.take() {
            granted.send(Err(error.clone()));
        } else if job.kind == Kind::Prefill
            && job.state != State::Finished
            && let Some(key) = job.key
        {
            self.handoff.failed(key, error);
        }
        if let Some(sink) = job.sink.take() {
            sink.tell(Event::Failed(error.clone()));
        }
    }

    /// Forgets a request and frees its pages.
    fn remove(&mut self, id: JobId) {
        let Some(job) = self.jobs.remove(&id) else { return };
        if let Some(key) = job.key {
            self.rooms.remove(&key);
        }
        self.queue.retain(|queued| *queued != id);
        if let Some(lease) = job.lease {
            self.pages.give_back(lease, |it| self.forward.retire(it));
        }
    }

    fn publish(&self) {
        let count = |state| {
            u32::try_from(self.jobs.values().filter(|job| job.state == state).count()).unwrap_or(u32::MAX)
        };
        let (ranks, slots) = (self.forward.placement().ranks(), self.forward.slots());
        let steps = self.forward.steps();
        let stats = EngineStats {
            pages_total: self.pages.total(),
            pages_free: self.pages.free(),
            pages_held: self.pages.held(),
            pages_cached: self.pages.cached(),
            slots_total: slots,
            slots_free: self.pages.slots_free(),
            slots_held: slots.saturating_sub(self.pages.slots_free()),
            slots_cached: self.pages.slots_cached(),
            queued: count(State::Queued),
            prefilling: count(State::Prefilling),
            reserved: count(State::Reserved),
            decoding: count(State::Decoding),
            finished: count(State::Finished),
            threads: 1 + if ranks > 1 { ranks } else { 0 },
            steps_fixed: steps.fixed,
            steps_eager: steps.eager,
            rows_padding: steps.padding,
            workspace_bytes: self.forward.workspace() as u64,
            scratch_bytes: self.forward.scratch() as u64,
        };
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }
}

/// Sends a request away that was never taken in.
fn refuse(job: Job, error: EngineError) {
    if let Some(granted) = job.granted {
        granted.send(Err(error.clone()));
    }
    if let Some(sink) = job.sink {
        sink.tell(Event::Failed(error));
    }
}
