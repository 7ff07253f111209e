//! Multi-head latent attention, absorbed: one latent row per token is key and value of all heads; the up-projections
//! of keys and values are applied to queries and outputs instead.

use kvferry_plan::{LayerId, Part};

use super::{
    rank::{Rank, add_bias, by_head},
    space::{Account, Space},
};
use crate::{
    EngineError, Fault,
    math::{rms_norm, scale},
    meeting::RankError,
    profile::Phase,
    weights::MlaWeights,
};

/// Memory of a layer.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// Queries' latents, and the same after their norm.
    down: Vec<f32>,
    normed: Vec<f32>,
    q: Vec<f32>,
    q_by_head: Vec<f32>,
    /// The queries that attend, `[own heads][rows][..]`.
    queries: Vec<f32>,
    free: Vec<f32>,
    absorbed: Vec<f32>,
    latent: Vec<f32>,
    latent_normed: Vec<f32>,
    expanded: Vec<f32>,
    out: Vec<f32>,
}

impl Rank<'_> {
    /// Adds this rank's part of the attention's output projection; stores the latent rows of its tokens.
    pub(super) fn mla(
        &self,
        layer: LayerId,
        weights: &MlaWeights,
        space: &mut Space,
    ) -> Result<(), RankError> {
        let Space { account, normed: x, partial, own, narrow, mla: b, attend, bad, .. } = space;
        let shape = self.model.mla().ok_or_else(|| EngineError::Config("the model has no latent".into()))?;
        let rows = self.batch.rows();
        let (rope, blind) = (self.rope, self.fault == Some(Fault::DropRope));
        let (lora, nope) = (shape.lora, shape.nope);

        let heads = self.share.heads.clone();
        let width = nope + shape.rope;
        let columns = heads.start * width..heads.end * width;
        let q = account.zeroed(&mut b.q, rows * columns.len())?;
        match &weights.q_a {
            None => weights.q.apply(x, rows, columns.clone(), q),
            Some((down, norm)) => {
                let own = account.zeroed(&mut b.down, rows * down.n())?;
                down.apply(x, rows, 0..down.n(), own);
                let normed = account.zeroed(&mut b.normed, own.len())?;
                rms_norm(own, norm, shape.latent_norm.unwrap_or(0.0), normed);
                weights.q.apply(normed, rows, columns.clone(), q);
            }
        }
        add_bias(q, weights.q_bias.as_deref().and_then(|bias| bias.get(columns)));
        by_head(q, (rows, heads.len(), width), account.zeroed(&mut b.q_by_head, q.len())?, |row, head| {
            // Padding is at no position.
            if let (Some(turned), Some(position)) = (head.get_mut(nope..), self.batch.positions.get(row)) {
                rope.rotate(turned, *position as usize);
                if blind {
                    turned.fill(0.0);
                }
            }
            scale(head, shape.scale);
        });
        // With nothing position-free in a head, its key is the rotary part alone.
        if nope > 0 {
            self.absorb(weights, (lora, nope, shape.rope), b, account)?;
        }

        self.own_rows(x, own, account)?;
        let count = own.rows.len();
        let row_width = lora + shape.rope;
        let latent = &mut account.zeroed(&mut b.latent, rows * row_width)?[..count * row_width];
        weights.kv_a.apply(&own.x, count, 0..row_width, latent);
        add_bias(latent, weights.kv_a_bias.as_deref());
        account.clock.lap(Phase::Projections);
        let normed = account.zeroed(&mut b.latent_normed, lora)?;
        for (row, latent) in own.rows.iter().zip(latent.chunks_exact_mut(row_width)) {
            if let (Some(norm), Some(eps)) = (&weights.latent_norm, shape.latent_norm) {
                rms_norm(&latent[..lora], norm, eps, normed);
                latent[..lora].copy_from_slice(normed);
            }
            if let Some(turned) = latent.get_mut(lora..) {
                rope.rotate(turned, row.position as usize);
            }
            let table = self.table(row)?;
            self.sharers.write((layer, Part::Latent), table, row.position, latent, narrow)?;
        }
        account.clock.lap(Phase::CacheWrites);
        self.all_written(account)?;

        let queries = if nope > 0 { &mut b.queries } else { &mut b.q_by_head };
        self.attend(layer, queries, attend, (account, bad))?;
        let expanded = account.zeroed(&mut b.expanded, heads.len() * rows * shape.v_dim)?;
        let latents = attend.out.chunks_exact((rows * lora).max(1));
        let values = expanded.chunks_exact_mut((rows * shape.v_dim).max(1));
        for ((w_uv, latent), value) in weights.w_uv.iter().skip(heads.start).zip(latents).zip(values) {
            w_uv.apply(latent, rows, 0..shape.v_dim, value);
        }
        let out = account.zeroed(&mut b.out, expanded.len())?;
        by_head(expanded, (heads.len(), rows, shape.v_dim), out, |_, _| {});
        weights.o.partial(out, rows, heads, partial);
        account.clock.lap(Phase::Projections);
        Ok(())
    }

    /// `[heads][rows][nope + rope]` to `[heads][rows][lora + rope]`: the position-free part of each query times the
    /// head's key up-projection.
    fn absorb(
        &self,
        weights: &MlaWeights,
        (lora, nope, rope): (usize, usize, usize),
        b: &mut Buffers,
        account: &Account,
    ) -> Result<(), EngineError> {
        let rows = self.batch.rows();
        let heads = self.share.heads.clone();
        let out = account.zeroed(&mut b.queries, heads.len() * rows * (lora + rope))?;
        let absorbed = account.zeroed(&mut b.absorbed, rows * lora)?;
        let ins = b.q_by_head.chunks_exact((rows * (nope + rope)).max(1));
        let outs = out.chunks_exact_mut((rows * (lora + rope)).max(1));
        for ((w_uk, q), out) in weights.w_uk.iter().skip(heads.start).zip(ins).zip(outs) {
            let free = account.cleared(&mut b.free, rows * nope)?;
            q.chunks_exact(nope + rope).for_each(|q| free.extend_from_slice(&q[..nope]));
            w_uk.apply(free, rows, 0..lora, absorbed);
            for ((out, q), absorbed) in out
                .chunks_exact_mut(lora + rope)
                .zip(q.chunks_exact(nope + rope))
                .zip(absorbed.chunks_exact(lora))
            {
                out[..lora].copy_from_slice(absorbed);
                out[lora..].copy_from_slice(&q[nope..]);
            }
        }
        Ok(())
    }
}
