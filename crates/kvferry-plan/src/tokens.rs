//! Who holds which token, and where among its own.

use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::Token;

/// How the tokens of a request are dealt to the ranks that share a head group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(map)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TokenMap {
    /// Every rank holds every token.
    #[n(0)]
    Dense,
    /// Decode context parallelism: token `t` is on DCP rank `(t / interleave) % ranks`.
    #[n(1)]
    Interleaved {
        /// DCP size; divides the attention TP.
        #[n(0)]
        ranks: u32,
        /// Consecutive tokens dealt at a time.
        #[n(1)]
        interleave: u32,
    },
    /// KV sharding: logical page `l` is on shard rank `l % ranks`, as local page `l / ranks`. Ownership comes
    /// from the page id, not from the position.
    #[n(2)]
    PageSharded {
        /// Shard group size.
        #[n(0)]
        ranks: u32,
    },
}

impl TokenMap {
    /// Consecutive attention TP ranks over which the tokens of one head group are dealt.
    pub(crate) fn dealt_in_tp(self) -> u32 {
        match self {
            Self::Interleaved { ranks, .. } => ranks.max(1),
            Self::Dense | Self::PageSharded { .. } => 1,
        }
    }

    /// Number of different token classes: ranks with the same class hold the same tokens.
    #[must_use]
    pub fn classes(self) -> u32 {
        match self {
            Self::Dense => 1,
            Self::Interleaved { ranks, .. } | Self::PageSharded { ranks } => ranks,
        }
    }

    /// Where `class` keeps `token`: the index among the tokens it holds, or `None` if another class holds it.
    /// For [`TokenMap::PageSharded`] ownership is decided by page ids, so this counts positions (all of them).
    ///
    /// ```
    /// use kvferry_plan::{Token, TokenMap};
    /// let dcp = TokenMap::Interleaved { ranks: 4, interleave: 1 };
    /// assert_eq!(dcp.local(Token(6), 2), Some(1));
    /// assert_eq!(dcp.local(Token(6), 3), None);
    /// ```
    #[must_use]
    pub fn local(self, token: Token, class: u32) -> Option<u64> {
        match self {
            Self::Dense | Self::PageSharded { .. } => Some(token.0),
            Self::Interleaved { ranks, interleave } => {
                let (n, il) = (u64::from(ranks), u64::from(interleave));
                let block = token.0.checked_div(il)?;
                (block.checked_rem(n)? == u64::from(class)).then(|| block / n * il + token.0 % il)
            }
        }
    }

    /// The token at local index `local` of `class`: the inverse of [`TokenMap::local`].
    #[must_use]
    pub fn token(self, local: u64, class: u32) -> Option<Token> {
        match self {
            Self::Dense | Self::PageSharded { .. } => Some(Token(local)),
            Self::Interleaved { ranks, interleave } => {
                let (n, il) = (u64::from(ranks), u64::from(interleave));
                let cycle = local.checked_div(il)?;
                let block = cycle.checked_mul(n)?.checked_add(u64::from(class))?;
                block.checked_mul(il)?.checked_add(local % il).map(Token)
            }
        }
    }

    /// How many of the tokens `0 .. end` `class` holds: the exact count on a partial last page.
    ///
    /// Source: `(end / cycle) * il + clamp(end % cycle - class * il, 0, il)` with `cycle = ranks * il`.
    ///
    /// ```
    /// use kvferry_plan::{Token, TokenMap};
    /// let dcp = TokenMap::Interleaved { ranks: 4, interleave: 1 };
    /// assert_eq!(dcp.owned(Token(1), 0), 1);
    /// assert_eq!(dcp.owned(Token(1), 3), 0);
    /// assert_eq!(dcp.owned(Token(257), 0), 65);
    /// ```
    #[must_use]
    pub fn owned(self, end: Token, class: u32) -> u64 {
        match self {
            Self::Dense | Self::PageSharded { .. } => end.0,
            Self::Interleaved { ranks, interleave } => {
                let (n, il) = (u64::from(ranks), u64::from(interleave));
                let Some(cycle) = n.checked_mul(il).filter(|c| *c > 0) else { return 0 };
                let rest = (end.0 % cycle).saturating_sub(u64::from(class).saturating_mul(il)).min(il);
                end.0 / cycle * il + rest
            }
        }
    }
}
