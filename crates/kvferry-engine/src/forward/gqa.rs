//! Grouped-query attention: keys and values are cached per KV head.

use kvferry_plan::{LayerId, PageTable, Part};

use super::{
    rank::{OwnRow, Rank, add_bias, by_head},
    space::Space,
};
use crate::{
    EngineError,
    math::{Matrix, scale},
    meeting::RankError,
    profile::Phase,
    weights::GqaWeights,
};

/// Memory of a layer.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    q: Vec<f32>,
    q_by_head: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
}

impl Rank<'_> {
    /// Adds this rank's part of the attention's output projection; stores the keys and values of its tokens.
    pub(super) fn gqa(
        &self,
        layer: LayerId,
        weights: &GqaWeights,
        space: &mut Space,
    ) -> Result<(), RankError> {
        let Space { account, normed: x, partial, own, narrow, gqa: b, attend, bad, .. } = space;
        let config = self.model.config();
        let (rows, dim) = (self.batch.rows(), config.head_dim);
        let rope = self.rope;
        let factor = self.model.scale();

        let heads = self.share.heads.clone();
        let columns = heads.start * dim..heads.end * dim;
        let q = account.zeroed(&mut b.q, rows * columns.len())?;
        weights.q.apply(x, rows, columns.clone(), q);
        add_bias(q, weights.q_bias.as_deref().and_then(|bias| bias.get(columns)));
        by_head(q, (rows, heads.len(), dim), account.zeroed(&mut b.q_by_head, q.len())?, |row, head| {
            // Padding is at no position.
            if let Some(position) = self.batch.positions.get(row) {
                rope.rotate(head, *position as usize);
            }
            scale(head, factor);
        });

        let kv_heads = self.share.kv_heads.clone();
        let columns = kv_heads.start * dim..kv_heads.end * dim;
        let width = columns.len();
        self.own_rows(x, own, account)?;
        let count = own.rows.len();
        let project = |matrix: &Matrix, bias: Option<&[f32]>, out: &mut [f32]| {
            matrix.apply(&own.x, count, columns.clone(), out);
            add_bias(out, bias.and_then(|bias| bias.get(columns.clone())));
        };
        let k = &mut account.zeroed(&mut b.k, rows * width)?[..count * width];
        project(&weights.k, weights.k_bias.as_deref(), k);
        let v = &mut account.zeroed(&mut b.v, rows * width)?[..count * width];
        project(&weights.v, weights.v_bias.as_deref(), v);
        account.clock.lap(Phase::Projections);
        for ((row, k), v) in
            own.rows.iter().zip(k.chunks_exact_mut(width.max(1))).zip(v.chunks_exact(width.max(1)))
        {
            rope.rotate(k, row.position as usize);
            let table = self.table(row)?;
            self.sharers.write((layer, Part::Key), table, row.position, k, narrow)?;
            self.sharers.write((layer, Part::Value), table, row.position, v, narrow)?;
        }
        account.clock.lap(Phase::CacheWrites);
        self.all_written(account)?;

        self.attend(layer, &mut b.q_by_head, attend, (account, bad))?;
        // `[heads][rows][dim]` to `[rows][heads * dim]`.
        let out = account.zeroed(&mut b.out, attend.out.len())?;
        by_head(&attend.out, (heads.len(), rows, dim), out, |_, _| {});
        weights.o.partial(out, rows, heads, partial);
        account.clock.lap(Phase::Projections);
        Ok(())
    }

    /// The pages of an own row's request.
    pub(super) fn table(&self, row: &OwnRow) -> Result<&PageTable, EngineError> {
        let span = self.batch.spans().get(row.span);
        span.map(|span| &span.table).ok_or_else(|| EngineError::Pool("a row of no request".into()))
    }
}
