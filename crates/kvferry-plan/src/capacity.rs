//! What an instance can hold: the one question that its intake, its scheduler and whoever chooses between instances
//! ask. Not for who holds which page now.

use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use serde::{Deserialize, Serialize};

use crate::{LayoutSpec, PartLayout, Placement, Token, TokenMap, placement};

/// What one instance can hold. It travels in registrations, so that a request which can never be served is refused
/// before anybody takes a page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Longest sequence that is served, in tokens of prompt and answer together.
    pub max_model_len: u64,
    /// Longest sequence that the model was made for, in tokens.
    pub made_for: u64,
    /// Pages of each rank's pool; with KV sharding the logical pages of all ranks together.
    pub pages: u32,
    /// How the tokens of each part lie in pages.
    pub parts: Vec<PartLayout>,
    /// Whether prompts go on from what earlier ones left.
    pub prefix_cache: bool,
}

/// By which rule a prompt is let in at prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionPath {
    /// The rule for all but those below.
    Normal,
    /// The rule for requests with `ignore_eos` at an instance without a prefix cache.
    IgnoreEos,
}

/// What is to be held of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    /// The prompt, for somebody else to continue: what prefill holds.
    Prompt(AdmissionPath),
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
        /// Pages that it takes on every rank; with KV sharding logical pages.
        pages: u32,
        /// What was asked for, capped to what can be held.
        max_tokens: u32,
    },
    /// There are enough pages, but others hold them.
    Later {
        /// Pages that it will take on every rank; with KV sharding logical pages.
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
    /// Which limit it is, with the numbers behind it.
    pub because: String,
    /// What would change it.
    pub remedy: String,
}

impl Capacity {
    /// When a request can be held while `free_pages` can be had: the whole prompt, and as much of the longest answer as
    /// there could ever be pages for. With all pages free the answer is never [`Fit::Later`].
    ///
    /// With KV sharding the owners of a request's pages take turns, and `free_pages` are those that can be had so. As many
    /// times what the rank with the fewest has as there are ranks can be had for certain, whichever rank is first.
    ///
    /// ```
    /// use kvferry_plan::{AdmissionPath, CacheShape, Capacity, Dtype, Fit, Hold, Need, Placement};
    /// let parts = Placement::single(&CacheShape::gqa(2, 2, 16), 16, Dtype::F32).parts;
    /// let capacity = Capacity { max_model_len: 100, made_for: 4096, pages: 4, parts, prefix_cache: true };
    /// // 4 pages of 16 tokens: prompt and at least one token of the answer.
    /// let need = |prompt_tokens, max_tokens| Need { hold: Hold::Continue, prompt_tokens, max_tokens };
    /// assert_eq!(capacity.fit(need(40, 8), 4), Fit::Now { pages: 3, max_tokens: 8 });
    /// assert_eq!(capacity.fit(need(40, 99), 3), Fit::Later { pages: 4, max_tokens: 24 });
    /// let Fit::Never(limit) = capacity.fit(need(64, 1), 4) else { unreachable!() };
    /// assert_eq!(limit.limit, 63);
    /// assert!(limit.remedy.contains("--pool-tokens to 65"));
    /// // At prefill a page and two tokens are kept back.
    /// let prompt = Need { hold: Hold::Prompt(AdmissionPath::Normal), ..need(46, 1) };
    /// assert_eq!(capacity.fit(prompt, 4), Fit::Now { pages: 3, max_tokens: 1 });
    /// assert!(matches!(capacity.fit(Need { prompt_tokens: 47, ..prompt }, 4), Fit::Never(_)));
    /// ```
    #[must_use]
    pub fn fit(&self, need: Need, free_pages: u32) -> Fit {
        let Need { hold, prompt_tokens, max_tokens } = need;
        let (placed, longest) = (self.placed(), self.longest_held(hold));
        // The narrower of two limits: who shortens the prompt to it is not refused again.
        if prompt_tokens > placed.min(longest) {
            return Fit::Never(if longest < placed {
                self.pool_limit(hold, prompt_tokens)
            } else {
                self.length_limit(prompt_tokens)
            });
        }
        let (tokens, max_tokens) = match hold {
            Hold::Prompt(_) => (prompt_tokens, max_tokens),
            Hold::Continue | Hold::Whole => {
                let room = self.max_model_len.min(self.pool_tokens()) - prompt_tokens;
                let max_tokens = max_tokens.min(u32::try_from(room).unwrap_or(u32::MAX));
                (prompt_tokens + u64::from(max_tokens), max_tokens)
            }
        };
        let Some(pages) = pages_for(&self.parts, tokens).filter(|pages| *pages <= self.whole_pages()) else {
            // Tokens that the pool holds have pages: only a capacity that contradicts itself comes here.
            return Fit::Never(self.pool_limit(hold, prompt_tokens));
        };
        if pages <= free_pages { Fit::Now { pages, max_tokens } } else { Fit::Later { pages, max_tokens } }
    }

    /// Longest prompt that can be held so, in tokens.
    #[must_use]
    pub fn longest(&self, hold: Hold) -> u64 {
        self.placed().min(self.longest_held(hold))
    }

    /// Tokens that the pool holds.
    #[must_use]
    pub fn pool_tokens(&self) -> u64 {
        tokens_for(&self.parts, self.whole_pages())
    }

    /// Tokens of a page; under DCP of a virtual one.
    #[must_use]
    pub fn page_tokens(&self) -> u64 {
        Margin::of(&self.parts).page
    }

    /// By which rule a request's prompt is let in here.
    #[must_use]
    pub fn path(&self, ignore_eos: bool) -> AdmissionPath {
        if ignore_eos && !self.prefix_cache { AdmissionPath::IgnoreEos } else { AdmissionPath::Normal }
    }

    /// Ranks over which logical pages are dealt; 1 without KV sharding.
    #[must_use]
    pub fn shard_ranks(&self) -> u32 {
        placement::shard_ranks(&self.parts)
    }

    /// Every shard rank has as many pages as the others.
    fn whole_pages(&self) -> u32 {
        self.pages - self.pages % self.shard_ranks()
    }

    /// The model has to place a token after the prompt, whoever computes it.
    fn placed(&self) -> u64 {
        self.max_model_len.saturating_sub(1)
    }

    /// Longest prompt that the pool lets in.
    fn longest_held(&self, hold: Hold) -> u64 {
        let pool = self.pool_tokens();
        match hold {
            Hold::Prompt(path) => Margin::of(&self.parts).longest(path, pool),
            Hold::Continue | Hold::Whole => pool.saturating_sub(1),
        }
    }

    fn length_limit(&self, tokens: u64) -> Limit {
        let Self { max_model_len, made_for, .. } = self;
        let (because, remedy) = if max_model_len < made_for {
            (
                format!("max-model-len={max_model_len}, one token of which is generated"),
                format!("raise --max-model-len, up to {made_for}, or shorten the prompt"),
            )
        } else {
            (
                format!("the model was made for {made_for} tokens, one of which is generated"),
                "shorten the prompt, or use a model with a longer context".into(),
            )
        };
        Limit { tokens, limit: self.placed(), because, remedy }
    }

    fn pool_limit(&self, hold: Hold, tokens: u64) -> Limit {
        let (pages, pool, margin) = (self.whole_pages(), self.pool_tokens(), Margin::of(&self.parts));
        let mut because = format!("the KV pool of {pages} pages holds {pool} tokens");
        let enough = match hold {
            Hold::Prompt(path) => {
                because += &margin.kept_back(path);
                margin.pool(path, tokens)
            }
            Hold::Continue | Hold::Whole => tokens.saturating_add(1),
        };
        let remedy = if tokens <= self.placed() {
            format!("raise --pool-tokens to {enough} or shorten the prompt")
        } else {
            // A larger pool would not be enough.
            format!("shorten the prompt: whatever the pool holds, {}", self.length_limit(tokens).because)
        };
        Limit { tokens, limit: self.longest_held(hold), because, remedy }
    }
}

/// What a prompt at prefill leaves of the pool.
///
/// Source: SGLang's `PrefillAdder` on an empty pool of `C` tokens, with `over` = shard ranks x page. On the normal path
/// it lets a prompt of `L` in when `L + 1 + over < C`, on the other when `C - (L in whole pages + over) - 1 > 1`.
#[derive(Clone, Copy)]
struct Margin {
    /// Tokens of a page.
    page: u64,
    shard_ranks: u64,
}

impl Margin {
    fn of(parts: &[PartLayout]) -> Self {
        let tokens = |part: &PartLayout| {
            let ranks = match part.tokens {
                TokenMap::Interleaved { ranks, .. } => ranks,
                TokenMap::Dense | TokenMap::PageSharded { .. } => 1,
            };
            u64::from(part.page_size) * u64::from(ranks)
        };
        let page = parts.iter().filter(|part| !part.part.is_state()).map(tokens).max();
        Self { page: page.unwrap_or(1).max(1), shard_ranks: placement::shard_ranks(parts).into() }
    }

    /// A page of every shard rank.
    fn over(self) -> u64 {
        self.page.saturating_mul(self.shard_ranks)
    }

    /// What is kept back beside `over`.
    fn tokens(path: AdmissionPath) -> u64 {
        match path {
            AdmissionPath::Normal => 2,
            AdmissionPath::IgnoreEos => 3,
        }
    }

    /// The longest prompt that a pool of so many tokens lets in.
    fn longest(self, path: AdmissionPath, pool: u64) -> u64 {
        let left = pool.saturating_sub(self.over()).saturating_sub(Self::tokens(path));
        match path {
            AdmissionPath::Normal => left,
            AdmissionPath::IgnoreEos => left - left % self.page,
        }
    }

    /// The smallest pool that lets a prompt in, in tokens: the inverse of [`Margin::longest`].
    fn pool(self, path: AdmissionPath, prompt_tokens: u64) -> u64 {
        let charged = match path {
            AdmissionPath::Normal => prompt_tokens,
            AdmissionPath::IgnoreEos => prompt_tokens.checked_next_multiple_of(self.page).unwrap_or(u64::MAX),
        };
        charged.saturating_add(self.over()).saturating_add(Self::tokens(path))
    }

    fn kept_back(self, path: AdmissionPath) -> String {
        let (over, more) = (self.over(), Self::tokens(path));
        let of = match self.shard_ranks {
            1 => "a page".to_string(),
            ranks => format!("a page on each of {ranks} ranks"),
        };
        match path {
            AdmissionPath::Normal => format!("; the normal path keeps back {over} ({of}) and {more}"),
            AdmissionPath::IgnoreEos => format!(
                "; the path of ignore_eos without a prefix cache keeps back {over} ({of}) and {more}, and counts whole \
                 pages"
            ),
        }
    }
}

impl LayoutSpec {
    /// Tokens that a prefill pool of this layout has to hold for a prompt of so many tokens to be let in, whatever the
    /// path.
    ///
    /// ```
    /// use kvferry_plan::LayoutSpec;
    /// let plain: LayoutSpec = "tp=2,page=16".parse()?;
    /// assert_eq!(plain.pool_for_prompt(40), 48 + 16 + 3);
    /// let sharded: LayoutSpec = "tp=2,shard=on,page=16".parse()?;
    /// assert_eq!(sharded.pool_for_prompt(40), 48 + 2 * 16 + 3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn pool_for_prompt(&self, prompt_tokens: u64) -> u64 {
        let shard_ranks = match (self.shard, self.cp) {
            (false, _) => 1,
            (true, 1) => self.tp,
            (true, cp) => cp,
        };
        let page = u64::from(self.page) * u64::from(self.dcp);
        Margin { page: page.max(1), shard_ranks: shard_ranks.into() }
            .pool(AdmissionPath::IgnoreEos, prompt_tokens)
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

    /// Pages of a pool that holds so many tokens: with KV sharding as many on every shard rank. `None` when the number
    /// overflows.
    #[must_use]
    pub fn pool_pages(&self, tokens: u64) -> Option<u32> {
        self.pages_for(tokens)?.checked_next_multiple_of(self.shard_ranks())
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
