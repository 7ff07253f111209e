//! Attention proper, for every kind of cache: each rank scores the head group's queries against the tokens that it
//! holds, then the ranks merge and each keeps the outputs of its own heads.

use std::ops::Range;

use kvferry_plan::{LayerId, Part};

use super::{
    batch::{Block, SCORES},
    meetings::Attended,
    rank::Rank,
    space::{Account, Memory},
};
use crate::{
    EngineError, Fault, Model,
    math::{Arith, AttentionSums, KeyPanels, Scores, ValueRows, merge_lse, merge_max},
    meeting::RankError,
    pool::{Pool, RowBuffer},
    profile::Phase,
};

/// How keys and values lie in the rows of the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kv {
    /// The part that holds the keys.
    key: Part,
    /// First element of a head's key within the head's elements.
    key_offset: usize,
    /// Elements of a key.
    key_dim: usize,
    /// The part that holds the values, from a head's first element on.
    value: Part,
    /// Elements of a value.
    value_dim: usize,
    /// Query heads that read one KV head.
    heads_per_kv: usize,
}

impl Kv {
    /// How a model's attention caches them.
    pub(super) fn of(model: &Model) -> Self {
        let config = model.config();
        match model.mla() {
            Some(mla) => {
                // With nothing position-free in a head, its key is the rotary part alone.
                let key_offset = if mla.nope == 0 { mla.lora } else { 0 };
                Self {
                    key: Part::Latent,
                    key_offset,
                    key_dim: mla.lora + mla.rope - key_offset,
                    value: Part::Latent,
                    value_dim: mla.lora,
                    heads_per_kv: mla.heads,
                }
            }
            None => Self {
                key: Part::Key,
                key_offset: 0,
                key_dim: config.head_dim,
                value: Part::Value,
                value_dim: config.head_dim,
                heads_per_kv: config.group(),
            },
        }
    }
}

/// The cache of one span on this rank, head by head, ready for the kernels.
#[derive(Debug)]
struct Loaded<T> {
    span: Option<usize>,
    heads: Vec<T>,
}

impl<T> Default for Loaded<T> {
    fn default() -> Self {
        Self { span: None, heads: Vec::new() }
    }
}

/// Memory of attention. One span's cache is in it at a time.
#[derive(Debug)]
pub(super) struct Buffers {
    arith: Arith,
    blocks: Vec<Block>,
    /// Runs of blocks.
    meetings: Vec<Range<usize>>,
    rows: RowBuffer,
    /// Whose rows these are, and of what part.
    rows_of: Option<(usize, Part)>,
    keys: Loaded<KeyPanels>,
    values: Loaded<ValueRows>,
    scores: Scores,
    visible: Vec<usize>,
    q: Vec<f32>,
    largest: Vec<f32>,
    sums: AttentionSums,
    attended: Attended,
    /// The result: this rank's own heads, `[own heads][rows][value_dim]`.
    pub(super) out: Vec<f32>,
}

impl Buffers {
    pub(super) fn new(arith: Arith) -> Self {
        Self {
            arith,
            blocks: Vec::new(),
            meetings: Vec::new(),
            rows: RowBuffer::default(),
            rows_of: None,
            keys: Loaded::default(),
            values: Loaded::default(),
            scores: Scores::new(),
            visible: Vec::new(),
            q: Vec::new(),
            largest: Vec::new(),
            sums: AttentionSums::new(),
            attended: Attended::default(),
            out: Vec::new(),
        }
    }

    /// Memory held, in bytes.
    pub(super) fn bytes(&self) -> usize {
        let keys: usize = self.keys.heads.iter().map(KeyPanels::bytes).sum();
        let values: usize = self.values.heads.iter().map(ValueRows::bytes).sum();
        let lists = [&self.q, &self.largest, &self.attended.out, &self.attended.lse, &self.out];
        let lists: usize = lists.into_iter().map(Memory::bytes).sum();
        let plan = self.blocks.bytes() + self.meetings.bytes() + self.visible.bytes();
        self.rows.bytes() + keys + values + self.scores.bytes() + self.sums.bytes() + lists + plan
    }

    /// Takes the memory in which the rows of one part of a layer are put together, for sequences of `tokens` tokens;
    /// returns its bytes.
    pub(super) fn assemble(
        &mut self,
        kv: &Kv,
        pool: &Pool,
        tokens: usize,
        account: &Account,
    ) -> Result<usize, EngineError> {
        for part in [kv.key, kv.value] {
            account.note(&mut self.rows, |rows| pool.reserve(part, tokens, rows))??;
        }
        Ok(self.assembled())
    }

    /// Has the system give this memory.
    pub(super) fn touch(&mut self) {
        self.rows.touch();
    }

    /// Memory in which the rows of one part of a layer are put together, in bytes.
    pub(super) fn assembled(&self) -> usize {
        self.rows.bytes()
    }

    /// What is loaded is of another layer.
    fn forget(&mut self) {
        (self.rows_of, self.keys.span, self.values.span) = (None, None, None);
    }
}

/// A block's place in the work of this rank.
struct Placed {
    /// The group's query heads that read the block's KV head, counted from the group's first.
    group: Range<usize>,
    /// Those of them that are this rank's own, likewise.
    own: Range<usize>,
    /// Batch rows.
    rows: Range<usize>,
}

impl Placed {
    /// Score rows `[heads][rows]`: those of this rank's own heads.
    fn own_rows(&self) -> Range<usize> {
        let rows = self.rows.len();
        (self.own.start - self.group.start) * rows..(self.own.end - self.group.start) * rows
    }

    fn count(&self) -> usize {
        self.group.len() * self.rows.len()
    }

    /// The batch row of a score row.
    fn row(&self, score_row: usize) -> usize {
        self.rows.start + score_row % self.rows.len().max(1)
    }
}

impl Rank<'_> {
    /// Finds the blocks of this step, the same in every layer.
    pub(super) fn plan(&self, kv: &Kv, b: &mut Buffers, account: &Account) -> Result<(), EngineError> {
        let heads = (self.share.kv_heads.len(), kv.heads_per_kv);
        let most = |span: &super::batch::Span| self.pool.most(kv.key, span.context());
        self.batch.meetings(b.arith, heads, self.dcp, most, (&mut b.blocks, &mut b.meetings), account)
    }

    /// Takes the memory for a next token of each of as many requests as the batch has rows, all of them as long as they
    /// may be.
    pub(super) fn reserve_attention(
        &self,
        kv: &Kv,
        b: &mut Buffers,
        account: &Account,
    ) -> Result<(), EngineError> {
        let rows = self.batch.rows();
        let (group, kv_heads) = (self.share.group_heads.len(), self.share.kv_heads.len());
        let tokens = self.pool.most(kv.key, self.longest)?;
        let all = rows * group;
        let scores = (all * tokens).min(SCORES).max(kv.heads_per_kv * tokens);
        let dims = (kv.key_dim, kv.value_dim);
        account.cleared(&mut b.blocks, rows * kv_heads)?;
        account.cleared(&mut b.meetings, rows * kv_heads)?;
        account.note(&mut b.scores, |scratch| scratch.reserve(rows * kv_heads, all, scores, dims))?;
        account.cleared(&mut b.visible, group)?;
        account.cleared(&mut b.q, group * kv.key_dim)?;
        account.cleared(&mut b.largest, all)?;
        account.note(&mut b.sums, |sums| sums.reserve(all, kv.value_dim))?;
        let whole = |attended: &mut Attended| {
            account.cleared(&mut attended.out, all * kv.value_dim)?;
            account.cleared(&mut attended.lse, all).map(|_| ())
        };
        whole(&mut b.attended)?;
        self.member.group().sums.prepare(whole)?;
        self.member.group().weighted.prepare(whole)?;
        b.assemble(kv, self.pool, tokens, account)?;
        account.note(&mut b.keys.heads, |heads| heads.resize_with(kv_heads, KeyPanels::default))?;
        for keys in &mut b.keys.heads {
            account.note(keys, |keys| keys.reserve(tokens, kv.key_dim))?;
        }
        account.note(&mut b.values.heads, |heads| heads.resize_with(kv_heads, || ValueRows::new(b.arith)))?;
        for values in &mut b.values.heads {
            account.note(values, |values| values.reserve(tokens, kv.value_dim))?;
        }
        Ok(())
    }

    /// Attention of the queries `q` of this rank's own heads, `[own heads][rows][key_dim]`, rotated and scaled, over the
    /// cache of `layer` on all ranks of the head group. The result is in the buffers.
    pub(super) fn attend(
        &self,
        layer: LayerId,
        q: &mut Vec<f32>,
        b: &mut Buffers,
        (account, bad): (&Account, &mut Vec<usize>),
    ) -> Result<(), RankError> {
        let kv = &Kv::of(self.model);
        account.zeroed(&mut b.out, self.share.heads.len() * self.batch.rows() * kv.value_dim)?;
        if self.dcp <= 1 {
            return self.attend_all(layer, kv, q, b, (account, bad));
        }
        let gather = |parts: &mut [Vec<f32>], whole: &mut Vec<f32>| {
            let whole = account.cleared(whole, parts.iter().map(Vec::len).sum())?;
            parts.iter().for_each(|part| whole.extend_from_slice(part));
            Ok(())
        };
        let group = self.member.group();
        group
            .queries
            .meet(self.member.in_group(), q, gather, |q| self.attend_all(layer, kv, q, b, (account, bad)))?
    }

    /// As [`Self::attend`], of all heads of the group.
    fn attend_all(
        &self,
        layer: LayerId,
        kv: &Kv,
        q: &[f32],
        b: &mut Buffers,
        (account, bad): (&Account, &mut Vec<usize>),
    ) -> Result<(), RankError> {
        if self.dcp > 1 {
            account.clock.lap(Phase::Meetings);
        }
        b.forget();
        for number in 0..b.meetings.len() {
            let meeting = b.meetings[number].clone();
            match b.arith {
                Arith::Canonical => self.meet_on_the_grid((layer, kv), q, meeting, b, (account, bad))?,
                Arith::Fast => self.meet_by_weight((layer, kv), q, meeting, b, (account, bad))?,
            }
        }
        Ok(())
    }

    fn place(&self, block: &Block, kv: &Kv) -> Placed {
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
        Placed { group, own, rows: block.rows.clone() }
    }

    /// Reads the rows of a span, unless they are there.
    fn read(
        &self,
        (layer, part): (LayerId, Part),
        number: usize,
        b: &mut Buffers,
        account: &Account,
    ) -> Result<(), EngineError> {
        let Some(span) = self.batch.spans().get(number) else { return Ok(()) };
        account.clock.lap(Phase::Attention);
        if b.rows_of.replace((number, part)) != Some((number, part)) {
            let tokens = self.pool.owned(part, span.context())?;
            account
                .note(&mut b.rows, |rows| self.sharers.read((layer, part), &span.table, tokens, rows))??;
        }
        Ok(())
    }

    /// Loads the keys of a span, unless they are loaded.
    fn load_keys(
        &self,
        (layer, kv): (LayerId, &Kv),
        span: usize,
        b: &mut Buffers,
        account: &Account,
    ) -> Result<(), EngineError> {
        if b.keys.span.replace(span) == Some(span) {
            return Ok(());
        }
        self.read((layer, kv.key), span, b, account)?;
        let Buffers { rows, keys, .. } = b;
        let kv_heads = self.share.kv_heads.len();
        let elems = rows.stride() / kv_heads.max(1);
        account.note(&mut keys.heads, |heads| heads.resize_with(kv_heads, KeyPanels::default))?;
        for (head, keys) in keys.heads.iter_mut().enumerate() {
            let from = rows.from(head * elems + kv.key_offset);
            account.note(keys, |keys| keys.fill(from, kv.key_dim, rows.stride()))?;
        }
        account.clock.lap(Phase::CacheReads);
        Ok(())
    }

    /// Loads the values of a span, unless they are loaded.
    fn load_values(
        &self,
        (layer, kv): (LayerId, &Kv),
        span: usize,
        b: &mut Buffers,
        account: &Account,
    ) -> Result<(), EngineError> {
        if b.values.span.replace(span) == Some(span) {
            return Ok(());
        }
        self.read((layer, kv.value), span, b, account)?;
        let Buffers { arith, rows, values, .. } = b;
        let kv_heads = self.share.kv_heads.len();
        let elems = rows.stride() / kv_heads.max(1);
        account.note(&mut values.heads, |heads| heads.resize_with(kv_heads, || ValueRows::new(*arith)))?;
        for (head, values) in values.heads.iter_mut().enumerate() {
            let from = rows.from(head * elems);
            account.note(values, |values| values.fill(from, kv.value_dim, rows.stride()))?;
        }
        account.clock.lap(Phase::CacheReads);
        Ok(())
    }

    /// Puts the queries of a block side by side, and what each of them may see; returns how many rows they are.
    fn gather(
        &self,
        kv: &Kv,
        q: &[f32],
        block: &Block,
        b: &mut Buffers,
        account: &Account,
    ) -> Result<usize, EngineError> {
        let Buffers { visible, q: packed, .. } = b;
        let placed = self.place(block, kv);
        let (count, rows, dim) = (placed.count(), block.rows.len(), kv.key_dim);
        account.cleared(visible, count)?;
        account.cleared(packed, count * dim)?;
        for (at, head) in placed.group.clone().enumerate() {
            let first = head * self.batch.rows() + block.rows.start;
            packed.extend_from_slice(&q[first * dim..(first + rows) * dim]);
            if at > 0 {
                visible.extend_from_within(..rows);
                continue;
            }
            for position in &self.batch.positions[block.rows.clone()] {
                visible.push(self.pool.owned(kv.key, position + 1)?);
            }
        }
        Ok(count)
    }

    /// Canonical: the largest score over all ranks first, then sums on the integer grid.
    fn meet_on_the_grid(
        &self,
        (layer, kv): (LayerId, &Kv),
        q: &[f32],
        meeting: Range<usize>,
        b: &mut Buffers,
        (account, bad): (&Account, &mut Vec<usize>),
    ) -> Result<(), RankError> {
        let (group, in_group) = (self.member.group(), self.member.in_group());
        b.scores.clear();
        for at in meeting.clone() {
            let block = b.blocks[at].clone();
            self.load_keys((layer, kv), block.span, b, account)?;
            self.gather(kv, q, &block, b, account)?;
            let Buffers { keys, scores, visible, q, .. } = &mut *b;
            account.note(scores, |scores| scores.compute(q, &keys.heads[block.kv], visible))?;
        }
        let count = b.scores.max().len();
        account.cleared(&mut b.largest, count)?.extend_from_slice(b.scores.max());
        account.clock.lap(Phase::Attention);
        group.largest.meet(in_group, &mut b.largest, largest_of_all, |()| ())?;
        account.clock.lap(Phase::Meetings);
        if self.fault == Some(Fault::BlindMerge) {
            b.largest.copy_from_slice(b.scores.max());
        }
        b.sums.clear();
        let mut first = 0;
        for (number, at) in meeting.clone().enumerate() {
            let block = b.blocks[at].clone();
            self.load_values((layer, kv), block.span, b, account)?;
            let Buffers { scores, sums, values, largest, .. } = &mut *b;
            let here = &largest[first..first + self.place(&block, kv).count()];
            first += here.len();
            account.note(sums, |sums| scores.sums(number, here, &values.heads[block.kv], sums))?;
        }
        let Buffers { sums, blocks, out, .. } = b;
        let finish = |parts: &mut [AttentionSums], whole: &mut Attended| {
            let out = account.zeroed(&mut whole.out, count * kv.value_dim)?;
            let overflow = AttentionSums::finish(parts, 0..count, out);
            whole.bad.clear();
            whole.bad.extend_from_slice(overflow.rows());
            Ok(())
        };
        let blocks = &blocks[meeting];
        account.clock.lap(Phase::Attention);
        group.sums.meet(in_group, sums, finish, |whole| self.keep(kv, blocks, whole, out, bad))?;
        account.clock.lap(Phase::Meetings);
        Ok(())
    }

    /// Fast: each rank's softmax over its own tokens, merged by their log-sum-exp.
    fn meet_by_weight(
        &self,
        (layer, kv): (LayerId, &Kv),
        q: &[f32],
        meeting: Range<usize>,
        b: &mut Buffers,
        (account, bad): (&Account, &mut Vec<usize>),
    ) -> Result<(), RankError> {
        let dim = kv.value_dim;
        let count = b.blocks[meeting.clone()].iter().map(|block| self.place(block, kv).count()).sum();
        account.zeroed(&mut b.attended.out, count * dim)?;
        account.zeroed(&mut b.attended.lse, count)?;
        b.attended.bad.clear();
        let mut first = 0;
        for at in meeting.clone() {
            let block = b.blocks[at].clone();
            let rows = self.gather(kv, q, &block, b, account)?;
            self.load_keys((layer, kv), block.span, b, account)?;
            self.load_values((layer, kv), block.span, b, account)?;
            let Buffers { keys, scores, values, visible, q, attended, .. } = &mut *b;
            let cache = (&keys.heads[block.kv], &values.heads[block.kv]);
            let out = &mut attended.out[first * dim..(first + rows) * dim];
            let lse = &mut attended.lse[first..first + rows];
            let overflow = account.note(scores, |scores| scores.attend(q, cache, visible, out, lse))?;
            attended.bad.extend(overflow.rows().iter().map(|row| first + row));
            first += rows;
        }
        let Buffers { attended, blocks, out, .. } = b;
        let blocks = &blocks[meeting];
        if self.fault == Some(Fault::BlindMerge) {
            attended.lse.iter_mut().filter(|lse| lse.is_finite()).for_each(|lse| *lse = 0.0);
        }
        account.clock.lap(Phase::Attention);
        if self.dcp <= 1 {
            self.keep(kv, blocks, attended, out, bad);
            return Ok(());
        }
        let merge = |parts: &mut [Attended], whole: &mut Attended| {
            let out = account.zeroed(&mut whole.out, count * dim)?;
            let lse = account.zeroed(&mut whole.lse, count)?;
            let each = parts.iter().map(|part| (part.out.as_slice(), part.lse.as_slice()));
            merge_lse(&each, dim, out, lse);
            whole.bad.clear();
            parts.iter().for_each(|part| whole.bad.extend_from_slice(&part.bad));
            Ok(())
        };
        let group = self.member.group();
        group.weighted.meet(self.member.in_group(), attended, merge, |whole| {
            self.keep(kv, blocks, whole, out, bad);
        })?;
        account.clock.lap(Phase::Meetings);
        Ok(())
    }

    /// Copies what is this rank's own of some blocks' `[heads][rows][value_dim]` to its place in the output, and notes
    /// bad rows.
    fn keep(&self, kv: &Kv, blocks: &[Block], whole: &Attended, out: &mut [f32], bad: &mut Vec<usize>) {
        let (all, dim) = (self.batch.rows(), kv.value_dim);
        let own = self.share.heads.start - self.share.group_heads.start;
        let mut first = 0;
        for block in blocks {
            let placed = self.place(block, kv);
            let (rows, mine) = (block.rows.clone(), placed.own_rows());
            let result = &whole.out[(first + mine.start) * dim..(first + mine.end) * dim];
            for (head, result) in placed.own.clone().zip(result.chunks_exact((rows.len() * dim).max(1))) {
                let at = (head - own) * all;
                out[(at + rows.start) * dim..(at + rows.end) * dim].copy_from_slice(result);
            }
            let here = first..first + placed.count();
            let lost = whole.bad.iter().filter(|row| here.contains(row));
            bad.extend(lost.map(|row| placed.row(row - first)));
            first = here.end;
        }
    }
}

/// Every member's list becomes the largest of all, place by place.
fn largest_of_all(all: &mut [Vec<f32>], (): &mut ()) -> Result<(), EngineError> {
    if let Some((first, others)) = all.split_first_mut() {
        others.iter().for_each(|other| merge_max(first, other));
        others.iter_mut().for_each(|other| other.copy_from_slice(first));
    }
    Ok(())
}
