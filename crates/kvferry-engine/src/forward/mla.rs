//! Multi-head latent attention, absorbed: one latent row per token is key and value of all heads; the up-projections
//! of keys and values are applied to queries and outputs instead.

use kvferry_plan::{LayerId, Part};

use super::{
    attend::Kv,
    rank::{Rank, add_bias, by_head},
};
use crate::{
    EngineError, Fault,
    math::{Partial, rms_norm, scale},
    ranks::RankError,
    weights::MlaWeights,
};

impl Rank<'_> {
    /// This rank's part of the attention's output projection; stores the latent rows of its tokens.
    pub(super) fn mla(
        &mut self,
        layer: LayerId,
        weights: &MlaWeights,
        x: &[f32],
    ) -> Result<Partial, RankError> {
        let shape = self.model.mla().ok_or_else(|| EngineError::Config("the model has no latent".into()))?;
        let (rows, hidden) = (self.batch.rows(), self.model.config().hidden);
        let (rope, blind) = (self.rope, self.fault == Some(Fault::DropRope));
        let (lora, nope) = (shape.lora, shape.nope);

        let heads = self.share.heads.clone();
        let width = nope + shape.rope;
        let columns = heads.start * width..heads.end * width;
        let mut q = vec![0.0; rows * columns.len()];
        match &weights.q_a {
            None => weights.q.apply(x, rows, columns.clone(), &mut q),
            Some((down, norm)) => {
                let mut own = vec![0.0; rows * down.n()];
                down.apply(x, rows, 0..down.n(), &mut own);
                let mut normed = vec![0.0; own.len()];
                rms_norm(&own, norm, shape.latent_norm.unwrap_or(0.0), &mut normed);
                weights.q.apply(&normed, rows, columns.clone(), &mut q);
            }
        }
        add_bias(&mut q, weights.q_bias.as_deref().and_then(|bias| bias.get(columns)));
        let q = by_head(&q, (rows, heads.len(), width), |row, head| {
            if let Some(turned) = head.get_mut(nope..) {
                rope.rotate(turned, self.batch.positions[row] as usize);
                if blind {
                    turned.fill(0.0);
                }
            }
            scale(head, shape.scale);
        });
        // With nothing position-free in a head, its key is the rotary part alone.
        let (q, key_offset) =
            if nope == 0 { (q, lora) } else { (self.absorb(weights, &q, (lora, nope, shape.rope))?, 0) };
        let q = self.member.group(q, |parts| parts.concat())?;

        let (own, own_x) = self.own_rows(x)?;
        let mut latent = vec![0.0; own.len() * (lora + shape.rope)];
        weights.kv_a.apply(&own_x, own.len(), 0..lora + shape.rope, &mut latent);
        add_bias(&mut latent, weights.kv_a_bias.as_deref());
        let mut normed = vec![0.0; lora];
        for (row, latent) in own.iter().zip(latent.chunks_exact_mut(lora + shape.rope)) {
            if let (Some(norm), Some(eps)) = (&weights.latent_norm, shape.latent_norm) {
                rms_norm(&latent[..lora], norm, eps, &mut normed);
                latent[..lora].copy_from_slice(&normed);
            }
            if let Some(turned) = latent.get_mut(lora..) {
                rope.rotate(turned, row.position as usize);
            }
            self.pool.write((layer, Part::Latent), row.table, row.position, latent)?;
        }

        let kv = Kv {
            key: Part::Latent,
            key_offset,
            key_dim: lora + shape.rope - key_offset,
            value: Part::Latent,
            value_dim: lora,
            heads_per_kv: shape.heads,
        };
        let out = self.attend(layer, &kv, &q)?;
        let mut expanded = vec![0.0; heads.len() * rows * shape.v_dim];
        let latents = out.chunks_exact((rows * lora).max(1));
        let values = expanded.chunks_exact_mut((rows * shape.v_dim).max(1));
        for ((w_uv, latent), value) in weights.w_uv.iter().skip(heads.start).zip(latents).zip(values) {
            w_uv.apply(latent, rows, 0..shape.v_dim, value);
        }
        let out = by_head(&expanded, (heads.len(), rows, shape.v_dim), |_, _| {});
        let mut partial = Partial::new(self.model.arith(), rows, hidden);
        weights.o.partial(&out, rows, heads, &mut partial);
        Ok(partial)
    }

    /// `[heads][rows][nope + rope]` to `[heads][rows][lora + rope]`: the position-free part of each query times the
    /// head's key up-projection.
    fn absorb(
        &self,
        weights: &MlaWeights,
        q: &[f32],
        (lora, nope, rope): (usize, usize, usize),
    ) -> Result<Vec<f32>, RankError> {
        let rows = self.batch.rows();
        let heads = self.share.heads.clone();
        let mut out = vec![0.0; heads.len() * rows * (lora + rope)];
        let mut absorbed = vec![0.0; rows * lora];
        let ins = q.chunks_exact((rows * (nope + rope)).max(1));
        let outs = out.chunks_exact_mut((rows * (lora + rope)).max(1));
        for ((w_uk, q), out) in weights.w_uk.iter().skip(heads.start).zip(ins).zip(outs) {
            let free: Vec<f32> = q.chunks_exact(nope + rope).flat_map(|q| q[..nope].to_vec()).collect();
            w_uk.apply(&free, rows, 0..lora, &mut absorbed);
            for ((out, q), absorbed) in out
                .chunks_exact_mut(lora + rope)
                .zip(q.chunks_exact(nope + rope))
                .zip(absorbed.chunks_exact(lora))
            {
                out[..lora].copy_from_slice(absorbed);
                out[lora..].copy_from_slice(&q[nope..]);
            }
        }
        Ok(out)
    }
}
