//! Which pages of a rank's pool a request owns.

use alloc::{format, vec::Vec};
use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::unsupported::unsupported;
use crate::{Axis, PageId, Rotation, Row, Unsupported};

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
        Self::rotated(Rotation(0), pages)
    }

    /// Page `rotation + k` at entry `k`: for a receiver, which knows of the pages of a sharded side only who owns them.
    ///
    /// ```
    /// use kvferry_plan::{PageId, PageTable, Rotation};
    /// assert_eq!(PageTable::rotated(Rotation(2), 3), PageTable([2, 3, 4].map(PageId).into()));
    /// ```
    #[must_use]
    pub fn rotated(rotation: Rotation, pages: u32) -> Self {
        Self((0..pages).map(|k| PageId(k.saturating_add(rotation.0))).collect())
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

    /// Checks that a pool of `pages` pages can own these pages for one request: each exists and none comes twice.
    /// Asked once, when a table is granted; plans do not ask again.
    ///
    /// # Errors
    /// Names the page.
    ///
    /// ```
    /// use kvferry_plan::{PageId, PageTable};
    /// assert!(PageTable([PageId(7), PageId(2)].into()).check(8).is_ok());
    /// assert!(PageTable([PageId(7), PageId(7)].into()).check(8).is_err());
    /// assert!(PageTable([PageId(8)].into()).check(8).is_err());
    /// ```
    pub fn check(&self, pages: u32) -> Result<(), Unsupported> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        if let Some(last) = sorted.last().filter(|last| last.0 >= pages) {
            return unsupported(Axis::PageTable, format!("page {last} of a pool with {pages} pages"));
        }
        if let Some(twice) = sorted.windows(2).find(|w| w.first() == w.last()).and_then(|w| w.first()) {
            return unsupported(Axis::PageTable, format!("page {twice} is in the table twice"));
        }
        Ok(())
    }
}
