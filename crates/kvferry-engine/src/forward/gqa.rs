//! Grouped-query attention: keys and values are cached per KV head.

use kvferry_plan::{LayerId, Part};

use super::{
    attend::Kv,
    rank::{Rank, add_bias, by_head},
};
use crate::{
    math::{Partial, scale},
    ranks::RankError,
    weights::GqaWeights,
};

impl Rank<'_> {
    /// This rank's part of the attention's output projection; stores the keys and values of its tokens.
    pub(super) fn gqa(
        &mut self,
        layer: LayerId,
        weights: &GqaWeights,
        x: &[f32],
    ) -> Result<Partial, RankError> {
        let config = self.model.config();
        let (rows, dim, hidden) = (self.batch.rows(), config.head_dim, config.hidden);
        let rope = self.rope;
        let factor = self.model.scale();

        let heads = self.share.heads.clone();
        let columns = heads.start * dim..heads.end * dim;
        let mut q = vec![0.0; rows * columns.len()];
        weights.q.apply(x, rows, columns.clone(), &mut q);
        add_bias(&mut q, weights.q_bias.as_deref().and_then(|bias| bias.get(columns)));
        let q = by_head(&q, (rows, heads.len(), dim), |row, head| {
            rope.rotate(head, self.batch.positions[row] as usize);
            scale(head, factor);
        });
        let q = self.member.group(q, |parts| parts.concat())?;

        let kv_heads = self.share.kv_heads.clone();
        let columns = kv_heads.start * dim..kv_heads.end * dim;
        let (own, own_x) = self.own_rows(x)?;
        let project = |matrix: &crate::math::Matrix, bias: Option<&[f32]>| {
            let mut out = vec![0.0; own.len() * columns.len()];
            matrix.apply(&own_x, own.len(), columns.clone(), &mut out);
            add_bias(&mut out, bias.and_then(|bias| bias.get(columns.clone())));
            out
        };
        let mut k = project(&weights.k, weights.k_bias.as_deref());
        let v = project(&weights.v, weights.v_bias.as_deref());
        let width = columns.len();
        for ((row, k), v) in
            own.iter().zip(k.chunks_exact_mut(width.max(1))).zip(v.chunks_exact(width.max(1)))
        {
            rope.rotate(k, row.position as usize);
            self.pool.write((layer, Part::Key), row.table, row.position, k)?;
            self.pool.write((layer, Part::Value), row.table, row.position, v)?;
        }

        let kv = Kv {
            key: Part::Key,
            key_offset: 0,
            key_dim: dim,
            value: Part::Value,
            value_dim: dim,
            heads_per_kv: config.group(),
        };
        let out = self.attend(layer, &kv, &q)?;
        // `[heads][rows][dim]` to `[rows][heads * dim]`.
        let out = by_head(&out, (heads.len(), rows, dim), |_, _| {});
        let mut partial = Partial::new(self.model.arith(), rows, hidden);
        weights.o.partial(&out, rows, heads, &mut partial);
        Ok(partial)
    }
}
