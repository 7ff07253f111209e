//! What an instance can hold: the one question that its intake, its scheduler and whoever chooses between instances
//! ask. Not for who holds which page now.

use alloc::{format, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

use crate::{PartLayout, Placement, Token};

/// What one instance can hold. It travels in registrations, so that a request which can never be served is refused
/// before anybody takes a page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Longest sequence that is served, in tokens of prompt and answer together.
    pub max_model_len: u64,
    /// Longest sequence that the model was made for, in tokens.
    pub made_for: u64,
    /// Pages of each rank's pool.
    pub pages: u32,
    /// How the tokens of each part lie in pages.
    pub parts: Vec<PartLayout>,
}

/// What is to be held of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    /// The prompt, for somebody else to continue: what prefill holds.
    Prompt,
    /// A prompt from somebody else and its answer, of at least one token: what decode holds.
    Continue,
    /// Prompt and answer, both computed here.
    Whole,
}

/// A request, as far as it takes pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Need {
    /// What is to be held of it.
    pub hold: Hold,
    /// Tokens of its prompt.
    pub prompt_tokens: u64,
    /// Most tokens of its answer; takes nothing where only the prompt is held.
    pub max_tokens: u32,
}

/// When a request can be held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// The pages are there.
    Now {
        /// Pages that it takes on every rank.
        pages: u32,
        /// What was asked for, capped to what can be held.
        max_tokens: u32,
    },
    /// There are enough pages, but others hold them.
    Later {
        /// Pages that it will take on every rank.
        pages: u32,
        /// What was asked for, capped to what can be held.
        max_tokens: u32,
    },
    /// Whatever others give back, it can not be held.
    Never(Limit),
}

/// A limit that a prompt exceeds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("a prompt of {tokens} tokens can never be served here: the limit is {limit} ({because}); {remedy}")]
pub struct Limit {
    /// Tokens of the prompt.
    pub tokens: u64,
    /// The longest prompt that can be held so.
    pub limit: u64,
    /// Which limit it is.
    pub because: String,
    /// What would change it.
    pub remedy: String,
}

impl Capacity {
    /// When a request can be held while `free_pages` can be had: the whole prompt, and as much of the longest answer as
    /// there could ever be pages for. With all pages free the answer is never [`Fit::Later`].
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Capacity, Dtype, Fit, Hold, Need, Placement};
    /// let parts = Placement::single(&CacheShape::gqa(2, 2, 16), 16, Dtype::F32).parts;
    /// let capacity = Capacity { max_model_len: 100, made_for: 4096, pages: 4, parts };
    /// // 4 pages of 16 tokens: prompt and at least one token of the answer.
    /// let need = |prompt_tokens, max_tokens| Need { hold: Hold::Continue, prompt_tokens, max_tokens };
    /// assert_eq!(capacity.fit(need(40, 8), 4), Fit::Now { pages: 3, max_tokens: 8 });
    /// assert_eq!(capacity.fit(need(40, 99), 3), Fit::Later { pages: 4, max_tokens: 24 });
    /// let Fit::Never(limit) = capacity.fit(need(64, 1), 4) else { unreachable!() };
    /// assert_eq!(limit.limit, 63);
    /// assert!(limit.remedy.contains("--pool-tokens"));
    /// let prompt = Need { hold: Hold::Prompt, ..need(64, 1) };
    /// assert_eq!(capacity.fit(prompt, 4), Fit::Now { pages: 4, max_tokens: 1 });
    /// ```
    #[must_use]
    pub fn fit(&self, need: Need, free_pages: u32) -> Fit {
        let Need { hold, prompt_tokens, max_tokens } = need;
        let pool = self.pool_tokens();
        let never =
            |limit, (because, remedy)| Fit::Never(Limit { tokens: prompt_tokens, limit, because, remedy });
        // The model has to place a token after the prompt, whoever computes it.
        let placed = self.max_model_len.saturating_sub(1);
        let longest = match hold {
            Hold::Prompt => pool,
            Hold::Continue | Hold::Whole => pool.saturating_sub(1),
        };
        // The narrower of two limits: who shortens the prompt to it is not refused again.
        if prompt_tokens > placed.min(longest) {
            return if longest < placed {
                never(longest, self.pool_limit(pool))
            } else {
                never(placed, self.length_limit())
            };
        }
        let (tokens, max_tokens) = match hold {
            Hold::Prompt => (prompt_tokens, max_tokens),
            Hold::Continue | Hold::Whole => {
                let room = self.max_model_len.min(pool) - prompt_tokens;
                let max_tokens = max_tokens.min(u32::try_from(room).unwrap_or(u32::MAX));
                (prompt_tokens + u64::from(max_tokens), max_tokens)
            }
        };
        match pages_for(&self.parts, tokens).filter(|pages| *pages <= self.pages) {
            Some(pages) if pages <= free_pages => Fit::Now { pages, max_tokens },
            Some(pages) => Fit::Later { pages, max_tokens },
            // Tokens that the pool holds have pages: only a capacity that contradicts itself comes here.
            None => never(longest, self.pool_limit(pool)),
        }
    }

    /// Longest prompt that can be held so, in tokens.
    #[must_use]
    pub fn longest(&self, hold: Hold) -> u64 {
        let pool = self.pool_tokens();
        let after = self.max_model_len.saturating_sub(1);
        match hold {
            Hold::Prompt => after.min(pool),
            Hold::Continue | Hold::Whole => after.min(pool.saturating_sub(1)),
        }
    }

    /// Tokens that the pool holds.
    #[must_use]
    pub fn pool_tokens(&self) -> u64 {
        tokens_for(&self.parts, self.pages)
    }

    fn length_limit(&self) -> (String, String) {
        let Self { max_model_len, made_for, .. } = self;
        if max_model_len < made_for {
            return (
                format!("max-model-len={max_model_len}, one token of which is generated"),
                format!("raise --max-model-len, up to {made_for}, or shorten the prompt"),
            );
        }
        (
            format!("the model was made for {made_for} tokens, one of which is generated"),
            "shorten the prompt, or use a model with a longer context".into(),
        )
    }

    fn pool_limit(&self, pool: u64) -> (String, String) {
        (
            format!("the KV pool of {} pages holds {pool} tokens", self.pages),
            "raise --pool-tokens or shorten the prompt".into(),
        )
    }
}

impl Placement {
    /// Pages that `tokens` tokens need on every rank. `None` when the number overflows. With KV sharding the pages are
    /// logical ones.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, LayoutSpec};
    /// let dcp: LayoutSpec = "tp=4,dcp=4,page=16".parse()?;
    /// let placement = dcp.placement(&CacheShape::mla(2, 96), Dtype::Bf16)?;
    /// assert_eq!(placement.pages_for(64), Some(1));
    /// assert_eq!(placement.pages_for(65), Some(2));
    /// assert_eq!(placement.tokens_for(2), 128);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn pages_for(&self, tokens: u64) -> Option<u32> {
        pages_for(&self.parts, tokens)
    }

    /// Tokens that `pages` pages hold for certain: the inverse of [`Placement::pages_for`].
    #[must_use]
    pub fn tokens_for(&self, pages: u32) -> u64 {
        tokens_for(&self.parts, pages)
    }
}

/// The pages of the fullest rank, which is always the first of a token class. State lies in slots, not in pages.
fn pages_for(parts: &[PartLayout], tokens: u64) -> Option<u32> {
    parts
        .iter()
        .filter(|part| !part.part.is_state())
        .map(|part| {
            let rows = part.tokens.owned(Token(tokens), 0);
            u32::try_from(rows.div_ceil(u64::from(part.page_size.max(1)))).ok()
        })
        .try_fold(0, |most, pages| pages.map(|pages| pages.max(most)))
}

fn tokens_for(parts: &[PartLayout], pages: u32) -> u64 {
    parts
        .iter()
        .filter(|part| !part.part.is_state())
        .map(|part| {
            // The fullest rank is class 0: the first token that does not fit is the one after its last row.
            let rows = u64::from(pages) * u64::from(part.page_size.max(1));
            part.tokens.token(rows, 0).map_or(u64::MAX, |token| token.0)
        })
        .min()
        .unwrap_or(0)
}
