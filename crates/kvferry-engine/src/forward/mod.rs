//! The forward pass of a step on all ranks. Not for choosing what is in a step (`scheduler`) or which token
//! follows (`sampler`).

mod attend;
mod batch;
mod ffn;
mod gqa;
mod mla;
mod rank;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use kvferry_arena::Arena;
use kvferry_plan::{
    CacheShape, Dtype, LayerSplit, LayoutSpec, PageId, PageTable, Placement, RankId, RoomKey, TokenRange,
};

pub(crate) use batch::{Outcome, Piece};

use crate::{
    EngineConfig, EngineError, Model, Rows,
    math::RopeTable,
    pool::Pool,
    ranks::Ranks,
    shares::{self, Share, Totals},
};
use batch::Batch;

/// The ranks of an instance: their pools and their shares of the one copy of the weights.
#[derive(Debug)]
pub(crate) struct Forward {
    model: Arc<Model>,
    rope: RopeTable,
    shape: CacheShape,
    placement: Placement,
    pools: Vec<Pool>,
    shares: Vec<Share>,
    pages: u32,
}

impl Forward {
    /// Builds the pools.
    pub(crate) fn new(model: Arc<Model>, config: &EngineConfig) -> Result<Self, EngineError> {
        if config.chunk == 0 {
            return Err(EngineError::Config("chunk=0: a step computes at least 1 prompt token".into()));
        }
        built(&config.layout)?;
        let shape = model.shape();
        let placement = config
            .layout
            .placement(&shape, config.kv)
            .map_err(|error| EngineError::Layout(error.to_string()))?;
        if let Some(part) = placement.parts.iter().find(|p| !matches!(p.dtype, Dtype::F32 | Dtype::Bf16)) {
            return Err(EngineError::Layout(format!("kv={} is not built yet; use f32 or bf16", part.dtype)));
        }
        let pages = placement.pages_for(config.pool_tokens).filter(|pages| *pages > 0).ok_or_else(|| {
            EngineError::Config(format!(
                "pool-tokens={}: a pool holds at least 1 token and less than 2^32 pages",
                config.pool_tokens
            ))
        })?;
        // No token that is served has a later position: there is no page for it.
        let longest = config.max_model_len.unwrap_or(u32::MAX).min(model.config().max_position);
        let longest = u64::from(longest).min(placement.tokens_for(pages));
        let pools = (0..placement.ranks())
            .map(|rank| Pool::new(&shape, &placement, RankId(rank), pages))
            .collect::<Result<_, _>>()?;
        let shares = shares::shares(
            &shape,
            &placement,
            Totals {
                heads: model.config().heads as u32,
                units: model.ffn_units() as u32,
                vocab: model.config().vocab as u32,
            },
        );
        let rope = model.rope(usize::try_from(longest).unwrap_or(usize::MAX));
        Ok(Self { model, rope, shape, placement, pools, shares, pages })
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

    /// The pools' memory, by rank.
    pub(crate) fn arenas(&self) -> Vec<Arc<Arena>> {
        self.pools.iter().map(|pool| Arc::clone(pool.arena())).collect()
    }

    /// End-of-sequence ids of the model.
    pub(crate) fn eos(&self) -> &[u32] {
        self.model.eos()
    }

    /// The prompt's rows of a request that holds `table`.
    pub(crate) fn rows(&self, key: RoomKey, table: PageTable, prompt: u64) -> Result<Rows, EngineError> {
        Rows::new(key, self.model.digest(), (&self.shape, &self.placement), self.arenas(), table, prompt)
    }

    /// Says on every rank that `page` has lost its owner.
    pub(crate) fn retire(&self, page: PageId) {
        for pool in &self.pools {
            // The page came from an allocator of as many pages as the arenas have.
            if let Err(error) = pool.arena().next_generation(page) {
                tracing::error!(%page, %error, "a page without a generation word");
            }
        }
    }

    /// Computes `pieces`, which belong to different requests, and stores their cache rows.
    ///
    /// # Errors
    /// When a rank failed: then nothing is known about any of the pieces.
    pub(crate) fn step(&self, pieces: &[Piece<'_>]) -> Result<Vec<Outcome>, EngineError> {
        let batch = Batch::new(pieces);
        let dcp = shares::dcp(&self.placement);
        let ranks = Ranks::new(self.placement.tp, dcp);
        let results = ranks.run(|member| {
            let rank = member.rank();
            let lost = || EngineError::Rank { rank, reason: "it has no pool".into() };
            let pool = self.pools.get(rank.index()).ok_or_else(lost)?;
            let share = self.shares.get(rank.index()).ok_or_else(lost)?;
            rank::Rank::new((&self.model, &self.rope), pool, share, &batch, member, dcp as usize).run()
        })?;
        let vocab = self.model.config().vocab;
        let mut logits = results.first().map_or(&[][..], |first| first.logits.as_slice()).chunks_exact(vocab);
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
    match &layout.layers {
        LayerSplit::Stages(1) => {}
        LayerSplit::Stages(_) => return refuse("pp", ""),
        LayerSplit::Explicit(_) => return refuse("layers", ""),
    }
    if layout.cp != 1 {
        return refuse("cp", ", or use dcp on the decode side");
    }
    if layout.shard {
        return refuse("shard", "");
    }
    if layout.ep != 1 {
        return refuse("ep", "");
    }
    Ok(())
}
