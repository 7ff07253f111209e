//! What is refused before any byte moves, by name: placements that make no sense, sides that do not fit, descriptors
//! that differ, chunks that do not cover.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use kvferry_plan::*;
use proptest::prelude::*;

fn gqa() -> (CacheShape, Placement) {
    let shape = CacheShape::gqa(4, 4, 64);
    let single = Placement::single(&shape, 16, Dtype::Bf16);
    (shape, single)
}

fn with(edit: impl FnOnce(&mut Placement)) -> Placement {
    let mut placement = gqa().1;
    edit(&mut placement);
    placement
}

fn all_tokens(placement: &mut Placement, tokens: TokenMap) {
    placement.parts.iter_mut().for_each(|part| part.tokens = tokens);
}

#[test]
fn placements_that_make_no_sense_name_the_number() {
    let (shape, single) = gqa();
    assert_eq!(single.check(&shape), Ok(()));
    let dcp = |ranks, interleave| {
        with(|p| {
            p.tp = 4;
            all_tokens(p, TokenMap::Interleaved { ranks, interleave });
        })
    };
    for (placement, error) in [
        (with(|p| p.tp = 0), "tp, cp and the number of pipeline stages must be at least 1"),
        (with(|p| p.stages.clear()), "tp, cp and the number of pipeline stages must be at least 1"),
        (with(|p| p.tp = 4097), "1 stages x cp 1 x tp 4097 is more than the 4096 ranks supported"),
        (
            with(|p| (p.tp, p.cp) = (1 << 31, 2)),
            "1 stages x cp 2 x tp 2147483648 is more than the 4096 ranks supported",
        ),
        (with(|p| p.parts[1].page_size = 0), "page size 0 is not in 1..=1048576"),
        (with(|p| p.parts[1].page_size = 1 << 21), "page size 2097152 is not in 1..=1048576"),
        (with(|p| p.parts.truncate(1)), "the layout says nothing about the part `value`"),
        (with(|p| p.parts[1].part = Part::Key), "the layout describes the part `key` twice"),
        (with(|p| p.stages[0].reverse()), "the layers of stage 0 are not ascending"),
        (with(|p| p.stages[0].truncate(3)), "layer 3 is in no pipeline stage; give it to one"),
        (with(|p| p.stages.push(vec![LayerId(2)])), "layer 2 is in two pipeline stages; give it to one"),
        (dcp(3, 1), "dcp 3 does not divide tp 4"),
        (dcp(2, 0), "dcp 2 with interleave 0: dcp must be at least 1 and interleave in 1..=1048576"),
        (dcp(0, 1), "dcp 0 with interleave 1: dcp must be at least 1 and interleave in 1..=1048576"),
        (
            with(|p| all_tokens(p, TokenMap::PageSharded { ranks: 2 })),
            "2 shard ranks, but pages are dealt over the 1 tp ranks",
        ),
    ] {
        assert_eq!(placement.check(&shape).unwrap_err().to_string(), error);
        // Pairing refuses the same, on either side.
        for (src, dst) in [(&placement, &single), (&single, &placement)] {
            let refusal = Pair::new(shape.clone(), src.clone(), dst.clone()).unwrap_err();
            assert_eq!(
                (refusal.axis, refusal.blame()),
                (Axis::Placement, Blame::PeerIncompatible),
                "{refusal}"
            );
        }
    }
}

#[test]
fn shapes_that_make_no_sense_name_the_part() {
    let edited = |edit: fn(&mut CacheShape)| {
        let mut shape = gqa().0;
        edit(&mut shape);
        shape.check().unwrap_err().to_string()
    };
    assert_eq!(edited(|s| s.parts[0].heads = 0), "part `key` has rows of no bytes");
    assert_eq!(edited(|s| s.parts[1].part = Part::Key), "part `key` is described twice");
    assert_eq!(edited(|s| s.parts[1].layers.swap(0, 1)), "part `value` has layers that are not ascending");
    assert_eq!(
        edited(|s| s.parts[1].heads = u32::MAX),
        "part `value` has rows of 4294967295 heads x 64 elements, more than 268435456"
    );
}

#[test]
fn sides_that_do_not_fit_name_the_axis() {
    let (shape, single) = gqa();
    let refuse = |src: Placement, dst: Placement| Pair::new(shape.clone(), src, dst).unwrap_err();

    let refusal = refuse(single.clone(), with(|p| p.parts[1].dtype = Dtype::F32));
    assert_eq!(
        refusal.to_string(),
        "unsupported dtype: part `value` is bf16 at the source and f32 at the target; give both the same element type, \
         or have the source convert with `--convert-kv`"
    );

    let other = with(|p| p.parts[1].dtype = Dtype::F32);
    let pair = Pair::with(shape.clone(), single.clone(), other, Dtypes::Converted).unwrap();
    let casts: Vec<_> = pair.casts().map(|(part, cast)| format!("{part}: {cast}")).collect();
    assert_eq!(casts, ["value: bf16 to f32"]);

    let refusal = refuse(single.clone(), with(|p| p.cp = 2));
    assert_eq!(refusal.to_string(), "unsupported context parallel: the target has cp 2; 1 is supported");
    assert!(Pair::new(shape.clone(), with(|p| p.cp = 2), single.clone()).is_ok());

    let tiered = with(|p| p.host_pages = Some(64));
    for (side, refusal) in
        [("source", refuse(tiered.clone(), single.clone())), ("target", refuse(single.clone(), tiered))]
    {
        assert_eq!(
            refusal.to_string(),
            format!(
                "unsupported host tier: the {side} keeps 64 pages in host memory; start it without a host-tier cache"
            )
        );
        assert_eq!(refusal.blame(), Blame::PeerIncompatible);
    }

    // Pages dealt over TP ranks that hold different heads: page 1 has no rank with head 0.
    let holes = with(|p| {
        p.tp = 2;
        all_tokens(p, TokenMap::PageSharded { ranks: 2 });
    });
    let refusal = refuse(holes, single);
    assert_eq!((refusal.axis, refusal.blame()), (Axis::Coverage, Blame::PeerIncompatible));
    assert_eq!(refusal.reason, "source: no rank holds head 2 of part `key` for token class 0 of 2");
}

#[test]
fn plans_refuse_ranks_and_tables_that_are_not_there() {
    let (shape, single) = gqa();
    let pair = Pair::new(shape, single.clone(), with(|p| p.tp = 2)).unwrap();
    let (long, short) = (PageTable::identity(4), PageTable::identity(1));
    let end = |rank, table| End { rank: RankId(rank), table };
    let plan = |src, dst| pair.plan(src, dst, TokenRange::new(0, 40)).unwrap_err().to_string();
    assert_eq!(
        plan(end(1, &long), end(0, &long)),
        "unsupported rank: source rank 1 of an instance with 1 ranks"
    );
    assert_eq!(
        plan(end(0, &long), end(2, &long)),
        "unsupported rank: target rank 2 of an instance with 2 ranks"
    );
    assert_eq!(
        plan(end(0, &long), end(0, &short)),
        "unsupported page table: target: 1 pages, but tokens 0..40 need 3"
    );
    assert!(pair.granted_bytes(end(2, &long), TokenRange::new(0, 40)).is_err());
    assert!(pair.granted_bytes(end(0, &short), TokenRange::new(0, 40)).is_err());
    // An empty or backward range moves nothing, whatever the tables.
    for tokens in [TokenRange::new(7, 7), TokenRange::new(9, 3)] {
        assert!(pair.plan(end(0, &short), end(0, &short), tokens).unwrap().is_empty());
        assert_eq!(pair.target_bytes(RankId(0), tokens), Bytes(0));
    }
}

/// Both peers must see the same units: only row numbers may depend on the page ids of the other side.
#[test]
fn a_receiver_that_does_not_know_the_source_pages_sees_the_same_units() {
    let shape = CacheShape::mla(2, 8);
    let single = Placement::single(&shape, 4, Dtype::F32);
    let mut dcp = single.clone();
    (dcp.tp, dcp.parts[0].tokens) = (3, TokenMap::Interleaved { ranks: 3, interleave: 2 });
    let pair = Pair::new(shape, single, dcp).unwrap();
    let scattered = PageTable([9, 2, 77, 5, 6, 1].map(PageId).into());
    let identity = PageTable::identity(6);
    let granted = PageTable([3, 1].map(PageId).into());
    let plan = |table| {
        let dst = End { rank: RankId(1), table: &granted };
        pair.plan(End { rank: RankId(0), table }, dst, TokenRange::new(3, 23)).unwrap()
    };
    let (sender, receiver) = (plan(&scattered), plan(&identity));
    assert_ne!(sender, receiver);
    let seen = |plan: &Plan| -> Vec<_> {
        plan.units()
            .map(|unit| {
                let rows: Vec<_> =
                    unit.runs.iter().flat_map(Run::expand).map(|(t, _, dst)| (t, dst)).collect();
                (unit.layer, unit.part, unit.first_token(), unit.bytes(), rows)
            })
            .collect()
    };
    assert_eq!(seen(&sender), seen(&receiver));
}

#[test]
fn pools_have_the_rows_of_their_rank_and_no_others() {
    let (shape, _) = gqa();
    let placement =
        with(|p| (p.tp, p.stages) = (3, vec![vec![LayerId(0), LayerId(1)], vec![LayerId(2), LayerId(3)]]));
    let pool = PoolLayout::new(&shape, &placement, RankId(5), 10).unwrap();
    assert_eq!(pool.regions().len(), 4);
    assert!(pool.region(LayerId(1), Part::Key).is_none());
    // Heads 0..1, 1..2 and 2..4 of 4 on three ranks.
    assert_eq!(pool.region(LayerId(2), Part::Key).unwrap().row_bytes, Bytes(2 * 64 * 2));
    assert_eq!(
        (pool.generation_offset(PageId(9)), pool.generation_offset(PageId(10))),
        (Some(Bytes(72)), None)
    );
    let mut ends: Vec<_> =
        pool.regions().iter().map(|r| (r.offset.0, r.offset.0 + r.rows * r.row_bytes.0)).collect();
    ends.sort_unstable();
    assert!(ends[0].0 >= 80 && ends.windows(2).all(|w| w[0].1 <= w[1].0) && ends[3].1 <= pool.len().0);
    assert!(PoolLayout::new(&shape, &placement, RankId(6), 10).is_err(), "there is no rank 6");

    let wide = CacheShape::gqa(4096, 1 << 8, 1 << 20);
    let huge = Placement::single(&wide, 1 << 20, Dtype::F32);
    assert!(PoolLayout::new(&wide, &huge, RankId(0), u32::MAX).is_err());
}

/// Tables may name pages that a pool does not have; their bytes must not land in the region behind.
#[test]
fn rows_that_a_region_does_not_have_go_nowhere() {
    let shape = CacheShape::mla(1, 8);
    let place = Placement::single(&shape, 16, Dtype::F32);
    let pair = Pair::new(shape, place.clone(), place).unwrap();
    let region = |rows, row_bytes| Region {
        layer: LayerId(0),
        part: Part::Latent,
        offset: Bytes(4096),
        row_bytes: Bytes(row_bytes),
        rows,
    };
    let table = PageTable::identity(2);
    let end = End { rank: RankId(0), table: &table };
    let plan = pair.plan(end, end, TokenRange::new(0, 32)).unwrap();
    let offsets = |src: Region, dst: Region| -> Vec<_> {
        plan.units()
            .flat_map(|unit| unit.moves(&src, &dst).collect::<Vec<_>>())
            .map(|m| (m.src.offset.0, m.dst.offset.0))
            .collect()
    };
    let (first, second, nowhere) = (4096, 4096 + 16 * 32, u64::MAX);
    let whole = region(32, 32);
    assert_eq!(offsets(whole, whole), [(first, first), (second, second)]);
    assert_eq!(offsets(whole, region(16, 32)), [(first, first), (second, nowhere)]);
    // The second page begins inside and ends outside.
    assert_eq!(offsets(region(31, 32), whole), [(first, first), (nowhere, second)]);
    // Rows too narrow for the slice, and rows whose offsets 64 bits cannot count.
    assert_eq!(offsets(whole, region(32, 31)), [(first, nowhere), (second, nowhere)]);
    assert_eq!(offsets(region(32, u64::MAX / 2), whole), [(first, first), (nowhere, second)]);
}

#[test]
fn descriptors_that_differ_name_the_first_field() {
    let (shape, placement) = gqa();
    let ours = Descriptor { protocol: PROTOCOL, model: "abc".into(), shape, placement, converts: false };
    assert_eq!(ours.compare(&ours, Dtypes::Equal), Ok(()));
    let differs = |edit: fn(&mut Descriptor)| {
        let mut theirs = ours.clone();
        edit(&mut theirs);
        let mismatch = ours.compare(&theirs, Dtypes::Equal).unwrap_err();
        assert_eq!(mismatch.blame(), Blame::PeerIncompatible);
        mismatch.to_string()
    };
    assert_eq!(
        differs(|d| d.protocol = 2),
        "`protocol` differs: here 1, at the peer 2; run the same version on both sides"
    );
    assert_eq!(
        differs(|d| d.model = "abd".into()),
        "`model` differs: here abc, at the peer abd; give both the same weights, attention form and arithmetic"
    );
    assert_eq!(differs(|d| d.shape.parts[1].heads = 8), "`value.heads` differs: here 4, at the peer 8");
    assert_eq!(
        differs(|d| d.shape.parts[0].head_elems = 128),
        "`key.head_elems` differs: here 64, at the peer 128"
    );
    assert_eq!(
        differs(|d| d.placement.parts[0].dtype = Dtype::F32),
        "`key.dtype` differs: here bf16, at the peer f32; give both the same element type, or have the \
         prefill side convert with `--convert-kv`"
    );
    let mut theirs = ours.clone();
    (theirs.converts, theirs.placement.parts[0].dtype) = (true, Dtype::F32);
    assert_eq!(ours.compare(&theirs, theirs.dtypes()), Ok(()), "the source converts");
    assert!(ours.compare(&theirs, ours.dtypes()).is_err(), "a target cannot");
    assert_eq!(
        differs(|d| d.shape.parts.truncate(1)),
        "`parts` differs: here key+value, at the peer key; give both the same model and attention form"
    );
    assert_eq!(
        differs(|d| d.shape.parts[0].layers = [0, 1, 3, 7, 8, 9].map(LayerId).into()),
        "`key.layers` differs: here 4 layers 0-3, at the peer 6 layers 0-1,3,7-9"
    );
    // A peer cannot make the message long.
    let long = differs(|d| d.shape.parts[0].layers = (0..100_000).map(|l| LayerId(2 * l)).collect());
    assert!(long.len() < 200 && long.ends_with("14,..."), "{long}");
    // Layouts may differ.
    let mut theirs = ours.clone();
    (theirs.placement.tp, theirs.placement.parts[0].page_size) = (4, 24);
    assert_eq!(ours.compare(&theirs, Dtypes::Equal), Ok(()));
}

#[test]
fn digests_tell_places_apart() {
    let (shape, single) = gqa();
    let pair = Pair::new(shape, single.clone(), single).unwrap();
    let table = PageTable::identity(2);
    let end = End { rank: RankId(0), table: &table };
    let plan = pair.plan(end, end, TokenRange::new(0, 32)).unwrap();
    let key = |room, attempt| RoomKey { room: RoomId(room), attempt: Attempt(attempt) };
    let digest = |key, target, unit: &Unit<'_>| {
        let mut hasher = UnitId::new(key, RankId(target), unit).hasher();
        hasher.update(b"the same bytes");
        hasher.digest()
    };
    // Every unit differs in layer, part or first token; then room, attempt and target rank.
    let first = plan.units().next().unwrap();
    let mut digests: Vec<_> = plan.units().map(|unit| digest(key(1, 1), 0, &unit)).collect();
    digests.extend([
        digest(key(2, 1), 0, &first),
        digest(key(1, 2), 0, &first),
        digest(key(1, 1), 1, &first),
    ]);
    let count = digests.len();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!((digests.len(), count), (4 * 2 * 2 + 3, 4 * 2 * 2 + 3));

    // The sum of a part does not depend on the order of its units.
    let sum = |order: &[u64]| {
        let mut list = Vec::new();
        order.iter().for_each(|d| PartDigest::add(&mut list, Part::Key, *d, Bytes(10)));
        list
    };
    assert_eq!(sum(&[u64::MAX, 7, 9]), sum(&[9, u64::MAX, 7]));
    assert_eq!(sum(&[u64::MAX, 7, 9]), [PartDigest { part: Part::Key, sum: 15, bytes: Bytes(30) }]);
}

#[test]
fn chunks_that_do_not_belong_are_refused_by_name() {
    let mut coverage = Coverage::new(2, TokenRange::new(10, 50));
    let mut accept = |source, start, end| {
        let accepted = coverage.accept(RankId(source), TokenRange::new(start, end));
        accepted.map_err(|e| (e.blame(), e.to_string()))
    };
    assert_eq!(accept(0, 20, 30), Ok(Accepted::New));
    let peer = |text: &str| Err((Blame::PeerMisbehaved, text.to_owned()));
    assert_eq!(accept(2, 10, 20), peer("source rank 2 of an instance with 2 ranks announced a chunk"));
    assert_eq!(
        accept(0, 30, 30),
        peer("source rank 0 announced the empty chunk 30..30; a chunk holds at least one token")
    );
    assert_eq!(
        accept(0, 9, 20),
        peer("source rank 0 announced tokens 9..20, but the hand-off is of tokens 10..50")
    );
    assert_eq!(
        accept(1, 40, 51),
        peer("source rank 1 announced tokens 40..51, but the hand-off is of tokens 10..50")
    );
    assert_eq!(
        accept(0, 29, 31),
        peer("source rank 0 announced tokens 29..31 after tokens 20..30; chunks may not overlap")
    );
    assert_eq!(accept(1, 29, 31), Ok(Accepted::New));
    assert!(Coverage::new(3, TokenRange::new(5, 5)).complete(), "nothing to cover");
}

proptest! {
    /// Against a model that marks tokens one by one.
    #[test]
    fn coverage_is_what_marking_tokens_says(
        chunks in prop::collection::vec((0..3_u32, 0..16_u64, 0..6_u64), 0..80),
        (start, end) in (0..8_u64, 0..16_u64),
    ) {
        let mut coverage = Coverage::new(2, TokenRange::new(start, end));
        let mut marked = vec![vec![false; 32]; 2];
        let mut before = Vec::new();
        for (source, a, len) in chunks {
            let b = a + len;
            let fits = source < 2 && a < b && start <= a && b <= end;
            let free = fits && !marked[source as usize][a as usize..b as usize].contains(&true);
            let repeat = before.contains(&(source, a, b));
            let expected = if repeat { Some(Accepted::Repeat) } else { free.then_some(Accepted::New) };
            let accepted = coverage.accept(RankId(source), TokenRange::new(a, b)).ok();
            prop_assert_eq!(accepted, expected);
            if free {
                before.push((source, a, b));
                marked[source as usize][a as usize..b as usize].fill(true);
            }
            let wanted = start as usize..end.max(start) as usize;
            let gap = |source: usize| {
                let first = wanted.clone().find(|t| !marked[source][*t])?;
                let last = (first..wanted.end).find(|t| marked[source][*t]).unwrap_or(wanted.end);
                Some(TokenRange::new(first as u64, last as u64))
            };
            for source in 0..2 {
                prop_assert_eq!(coverage.gap(RankId(source as u32)), gap(source));
                prop_assert_eq!(coverage.covers(RankId(source as u32)), gap(source).is_none());
            }
            prop_assert_eq!(coverage.complete(), gap(0).is_none() && gap(1).is_none());
        }
    }
}
