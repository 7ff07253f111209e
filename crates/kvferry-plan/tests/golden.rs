//! Rows, owners and head slices recorded from SGLang 0.5.23's own functions (`tests/vectors/`): what our plans
//! expand to must be the recorded rows.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::collections::BTreeSet;

use kvferry_plan::*;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn vectors(name: &str) -> Value {
    let path = format!("{}/tests/vectors/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

/// One recorded call: pages of one chunk on the dense side, pages of the whole suffix on the DCP side.
struct DcpCase {
    src_pages: Vec<u64>,
    dst_pages: Vec<u64>,
    page: u32,
    ranks: u32,
    rank: RankId,
    /// Tokens that decode already holds, and where the chunk begins behind them.
    prefix: u64,
    tokens: TokenRange,
}

impl DcpCase {
    fn new(input: &Value) -> Self {
        let number = |key: &str| input[key].as_u64().unwrap_or(0);
        let page = number("physical_page_size") as u32;
        let src_pages = numbers(&input["src_pages"]);
        let start = number("decode_prefix_len") + number("src_page_offset") * u64::from(page);
        let count = input["num_kv_tokens"].as_u64().unwrap_or(src_pages.len() as u64 * u64::from(page));
        Self {
            src_pages,
            dst_pages: numbers(&input["dst_pages"]),
            page,
            ranks: number("dcp_size") as u32,
            rank: RankId(number("dcp_rank") as u32),
            prefix: number("decode_prefix_len"),
            tokens: TokenRange::new(start, start + count),
        }
    }

    /// Our table counts from token 0 of the request; pages before the recorded ones are never read.
    fn table(pages: &[u64], before: u64) -> PageTable {
        let unread = std::iter::repeat_n(PageId(u32::MAX), before as usize);
        PageTable(unread.chain(pages.iter().map(|page| PageId(*page as u32))).collect())
    }

    /// (source rows, target rows) of our plan to a target whose latent rows are laid out so.
    fn rows(&self, tokens: TokenMap, page_size: u32) -> Result<(Vec<u64>, Vec<u64>), Unsupported> {
        let shape = CacheShape::mla(1, 576);
        let src = Placement::single(&shape, self.page, Dtype::Bf16);
        let mut dst = Placement::single(&shape, page_size, Dtype::Bf16);
        (dst.tp, dst.parts[0].tokens) = (self.ranks, tokens);
        let pair = Pair::new(shape, src, dst).unwrap();
        let src_table = Self::table(&self.src_pages, self.tokens.start.0 / u64::from(self.page));
        let virtual_page = u64::from(self.page) * u64::from(self.ranks);
        let dst_table = Self::table(&self.dst_pages, self.prefix / virtual_page);
        let plan = pair.plan(
            End { rank: RankId(0), table: &src_table },
            End { rank: self.rank, table: &dst_table },
            self.tokens,
        )?;
        Ok(plan.runs().iter().flat_map(Run::expand).map(|(_, src, dst)| (src.0, dst.0)).unzip())
    }
}

/// The recorded runs of consecutive rows are what our rows coalesce to; where many, only their digest is recorded, and
/// for long drafts nothing.
fn assert_groups(expected: &Value, key: &str, rows: (&[u64], &[u64]), note: &str) {
    let ours = groups_of(rows);
    if let Some(digest) = expected[format!("{key}_sha256")].as_str() {
        assert_eq!(digest, sha256(&ours.concat()), "{note}: {key}");
    }
    if let Some(groups) = expected[key].as_array() {
        assert_eq!(groups.iter().map(numbers).collect::<Vec<_>>(), ours, "{note}: {key}");
    }
}

fn groups_of((src, dst): (&[u64], &[u64])) -> Vec<Vec<u64>> {
    let pairs = src.iter().zip(dst).map(|(src, dst)| RowRun { src: Row(*src), dst: Row(*dst), rows: 1 });
    coalesce(pairs).map(|run| vec![run.src.0, run.dst.0, run.rows]).collect()
}

fn sha256(rows: &[u64]) -> String {
    let mut hash = Sha256::new();
    rows.iter().for_each(|row| hash.update((*row as i64).to_le_bytes()));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The recorded rows are given in full, or as a digest where they are many.
fn assert_rows(expected: &Value, key: &str, rows: &[u64], note: &str) {
    let full = &expected[key];
    let digest = &expected[format!("{key}_sha256")];
    assert!(full.is_array() || digest.is_string(), "{note}: nothing recorded for {key}");
    if full.is_array() {
        assert_eq!(numbers(full), rows, "{note}: {key}");
    }
    if let Some(digest) = digest.as_str() {
        assert_eq!(digest, sha256(rows), "{note}: {key}");
    }
}

#[test]
fn dcp_rows_are_the_recorded_rows() {
    let (mut compared, mut refused) = (0, 0);
    for case in vectors("dcp_plan")["cases"].as_array().unwrap() {
        let (note, expected) = (case["note"].as_str().unwrap(), &case["expected"]);
        let case = DcpCase::new(&case["input"]);
        let dcp = TokenMap::Interleaved { ranks: case.ranks, interleave: 1 };
        let rows = case.rows(dcp, case.page);
        if expected["error"].is_string() {
            assert_eq!(rows.unwrap_err().axis, Axis::PageTable, "{note}");
            refused += 1;
            continue;
        }
        let (src, dst) = rows.unwrap();
        assert_eq!(expected["n_target"].as_u64(), Some(src.len() as u64), "{note}");
        assert_rows(expected, "target_src", &src, note);
        assert_rows(expected, "target_dst", &dst, note);
        assert_groups(expected, "target_groups", (&src, &dst), note);
        // Draft rows: every rank holds every token, on pages of a virtual page's tokens.
        let (src, dst) = case.rows(TokenMap::Dense, case.page * case.ranks).unwrap();
        assert_eq!(expected["n_draft"].as_u64(), Some(src.len() as u64), "{note}");
        assert_rows(expected, "draft_src", &src, note);
        assert_rows(expected, "draft_dst", &dst, note);
        assert_groups(expected, "draft_groups", (&src, &dst), note);
        compared += 1;
    }
    assert_eq!((compared, refused), (320, 1));
}

#[test]
fn dcp_owners_and_counts_are_the_recorded_ones() {
    let file = vectors("dcp_ownership");
    let (mut counts, mut places) = (0, 0);
    for case in file["lens"].as_array().unwrap() {
        let (map, class) = dcp(case);
        let owned = |end: u64| map.owned(Token(end), class);
        let (lens, starts) = (numbers(&case["lens"]), numbers(&case["start"]));
        let (whole, from_start) = (numbers(&case["owned"]), numbers(&case["owned_from_start"]));
        for (i, len) in lens.iter().enumerate() {
            assert_eq!(owned(*len), whole[i], "{map:?} {class} {len}");
            assert_eq!(owned(starts[i] + len) - owned(starts[i]), from_start[i], "{map:?} {class} {len}");
            counts += 1;
        }
    }
    for case in file["local"].as_array().unwrap() {
        let (map, class) = dcp(case);
        let pairs = case["indices"].as_array().unwrap().iter().zip(case["local"].as_array().unwrap());
        for (index, local) in pairs {
            // The recorded function passes padding, -1, through; our tokens cannot be negative.
            let Some(token) = index.as_u64() else { continue };
            assert_eq!(map.local(Token(token), class), local.as_u64(), "{map:?} {class} {token}");
            if let Some(local) = local.as_u64() {
                assert_eq!(map.token(local, class), Some(Token(token)), "{map:?} {class} {token}");
            }
            places += 1;
        }
    }
    assert!(counts > 300 && places > 150, "{counts} {places}");
}

fn dcp(case: &Value) -> (TokenMap, u32) {
    let number = |key: &str| case[key].as_u64().unwrap() as u32;
    (TokenMap::Interleaved { ranks: number("dcp_size"), interleave: number("interleave") }, number("rank"))
}

/// (source rank, target rank) that the recorded system connects: the larger side's ranks in groups.
fn connected(src_tp: u32, dst_tp: u32, src: u32, dst: u32) -> bool {
    if dst_tp >= src_tp { src == dst / (dst_tp / src_tp) } else { dst == src / (src_tp / dst_tp) }
}

/// What each target head slot receives, as our plans say it: (slot, head, source rank).
fn slots(src_tp: u32, dst_tp: u32, dst: RankId, heads: u32) -> BTreeSet<(u32, u32, u32)> {
    let shape = CacheShape::gqa(1, heads, 1);
    let tp = |tp| Placement { tp, ..Placement::single(&shape, 1, Dtype::Fp8E4m3) };
    let (src_side, dst_side) = (tp(src_tp), tp(dst_tp));
    let pair = Pair::new(shape.clone(), src_side.clone(), dst_side).unwrap();
    // As many one-token pages as there are ranks, so that everybody's turn comes.
    let table = PageTable::identity(src_tp);
    (0..src_tp)
        .flat_map(|src| {
            let ends = (End { rank: RankId(src), table: &table }, End { rank: dst, table: &table });
            let plan = pair.plan(ends.0, ends.1, TokenRange::new(0, u64::from(src_tp))).unwrap();
            let slice = plan.groups().first().map(|group| group.slice);
            let first = src_side.heads(&shape.parts[0], RankId(src)).start;
            slice.into_iter().flat_map(move |slice| {
                (0..slice.len.0).map(move |i| {
                    ((slice.dst_offset.0 + i) as u32, first + (slice.src_offset.0 + i) as u32, src)
                })
            })
        })
        .collect()
}

/// Each recorded slice puts the same heads in the same slots as our plans do. Where heads are not replicated the
/// sender is the same too; above the head count we deal pages among the replicas, so that only the bytes compare.
#[test]
fn head_slices_put_the_recorded_heads_in_the_recorded_slots() {
    let mut compared = 0;
    for record in vectors("slices_and_maps")["head_slice"].as_array().unwrap() {
        let n: Vec<u32> = numbers(record).into_iter().map(|n| n as u32).collect();
        let [src_tp, dst_tp, src, dst, heads, src_start, src_num, dst_start, dst_num] = n[..] else {
            panic!("{record}")
        };
        if !connected(src_tp, dst_tp, src, dst) {
            continue;
        }
        assert_eq!(src_num, dst_num, "{record}");
        let ours = slots(src_tp, dst_tp, RankId(dst), heads);
        let first = shard_replicated(heads, src_tp, src).start;
        for i in 0..src_num {
            let (slot, head) = (dst_start + i, first + src_start + i);
            let senders: Vec<u32> = ours
                .iter()
                .filter(|(s, h, _)| (*s, *h) == (slot, head))
                .map(|(.., sender)| *sender)
                .collect();
            assert!(senders.contains(&src), "{record}: {ours:?}");
            if src_tp <= heads {
                assert_eq!(senders, [src], "{record}");
            }
        }
        // Nothing goes to a slot but one head.
        let heads_of = |slot| ours.iter().filter(|o| o.0 == slot).map(|o| o.1).collect::<BTreeSet<_>>();
        assert!((0..).map(heads_of).take_while(|h| !h.is_empty()).all(|h| h.len() == 1), "{record}");
        compared += 1;
    }
    assert!(compared > 150, "{compared}");
}
