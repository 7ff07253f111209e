//! The engine's front: what other threads and tasks call. Every call returns at once; the work is done by the
//! scheduler thread.

use std::{
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
};

use kvferry_arena::{Arena, Memory};
use kvferry_plan::{
    CacheShape, Capacity, Cast, Descriptor, Dtype, Hold, LayoutSpec, Need, PROTOCOL, Placement, PoolLayout,
    RoomKey,
};

use crate::{
    Answer, EngineError, Events, Fault, FirstToken, HandOff, Model, Profile, RankRows, Request, RoomLease,
    Rows,
    forward::Forward,
    limits::Limits,
    mailbox::{Sender, mailbox},
    scheduler::{Command, Scheduler},
};

/// The form of steps that hold nothing but next tokens of requests that generate. Both give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DecodeBatch {
    /// Padded to one of a few captured numbers of rows, in memory that is taken at the start. Other steps, and those with
    /// more requests than the largest shape has rows, are eager.
    Fixed,
    /// As many rows as there are requests.
    #[default]
    Eager,
}

/// How an engine is laid out and how much it may hold.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Ranks, page size and token placement.
    pub layout: LayoutSpec,
    /// Element type of the pools, where the layout does not say.
    pub kv: Dtype,
    /// Most prompt tokens computed in one step, over all prompts; each chunk is handed over while the next is computed.
    pub chunk: u32,
    /// Longest sequence, prompt and generated tokens together; `None` takes the model's own limit, which only a model
    /// without positions may exceed ([`ModelConfig::longest_possible`](crate::checkpoint::ModelConfig::longest_possible)).
    pub max_model_len: Option<u32>,
    /// Tokens that the pool holds at least, over all requests.
    pub pool_tokens: u64,
    /// States that the pool holds, in a model with state per request (Kimi Linear): one for each request that is under
    /// way, further ones wait; what requests leave is for the prefix cache.
    pub state_slots: u32,
    /// Most requests that wait; a further one is refused at once.
    pub max_queued: u32,
    /// Keep the cache of finished requests while nobody needs the pages, so that prompts that begin alike share it. In
    /// a model with state per request a prompt goes on where a state was stored: at the last whole block of an earlier prompt,
    /// where earlier prompts parted, and where else a step ended and a slot was free.
    pub prefix_cache: bool,
    /// Form of steps that only generate.
    pub decode_batch: DecodeBatch,
    /// Keep count of where the steps' time goes ([`Engine::profile`]).
    pub profile: bool,
    /// Arithmetic that is wrong on purpose, for negative controls.
    pub fault: Option<Fault>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            layout: LayoutSpec::default(),
            kv: Dtype::F32,
            chunk: 256,
            max_model_len: None,
            pool_tokens: 4096,
            state_slots: 64,
            max_queued: 1024,
            prefix_cache: true,
            decode_batch: DecodeBatch::default(),
            profile: false,
            fault: None,
        }
    }
}

/// What an engine holds at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct EngineStats {
    /// Pages of the pool, the same ones on every rank. With KV sharding they are logical pages, dealt over the ranks; so
    /// are all that follow.
    pub pages_total: u32,
    /// Pages that a request can have for certain: nobody holds them. Some may be cached. With KV sharding a request
    /// takes pages of every rank in turn, so that it is as many as the fullest rank has left, of every rank: free and held
    /// ones need not be all.
    pub pages_free: u32,
    /// Pages that requests hold, finished ones that were not released included.
    pub pages_held: u32,
    /// Pages of prefixes that later requests can begin with, free or held.
    pub pages_cached: u32,
    /// State slots of each rank's pool; 0 in a model without state per request.
    pub slots_total: u32,
    /// State slots that can be had: no request holds them. Some may be cached.
    pub slots_free: u32,
    /// State slots that requests hold, finished ones that were not released included.
    pub slots_held: u32,
    /// State slots whose state later requests can go on from; all of them are free.
    pub slots_cached: u32,
    /// Requests that wait for pages.
    pub queued: u32,
    /// Requests whose prompt is being computed.
    pub prefilling: u32,
    /// Requests that wait for their prompt's cache from elsewhere.
    pub reserved: u32,
    /// Requests that generate.
    pub decoding: u32,
    /// Requests that are over but whose pages are kept until they are released.
    pub finished: u32,
    /// Threads of the engine: the scheduler, and one per rank where there are several.
    pub threads: u32,
    /// Steps of a captured shape ([`DecodeBatch::Fixed`]) so far. Not told by a ledger, which says what is held.
    #[serde(skip)]
    pub steps_fixed: u64,
    /// All other steps so far.
    #[serde(skip)]
    pub steps_eager: u64,
    /// Rows that padded steps to their captured shape, so far.
    #[serde(skip)]
    pub rows_padding: u64,
    /// Memory that all ranks compute in, in bytes: that of the captured shapes, or what the largest step so far has
    /// needed.
    #[serde(skip)]
    pub workspace_bytes: u64,
    /// With KV sharding, the part of a rank's workspace in which it puts the rows of all ranks together, one part of a layer
    /// at a time: taken at the start, for the longest sequence that is served. In bytes; else 0.
    #[serde(skip)]
    pub scratch_bytes: u64,
}

/// A running engine. Dropping it ends the scheduler; requests that are under way fail with
/// [`EngineError::Stopped`].
#[derive(Debug)]
pub struct Engine {
    model: Arc<Model>,
    shape: CacheShape,
    placement: Placement,
    arenas: Vec<Arc<Arena>>,
    limits: Limits,
    commands: Sender<Command>,
    stats: Arc<Mutex<EngineStats>>,
    profile: Arc<Mutex<Profile>>,
    scheduler: Option<JoinHandle<()>>,
}

impl Engine {
    /// Builds the pools and starts the scheduler.
    ///
    /// # Errors
    /// [`EngineError::Layout`] and [`EngineError::Config`] name the number that cannot work and what would;
    /// [`EngineError::Pool`] when the memory cannot be had.
    pub fn start(
        model: Arc<Model>,
        config: &EngineConfig,
        handoff: Arc<dyn HandOff>,
    ) -> Result<Self, EngineError> {
        let forward = Forward::new(Arc::clone(&model), config)?;
        let limits = Limits::new(&model, config, forward.placement(), forward.pages())?;
        let stats = Arc::new(Mutex::new(EngineStats::default()));
        let (commands, inbox) = mailbox();
        let (shape, placement) = (forward.shape().clone(), forward.placement().clone());
        let (arenas, profile) = (forward.arenas(), forward.profile());
        let mailbox = (commands.clone(), inbox);
        let scheduler =
            Scheduler::new(forward, limits.capacity().clone(), config, handoff, mailbox, Arc::clone(&stats));
        let scheduler = thread::Builder::new()
            .name("scheduler".into())
            .spawn(move || scheduler.run())
            .map_err(|error| EngineError::Thread(error.to_string()))?;
        Ok(Self {
            model,
            shape,
            placement,
            arenas,
            limits,
            commands,
            stats,
            profile,
            scheduler: Some(scheduler),
        })
    }

    /// Computes a prompt and continues it, all in this engine.
    ///
    /// # Errors
    /// [`EngineError::NeverFits`], [`EngineError::Request`] and [`EngineError::QueueFull`], before any work.
    pub fn generate(&self, request: Request) -> Result<Events, EngineError> {
        let (request, place) = self.limits.admit(Hold::Whole, request)?;
        let (sink, events) = Events::channel(&self.commands);
        self.send(Command::Generate { request, place, sink })?;
        Ok(events)
    }

    /// Computes a prompt for somebody else to continue. The answer comes when the request has its pages (requests
    /// wait in order of arrival); then the calls of [`HandOff`] follow. The pages stay as long as the lease.
    ///
    /// # Errors
    /// As [`Engine::generate`], before any work; through the answer [`EngineError::RoomInUse`].
    pub fn prefill(&self, key: RoomKey, request: Request) -> Result<Answer<RoomLease>, EngineError> {
        let hold = Hold::Prompt(self.capacity().path(request.ignore_eos));
        let (request, place) = self.limits.admit(hold, request)?;
        let (granted, answer) = Answer::channel(&self.commands);
        self.send(Command::Prefill { key, request, place, granted })?;
        Ok(answer)
    }

    /// Reserves pages for a request whose prompt somebody else computes. All of the request is checked now, so that
    /// nothing is moved for one that could not go on. The answer comes when the pages are there; they stay as long
    /// as the lease.
    ///
    /// # Errors
    /// As [`Engine::prefill`].
    pub fn reserve(&self, key: RoomKey, request: Request) -> Result<Answer<RoomLease>, EngineError> {
        self.reserve_with(key, request, false)
    }

    /// The same for a request that neither begins with a prefix that earlier ones left nor leaves its own to later ones:
    /// for rows that are not what this engine would compute, as those are not that were converted on the way.
    ///
    /// # Errors
    /// As [`Engine::prefill`].
    pub fn reserve_apart(&self, key: RoomKey, request: Request) -> Result<Answer<RoomLease>, EngineError> {
        self.reserve_with(key, request, true)
    }

    fn reserve_with(
        &self,
        key: RoomKey,
        request: Request,
        apart: bool,
    ) -> Result<Answer<RoomLease>, EngineError> {
        let (request, place) = self.limits.admit(Hold::Continue, request)?;
        let (granted, answer) = Answer::channel(&self.commands);
        self.send(Command::Reserve { key, request, place, apart, granted })?;
        Ok(answer)
    }

    /// Continues a reserved request whose prompt's cache is now in the pool, from the `first` token that prefill
    /// sampled (which is also the first event). No prompt token is computed.
    ///
    /// # Errors
    /// [`EngineError::Request`] at once; what depends on the room comes as [`crate::Event::Failed`].
    pub fn decode(&self, lease: &RoomLease, first: FirstToken) -> Result<Events, EngineError> {
        self.limits.vocabulary(&[first.id])?;
        let (sink, events) = Events::channel(&self.commands);
        self.send(Command::Decode { id: lease.id(), key: lease.key(), first, sink })?;
        Ok(events)
    }

    /// Checks whether a prompt and at least one token after it could ever be served here, without beginning anything.
    ///
    /// # Errors
    /// [`EngineError::NeverFits`]; [`EngineError::Request`] when either number is 0.
    pub fn check(&self, prompt_tokens: u64, max_tokens: u32) -> Result<(), EngineError> {
        self.limits.fit(Need { hold: Hold::Whole, prompt_tokens, max_tokens }).map(drop)
    }

    /// Checks all that [`Engine::reserve`] checks before any work, without beginning anything.
    ///
    /// # Errors
    /// [`EngineError::NeverFits`] and [`EngineError::Request`].
    pub fn check_reserve(&self, request: &Request) -> Result<(), EngineError> {
        self.limits.check(Hold::Continue, request).map(drop)
    }

    /// Ends a request that [`Engine::generate`] was told to hold, and frees its pages. Does nothing to what a
    /// [`RoomLease`] owns, nor when there is nothing.
    pub fn release(&self, key: RoomKey) {
        // An engine that has stopped holds no pages.
        let _ = self.commands.send(Command::Release { key });
    }

    /// The cache of a request's prompt, to be read by coordinate. It answers until the request is released, and longer
    /// only while the prefix cache keeps every page of it.
    ///
    /// # Errors
    /// [`EngineError::UnknownRoom`] through the answer, and [`EngineError::RoomState`] while it is queued.
    pub fn rows(&self, key: RoomKey) -> Result<Answer<Rows>, EngineError> {
        let (reply, answer) = Answer::channel(&self.commands);
        self.send(Command::Rows { key, reply })?;
        Ok(answer)
    }

    /// Everything that `rank` holds of a request's prompt. Blocks until the scheduler is between two steps.
    ///
    /// # Errors
    /// [`EngineError::UnknownRoom`]; [`EngineError::Request`] for a rank that does not exist.
    pub fn rank_rows(&self, key: RoomKey, rank: kvferry_plan::RankId) -> Result<RankRows, EngineError> {
        self.rows(key)?.wait()?.rank(rank)
    }

    /// Copies the prompt's cache of `from` (another engine with any layout, same model and element type) into the
    /// pages that `lease` reserved here, apart from what is cached there, coordinate by coordinate: slow, and independent of every plan, so that
    /// it can stand as the reference for one.
    ///
    /// # Errors
    /// [`EngineError::UnknownRoom`]; [`EngineError::RoomState`] when lengths or models differ.
    pub fn adopt(&self, lease: &RoomLease, from: &Rows) -> Result<(), EngineError> {
        self.rows(lease.key())?.wait()?.fill_from(from, lease.cached(), None)
    }

    /// As [`Engine::adopt`], where `from` may have other element types: `convert` casts each piece that does.
    ///
    /// # Errors
    /// As [`Engine::adopt`], and [`EngineError::RoomState`] when a piece has not become as long as it is here.
    pub fn adopt_converted(
        &self,
        lease: &RoomLease,
        from: &Rows,
        convert: &dyn Fn(Cast, &[u8]) -> Vec<u8>,
    ) -> Result<(), EngineError> {
        self.rows(lease.key())?.wait()?.fill_from(from, lease.cached(), Some(convert))
    }

    /// What the model caches.
    #[must_use]
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// Who holds it.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The pools, by rank.
    #[must_use]
    pub fn arenas(&self) -> &[Arc<Arena>] {
        &self.arenas
    }

    /// How the pools are laid out, by rank.
    pub fn pools(&self) -> impl Iterator<Item = &PoolLayout> {
        self.arenas.iter().map(|arena| arena.layout())
    }

    /// What a peer compares before it pairs with this instance. Whether rows are converted on their way is the node's
    /// affair: an engine says no.
    #[must_use]
    pub fn descriptor(&self) -> Descriptor {
        Descriptor {
            protocol: PROTOCOL,
            model: self.model.digest().to_owned(),
            shape: self.shape.clone(),
            placement: self.placement.clone(),
            converts: false,
        }
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// End-of-sequence ids of the model.
    #[must_use]
    pub fn eos(&self) -> &[u32] {
        self.model.eos()
    }

    /// Longest prompt that [`Engine::generate`] and [`Engine::reserve`] accept, in tokens.
    #[must_use]
    pub fn longest_prompt(&self) -> u64 {
        self.capacity().longest(Hold::Whole)
    }

    /// What the engine can hold: what its intake and its scheduler ask.
    #[must_use]
    pub fn capacity(&self) -> &Capacity {
        self.limits.capacity()
    }

    /// What the engine holds now.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Where the time of all steps so far went, if [`EngineConfig::profile`] asked for it. A step is in it when it is over.
    #[must_use]
    pub fn profile(&self) -> Profile {
        *self.profile.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        if self.commands.send(command) { Ok(()) } else { Err(EngineError::Stopped) }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(scheduler) = self.scheduler.take() {
            // A scheduler that panicked has dropped all its channels: the requests have seen it.
            let _ = scheduler.join();
        }
    }
}
