//! Which pages two requests with a common prefix can share. Not for which ones do.

use serde::{Deserialize, Serialize};

use crate::{Placement, TokenMap};

/// The smallest number of pages that hold consecutive tokens, all of them and no others, on every rank and for every
/// part: pages `k * pages ..` of a request hold its tokens `k * tokens ..`. Whole blocks can be shared by requests
/// that begin with the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixBlock {
    /// Pages of each rank.
    pub pages: u32,
    /// Tokens in them.
    pub tokens: u64,
}

impl Placement {
    /// The unit in which prefixes can be shared. `None` when there is none: pages of different parts hold different
    /// tokens. With KV sharding it is one logical page, which its owner holds alone. State per request lies in slots, not in pages: whoever shares rows
    /// says where there is a state for them.
    ///
    /// ```
    /// use kvferry_plan::{CacheShape, Dtype, LayoutSpec, PrefixBlock};
    /// let block = |spec: &str| -> Result<_, Box<dyn std::error::Error>> {
    ///     Ok(spec.parse::<LayoutSpec>()?.placement(&CacheShape::mla(2, 96), Dtype::Bf16)?.prefix_block())
    /// };
    /// assert_eq!(block("tp=2,page=16")?, Some(PrefixBlock { pages: 1, tokens: 16 }));
    /// assert_eq!(block("tp=4,dcp=4,page=16")?, Some(PrefixBlock { pages: 1, tokens: 64 }));
    /// // Pages end inside of what is dealt at a time; every third one does not.
    /// assert_eq!(block("tp=2,dcp=2,interleave=6,page=4")?, Some(PrefixBlock { pages: 3, tokens: 24 }));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn prefix_block(&self) -> Option<PrefixBlock> {
        let (mut pages, mut per_page) = (1_u32, None);
        for part in &self.parts {
            if part.part.is_state() {
                continue;
            }
            if part.page_size == 0 {
                return None;
            }
            let ranks = match part.tokens {
                TokenMap::Dense | TokenMap::PageSharded { .. } => 1,
                TokenMap::Interleaved { ranks, interleave } => {
                    // Every rank has whole turns of the deal when the rows of a block are a multiple of one turn.
                    let turn = interleave.checked_div(gcd(interleave, part.page_size))?;
                    pages = (pages / gcd(pages, turn)).checked_mul(turn)?;
                    ranks
                }
            };
            let tokens = u64::from(part.page_size) * u64::from(ranks);
            if tokens == 0 || *per_page.get_or_insert(tokens) != tokens {
                return None;
            }
        }
        Some(PrefixBlock { pages, tokens: per_page?.checked_mul(u64::from(pages))? })
    }
}

/// Greatest common divisor; of 0 and `b` it is `b`.
fn gcd(a: u32, b: u32) -> u32 {
    let (mut a, mut b) = (a, b);
    while let Some(rest) = b.checked_rem(a) {
        (a, b) = (rest, a);
    }
    b
}
