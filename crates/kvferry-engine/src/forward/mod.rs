//! The forward pass of a step on all ranks. Not for choosing what is in a step (`scheduler`) or which token
//! follows (`sampler`).

mod attend;
mod batch;
mod ffn;
mod gqa;
mod kda;
mod mla;
mod rank;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use kvferry_arena::Arena;
use kvferry_plan::{CacheShape, LayoutSpec, Placement, PoolSize, RankId, RoomKey, SlotId, TokenRange};

pub(crate) use batch::{Outcome, Piece};

use crate::{
    EngineConfig, EngineError, Fault, Model, Rows,
    checkpoint::MoeConfig,
    math::RopeTable,
    pages::{Lease, Retired},
    pool::Pool,
    ranks::Ranks,
    shares::{self, Share, Totals},
};
use batch::Batch;

/// The ranks of an instance, stage after stage: their pools and their shares of the one copy of the weights.
#[derive(Debug)]
pub(crate) struct Forward {
    model: Arc<Model>,
    rope: RopeTable,
    shape: CacheShape,
    placement: Placement,
    pools: Vec<Pool>,
    /// By TP coordinate; every stage has the same.
    shares: Vec<Share>,
    pages: u32,
    slots: u32,
    fault: Option<Fault>,
}

impl Forward {
    /// Builds the pools.
    pub(crate) fn new(model: Arc<Model>, config: &EngineConfig) -> Result<Self, EngineError> {
        if config.chunk == 0 {
            return Err(EngineError::Config("chunk=0: a step computes at least 1 prompt token".into()));
        }
        built(&config.layout)?;
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
        let pages = placement.pages_for(config.pool_tokens).filter(|pages| *pages > 0).ok_or_else(|| {
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
            .collect::<Result<_, _>>()?;
        let shares = shares::shares(&shape, &placement, Totals::of(model.config(), config.layout.ep));
        let rope = model.rope(usize::try_from(longest).unwrap_or(usize::MAX));
        Ok(Self { model, rope, shape, placement, pools, shares, pages, slots, fault: config.fault })
    }

    pub(crate) fn shape(&self) -> &CacheShape {
        &self.shape
    }

    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Pages of each rank's pool.
    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    /// State slots of each rank's pool; 0 for a model without per-request state.
    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    /// The pools' memory, by rank.
    pub(crate) fn arenas(&self) -> Vec<Arc<Arena>> {
        self.pools.iter().map(|pool| Arc::clone(pool.arena())).collect()
    }

    /// End-of-sequence ids of the model.
    pub(crate) fn eos(&self) -> &[u32] {
        self.model.eos()
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
            self.model.digest(),
            (&self.shape, &self.placement),
            self.arenas(),
            lease,
            (prompt, filled),
        )
    }

    /// Says on every rank that a page or slot has lost its owner.
    pub(crate) fn retire(&self, retired: Retired) {
        for pool in &self.pools {
            let next = match retired {
                Retired::Page(page) => pool.arena().next_generation(page),
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
        self.pools.iter().try_for_each(|pool| pool.copy_state(from, to))
    }

    /// Computes `pieces`, which belong to different requests, and stores their cache rows.
    ///
    /// # Errors
    /// When a rank failed: then nothing is known about any of the pieces.
    pub(crate) fn step(&self, pieces: &[Piece<'_>]) -> Result<Vec<Outcome>, EngineError> {
        let batch = Batch::new(pieces);
        let dcp = shares::dcp(&self.placement);
        let stages = &self.placement.stages;
        let ranks = Ranks::new(stages.len() as u32, self.placement.tp, dcp);
        let results = ranks.run(|member| {
            let rank = member.rank();
            let lost = || EngineError::Rank { rank, reason: "it has no pool".into() };
            let pool = self.pools.get(rank.index()).ok_or_else(lost)?;
            let share = self.shares.get(member.tp()).ok_or_else(lost)?;
            let layers = stages.get(member.stage()).ok_or_else(lost)?;
            let how = (dcp as usize, layers.as_slice(), self.fault);
            rank::Rank::new((&self.model, &self.rope), pool, share, &batch, member, how).run()
        })?;
        let vocab = self.model.config().vocab;
        let logits = results.iter().map(|rank| rank.logits.as_slice()).find(|logits| !logits.is_empty());
        let mut logits = logits.unwrap_or_default().chunks_exact(vocab);
        Ok(pieces
            .iter()
            .zip(&batch.spans)
            .map(|(piece, span)| Outcome {
                computed: TokenRange::new(piece.start, piece.start + span.len() as u64),
                logits: if piece.logits && !span.is_empty() {
                    logits.next().map(<[f32]>::to_vec)
                } else {
                    None
                },
                in_range: results.iter().all(|r| !r.bad.iter().any(|row| span.contains(row))),
            })
            .collect())
    }
}

/// Refuses by name what a layout can say but this engine cannot do yet.
fn built(layout: &LayoutSpec) -> Result<(), EngineError> {
    let refuse = |key: &str, instead: &str| {
        Err(EngineError::Layout(format!("`{key}` is not built yet in this engine; leave it out{instead}")))
    };
    if layout.cp != 1 {
        return refuse("cp", ", or use dcp on the decode side");
    }
    if layout.shard {
        return refuse("shard", "");
    }
    Ok(())
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
