//! Casts between element types against definitions, against other implementations, and on the way between arenas.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use kvferry_arena::{
    Arena, Memory, Side, Stores, UnitRead, convert, digest_plan, narrow_bf16, narrow_fp8, read_units,
    widen_bf16, widen_fp8,
};
use kvferry_plan::{
    Attempt, Bytes, CacheShape, Cast, Dtype, Dtypes, End, LayoutSpec, PageId, PageTable, Pair, PoolLayout,
    RankId, RoomId, RoomKey, Run, StridedMove, Strides, TokenRange,
};
use proptest::prelude::*;

/// The code of every bf16 number, made by another implementation: `tests/data/fp8`.
fn fp8_of_bf16() -> Vec<u8> {
    let changes = include_str!("data/fp8/e4m3fn.txt").lines().map(|line| {
        let (bits, code) = line.split_once(' ').unwrap();
        (usize::from_str_radix(bits, 16).unwrap(), u8::from_str_radix(code, 16).unwrap())
    });
    let mut codes = vec![0; 1 << 16];
    for (from, code) in changes {
        codes[from..].fill(code);
    }
    codes
}

#[test]
fn all_bf16_narrow_to_the_fp8_of_another_implementation() {
    let expected = fp8_of_bf16();
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    let (mut wide, mut codes) = (vec![0.0; halves.len()], vec![0; halves.len()]);
    widen_bf16(&halves, &mut wide);
    narrow_fp8(&wide, &mut codes);
    for ((bits, code), expected) in halves.iter().zip(&codes).zip(&expected) {
        assert_eq!(code, expected, "bf16 {bits:#06x}");
    }
    // NaN stays NaN, what is too large is 448.
    assert_eq!([0x7fc0, 0xffc0, 0x7f80, 0xff80].map(|bits| codes[bits]), [0x7f, 0xff, 0x7e, 0xfe]);
}

#[test]
fn all_fp8_widen_exactly_and_come_back() {
    let codes: Vec<u8> = (0..=u8::MAX).collect();
    let (mut wide, mut back) = (vec![0.0; codes.len()], vec![0; codes.len()]);
    widen_fp8(&codes, &mut wide);
    narrow_fp8(&wide, &mut back);
    assert_eq!(back, codes);
    // Every code's number is a bf16, so the other implementation has said what it is.
    let of_bf16 = fp8_of_bf16();
    for (code, value) in codes.iter().zip(&wide) {
        let bits = value.to_bits();
        assert_eq!(bits & 0xffff, 0);
        assert_eq!(of_bf16[(bits >> 16) as usize], *code, "{value}");
    }
}

proptest! {
    /// Between bf16 numbers too: the nearest of the 256, and of two the even one.
    #[test]
    fn fp8_is_the_nearest(bits: u32) {
        let value = f32::from_bits(bits);
        let mut code = [0];
        narrow_fp8(&[value], &mut code);
        let mut all = [0.0; 128];
        widen_fp8(&(0..128).collect::<Vec<_>>(), &mut all);
        let positive = usize::from(code[0] & 0x7f);
        prop_assert_eq!(code[0] >> 7 == 1, value.is_sign_negative());
        if value.is_nan() {
            prop_assert_eq!(positive, 0x7f);
        } else {
            let off = |code: usize| (f64::from(all[code]) - f64::from(value.abs().min(448.0))).abs();
            let (mine, best) = (off(positive), (0..127).map(off).fold(f64::INFINITY, f64::min));
            prop_assert_eq!(mine, best);
            let ties = (0..127).filter(|code| off(*code) == best).count();
            prop_assert!(ties == 1 || positive % 2 == 0);
        }
    }
}

#[test]
fn all_bf16_widen_exactly() {
    let src: Vec<u16> = (0..=u16::MAX).collect();
    let mut wide = vec![0.0; src.len()];
    widen_bf16(&src, &mut wide);
    let expected = src.iter().map(|&bits| half::bf16::from_bits(bits).to_f32());
    assert!(wide.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())));
}

proptest! {
    #[test]
    fn narrowing_agrees_with_an_independent_crate(values in prop::collection::vec(any::<u32>(), 1..64)) {
        let values: Vec<f32> = values.into_iter().map(f32::from_bits).collect();
        let mut narrow = vec![0; values.len()];
        narrow_bf16(&values, &mut narrow);
        for (value, narrow) in values.iter().zip(narrow) {
            let expected = half::bf16::from_f32(*value);
            prop_assert_eq!(half::bf16::from_bits(narrow).is_nan(), value.is_nan());
            prop_assert!(value.is_nan() || narrow == expected.to_bits(), "{}", value);
        }
    }
}

fn of(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_ne_bytes(*x)).collect(),
        Dtype::Bf16 => {
            let halves: Vec<_> = bytes.as_chunks().0.iter().map(|x| u16::from_ne_bytes(*x)).collect();
            let mut wide = vec![0.0; halves.len()];
            widen_bf16(&halves, &mut wide);
            wide
        }
        _ => {
            let mut wide = vec![0.0; bytes.len()];
            widen_fp8(bytes, &mut wide);
            wide
        }
    }
}

fn to(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Dtype::Bf16 => {
            let mut halves = vec![0; values.len()];
            narrow_bf16(values, &mut halves);
            halves.iter().flat_map(|x| x.to_ne_bytes()).collect()
        }
        _ => {
            let mut codes = vec![0; values.len()];
            narrow_fp8(values, &mut codes);
            codes
        }
    }
}

/// Every cast that there is.
fn casts() -> Vec<Cast> {
    let types = [Dtype::F32, Dtype::Bf16, Dtype::Fp8E4m3];
    types
        .into_iter()
        .flat_map(|from| types.into_iter().filter_map(move |to| Cast::between(from, to)))
        .collect()
}

fn any_cast() -> impl Strategy<Value = Cast> {
    prop::sample::select(casts())
}

#[test]
fn there_and_back_is_exact_where_the_other_type_is_wider() {
    let mut exact = 0;
    for cast in casts().into_iter().filter(|cast| cast.exact()) {
        let all: Vec<u8> = match cast.from() {
            Dtype::Bf16 => (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect(),
            _ => (0..=u8::MAX).collect(),
        };
        let mut wide = vec![0; all.len() * (cast.to().size().0 / cast.from().size().0) as usize];
        convert(cast, &all, &mut wide);
        let mut back = vec![0; all.len()];
        convert(Cast::between(cast.to(), cast.from()).unwrap(), &wide, &mut back);
        for ((x, wide), y) in
            of(&all, cast.from()).iter().zip(of(&wide, cast.to())).zip(of(&back, cast.from()))
        {
            assert!(
                x.is_nan() && wide.is_nan() && y.is_nan() || (*x == wide && *x == y),
                "{cast}: {x} {wide} {y}"
            );
        }
        exact += 1;
    }
    assert_eq!(exact, 3);
}

/// A pool of `pages` pages with numbers of all sizes, and some that are none.
fn arena(shape: &CacheShape, spec: &str, dtype: Dtype, rank: RankId) -> Arena {
    let place = spec.parse::<LayoutSpec>().unwrap().placement(shape, dtype).unwrap();
    let arena = Arena::new("test", PoolLayout::new(shape, &place, rank, 40).unwrap()).unwrap();
    let mut state = 7 + u64::from(rank.0);
    let bytes: Vec<u8> = (0..arena.layout().len().0)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect();
    arena.write(Bytes(0), &bytes).unwrap();
    arena
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// What `convert` does with packed elements is what the casts of whole rows do.
    #[test]
    fn packed_elements(cast in any_cast(), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let whole = &bytes[..bytes.len() - bytes.len() % 4];
        let expected = to(&of(whole, cast.from()), cast.to());
        let mut found = vec![0; expected.len()];
        convert(cast, whole, &mut found);
        prop_assert_eq!(found, expected);
    }

    /// Rows on their way between two arenas: what a pull writes, what a push packs and what both digest, for runs that
    /// touch at the source, at the target, at both and at neither.
    #[test]
    fn units_of_plans_are_cast_on_the_way(
        layouts in prop::sample::select(vec![
            ("tp=3,page=16", "tp=1,page=16"),
            ("tp=1,page=16", "tp=2,page=24"),
            ("tp=2,page=8", "tp=4,dcp=4,page=8"),
            ("tp=1,page=64", "tp=4,dcp=2,interleave=3,page=16"),
        ]),
        cast in any_cast(),
        head_elems in prop::sample::select(vec![1_u32, 6, 700]),
        (start, tokens) in (0_u64..130, 1_u64..130),
        stores in prop::sample::select(vec![Stores::Cached, Stores::Streaming]),
    ) {
        let shape = CacheShape::gqa(2, 3, head_elems);
        let place = |spec: &str, dtype| spec.parse::<LayoutSpec>().unwrap().placement(&shape, dtype).unwrap();
        let (src, dst) = (place(layouts.0, cast.from()), place(layouts.1, cast.to()));
        let pair = Pair::with(shape.clone(), src, dst, Dtypes::Converted).unwrap();
        let table = PageTable((0..20).rev().map(|p| PageId(p * 2)).collect());
        let rank = RankId(0);
        let source = arena(&shape, layouts.0, cast.from(), rank);
        let target = arena(&shape, layouts.1, cast.to(), RankId(0));
        let end = End { rank, table: &table };
        let plan = pair.plan(end, end, TokenRange::new(start.min(tokens), tokens)).unwrap();
        for unit in plan.units() {
            let (from, to_) = (source.region(unit.layer, unit.part).unwrap(), target.region(unit.layer, unit.part).unwrap());
            let rows: Vec<_> = unit.runs.iter().flat_map(Run::expand).collect();
            let expected: Vec<u8> = rows.iter().flat_map(|(_, row, _)| {
                let mut bytes = vec![0; unit.slice.src_len().index()];
                source.read(Bytes(from.row_offset(*row).unwrap().0 + unit.slice.src_offset.0), &mut bytes).unwrap();
                to(&of(&bytes, cast.from()), cast.to())
            }).collect();
            let mut packed = vec![0; unit.bytes().index()];
            let read = UnitRead { unit, rows: 0..unit.rows(), into: Some(packed.as_mut_slice().into()), hasher: None };
            read_units(&source, Side::Source, vec![read]).unwrap();
            prop_assert!(packed == expected);
            for m in unit.moves(from, to_) {
                target.copy_from(&source, &m, stores).unwrap();
            }
            let landed: Vec<u8> = rows.iter().flat_map(|(.., row)| {
                let mut bytes = vec![0; unit.slice.len.index()];
                target.read(Bytes(to_.row_offset(*row).unwrap().0 + unit.slice.dst_offset.0), &mut bytes).unwrap();
                bytes
            }).collect();
            prop_assert!(landed == expected);
        }
        let key = RoomKey { room: RoomId(1), attempt: Attempt(1) };
        let digest = |memory, side| digest_plan(memory, side, &plan, key, rank).unwrap();
        prop_assert_eq!(digest(&source, Side::Source), digest(&target, Side::Target));
    }
}

/// Both ends of a converting move are held to their own arena, by their own length.
#[test]
fn a_converting_move_stays_inside_on_both_sides() {
    let shape = CacheShape::mla(1, 4);
    let arena = || arena(&shape, "page=16", Dtype::F32, RankId(0));
    let (source, target) = (arena(), arena());
    let len = source.layout().len();
    let at = |offset| Strides { offset, row: Bytes(0), block: Bytes(0) };
    let m = |cast: Option<Cast>, src, dst, len| StridedMove {
        src: at(src),
        dst: at(dst),
        len: Bytes(len),
        rows: 1,
        blocks: 1,
        cast,
    };
    let copy = |m| target.copy_from(&source, &m, Stores::Cached).is_ok();
    let (narrow, wide) =
        (Cast::between(Dtype::F32, Dtype::Fp8E4m3), Cast::between(Dtype::Fp8E4m3, Dtype::F32));
    let before = |bytes: u64| Bytes(len.0 - bytes);
    assert!(copy(m(narrow, before(32), before(8), 8)));
    assert!(!copy(m(narrow, before(28), before(8), 8)), "32 bytes are read");
    assert!(!copy(m(narrow, before(32), before(7), 8)));
    assert!(copy(m(wide, before(2), before(8), 8)));
    assert!(!copy(m(wide, before(1), before(8), 8)));
    assert!(!copy(m(wide, before(2), before(4), 8)), "8 bytes are written");
    assert!(!copy(m(wide, before(8), before(8), 7)), "no whole number of elements");
}
