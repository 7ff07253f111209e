//! What a fuzzer's bytes mean: a geometry that is compared with the naive copier, or a peer's message.
//!
//! `fuzz/src/plan.rs` runs it under libFuzzer, `tests/corpus.rs` replays the inputs that were found interesting.

use kvferry_plan::*;

use crate::naive::{Case, table};

/// Panics if the planner is wrong about what the bytes describe.
pub(crate) fn check(data: &[u8]) {
    match data.split_first() {
        Some((0xff, message)) => check_message(message),
        _ => {
            let mut reader = Reader(data);
            let case = reader.case();
            case.check_rows();
            case.check_bytes();
            case.check_covers();
            case.check_rotation(Rotation(reader.byte()));
        }
    }
}

/// A peer's description of itself must have an answer, whatever it says.
fn check_message(message: &[u8]) {
    let Ok(theirs) = minicbor::decode::<Descriptor>(message) else { return };
    let shape = CacheShape::gqa(2, 4, 8);
    let placement = Placement::single(&shape, 16, Dtype::Bf16);
    let ours = Descriptor { protocol: PROTOCOL, model: String::new(), shape, placement, converts: false };
    let _ = ours.compare(&theirs, theirs.dtypes());
    let Ok(pair) = Pair::new(theirs.shape, theirs.placement.clone(), theirs.placement) else { return };
    let pages = PageTable::identity(40);
    for rank in [0, 1, 7].map(RankId) {
        for rotation in [0, 1, u32::MAX].map(Rotation) {
            let entries = pair.src().entries(rank, TokenRange::new(3, u64::MAX), rotation);
            assert!(entries.iter().take(9).all(|k| k < entries.end()));
            let known = pair.src().check_rotation(rotation).is_ok();
            assert_eq!(known, rotation.0 < pair.src().shard_ranks());
        }
        let end = End { rank, table: &pages };
        for tokens in [TokenRange::new(0, 100), TokenRange::new(3, u64::MAX)] {
            let Ok(plan) = pair.plan(end, end, tokens) else { continue };
            let sum = plan.units().map(|unit| unit.bytes().0).fold(0, u64::saturating_add);
            assert_eq!(plan.bytes().0, sum);
        }
        let slot = Slot { rank, slot: SlotId(3) };
        let _ = (pair.state(slot, slot), pair.state_bytes(rank));
    }
}

/// Reads numbers; zeros after the end.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> u32 {
        let (first, rest) = self.0.split_first().map_or((0, self.0), |(first, rest)| (*first, rest));
        self.0 = rest;
        u32::from(first)
    }

    /// A number in `1..=most`.
    fn up_to(&mut self, most: u32) -> u32 {
        1 + self.byte() % most
    }

    fn case(&mut self) -> Case {
        let shape = self.shape();
        let (mut src, mut dst) = (self.placement(&shape, 3), self.placement(&shape, 1));
        let start = u64::from(self.byte() % 32);
        let middle = start + u64::from(self.up_to(40));
        let end = middle + u64::from(self.up_to(24));
        let (a, b) = (u64::from(self.byte()), u64::from(self.byte()));
        let (src_table, dst_table) = (table(&src, end, a), table(&dst, end, b));
        let chunks = vec![TokenRange::new(start, middle), TokenRange::new(middle, end)];
        // Last, so that what was found interesting before there were conversions means what it meant.
        for part in src.parts.iter_mut().chain(&mut dst.parts) {
            part.dtype = [Dtype::Bf16, Dtype::F32, Dtype::Fp8E4m3][self.byte() as usize % 3];
        }
        Case { shape, src, dst, src_table, dst_table, chunks }
    }

    fn shape(&mut self) -> CacheShape {
        let (kind, layers) = (self.byte(), self.up_to(3));
        let mut shape = match kind % 2 {
            0 => CacheShape::mla(layers, self.up_to(3)),
            _ => CacheShape::gqa(layers, self.up_to(6), self.up_to(2)),
        };
        let all: Vec<_> = (0..layers).map(LayerId).collect();
        if kind & 2 != 0 {
            let part = if kind % 2 == 0 { Part::DraftLatent } else { Part::DraftKey };
            let heads = shape.parts[0].heads;
            shape.parts.push(PartShape::rows(part, [LayerId(layers - 1)].into(), heads, 2));
        }
        if kind & 4 != 0 {
            let groups = (0..self.byte() % 4).map(|_| self.up_to(7)).collect();
            let mut part = PartShape::state(Part::Conv, all.clone(), self.up_to(3), groups, self.up_to(3));
            part.heads = part.heads.max(1);
            shape.parts.push(part);
        }
        if kind & 8 != 0 {
            shape.parts.push(PartShape::state(Part::Recurrent, all, 1, [self.up_to(9)].into(), 4));
        }
        shape
    }

    fn placement(&mut self, shape: &CacheShape, most_cp: u32) -> Placement {
        let (tp, cp) = (self.up_to(8), self.up_to(most_cp));
        let mut stages = vec![Vec::new(); self.up_to(3) as usize];
        for layer in &shape.parts[0].layers {
            let stage = self.byte() as usize % stages.len();
            stages[stage].push(*layer);
        }
        let latent = shape.part(Part::Latent).is_some();
        let mut layout = |part: &PartShape| {
            let (mut tokens, mut page_size) = (self.tokens(tp, cp, latent), self.up_to(17));
            if let Some(state) = &part.state {
                (tokens, page_size) = (TokenMap::Dense, state.window);
            }
            PartLayout { part: part.part, tokens, page_size, dtype: Dtype::Bf16 }
        };
        let parts = shape.parts.iter().map(&mut layout).collect();
        Placement { stages, cp, tp, parts, host_pages: None }
    }

    fn tokens(&mut self, tp: u32, cp: u32, latent: bool) -> TokenMap {
        let divisors: Vec<u32> = (2..=tp).filter(|d| tp.is_multiple_of(*d)).collect();
        match self.byte() % 3 {
            1 if !divisors.is_empty() => {
                let ranks = divisors[self.byte() as usize % divisors.len()];
                TokenMap::Interleaved { ranks, interleave: self.up_to(9) }
            }
            2 if cp > 1 => TokenMap::PageSharded { ranks: cp },
            2 if latent && tp > 1 => TokenMap::PageSharded { ranks: tp },
            _ => TokenMap::Dense,
        }
    }
}
