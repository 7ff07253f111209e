//! The one rule by which heads, layers and other whole items are dealt to owners.

use core::ops::Range;

/// The rule by which `count` whole items are dealt to `n` owners as *work*: owner `r` gets
/// `floor(r*count/n) .. floor((r+1)*count/n)`, which is empty for some owners when `n > count`.
///
/// ```
/// use kvferry_plan::shard;
/// assert_eq!(shard(9, 4, 1), 2..4);
/// assert_eq!(shard(1, 2, 0), 0..0);
/// assert_eq!(shard(1, 2, 1), 0..1);
/// ```
#[must_use]
pub fn shard(count: u32, n: u32, r: u32) -> Range<u32> {
    if n == 0 || r >= n {
        return 0..0;
    }
    let cut = |r: u32| (u64::from(r) * u64::from(count) / u64::from(n)) as u32;
    cut(r)..cut(r + 1)
}

/// The rule by which `count` stored heads are held by `n` owners: as [`shard`] while `n <= count`; with more
/// owners than heads, owner `r` holds head `floor(r*count/n)`, so heads are replicated over consecutive owners.
///
/// ```
/// use kvferry_plan::shard_replicated;
/// let held: Vec<_> = (0..4).map(|r| shard_replicated(2, 4, r)).collect();
/// assert_eq!(held, [0..1, 0..1, 1..2, 1..2]);
/// ```
#[must_use]
pub fn shard_replicated(count: u32, n: u32, r: u32) -> Range<u32> {
    if n <= count || count == 0 || r >= n {
        return shard(count, n, r);
    }
    let head = (u64::from(r) * u64::from(count) / u64::from(n)) as u32;
    head..head + 1
}

/// The owners that hold the same heads as owner `r` under [`shard_replicated`].
pub(crate) fn same_heads(count: u32, n: u32, r: u32) -> Range<u32> {
    let held = shard_replicated(count, n, r);
    if n <= count || held.is_empty() {
        return r..r.saturating_add(1);
    }
    let first = |head: u32| (u64::from(head) * u64::from(n)).div_ceil(u64::from(count)) as u32;
    first(held.start)..first(held.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_of_the_same_heads_are_those_a_scan_finds() {
        for (count, n) in (1..=9).flat_map(|count| (1..=20).map(move |n| (count, n))) {
            for r in 0..n {
                let mine = shard_replicated(count, n, r);
                let scan: alloc::vec::Vec<_> =
                    (0..n).filter(|o| shard_replicated(count, n, *o) == mine).collect();
                assert!(same_heads(count, n, r).eq(scan), "{count} heads, owner {r} of {n}");
            }
        }
    }

    #[test]
    fn every_head_has_an_owner_and_work_is_dealt_once() {
        for (count, n) in (1..=9).flat_map(|count| (1..=20).map(move |n| (count, n))) {
            let mut held: alloc::vec::Vec<_> = (0..n).flat_map(|r| shard_replicated(count, n, r)).collect();
            held.dedup();
            assert!(held.into_iter().eq(0..count));
            assert!((0..n).flat_map(|r| shard(count, n, r)).eq(0..count));
        }
    }

    #[test]
    fn absurd_numbers_have_an_answer() {
        for n in [0, 1, u32::MAX] {
            for r in [0, 1, u32::MAX - 1, u32::MAX] {
                assert!(shard(u32::MAX, n, r).len() as u64 <= u64::from(u32::MAX));
                assert!(shard_replicated(3, n, r).len() <= 3);
                assert!(!same_heads(3, n, r).contains(&u32::MAX));
            }
        }
    }
}
