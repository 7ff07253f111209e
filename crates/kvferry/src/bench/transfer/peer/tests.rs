//! Descriptors against calls recorded from SGLang 0.5.23 (`tests/vectors/`): what its Mooncake and NIXL back ends handed to
//! the engines.

#![allow(clippy::unwrap_used, clippy::panic)]

use kvferry_plan::{
    CacheShape, Dtype, End, LayerId, PageId, PageTable, PartShape, Placement, RankId, TokenMap, TokenRange,
    shard_replicated,
};
use kvferry_transport::{DeviceId, MemoryKind};
use serde_json::Value;

use super::*;

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

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("no number {key}"))
}

/// All of an address space, so that offsets are addresses.
fn everywhere(device: u64) -> BlockSpan {
    BlockSpan { address: 0, len: Bytes(u64::MAX), kind: MemoryKind::Host, device: DeviceId(device as u32) }
}

fn table(pages: &[u64]) -> PageTable {
    PageTable(pages.iter().map(|page| PageId(*page as u32)).collect())
}

fn layers(ids: impl IntoIterator<Item = u64>) -> Vec<LayerId> {
    ids.into_iter().map(|id| LayerId(id as u32)).collect()
}

/// Entries of one-byte elements, of enough rows.
fn region(layer: LayerId, part: Part, address: u64, row: u64) -> Region {
    Region { layer, part, offset: Bytes(address), row_bytes: Bytes(row), rows: 1 << 20 }
}

fn entries(regions: &[Region], device: u64) -> Entries<'_> {
    Entries { regions, span: everywhere(device) }
}

/// A placement whose first stage has some of the layers.
fn stages(mut placement: Placement, all: &[LayerId], held: &[LayerId]) -> Placement {
    if all != held {
        let rest = all.iter().copied().filter(|layer| !held.contains(layer)).collect();
        placement.stages = vec![held.to_vec(), rest];
    }
    placement
}

fn plan(pair: &Pair, from: (u32, &[u64]), to: (u32, &[u64]), tokens: u64) -> Plan {
    let (src, dst) = (table(from.1), table(to.1));
    let end = |rank, table| End { rank: RankId(rank), table };
    pair.plan(end(from.0, &src), end(to.0, &dst), TokenRange::new(0, tokens)).unwrap()
}

fn blocks(descriptors: &[Descriptor]) -> Vec<[u64; 3]> {
    let block = |(from, to): &Descriptor| {
        assert_eq!(from.len, to.len);
        [from.address, to.address, from.len.0]
    };
    descriptors.iter().map(block).collect()
}

/// A DCP relayout: dense latent rows to one rank of several.
struct Dcp {
    pair: Pair,
    plan: Plan,
    from: Vec<Region>,
    to: Vec<Region>,
}

impl Dcp {
    fn new(case: &Value) -> Self {
        let (src_ptrs, dst_ptrs) = (numbers(case, "src_ptrs"), numbers(case, "dst_ptrs"));
        let ids =
            |key: &str| case[key].as_array().is_some_and(|ids| !ids.is_empty()).then(|| numbers(case, key));
        // Without ids entries count from the first layer of the source's stage.
        let first = case["prefill_start_layer"].as_u64().unwrap_or(0);
        let ours = layers(ids("src_layer_ids").unwrap_or_else(|| (first..).take(src_ptrs.len()).collect()));
        let all = layers(ids("dst_layer_ids").unwrap_or_else(|| (0..dst_ptrs.len() as u64).collect()));
        let (token, page, ranks) =
            (number(case, "token_bytes"), number(case, "page_size") as u32, number(case, "dcp_size") as u32);
        let shape = CacheShape { parts: vec![PartShape::rows(Part::Latent, all.clone(), 1, token as u32)] };
        let src = stages(Placement::single(&shape, page, Dtype::Fp8E4m3), &all, &ours);
        let mut dst = Placement::single(&shape, page, Dtype::Fp8E4m3);
        (dst.tp, dst.parts[0].tokens) = (ranks, TokenMap::Interleaved { ranks, interleave: 1 });
        let pair = Pair::new(shape, src, dst).unwrap();
        let rank = number(case, "dcp_rank") as u32;
        let (from, to) = (numbers(case, "src_pages"), numbers(case, "dst_pages"));
        let plan = plan(&pair, (0, &from), (rank, &to), number(case, "num_kv_tokens"));
        let regions = |layers: &[LayerId], at: &[u64]| {
            layers.iter().zip(at).map(|(layer, at)| region(*layer, Part::Latent, *at, token)).collect()
        };
        Self { from: regions(&ours, &src_ptrs), to: regions(&all, &dst_ptrs), pair, plan }
    }
}

#[test]
fn a_relayout_is_the_recorded_blocks_of_mooncake() {
    let file = vectors("mooncake_blocks");
    for case in list(&file, "dcp") {
        let Dcp { pair, plan, from, to } = Dcp::new(case);
        let ours = rows(&pair, &plan, entries(&from, 0), entries(&to, 0)).unwrap();
        assert_eq!(serde_json::to_value(blocks(&ours)).unwrap(), case["blocks"], "{case}");
    }
    assert_eq!(list(&file, "dcp").len(), 16);
}

#[test]
fn a_relayout_is_the_recorded_descriptors_of_nixl_packed_or_not() {
    let file = vectors("nixl_descs");
    let (mut apart, mut packed_ones) = (0, 0);
    for case in list(&file, "dcp") {
        let Dcp { pair, plan, from, to } = Dcp::new(case);
        let (ours, theirs) = (number(case, "src_gpu"), number(case, "dst_gpu"));
        let to = entries(&to, theirs);
        let descriptors = if case["packed"] == true {
            packed_ones += 1;
            // The recorded pointers say where each layer begins in the pack buffer.
            let block = numbers(case, "src_ptrs")[0];
            let block = BlockSpan { address: block, len: plan.bytes(), ..everywhere(ours) };
            packed(&plan, &from, block, to).unwrap()
        } else {
            apart += 1;
            rows(&pair, &plan, entries(&from, ours), to).unwrap()
        };
        // One request, unless there is nothing to move.
        assert_eq!(number(case, "n_handles"), u64::from(!descriptors.is_empty()), "{case}");
        let side = |of: fn(&Descriptor) -> BlockSpan| {
            let flat = |span: BlockSpan| [span.address, span.len.0, u64::from(span.device.0)];
            descriptors.iter().map(|both| flat(of(both))).collect::<Vec<_>>()
        };
        let recorded: Vec<_> = list(case, "xfers").iter().map(|xfer| (&xfer["src"], &xfer["dst"])).collect();
        let (src, dst) = (side(|both| both.0), side(|both| both.1));
        let (src, dst) = (serde_json::to_value(src).unwrap(), serde_json::to_value(dst).unwrap());
        let expected = if descriptors.is_empty() { vec![] } else { vec![(&src, &dst)] };
        assert_eq!(expected, recorded, "{case}");
    }
    assert_eq!((apart, packed_ones), (6, 5));
}

/// Whole pages between equal layouts, of latent rows or of keys and values, to a target with more stages' layers.
#[test]
fn pages_are_the_recorded_blocks_of_mooncake() {
    let file = vectors("mooncake_blocks");
    for case in list(&file, "generic") {
        let parts = if case["backend"] == "mla" { &[Part::Latent][..] } else { &[Part::Key, Part::Value] };
        let (item, first) = (number(case, "item_len"), number(case, "prefill_start_layer"));
        let (src_ptrs, dst_ptrs) = (numbers(case, "src_ptrs"), numbers(case, "dst_ptrs"));
        let of = |ptrs: &[u64], first: u64| layers(first..first + (ptrs.len() / parts.len()) as u64);
        let (ours, all) = (of(&src_ptrs, first), of(&dst_ptrs, 0));
        let part = |part: &Part| PartShape::rows(*part, all.clone(), 1, item as u32);
        let shape = CacheShape { parts: parts.iter().map(part).collect() };
        // A page of one row is as good as any.
        let dst = Placement::single(&shape, 1, Dtype::Fp8E4m3);
        let pair = Pair::new(shape, stages(dst.clone(), &all, &ours), dst).unwrap();
        let (from, to) = (numbers(case, "src_pages"), numbers(case, "dst_pages"));
        let plan = plan(&pair, (0, &from), (0, &to), from.len() as u64);
        let regions = |layers: &[LayerId], at: &[u64]| {
            let each = parts.iter().flat_map(|part| layers.iter().map(move |layer| (*layer, *part)));
            each.zip(at).map(|((layer, part), at)| region(layer, part, *at, item)).collect::<Vec<_>>()
        };
        let (from, to) = (regions(&ours, &src_ptrs), regions(&all, &dst_ptrs));
        let ours = rows(&pair, &plan, entries(&from, 0), entries(&to, 0)).unwrap();
        assert_eq!(serde_json::to_value(blocks(&ours)).unwrap(), case["blocks"], "{case}");
    }
    assert_eq!(list(&file, "generic").len(), 16);
}

/// Heads cut at other ranks: a block for each token of each entry. Of source ranks that hold the same heads all send the same there,
/// and ours take turns with the pages, so they are looked at together. Three recorded calls are of ranks that hold
/// different heads: nothing goes between them here.
#[test]
fn head_slices_are_the_recorded_blocks_of_mooncake() {
    let (mut compared, mut apart) = (0, 0);
    for case in list(&vectors("mooncake_blocks"), "slice") {
        let n = |key: &str| number(case, key) as u32;
        let (heads, page, tps) = (n("total_kv_heads"), n("page_size"), (n("prefill_tp"), n("decode_tp")));
        let parts = [Part::Key, Part::Value];
        let part = |part| PartShape::rows(part, layers([0]), heads, n("head_bytes"));
        let shape = CacheShape { parts: parts.map(part).into() };
        let tp = |tp| Placement { tp, ..Placement::single(&shape, page, Dtype::Fp8E4m3) };
        let (src, dst) = (tp(tps.0), tp(tps.1));
        let pair = Pair::new(shape, src, dst).unwrap();
        let regions = |ptrs: &str, item: &str| {
            let row = number(case, item) / u64::from(page);
            let both = parts.into_iter().zip(numbers(case, ptrs));
            both.map(|(part, at)| region(LayerId(0), part, at, row)).collect::<Vec<_>>()
        };
        let (from, to) = (regions("src_ptrs", "src_item_len"), regions("dst_ptrs", "dst_item_len"));
        let (src_pages, dst_pages) = (numbers(case, "src_pages"), numbers(case, "dst_pages"));
        let held = |rank| shard_replicated(heads, tps.0, rank);
        let mut ours = Vec::new();
        for rank in (0..tps.0).filter(|rank| held(*rank) == held(n("src_rank"))) {
            let tokens = src_pages.len() as u64 * u64::from(page);
            let plan = plan(&pair, (rank, &src_pages), (n("dst_rank"), &dst_pages), tokens);
            ours.extend(blocks(&rows(&pair, &plan, entries(&from, 0), entries(&to, 0)).unwrap()));
        }
        if ours.is_empty() {
            assert_ne!(held(n("src_rank")), shard_replicated(heads, tps.1, n("dst_rank")), "{case}");
            apart += 1;
            continue;
        }
        // Of several senders in the order of one: entries, and their pages, ascend.
        ours.sort_unstable_by_key(|block| block[1]);
        let recorded = list(case, "per_layer_blocks").iter().flat_map(|layer| layer.as_array().unwrap());
        let recorded: Vec<_> = recorded.cloned().collect();
        assert_eq!(serde_json::to_value(ours).unwrap(), Value::from(recorded), "{case}");
        compared += 1;
    }
    assert_eq!((compared, apart), (9, 3));
}

/// A prepared list has a descriptor for each page of each entry, and a request is numbers of these. Where descriptors are one
/// byte long and entries lie side by side, such a number is an address.
#[test]
fn pages_are_the_recorded_numbers_in_a_prepared_list() {
    let file = vectors("nixl_descs");
    for case in list(&file, "repeat") {
        let (all, slots) = (layers(0..number(case, "num_layers")), number(case, "layer_length"));
        let shape = CacheShape { parts: vec![PartShape::rows(Part::Latent, all.clone(), 1, 1)] };
        let side = Placement::single(&shape, 1, Dtype::Fp8E4m3);
        let pair = Pair::new(shape, side.clone(), side).unwrap();
        let pages = numbers(case, "indices");
        // Nothing lies side by side at the target.
        let apart: Vec<u64> = (0..pages.len() as u64).map(|i| 2 * i).collect();
        let plan = plan(&pair, (0, &pages), (0, &apart), pages.len() as u64);
        let regions = |slots: u64| -> Vec<_> {
            let at = |(i, layer): (u64, &LayerId)| Region {
                rows: slots,
                ..region(*layer, Part::Latent, i * slots, 1)
            };
            (0..).zip(&all).map(at).collect()
        };
        let (from, to) = (regions(slots), regions(100));
        let ours = rows(&pair, &plan, entries(&from, 0), entries(&to, 0)).unwrap();
        let ours: Vec<u64> = ours.iter().map(|(from, _)| from.address).collect();
        assert_eq!(ours, numbers(case, "out"), "{case}");
    }
    assert_eq!(list(&file, "repeat").len(), 3);
}

/// As above, of tokens whose heads are cut: at a source that has several groups of heads, or at a target that has one.
#[test]
fn head_slices_are_the_recorded_numbers_in_a_prepared_list() {
    let file = vectors("nixl_descs");
    for case in list(&file, "expand") {
        let (groups, group) = (number(case, "num_groups"), number(case, "head_group_idx") as u32);
        let (all, slots, page) =
            (layers(0..number(case, "num_ptr_pairs")), number(case, "num_slots"), number(case, "page_size"));
        let at_source = groups > 1;
        let heads = if at_source { groups as u32 } else { 2 };
        let shape = CacheShape { parts: vec![PartShape::rows(Part::Key, all.clone(), heads, 1)] };
        let tp = |tp| Placement { tp, ..Placement::single(&shape, page as u32, Dtype::Fp8E4m3) };
        let (src, dst) = (tp(1), tp(heads));
        let pair = Pair::new(shape, src, dst).unwrap();
        let pages = numbers(case, "page_indices");
        let others: Vec<u64> = (0..pages.len() as u64).collect();
        let (from, to) = if at_source { (&pages, &others) } else { (&others, &pages) };
        let plan = plan(&pair, (0, from), (group, to), pages.len() as u64 * page);
        let regions = |row: u64| -> Vec<_> {
            let rows = slots * page;
            let at = |(i, layer): (u64, &LayerId)| Region {
                rows,
                ..region(*layer, Part::Key, i * rows * row, row)
            };
            (0..).zip(&all).map(at).collect()
        };
        let (from, to) = (regions(u64::from(heads)), regions(1));
        let ours = rows(&pair, &plan, entries(&from, 0), entries(&to, 0)).unwrap();
        let ours: Vec<u64> =
            ours.iter().map(|(from, to)| if at_source { from.address } else { to.address }).collect();
        assert_eq!(ours, numbers(case, "out"), "{case}");
    }
    assert_eq!(list(&file, "expand").len(), 4);
}

/// What leaves the registered memory is refused as a whole.
#[test]
fn a_plan_that_leaves_the_memory_has_no_descriptors() {
    let Dcp { pair, plan, from, to } = Dcp::new(&list(&vectors("mooncake_blocks"), "dcp")[1]);
    let few: Vec<_> = to.iter().map(|region| Region { rows: 2, ..*region }).collect();
    assert!(rows(&pair, &plan, entries(&from, 0), entries(&to, 0)).is_some());
    assert!(rows(&pair, &plan, entries(&from, 0), entries(&few, 0)).is_none());
    let short = BlockSpan { len: Bytes(plan.bytes().0 - 1), ..everywhere(0) };
    assert!(packed(&plan, &from, short, entries(&to, 0)).is_none());
}
