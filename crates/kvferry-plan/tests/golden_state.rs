//! State slices and run grouping recorded from SGLang 0.5.23's own functions (`tests/vectors/`).

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::collections::BTreeSet;

use kvferry_plan::*;
use serde_json::Value;

fn vectors(name: &str) -> Value {
    let path = format!("{}/tests/vectors/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

/// (source byte, target byte) of every byte of slot 0 that our plan moves.
fn bytes(pair: &Pair, src: u32, dst: u32) -> BTreeSet<(u64, u64)> {
    let slot = |rank| Slot { rank: RankId(rank), slot: SlotId(0) };
    let plan = pair.state(slot(src), slot(dst)).unwrap();
    let pool = |side: &Placement, rank| {
        PoolLayout::with_slots(pair.shape(), side, RankId(rank), PoolSize { pages: 0, slots: 1 }).unwrap()
    };
    let (from, to) = (pool(pair.src(), src), pool(pair.dst(), dst));
    let base = |pool: &PoolLayout| pool.regions()[0].offset.0;
    let (src_base, dst_base) = (base(&from), base(&to));
    let mut all = BTreeSet::new();
    for piece in plan.flat(&from, &to) {
        all.extend((0..piece.len.0).map(|i| (piece.src.0 - src_base + i, piece.dst.0 - dst_base + i)));
    }
    all
}

#[test]
fn state_slices_are_the_recorded_bytes() {
    let mut checked = 0;
    for case in vectors("slices_and_maps")["mamba"].as_array().unwrap() {
        let number = |key: &str| case[key].as_u64().unwrap();
        let (src_tp, dst_tp) = (number("src_tp") as u32, number("dst_tp") as u32);
        let window = number("outer") as u32;
        let heads = number("src_dim") as u32 * src_tp;
        let groups = match case["groups"].as_array() {
            Some(_) => numbers(&case["groups"]).into_iter().map(|g| g as u32).collect(),
            None => vec![heads],
        };
        let element = number("src_item_len") / (number("src_dim") * u64::from(window));
        let dtype =
            [Dtype::F32, Dtype::Bf16, Dtype::Fp8E4m3].into_iter().find(|d| d.size().0 == element).unwrap();
        let part = PartShape::state(Part::Conv, [LayerId(0)].into(), window, groups, 1);
        let shape = CacheShape { parts: vec![part] };
        let side = |tp| Placement { tp, ..Placement::single(&shape, 1, dtype) };
        let pair = Pair::new(shape.clone(), side(src_tp), side(dst_tp)).unwrap();
        let ours = bytes(&pair, number("src_rank") as u32, number("dst_rank") as u32);
        let mut recorded = BTreeSet::new();
        for slice in case["bytes"].as_array().unwrap() {
            let n = numbers(slice);
            recorded.extend((0..n[2]).map(|i| (n[0] + i, n[1] + i)));
        }
        assert_eq!(ours, recorded, "{case}");
        checked += 1;
    }
    assert_eq!(checked, 48);
}

/// Upstream several ranks may send the same; ours send it once. Either way the target has the whole state.
#[test]
fn replicated_state_arrives_whole_and_once() {
    let shape = CacheShape {
        parts: vec![PartShape {
            part: Part::Recurrent,
            layers: (0..6).map(LayerId).collect(),
            heads: 3,
            head_elems: 5,
            state: Some(StateShape { window: 2, groups: Vec::new() }),
        }],
    };
    let mut senders = BTreeSet::new();
    for record in vectors("slices_and_maps")["replicated"].as_array().unwrap() {
        let (src_tp, dst_tp) = (record[0].as_u64().unwrap() as u32, record[1].as_u64().unwrap() as u32);
        senders.insert((src_tp, dst_tp, record[3].as_bool().unwrap()));
        let side = |tp| Placement { tp, ..Placement::single(&shape, 1, Dtype::F32) };
        let pair = Pair::new(shape.clone(), side(src_tp), side(dst_tp)).unwrap();
        for dst in 0..dst_tp {
            let slot = |rank| Slot { rank: RankId(rank), slot: SlotId(0) };
            let plans: Vec<_> = (0..src_tp).map(|src| pair.state(slot(src), slot(dst)).unwrap()).collect();
            let mut layers: Vec<_> =
                plans.iter().flat_map(Plan::units).map(|unit| (unit.layer, unit.bytes().0)).collect();
            layers.sort_unstable();
            let whole: Vec<_> = (0..6).map(|layer| (LayerId(layer), 2 * 3 * 5 * 4)).collect();
            assert_eq!(layers, whole, "{record}, target {dst}");
            let counts: Vec<_> = plans.iter().map(Plan::unit_count).collect();
            assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "evenly: {counts:?}");
        }
    }
    // The recorded system always has a sender too.
    assert!(senders.iter().all(|(src, dst, sends)| *sends || senders.contains(&(*src, *dst, true))));
}

/// Row numbers of a list; `None` where one is negative, which is what a wrapped int32 is.
fn rows(value: &Value) -> Option<Vec<Row>> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().map(Row)).collect()
}

#[test]
fn consecutive_rows_are_grouped_as_recorded_and_a_wrap_is_refused() {
    let mut grouped = 0;
    for case in vectors("grouping")["cases"].as_array().unwrap() {
        let (src, dst) = (rows(&case["src"]).unwrap(), rows(&case["dst"]).unwrap());
        if case["expected"]["error"].is_string() {
            // Our rows come in pairs; two lists of different lengths cannot be written down.
            assert_ne!(src.len(), dst.len());
            continue;
        }
        let pairs = src.into_iter().zip(dst).map(|(src, dst)| RowRun { src, dst, rows: 1 });
        let ours: Vec<_> = coalesce(pairs).map(|run| vec![run.src.0, run.dst.0, run.rows]).collect();
        let recorded: Vec<_> = case["expected"]["groups"].as_array().unwrap().iter().map(numbers).collect();
        assert_eq!(ours, recorded, "{}", case["note"]);
        grouped += 1;
    }
    assert_eq!(grouped, 132);
    // Upstream joins 2147483647 and -2147483648 in int32. Here the second is no row.
    assert_eq!(rows(&serde_json::json!([2_147_483_647, -2_147_483_648_i64])), None);
    // Nor do our own numbers wrap.
    let edge = [u64::MAX, 0].map(|n| RowRun { src: Row(n), dst: Row(n), rows: 1 });
    assert_eq!(coalesce(edge).count(), 2);
}
