//! Recorded from SGLang 0.5.23's own functions (`tests/vectors/`): which rank sends what. Where that system refuses and
//! we serve, the case is checked against the naive copier and counted as "beyond".

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod naive;

use std::collections::BTreeSet;

use kvferry_plan::*;
use naive::{Case, table};
use serde_json::Value;

fn vectors(name: &str) -> Value {
    let path = format!("{}/tests/vectors/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("no list {key}"))
}

fn numbers(value: &Value, key: &str) -> Vec<u64> {
    list(value, key).iter().map(|n| n.as_u64().unwrap()).collect()
}

fn number(value: &Value, key: &str) -> u32 {
    value[key].as_u64().unwrap_or_else(|| panic!("no number {key}")) as u32
}

fn latent(tp: u32, cp: u32, page: u32, tokens: TokenMap) -> Placement {
    let mut placement = Placement::single(&CacheShape::mla(1, 4), page, Dtype::Bf16);
    (placement.tp, placement.cp, placement.parts[0].tokens) = (tp, cp, tokens);
    placement
}

/// (source page, position in the target's table) of whole pages that `rank` of a source sends.
fn sent_pages(src: &Placement, rank: u32, pages: &[u64], start: u64) -> Vec<(u64, u64)> {
    let page = u64::from(src.parts[0].page_size);
    let pair =
        Pair::new(CacheShape::mla(1, 4), src.clone(), latent(1, 1, page as u32, TokenMap::Dense)).unwrap();
    let unread = std::iter::repeat_n(0, start as usize);
    let from = PageTable(unread.chain(pages.iter().copied()).map(|page| PageId(page as u32)).collect());
    let to = PageTable::identity((start + pages.len() as u64) as u32);
    let tokens = TokenRange::new(start * page, (start + pages.len() as u64) * page);
    let (from, to) = (End { rank: RankId(rank), table: &from }, End { rank: RankId(0), table: &to });
    let plan = pair.plan(from, to, tokens).unwrap();
    let rows: Vec<_> = plan.runs().iter().flat_map(Run::expand).collect();
    let mut sent: Vec<_> = rows.iter().map(|(_, src, dst)| (src.0 / page, dst.0 / page)).collect();
    assert_eq!(sent.len() as u64 % page, 0, "whole pages");
    sent.dedup();
    sent
}

fn sharded(ranks: u32) -> Placement {
    latent(ranks, 1, 2, TokenMap::PageSharded { ranks })
}

#[test]
fn a_shard_rank_sends_the_recorded_pages() {
    let file = vectors("shard_filter");
    let mut checked = 0;
    for case in list(&file, "cases") {
        let pages = numbers(case, "kv_indices");
        let sent = sent_pages(
            &sharded(number(case, "shard_size")),
            number(case, "shard_rank"),
            &pages,
            u64::from(number(case, "start")),
        );
        let recorded: Vec<_> = numbers(case, "local").into_iter().zip(numbers(case, "positions")).collect();
        assert_eq!(sent, recorded, "{}", case["note"]);
        checked += 1;
    }
    for case in list(&file, "sender") {
        let pages = numbers(case, "page_ids");
        for step in list(case, "steps") {
            let chunk = numbers(step, "chunk");
            let piece = &pages[chunk[0] as usize..chunk[1] as usize];
            let sent =
                sent_pages(&sharded(number(case, "shard_size")), number(case, "shard_rank"), piece, chunk[0]);
            let recorded: Vec<_> =
                numbers(step, "local").into_iter().zip(numbers(step, "positions")).collect();
            assert_eq!(sent, recorded, "{case}");
            checked += 1;
        }
    }
    assert_eq!(checked, 143 + 116);
}

/// Where the recorded owners are cyclic, the rotation alone says which positions a rank sends: to the rank, and to a
/// receiver that knows none of the pages.
#[test]
fn recorded_positions_follow_from_the_rotation() {
    let file = vectors("shard_filter");
    let mut checked = 0;
    let mut check = |ranks: u32, rank: u32, pages: &[u64], start: u64, positions: &[u64]| {
        let side = sharded(ranks);
        let table = PageTable(pages.iter().map(|page| PageId(*page as u32)).collect());
        let Ok(first) = side.rotation(&table) else { return };
        let before = (start % u64::from(ranks)) as u32;
        let rotation = Rotation((first.0 + ranks - before) % ranks);
        let tokens = TokenRange::new(start * 2, (start + pages.len() as u64) * 2);
        let entries = side.entries(RankId(rank), tokens, rotation);
        assert_eq!(entries.iter().collect::<Vec<_>>(), positions, "{pages:?} from {start}");
        let told: Vec<_> = (0..pages.len() as u64).map(|k| u64::from(rotation.0) + start + k).collect();
        let seen: Vec<_> = sent_pages(&side, rank, &told, start).into_iter().map(|(_, at)| at).collect();
        assert_eq!(seen, positions, "{pages:?} from {start}");
        checked += 1;
    };
    for case in list(&file, "cases") {
        let (ranks, rank) = (number(case, "shard_size"), number(case, "shard_rank"));
        let start = u64::from(number(case, "start"));
        check(ranks, rank, &numbers(case, "kv_indices"), start, &numbers(case, "positions"));
    }
    for case in list(&file, "sender") {
        let (ranks, rank) = (number(case, "shard_size"), number(case, "shard_rank"));
        let pages = numbers(case, "page_ids");
        for step in list(case, "steps") {
            let [from, to] = numbers(step, "chunk")[..] else { panic!("{step}") };
            let piece = &pages[from as usize..to as usize];
            check(ranks, rank, piece, from, &numbers(step, "positions"));
        }
    }
    // Of 143 and 116 recorded ones; in the others owners are out of turn.
    assert_eq!(checked, 25 + 116);
}

#[test]
fn logical_pages_lie_where_recorded() {
    for case in list(&vectors("shard_filter"), "placement") {
        let (ranks, page) = (number(case, "shard_size"), number(case, "page_size"));
        let src = latent(ranks, 1, page, TokenMap::PageSharded { ranks });
        let pair = Pair::new(CacheShape::mla(1, 4), src, latent(1, 1, page, TokenMap::Dense)).unwrap();
        let places =
            numbers(case, "loc").into_iter().zip(numbers(case, "owner")).zip(numbers(case, "local_row"));
        for ((token, owner), row) in places {
            let table = PageTable::identity((token / u64::from(page) + 1) as u32);
            for rank in 0..ranks {
                let ends =
                    (End { rank: RankId(rank), table: &table }, End { rank: RankId(0), table: &table });
                let plan = pair.plan(ends.0, ends.1, TokenRange::new(token, token + 1)).unwrap();
                let rows: Vec<_> = plan.runs().iter().map(|run| run.src_row.0).collect();
                let expected = if u64::from(rank) == owner { vec![row] } else { vec![] };
                assert_eq!(rows, expected, "token {token} on rank {rank} of {ranks}");
            }
        }
    }
}

/// The recorded CP ranks cut each chunk in contiguous pieces, ours take turns; the same pages arrive, each once.
#[test]
fn cp_ranks_send_the_recorded_pages_together() {
    for case in list(&vectors("shard_filter"), "cp") {
        let (chunk, first) = (numbers(case, "chunk"), u64::from(number(case, "first_index")));
        let pages: Vec<u64> = (0..chunk[1] - chunk[0]).map(|i| first + i).collect();
        let src = latent(1, number(case, "cp_size"), 2, TokenMap::Dense);
        let mut all: Vec<u64> =
            (0..src.cp).flat_map(|r| sent_pages(&src, r, &pages, chunk[0])).map(|(page, _)| page).collect();
        all.sort_unstable();
        assert_eq!(all, pages, "{case}");
        assert!(numbers(case, "out").iter().all(|page| all.contains(page)), "{case}");
    }
}

#[test]
fn chunks_send_the_recorded_pages_and_tokens() {
    let mut checked = 0;
    for case in list(&vectors("chunks_and_scratch"), "sends") {
        let page = u64::from(number(case, "page_size"));
        let prefix = u64::from(number(case, "decode_prefix_len"));
        let pages = PageTable(numbers(case, "row_pages").into_iter().map(|p| PageId(p as u32)).collect());
        let side = latent(1, 1, page as u32, TokenMap::Dense);
        let pair = Pair::new(CacheShape::mla(1, 4), side.clone(), side).unwrap();
        let mut coverage = Coverage::new(1, TokenRange::new(prefix, u64::from(number(case, "prompt_len"))));
        for send in list(case, "steps").iter().flat_map(|step| list(step, "sends")) {
            let start = prefix + numbers(send, "index_slice")[0] * page;
            let tokens = TokenRange::new(start, start + u64::from(number(send, "num_kv_tokens")));
            let to = PageTable::identity(pages.0.len() as u32);
            let (from, to) = (End { rank: RankId(0), table: &pages }, End { rank: RankId(0), table: &to });
            let plan = pair.plan(from, to, tokens).unwrap();
            let rows: Vec<_> = plan.runs().iter().flat_map(Run::expand).map(|(_, src, _)| src.0).collect();
            let mut touched: Vec<u64> = rows.iter().map(|row| row / page).collect();
            touched.dedup();
            assert_eq!((touched, rows.len() as u64), (numbers(send, "pages"), tokens.len()), "{send}");
            assert_eq!(coverage.accept(RankId(0), tokens), Ok(Accepted::New), "{send}");
            checked += 1;
        }
        assert!(coverage.complete(), "{case}");
    }
    assert!(checked > 100, "{checked}");
}

#[test]
fn layers_pair_as_recorded_by_global_id() {
    let (mut paired, mut inexpressible) = (0, 0);
    for case in list(&vectors("slices_and_maps"), "pairs") {
        // Without ids upstream pairs by position; we always have ids, so positions are the ids.
        let ids = |key: &str, count: &str| -> Vec<LayerId> {
            let ids = numbers(case, key);
            let count = number(case, count) as usize;
            match ids.is_empty() {
                true => (0..count as u32).map(LayerId).collect(),
                false => ids.into_iter().map(|id| LayerId(id as u32)).collect(),
            }
        };
        let (src, dst) = (ids("src_ids", "n_src"), ids("dst_ids", "n_dst"));
        let one_sided = numbers(case, "src_ids").is_empty() != numbers(case, "dst_ids").is_empty();
        let miscounted = src.len() != number(case, "n_src") as usize;
        if one_sided || miscounted {
            // Our layers cannot be without a global id.
            inexpressible += 1;
            continue;
        }
        let mut all: Vec<LayerId> = src.iter().chain(&dst).copied().collect();
        all.sort_unstable();
        all.dedup();
        let shape = CacheShape { parts: vec![PartShape::rows(Part::Latent, all.clone(), 1, 4)] };
        let side = |held: &[LayerId]| {
            let mut placement = Placement::single(&shape, 4, Dtype::Bf16);
            let rest = all.iter().copied().filter(|layer| !held.contains(layer)).collect();
            placement.stages = vec![held.to_vec(), rest];
            placement
        };
        let pair = Pair::new(shape.clone(), side(&src), side(&dst)).unwrap();
        let table = PageTable::identity(1);
        let end = End { rank: RankId(0), table: &table };
        let plan = pair.plan(end, end, TokenRange::new(0, 4)).unwrap();
        let moved = plan.groups().iter().flat_map(|group| group.layers.clone());
        let at = |ids: &[LayerId], id| ids.iter().position(|other| *other == id).unwrap();
        let ours: Vec<_> = moved.map(|id| [at(&src, id), at(&dst, id)]).collect();
        let recorded = list(&case["expected"], "pairs");
        assert_eq!(serde_json::to_value(&ours).unwrap(), Value::from(recorded), "{case}");
        paired += 1;
    }
    assert_eq!((paired, inexpressible), (4, 3));
}

/// What the recorded source ranks hold together is what our source ranks send: the target misses nothing either way.
#[test]
fn each_target_gets_the_bytes_that_the_recorded_ranks_hold() {
    let (mut compared, mut beyond) = (0, Vec::new());
    for case in list(&vectors("slices_and_maps"), "rank_map") {
        let flag = |key: &str| case[key].as_bool().unwrap();
        let (mla, hybrid) = (flag("mla"), flag("hybrid_mla"));
        let (tp, cp) = (number(case, "prefill_tp"), number(case, "prefill_cp"));
        let mut shape = if mla || hybrid { CacheShape::mla(2, 4) } else { CacheShape::gqa(2, 4, 2) };
        if hybrid {
            let [_, recurrent] = CacheShape::kda([LayerId(0), LayerId(1)].into(), 8, 1, 2);
            shape.parts.push(recurrent);
        }
        let side = |tp, cp, pp: u32, tokens| {
            let mut side = Placement::single(&shape, 2, Dtype::Bf16);
            (side.tp, side.cp) = (tp, cp);
            if pp == 2 {
                side.stages = vec![vec![LayerId(0)], vec![LayerId(1)]];
            }
            side.parts.iter_mut().filter(|p| !p.part.is_state()).for_each(|p| p.tokens = tokens);
            side
        };
        // Over CP ranks, or for pure MLA over TP ranks.
        let tokens = match (flag("prefill_sharded"), cp) {
            (true, 2..) => TokenMap::PageSharded { ranks: cp },
            (true, _) if mla => TokenMap::PageSharded { ranks: tp },
            _ => TokenMap::Dense,
        };
        let src = side(tp, cp, number(case, "prefill_pp"), tokens);
        let dst = side(number(case, "decode_tp"), 1, number(case, "decode_pp"), TokenMap::Dense);
        let whole = TokenRange::new(0, 40);
        let case_of = Case {
            shape: shape.clone(),
            src: src.clone(),
            dst: dst.clone(),
            src_table: table(&src, 40, 1),
            dst_table: table(&dst, 40, 2),
            chunks: vec![whole],
        };
        // Every target byte once, by any of our source ranks.
        case_of.check_bytes();
        case_of.check_rotation(Rotation(1));
        let expected = &case["expected"];
        if expected["error"].is_string() {
            beyond.push(format!("sharded prefill tp={tp} to decode tp={}", dst.tp));
            continue;
        }
        let pp = numbers(expected, "target_pp_ranks");
        // Decode with stages asks one stage: its own.
        let stage = if dst.stages.len() > 1 { pp[0] as u32 } else { 0 };
        let target = RankId(stage * dst.tp + number(case, "decode_rank"));
        let mut held = BTreeSet::new();
        for (stage, cp_rank, tp_rank) in pp.iter().flat_map(|p| {
            let tps = numbers(expected, "target_tp_ranks");
            let cps = numbers(expected, "target_cp_ranks");
            cps.into_iter()
                .flat_map(move |c| tps.clone().into_iter().map(move |t| (*p as u32, c as u32, t as u32)))
        }) {
            let rank = RankId((stage * cp + cp_rank) * tp + tp_rank);
            held.extend(coordinates(&shape, &src, rank, &case_of.src_table, whole));
        }
        let wanted = coordinates(&shape, &dst, target, &case_of.dst_table, whole);
        assert!(wanted.is_subset(&held), "{case}");
        compared += 1;
    }
    assert_eq!((compared, beyond.len()), (47, 3), "beyond: {beyond:?}");
}

/// Every (part, layer, head, token) that a rank holds.
fn coordinates(
    shape: &CacheShape,
    side: &Placement,
    rank: RankId,
    table: &PageTable,
    tokens: TokenRange,
) -> BTreeSet<(Part, LayerId, u32, u64)> {
    let mut held = BTreeSet::new();
    for part in &shape.parts {
        let rows = if part.state.is_some() { 0..1 } else { tokens.start.0..tokens.end.0 };
        for token in rows {
            if part.state.is_none() && naive::row(side, part.part, rank, table, token).is_none() {
                continue;
            }
            for layer in side.layers(part, rank) {
                held.extend(side.heads(part, rank).map(|head| (part.part, layer, head, token)));
            }
        }
    }
    held
}

/// Equal DCP ranks exchange whole pages; what upstream refuses is served.
#[test]
fn dcp_topologies_that_are_refused_upstream_are_served() {
    let mut beyond = Vec::new();
    for case in list(&vectors("slices_and_maps"), "dcp_topology") {
        let latent = case["mla"] == true || case["hybrid_mla"] == true;
        let shape = if latent { CacheShape::mla(1, 4) } else { CacheShape::gqa(1, 4, 2) };
        let side = |key: &str| {
            let ranks = numbers(case, key)[0] as u32;
            let mut side = Placement::single(&shape, 2, Dtype::Bf16);
            if ranks > 1 {
                side.tp = ranks;
                side.parts.iter_mut().for_each(|p| p.tokens = TokenMap::Interleaved { ranks, interleave: 1 });
            }
            side
        };
        let (src, dst) = (side("prefill_dcp"), side("decode_dcp"));
        let (src_table, dst_table) = (table(&src, 30, 1), table(&dst, 30, 2));
        let chunks = vec![TokenRange::new(3, 17), TokenRange::new(17, 30)];
        Case { shape, src, dst, src_table, dst_table, chunks }.check_bytes();
        if case["expected"] == "RuntimeError" {
            beyond.push(format!("{} to {}", case["prefill_dcp"], case["decode_dcp"]));
        }
    }
    assert_eq!(beyond, ["[1,0] to [4,2]", "[4,1] to [4,2]", "[4,1] to [1,0]"]);
}

/// Prefixes that end inside a virtual page, which upstream refuses: every length, every chunk cut.
#[test]
fn a_prefix_that_decode_holds_may_end_at_any_token() {
    for (tp, ranks) in [(4, 4), (4, 2), (1, 1)] {
        let shape = CacheShape::mla(2, 4);
        let src = Placement::single(&shape, 4, Dtype::Bf16);
        let mut dst = src.clone();
        dst.tp = tp;
        if ranks > 1 {
            dst.parts[0].tokens = TokenMap::Interleaved { ranks, interleave: 1 };
        }
        for prefix in 0..33 {
            let chunks = vec![TokenRange::new(prefix, 35), TokenRange::new(35, 37)];
            let (src_table, dst_table) = (table(&src, 37, prefix), table(&dst, 37, 9));
            let case = Case {
                shape: shape.clone(),
                src: src.clone(),
                dst: dst.clone(),
                src_table,
                dst_table,
                chunks,
            };
            case.check_rows();
            case.check_bytes();
            case.check_covers();
        }
    }
}
