//! The forward pass of a step on all ranks. Not for choosing what is in a step (`scheduler`) or which token
//! follows (`sampler`).

#[cfg(test)]
#[allow(unsafe_code, reason = "an allocator")]
mod allocations;
mod attend;
mod batch;
mod ffn;
#[cfg(test)]
mod fixed;
mod gqa;
mod kda;
mod meetings;
mod mla;
mod rank;
mod space;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use kvferry_arena::Arena;
use kvferry_plan::{CacheShape, LayoutSpec, Placement, PoolSize, RankId, RoomKey, SlotId, TokenRange};

pub(crate) use batch::{Outcome, Outcomes, Piece};

use crate::{
    DecodeBatch, EngineConfig, EngineError, Fault, Model, Profile, Rows,
    checkpoint::{MoeConfig, available},
    math::RopeTable,
    meeting::RankError,
    pages::{Lease, Retired},
    pool::{Pool, Sharers},
    ranks::{Ranks, Work},
    shares::{self, Share, Totals},
};
use attend::Kv;
use batch::{Batch, Deal, Form, Found};
use meetings::{Axes, Meetings};
use space::Space;

/// Rows of the largest captured shape.
const MOST_ROWS: u32 = 64;

/// The ranks of an instance, stage after stage.
pub(crate) struct Forward {
    shape: CacheShape,
    pages: u32,
    slots: u32,
    scratch: usize,
    held: Arc<Held>,
    ranks: Ranks<Held>,
    /// Memory of the last step's outcomes, for those of the next.
    outcomes: Outcomes,
    shapes: Shapes,
    steps: Steps,
}

/// What the ranks hold between steps: their pools, and their shares of the one copy of the weights.
#[derive(Debug)]
struct Held {
    model: Arc<Model>,
    rope: RopeTable,
    placement: Placement,
    pools: Vec<Pool>,
    /// By TP coordinate; every stage has the same.
    shares: Vec<Share>,
    fault: Option<Fault>,
    /// Whether somebody wants to know where time goes, and where it went.
    timed: bool,
    profile: Arc<Mutex<Profile>>,
    /// Tokens of the longest sequence.
    longest: u64,
    meetings: Meetings,
    batch: RwLock<Batch>,
    /// In context-parallel prefill: how the step is dealt, and what falls to each rank.
    deal: Option<Deal>,
    parts: Vec<RwLock<Batch>>,
}

/// The shapes of steps that hold nothing but next tokens.
#[derive(Clone, Copy, Debug)]
struct Shapes {
    /// Rows of the largest, 0 if there are none.
    most: usize,
    captured: bool,
}

/// Steps so far, by their form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Steps {
    /// Of a captured shape.
    pub(crate) fixed: u64,
    /// Of any other.
    pub(crate) eager: u64,
    /// Rows that padded steps to their shape.
    pub(crate) padding: u64,
}

impl Shapes {
    /// The rows of the smallest shape that holds `pieces`, if they are next tokens and there is one. Shapes have 1, 2, 4
    /// and so on rows, and the most that there can be.
    fn holding(self, pieces: &[Piece<'_>]) -> Option<usize> {
        let next = pieces.iter().all(|piece| piece.tokens.len() == 1 && piece.logits);
        (next && pieces.len() <= self.most).then(|| pieces.len().next_power_of_two().min(self.most))
    }
}

impl Forward {
    /// Builds the pools.
    pub(crate) fn new(model: Arc<Model>, config: &EngineConfig) -> Result<Self, EngineError> {
        if config.chunk == 0 {
            return Err(EngineError::Config("chunk=0: a step computes at least 1 prompt token".into()));
        }
        experts(&config.layout, model.config().moe.as_ref())?;
        let shape = model.shape();
        let placement = config
            .layout
            .placement(&shape, config.kv)
            .map_err(|error| EngineError::Layout(error.to_string()))?;
        if !placement.stages.concat().is_sorted() {
            return Err(EngineError::Layout(
                "layers: a prompt goes through the stages one after the other; list them in the order of their layers"
                    .into(),
            ));
        }
        let pages = placement.pool_pages(config.pool_tokens).filter(|pages| *pages > 0).ok_or_else(|| {
            EngineError::Config(format!(
                "pool-tokens={}: a pool holds at least 1 token and less than 2^32 pages",
                config.pool_tokens
            ))
        })?;
        let stateful = shape.parts.iter().any(|part| part.state.is_some());
        if stateful && config.state_slots == 0 {
            return Err(EngineError::Config("state-slots=0: a request of this model needs one".into()));
        }
        let slots = if stateful { config.state_slots } else { 0 };
        // No token that is served has a later position: there is no page for it.
        let longest = model.config().longest(config.max_model_len);
        let longest = u64::from(longest).min(placement.tokens_for(pages));
        let pools = (0..placement.ranks())
            .map(|rank| Pool::new(&shape, &placement, RankId(rank), PoolSize { pages, slots }))
            .collect::<Result<Vec<_>, _>>()?;
        let shares = shares::shares(&shape, &placement, Totals::of(model.config(), config.layout.ep));
        let rope = model.rope(usize::try_from(longest).unwrap_or(usize::MAX));
        let rows = match config.decode_batch {
            // Nobody generates without a page, nor without a slot where there are some.
            // A step that is dealt to ranks has no shape.
            DecodeBatch::Fixed if placement.cp > 1 => 0,
            DecodeBatch::Fixed => MOST_ROWS.min(pages).min(if stateful { slots } else { MOST_ROWS }),
            DecodeBatch::Eager => 0,
        };
        let shapes = Shapes { most: rows as usize, captured: false };
        let meetings = Meetings::new(Axes::of(&placement));
        let deal = Deal::of(&placement, model.first_part());
        let parts = if deal.is_some() { placement.cp } else { 0 };
        let mut seats: Vec<Space> = pools.iter().map(|_| Space::new(&model)).collect();
        let mut scratch = 0;
        if placement.shard_ranks() > 1 {
            // Known and taken now: a rank has to read what is another's, whatever else there is memory for.
            let tokens = usize::try_from(longest).unwrap_or(usize::MAX);
            let needs = pools.iter().map(|pool| pool.assembly_bytes(longest)).fold(0, u64::saturating_add);
            let left = available().unwrap_or(u64::MAX);
            if needs > left {
                return Err(EngineError::Config(format!(
                    "shard=on: to put the rows of {longest} tokens together the ranks need {needs} bytes beside their \
                     pools, but the machine has {left} left; lower --max-model-len or --pool-tokens"
                )));
            }
            for (Space { attend, account, .. }, pool) in seats.iter_mut().zip(&pools) {
                scratch = attend.assemble(&Kv::of(&model), pool, tokens, account)?.max(scratch);
                attend.touch();
            }
        }
        let held = Arc::new(Held {
            model,
            rope,
            placement,
            pools,
            shares,
            fault: config.fault,
            timed: config.profile,
            profile: Arc::default(),
            longest,
            meetings,
            batch: RwLock::default(),
            deal,
            parts: (0..parts).map(|_| RwLock::default()).collect(),
        });
        let ranks = Ranks::start(Arc::clone(&held), seats)?;
        let (outcomes, steps) = (Outcomes::default(), Steps::default());
        Ok(Self { shape, pages, slots, scratch, held, ranks, outcomes, shapes, steps })
    }

    pub(crate) fn shape(&self) -> &CacheShape {
        &self.shape
    }

    pub(crate) fn placement(&self) -> &Placement {
        &self.held.placement
    }

    /// Pages that there are: of each rank's pool, or where they are dealt to ranks of all pools together.
    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    /// State slots of each rank's pool; 0 for a model without per-request state.
    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    /// The pools' memory, by rank.
    pub(crate) fn arenas(&self) -> Vec<Arc<Arena>> {
        self.held.pools.iter().map(|pool| Arc::clone(pool.arena())).collect()
    }

    /// Where the time of the steps so far went.
    pub(crate) fn profile(&self) -> Arc<Mutex<Profile>> {
        Arc::clone(&self.held.profile)
    }

    /// End-of-sequence ids of the model.
    pub(crate) fn eos(&self) -> &[u32] {
        self.held.model.eos()
    }

    /// The prompt's rows of a request whose cache is complete for `filled` tokens.
    pub(crate) fn rows(
        &self,
        key: RoomKey,
        lease: &Lease,
        prompt: u64,
        filled: u64,
    ) -> Result<Rows, EngineError> {
        Rows::new(
            key,
            self.held.model.digest(),
            (&self.shape, &self.held.placement),
            self.arenas(),
            lease,
            (prompt, filled),
        )
    }

    /// Says on every rank that has it that a page or slot has lost its owner.
    pub(crate) fn retire(&self, retired: Retired) {
        for pool in &self.held.pools {
            let next = match retired {
                Retired::Page(page) => match pool.local_page(page) {
                    Some(page) => pool.arena().next_generation(page),
                    None => continue,
                },
                Retired::Slot(slot) => pool.arena().next_slot_generation(slot),
            };
            // It came from an allocator of as many as the arenas have.
            if let Err(error) = next {
                tracing::error!(?retired, %error, "it has no generation word");
            }
        }
    }

    /// Copies a request's state from one slot to another on every rank.
    pub(crate) fn copy_state(&self, from: SlotId, to: SlotId) -> Result<(), EngineError> {
        self.held.pools.iter().try_for_each(|pool| pool.copy_state(from, to))
    }

    /// Steps so far.
    pub(crate) fn steps(&self) -> Steps {
        self.steps
    }

    /// Memory that the ranks work in, in bytes. After [`Forward::capture`] it is what steps of the captured shapes do
    /// with; other steps may have made it more.
    pub(crate) fn workspace(&self) -> usize {
        let spaces = (0..self.held.placement.ranks()).filter_map(|rank| self.ranks.seat(RankId(rank)));
        spaces.map(|space| space.account.bytes()).sum()
    }

    /// What of a rank's workspace is for the rows of pages that are dealt, one part of a layer at a time, in bytes; 0 without
    /// KV sharding.
    pub(crate) fn scratch(&self) -> usize {
        self.scratch
    }

    /// Takes all memory of the captured shapes, on the threads that will use it: by a step of nothing but padding, as
    /// large as the largest of them, on top of what depends on the length of contexts. Smaller shapes use a part of the
    /// same. Does nothing where there are no such shapes, or when it is done. Returns the rows of the largest.
    ///
    /// # Errors
    /// As [`Forward::step`].
    pub(crate) fn capture(&mut self) -> Result<usize, EngineError> {
        let rows = self.shapes.most;
        if self.shapes.captured || rows == 0 {
            return Ok(rows);
        }
        let pages = self.held.placement.pages_for(self.held.longest).unwrap_or(self.pages);
        let mut batch = self.held.batch.write().unwrap_or_else(PoisonError::into_inner);
        batch.reserve(rows, pages as usize);
        batch.fill(&[], Form::Capture, rows);
        drop(batch);
        self.ranks.run()?;
        let Outcomes { pieces, logits, .. } = &mut self.outcomes;
        pieces.reserve(rows.saturating_sub(pieces.len()));
        logits.reserve((rows * self.held.model.config().vocab).saturating_sub(logits.len()));
        self.shapes.captured = true;
        Ok(rows)
    }

    /// Computes `pieces`, which belong to different requests, and stores their cache rows. Whoever is done with the
    /// outcomes gives them back to [`Forward::reuse`]. A step of a captured shape takes no memory then.
    ///
    /// # Errors
    /// When a rank failed: then nothing is known about any of the pieces.
    pub(crate) fn step(&mut self, pieces: &[Piece<'_>]) -> Result<Outcomes, EngineError> {
        let shape = self.shapes.holding(pieces);
        if shape.is_some() {
            self.capture()?;
        }
        let form = if shape.is_some() { Form::Fixed } else { Form::Eager };
        let mut batch = self.held.batch.write().unwrap_or_else(PoisonError::into_inner);
        batch.fill(pieces, form, shape.unwrap_or(0));
        drop(batch);
        if let Some(deal) = self.held.deal {
            for (rank, part) in (0..).zip(&self.held.parts) {
                part.write().unwrap_or_else(PoisonError::into_inner).fill_dealt(pieces, deal, rank);
            }
        }
        if let Err(error) = self.ranks.run() {
            // A rank that panicked may have lost memory.
            self.shapes.captured = false;
            return Err(error);
        }
        match shape {
            Some(rows) => {
                self.steps.fixed += 1;
                self.steps.padding += (rows - pieces.len()) as u64;
            }
            None => self.steps.eager += 1,
        }
        Ok(self.outcomes(pieces))
    }

    /// Takes the memory of outcomes back.
    pub(crate) fn reuse(&mut self, outcomes: Outcomes) {
        self.outcomes = outcomes;
    }

    /// What the ranks have brought home.
    fn outcomes(&mut self, pieces: &[Piece<'_>]) -> Outcomes {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        let Outcomes { pieces: found, logits, vocab } = &mut outcomes;
        found.clear();
        found.extend(pieces.iter().map(|piece| Found {
            computed: TokenRange::new(piece.start, piece.start + piece.tokens.len() as u64),
            logits: None,
            in_range: true,
        }));
        logits.clear();
        *vocab = self.held.model.config().vocab;
        let placement = &self.held.placement;
        for rank in (0..placement.ranks()).map(RankId) {
            let (Some(at), Some(space)) = (placement.coords(rank), self.ranks.seat(rank)) else { continue };
            let batch = self.held.batch_of(at.cp).read().unwrap_or_else(PoisonError::into_inner);
            for span in batch.spans() {
                let Some(found) = found.get_mut(span.piece) else { continue };
                found.in_range &= !space.bad.iter().any(|row| span.rows.contains(row));
                // One rank of the last stage has them.
                let row = span.logits.filter(|_| found.logits.is_none());
                let row = row.and_then(|row| space.logits.get(row * *vocab..(row + 1) * *vocab));
                if let Some(row) = row {
                    found.logits = Some(logits.len() / (*vocab).max(1));
                    logits.extend_from_slice(row);
                }
            }
        }
        outcomes
    }
}

impl Held {
    /// What falls to a place in context parallelism: the whole step if there is none.
    fn batch_of(&self, cp: u32) -> &RwLock<Batch> {
        self.parts.get(cp as usize).unwrap_or(&self.batch)
    }
}

impl Work for Held {
    type Seat = Space;

    fn run(&self, rank: RankId, space: &mut Space) -> Result<(), RankError> {
        let lost = || EngineError::Rank { rank, reason: "it has no pool".into() };
        let at = self.placement.coords(rank).ok_or_else(lost)?;
        let whole = self.batch.read().unwrap_or_else(PoisonError::into_inner);
        let part = self.parts.get(at.cp as usize);
        let part = part.map(|part| part.read().unwrap_or_else(PoisonError::into_inner));
        let this = rank::Rank {
            model: &self.model,
            rope: &self.rope,
            pool: self.pools.get(rank.index()).ok_or_else(lost)?,
            sharers: Sharers::of(&self.placement, &self.pools, rank).ok_or_else(lost)?,
            share: self.shares.get(at.tp as usize).ok_or_else(lost)?,
            batch: part.as_deref().unwrap_or(&whole),
            dealt: part.as_deref().map(|_| rank::Dealt { whole: &whole, parts: &self.parts }),
            member: self.meetings.member(rank)?,
            dcp: shares::dcp(&self.placement) as usize,
            fault: self.fault,
            layers: self.placement.stages.get(at.stage as usize).ok_or_else(lost)?,
            longest: self.longest,
        };
        space.account.clock.start(self.timed);
        this.run(space)?;
        if let Some(mut spent) = space.account.clock.spent() {
            spent.attention_bytes = space.attend.bytes();
            self.profile.lock().unwrap_or_else(PoisonError::into_inner).add(&spent);
        }
        Ok(())
    }

    fn disband(&self) {
        self.meetings.disband();
    }

    fn gather(&self) {
        self.meetings.gather();
    }
}

/// Refuses groups of experts that the ranks do not make.
fn experts(layout: &LayoutSpec, moe: Option<&MoeConfig>) -> Result<(), EngineError> {
    let LayoutSpec { ep, tp, .. } = layout;
    let refuse = |reason: String| Err(EngineError::Layout(format!("ep={ep}: {reason}")));
    match moe {
        _ if *ep == 1 => Ok(()),
        None => refuse("the model has no experts; leave it out".into()),
        Some(_) if !tp.is_multiple_of(*ep) => refuse(format!("it does not divide tp={tp}; use a divisor")),
        Some(_) => Ok(()),
    }
}
