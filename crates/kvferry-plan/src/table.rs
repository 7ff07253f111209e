//! Which pages of a rank's pool a request owns.

use alloc::vec::Vec;
use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{PageId, Row};

/// A request's pages on one rank (mirrored on all ranks of an instance): entry `k` holds local rows
/// `k * page_size .. (k + 1) * page_size`, counted from token 0 of the request, held prefix included.
/// With [`crate::TokenMap::PageSharded`] the entries are logical pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[cbor(transparent)]
#[serde(transparent)]
pub struct PageTable(#[n(0)] pub Vec<PageId>);

impl PageTable {
    /// Page `k` at entry `k`: for a side whose rows do not matter, or that owns its whole pool.
    #[must_use]
    pub fn identity(pages: u32) -> Self {
        Self((0..pages).map(PageId).collect())
    }

    /// The pool row of local index `local`.
    ///
    /// ```
    /// use kvferry_plan::{PageId, PageTable, Row};
    /// let table = PageTable([PageId(7), PageId(2)].into());
    /// assert_eq!(table.row(5, 4), Some(Row(2 * 4 + 1)));
    /// assert_eq!(table.row(8, 4), None);
    /// ```
    #[must_use]
    pub fn row(&self, local: u64, page_size: u32) -> Option<Row> {
        let size = u64::from(page_size);
        let page = self.0.get(usize::try_from(local.checked_div(size)?).ok()?)?;
        u64::from(page.0).checked_mul(size)?.checked_add(local % size).map(Row)
    }
}
