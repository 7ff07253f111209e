//! Attention proper, for every kind of cache: each rank scores the head group's queries against the tokens that it
//! holds, then the ranks merge and each keeps the outputs of its own heads.

use std::ops::Range;

use kvferry_plan::{LayerId, Part};

use super::{batch::Block, rank::Rank};
use crate::{
    EngineError, Fault,
    math::{Arith, AttentionSums, KeyPanels, Scores, ValueRows, merge_lse, merge_max},
    pool::RowBuffer,
    ranks::RankError,
};

/// How keys and values lie in the rows of the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kv {
    /// The part that holds the keys.
    pub(super) key: Part,
    /// First element of a head's key within the head's elements.
    pub(super) key_offset: usize,
    /// Elements of a key.
    pub(super) key_dim: usize,
    /// The part that holds the values, from a head's first element on.
    pub(super) value: Part,
    /// Elements of a value.
    pub(super) value_dim: usize,
    /// Query heads that read one KV head.
    pub(super) heads_per_kv: usize,
}

/// The cache of one piece on this rank, ready for the kernels.
#[derive(Debug)]
struct Loaded {
    piece: usize,
    tokens: usize,
    keys: Vec<KeyPanels>,
    values: Vec<ValueRows>,
}

/// Memory that is used again from layer to layer.
#[derive(Debug)]
pub(super) struct Scratch {
    arith: Arith,
    rows: RowBuffer,
    /// The first `live` of them are loaded.
    loaded: Vec<Loaded>,
    live: usize,
    scores: Vec<Scores>,
    q: Vec<f32>,
}

impl Scratch {
    pub(super) fn new(arith: Arith) -> Self {
        Self {
            arith,
            rows: RowBuffer::default(),
            loaded: Vec::new(),
            live: 0,
            scores: Vec::new(),
            q: Vec::new(),
        }
    }
}

/// A block's place in the work of this rank.
struct Placed<'b> {
    block: &'b Block,
    /// The group's query heads that read the block's KV head, counted from the group's first.
    group: Range<usize>,
    /// Those of them that are this rank's own, likewise.
    own: Range<usize>,
}

impl Placed<'_> {
    /// Score rows `[heads][rows]`: those of this rank's own heads.
    fn own_rows(&self) -> Range<usize> {
        let rows = self.block.rows.len();
        (self.own.start - self.group.start) * rows..(self.own.end - self.group.start) * rows
    }

    fn count(&self) -> usize {
        self.group.len() * self.block.rows.len()
    }
}

impl Rank<'_> {
    /// Attention of the group's queries `q[group heads][rows][key_dim]`, rotated and scaled, over the cache of
    /// `layer` on all ranks of the group. Returns this rank's own heads, `[own heads][rows][value_dim]`.
    pub(super) fn attend(&mut self, layer: LayerId, kv: &Kv, q: &[f32]) -> Result<Vec<f32>, RankError> {
        let rows = self.batch.rows();
        let mut out = vec![0.0; self.share.heads.len() * rows * kv.value_dim];
        self.scratch.live = 0;
        for meeting in self.batch.meetings(self.share.kv_heads.len(), kv.heads_per_kv, self.dcp) {
            let placed: Vec<Placed<'_>> = meeting.iter().map(|block| self.place(block, kv)).collect();
            self.load(layer, kv, &meeting)?;
            self.score(kv, q, &placed)?;
            match self.model.arith() {
                Arith::Canonical => self.meet_on_the_grid(kv, &placed, &mut out)?,
                Arith::Fast => self.meet_by_weight(kv, &placed, &mut out)?,
            }
        }
        Ok(out)
    }

    fn place<'b>(&self, block: &'b Block, kv: &Kv) -> Placed<'b> {
        let reads = (self.share.kv_heads.start + block.kv) * kv.heads_per_kv;
        let reads = reads..reads + kv.heads_per_kv;
        let first = self.share.group_heads.start;
        let cut = |heads: &Range<usize>| {
            let start = heads.start.max(reads.start);
            let end = heads.end.min(reads.end).max(start);
            start - first..end - first
        };
        let group = cut(&self.share.group_heads);
        let own = cut(&self.share.heads);
        let own = if own.is_empty() { group.start..group.start } else { own };
        Placed { block, group, own }
    }

    /// Loads the cache of the meeting's pieces; what is loaded already stays.
    fn load(&mut self, layer: LayerId, kv: &Kv, meeting: &[Block]) -> Result<(), EngineError> {
        let Scratch { arith, rows, loaded, live, .. } = &mut self.scratch;
        let kv_heads = self.share.kv_heads.len();
        let mut kept = 0;
        for at in 0..*live {
            if meeting.iter().any(|block| block.piece == loaded[at].piece) {
                loaded.swap(kept, at);
                kept += 1;
            }
        }
        for block in meeting {
            if loaded[..kept].iter().any(|l| l.piece == block.piece) {
                continue;
            }
            if kept == loaded.len() {
                loaded.push(Loaded { piece: 0, tokens: 0, keys: Vec::new(), values: Vec::new() });
            }
            let slot = &mut loaded[kept];
            kept += 1;
            slot.piece = block.piece;
            slot.keys.resize_with(kv_heads, KeyPanels::default);
            slot.values.resize_with(kv_heads, || ValueRows::new(*arith));
            let Some(piece) = self.batch.pieces.get(block.piece) else { continue };
            slot.tokens = self.pool.owned(kv.key, self.batch.context(block.piece))?;
            self.pool.read((layer, kv.key), piece.table, slot.tokens, rows)?;
            let elems = rows.stride() / kv_heads.max(1);
            for (head, keys) in slot.keys.iter_mut().enumerate() {
                keys.fill(rows.from(head * elems + kv.key_offset), kv.key_dim, rows.stride());
            }
            if kv.value != kv.key {
                self.pool.read((layer, kv.value), piece.table, slot.tokens, rows)?;
            }
            let elems = rows.stride() / kv_heads.max(1);
            for (head, values) in slot.values.iter_mut().enumerate() {
                values.fill(rows.from(head * elems), kv.value_dim, rows.stride());
            }
        }
        *live = kept;
        Ok(())
    }

    /// Scores of every block, into the scratch.
    fn score(&mut self, kv: &Kv, q: &[f32], placed: &[Placed<'_>]) -> Result<(), EngineError> {
        let Scratch { loaded, live, scores, q: packed, .. } = &mut self.scratch;
        scores.resize_with(scores.len().max(placed.len()), Scores::new);
        let all = self.batch.rows();
        let dim = kv.key_dim;
        for (Placed { block, group, .. }, scores) in placed.iter().zip(scores) {
            let visible = block
                .rows
                .clone()
                .map(|row| self.pool.owned(kv.key, self.batch.positions[row] + 1))
                .collect::<Result<Vec<usize>, _>>()?;
            packed.clear();
            for head in group.clone() {
                let at = head * all;
                packed.extend_from_slice(&q[(at + block.rows.start) * dim..(at + block.rows.end) * dim]);
            }
            let Some(cache) = loaded[..*live].iter().find(|l| l.piece == block.piece) else { continue };
            scores.compute(packed, &cache.keys[block.kv], &visible.repeat(group.len()));
        }
        Ok(())
    }

    /// Canonical: the largest score over all ranks first, then sums on the integer grid.
    fn meet_on_the_grid(&mut self, kv: &Kv, placed: &[Placed<'_>], out: &mut [f32]) -> Result<(), RankError> {
        let count = placed.len();
        let mine: Vec<f32> =
            self.scratch.scores[..count].iter().flat_map(|scores| scores.max().iter().copied()).collect();
        let alone = (self.fault == Some(Fault::BlindMerge)).then(|| mine.clone());
        let max = self.member.group(mine, |all| {
            let mut all = all.into_iter();
            let mut max = all.next().unwrap_or_default();
            all.for_each(|other| merge_max(&mut max, &other));
            max
        })?;
        let Scratch { loaded, live, scores, .. } = &mut self.scratch;
        let mut sums = Vec::with_capacity(count);
        let mut max = alone.as_deref().unwrap_or(&max);
        for (placed, scores) in placed.iter().zip(scores) {
            let (here, rest) = max.split_at(placed.count());
            max = rest;
            let mut part = AttentionSums::new();
            if let Some(cache) = loaded[..*live].iter().find(|l| l.piece == placed.block.piece) {
                scores.sums(here, &cache.values[placed.block.kv], &mut part);
            }
            sums.push(part);
        }
        let parts = self.member.group(sums, |parts| parts)?;
        for (at, placed) in placed.iter().enumerate() {
            let own = placed.own_rows();
            let parts: Vec<&AttentionSums> = parts.iter().map(|rank| &rank[at]).collect();
            let mut result = vec![0.0; own.len() * kv.value_dim];
            let overflow = AttentionSums::finish(&parts, own, &mut result);
            let rows = placed.block.rows.clone();
            self.flag(&overflow, |row| rows.start + row % rows.len());
            self.keep(kv, placed, &result, out);
        }
        Ok(())
    }

    /// Fast: each rank's softmax over its own tokens, merged by their log-sum-exp.
    fn meet_by_weight(&mut self, kv: &Kv, placed: &[Placed<'_>], out: &mut [f32]) -> Result<(), RankError> {
        let dim = kv.value_dim;
        let mut mine: Vec<(Vec<f32>, Vec<f32>)> = Vec::with_capacity(placed.len());
        for (at, placed) in placed.iter().enumerate() {
            let count = placed.count();
            let (mut attended, mut lse) = (vec![0.0; count * dim], vec![f32::NEG_INFINITY; count]);
            let Scratch { loaded, live, scores, .. } = &mut self.scratch;
            if let Some(cache) = loaded[..*live].iter().find(|l| l.piece == placed.block.piece) {
                let overflow = scores[at].attend(&cache.values[placed.block.kv], &mut attended, &mut lse);
                let rows = placed.block.rows.clone();
                self.flag(&overflow, |row| rows.start + row % rows.len());
            }
            if self.fault == Some(Fault::BlindMerge) {
                lse.iter_mut().filter(|lse| lse.is_finite()).for_each(|lse| *lse = 0.0);
            }
            mine.push((attended, lse));
        }
        if self.dcp <= 1 {
            for (placed, (attended, _)) in placed.iter().zip(&mine) {
                let own = placed.own_rows();
                self.keep(kv, placed, &attended[own.start * dim..own.end * dim], out);
            }
            return Ok(());
        }
        let parts = self.member.group(mine, |parts| parts)?;
        for (at, placed) in placed.iter().enumerate() {
            let own = placed.own_rows();
            let parts: Vec<(&[f32], &[f32])> = parts
                .iter()
                .map(|rank| (&rank[at].0[own.start * dim..own.end * dim], &rank[at].1[own.clone()]))
                .collect();
            let mut result = vec![0.0; own.len() * dim];
            merge_lse(&parts, dim, &mut result, &mut vec![0.0; own.len()]);
            self.keep(kv, placed, &result, out);
        }
        Ok(())
    }

    /// Copies a block's `[own heads][rows][value_dim]` to its place in the output.
    fn keep(&self, kv: &Kv, placed: &Placed<'_>, result: &[f32], out: &mut [f32]) {
        let (all, dim) = (self.batch.rows(), kv.value_dim);
        let rows = placed.block.rows.clone();
        let first = self.share.heads.start - self.share.group_heads.start;
        for (head, result) in placed.own.clone().zip(result.chunks_exact((rows.len() * dim).max(1))) {
            let at = (head - first) * all;
            out[(at + rows.start) * dim..(at + rows.end) * dim].copy_from_slice(result);
        }
    }
}
