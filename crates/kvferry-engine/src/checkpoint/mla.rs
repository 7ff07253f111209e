//! Multi-head latent attention (MLA), and grouped-query attention (GQA) written exactly as it.
//!
//! MLA caches one row a token, shared by all heads: a latent `c` (from which values, and the position-free part
//! of keys, are expanded by per-head matrices) and a rotary part `r`. A head's score is
//! `scale * (q_nope . W_uk c + rope(q_rope) . r)`, its output `W_uv sum(p c)`.
//!
//! GQA is the special case whose latent is simply all V heads and whose rotary part is all K heads: `W_uv` picks
//! the group's block, and a head's query is zero outside its group's block. Every added product is with an exact
//! zero, so scores and outputs are those of GQA, and the row has the same number of elements.

use super::{GqaTensors, ModelConfig};

/// Geometry of latent attention, per layer. The cached row is `lora` latent elements, then `rope` rotary ones.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaConfig {
    /// Query heads.
    pub heads: usize,
    /// Elements of the queries' own latent; `None` when they come straight from the residual stream.
    pub q_lora: Option<usize>,
    /// Elements of the latent.
    pub lora: usize,
    /// Elements of the rotary part, shared by all heads.
    pub rope: usize,
    /// Position-free key elements of a head, expanded from the latent; may be 0.
    pub nope: usize,
    /// Value elements of a head.
    pub v_dim: usize,
    /// The rotary part turns in independent runs of this many elements, each with the whole frequency ladder of
    /// that width, in rotate-half order. `rope` for DeepSeek; `head_dim` for a GQA model, once per KV head; 0 for Kimi
    /// Linear, which encodes no positions here but keeps and caches the part.
    pub rope_ladder: usize,
    /// Factor on scores before the softmax.
    pub scale: f32,
    /// RMSNorm on the latents with this epsilon; `None` leaves them as they are.
    pub latent_norm: Option<f32>,
}

impl MlaConfig {
    /// Epsilon of the latents' norms in the published model code: that of its RMSNorm, not the configuration's
    /// `rms_norm_eps`, which some engines take instead.
    pub const LATENT_EPS: f32 = 1e-6;
}

/// One layer's attention weights as MLA, row-major `f32`.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaTensors {
    /// Projection to the queries' latent, `[q_lora][hidden]`, and the weight of its norm, `[q_lora]`.
    pub q_a: Option<(Vec<f32>, Vec<f32>)>,
    /// Query projection, `[heads * (nope + rope)][hidden, or q_lora]`; a head's position-free rows first.
    pub q: Vec<f32>,
    /// Query bias, `[heads * (nope + rope)]`.
    pub q_bias: Option<Vec<f32>>,
    /// Projection to the cached row, `[lora + rope][hidden]`.
    pub kv_a: Vec<f32>,
    /// Its bias, `[lora + rope]`.
    pub kv_a_bias: Option<Vec<f32>>,
    /// Weight of the latent's norm, `[lora]`, where there is one.
    pub latent_norm: Option<Vec<f32>>,
    /// Latent to position-free keys, `[heads][nope][lora]`; empty when `nope` is 0.
    pub w_uk: Vec<f32>,
    /// Latent to values, `[heads][v_dim][lora]`.
    pub w_uv: Vec<f32>,
    /// Output projection, `[hidden][heads * v_dim]`.
    pub o: Vec<f32>,
}

impl ModelConfig {
    /// The geometry of this model's attention as MLA: its own, or grouped queries written so.
    ///
    /// ```
    /// let config = kvferry_engine::checkpoint::embedded().unwrap().config().clone();
    /// let mla = config.to_mla();
    /// // The cached row is as wide as k and v of all heads.
    /// assert_eq!(mla.lora + mla.rope, 2 * config.kv_heads * config.head_dim);
    /// ```
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "head dimensions are far below 2^24")]
    pub fn to_mla(&self) -> MlaConfig {
        if let Some(mla) = &self.mla {
            return mla.clone();
        }
        MlaConfig {
            heads: self.heads,
            q_lora: None,
            lora: self.kv_heads * self.head_dim,
            rope: self.kv_heads * self.head_dim,
            nope: 0,
            v_dim: self.head_dim,
            rope_ladder: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            latent_norm: None,
        }
    }
}

impl GqaTensors {
    /// The same attention as MLA. `config` is the checkpoint's own.
    #[must_use]
    pub fn to_mla(&self, config: &ModelConfig) -> MlaTensors {
        let mla = config.to_mla();
        let head = |h: usize| h / config.group().max(1);
        // Each head's rows move to its group's block of the rotary part; the rest stays zero.
        let spread = |rows: &[f32], width: usize| {
            let block = config.head_dim * width;
            let mut wide = vec![0.0; config.heads * mla.rope * width];
            for ((h, from), to) in
                rows.chunks_exact(block).enumerate().zip(wide.chunks_exact_mut(mla.rope * width))
            {
                if let Some(place) = to.chunks_exact_mut(block).nth(head(h)) {
                    place.copy_from_slice(from);
                }
            }
            wide
        };
        let mut w_uv = vec![0.0; config.heads * mla.v_dim * mla.lora];
        for (h, rows) in w_uv.chunks_exact_mut(mla.v_dim * mla.lora).enumerate() {
            for (d, row) in rows.chunks_exact_mut(mla.lora).enumerate() {
                if let Some(one) = row.get_mut(head(h) * config.head_dim + d) {
                    *one = 1.0;
                }
            }
        }
        MlaTensors {
            q_a: None,
            latent_norm: None,
            q: spread(&self.q, config.hidden),
            q_bias: self.q_bias.as_ref().map(|bias| spread(bias, 1)),
            kv_a: [self.v.as_slice(), &self.k].concat(),
            kv_a_bias: self
                .v_bias
                .as_ref()
                .zip(self.k_bias.as_ref())
                .map(|(v, k)| [v.as_slice(), k].concat()),
            w_uk: Vec::new(),
            w_uv,
            o: self.o.clone(),
        }
    }
}
