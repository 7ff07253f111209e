//! Whether a prefill can serve a decode, and what a hand-off between the two costs. Each is found once for two starts.

use std::collections::HashMap;

use kvferry_node::{Choice, choices};
use kvferry_plan::{Blame, Descriptor, End, Incarnation, PageTable, Pair, RankId, TokenRange};

use super::seat::Seat;
use crate::{Problem, Stage};

/// Length of the prompt whose hand-off is planned to compare pairs, in tokens.
const TOKENS: u64 = 256;
/// Pairs of ranks that are planned for that; of larger instances only the bytes are compared.
const RANKS: u64 = 256;

/// What a hand-off of a prompt of [`TOKENS`] tokens takes; less is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cost {
    /// Bytes that the decode ranks receive together.
    pub(super) bytes: u64,
    /// Strided copies.
    pub(super) copies: u64,
}

/// Two that can serve each other.
#[derive(Clone, Debug)]
pub(super) struct Fitting {
    /// The planned hand-off.
    pub(super) cost: Cost,
    /// The transport that both want most, as the two will choose it.
    pub(super) transport: Choice,
}

/// The model that a router speaks for.
#[derive(Clone, Debug)]
pub(super) struct Served {
    /// What it is called here.
    pub(super) name: String,
    /// SHA-256 of its weights, hexadecimal.
    pub(super) sha256: String,
}

impl Served {
    /// What comes of one model's tokens in another one's vocabulary would look like an answer.
    fn check(&self, seat: &Seat) -> Result<(), Problem> {
        // The weights' digest is the first word; the others say how they are used.
        if seat.descriptor.model.split(' ').next() == Some(self.sha256.as_str()) {
            return Ok(());
        }
        let cause = format!(
            "{} runs another model than this router speaks for ({}); start both with the same `--model`",
            seat.instance, self.name
        );
        Err(Problem::new(Blame::PeerIncompatible, Stage::Lookup, cause))
    }
}

/// The answers so far.
#[derive(Debug)]
pub(super) struct Fits {
    served: Served,
    known: HashMap<(Incarnation, Incarnation), Result<Fitting, Problem>>,
}

impl Fits {
    /// For pairs that run this model.
    pub(super) fn new(served: Served) -> Self {
        Self { served, known: HashMap::new() }
    }

    /// Whether `prefill` can serve `decode`; a refusal names the field, or the instance of another model.
    pub(super) fn ask(&mut self, prefill: &Seat, decode: &Seat) -> Result<Fitting, Problem> {
        let compared = || {
            self.served.check(prefill)?;
            self.served.check(decode)?;
            compare(prefill, decode)
        };
        self.known.entry((prefill.incarnation, decode.incarnation)).or_insert_with(compared).clone()
    }

    /// Forgets starts that are not there any more.
    pub(super) fn keep(&mut self, there: impl Fn(Incarnation) -> bool) {
        self.known.retain(|(prefill, decode), _| there(*prefill) && there(*decode));
    }
}

fn compare(prefill: &Seat, decode: &Seat) -> Result<Fitting, Problem> {
    let refused = |why: &dyn std::fmt::Display| {
        let cause = format!("{} cannot serve {}: {why}", prefill.instance, decode.instance);
        Problem::new(Blame::PeerIncompatible, Stage::Lookup, cause)
    };
    let dtypes = prefill.descriptor.dtypes();
    prefill.descriptor.compare(&decode.descriptor, dtypes).map_err(|mismatch| refused(&mismatch))?;
    let pair = pair(&prefill.descriptor, &decode.descriptor).map_err(|axis| refused(&axis))?;
    let [ours, theirs] =
        [prefill, decode].map(|seat| seat.transports.iter().map(String::as_str).collect::<Vec<_>>());
    let Some(transport) = choices(&ours, &theirs).into_iter().next() else {
        let (ours, theirs) = (ours.join("+"), theirs.join("+"));
        return Err(refused(&format!("`transports` differs: here {ours}, at the peer {theirs}")));
    };
    Ok(Fitting { cost: cost(&pair), transport })
}

fn pair(prefill: &Descriptor, decode: &Descriptor) -> Result<Pair, kvferry_plan::Unsupported> {
    let (src, dst) = (prefill.placement.clone(), decode.placement.clone());
    Pair::with(prefill.shape.clone(), src, dst, prefill.dtypes())
}

fn cost(pair: &Pair) -> Cost {
    let tokens = TokenRange::new(0, TOKENS);
    let (sources, targets) = (pair.src().ranks(), pair.dst().ranks());
    let of = |rank| pair.target_bytes(rank, tokens).0.saturating_add(pair.state_bytes(rank).0);
    let bytes = (0..targets).map(|rank| of(RankId(rank))).sum();
    if u64::from(sources) * u64::from(targets) > RANKS {
        return Cost { bytes, copies: 0 };
    }
    // At most a page a token, on either side.
    let table = PageTable::identity(u32::try_from(TOKENS).unwrap_or(u32::MAX));
    let plan = |src, dst| {
        let end = |rank| End { rank: RankId(rank), table: &table };
        // A pair that was accepted and still has no plan is dear, not wrong: pairing will say.
        pair.plan(end(src), end(dst), tokens).map_or(u64::MAX, |plan| plan.copies())
    };
    let copies = (0..sources)
        .flat_map(|src| (0..targets).map(move |dst| (src, dst)))
        .fold(0, |sum: u64, (src, dst)| sum.saturating_add(plan(src, dst)));
    Cost { bytes, copies }
}

#[cfg(test)]
mod tests {
    use kvferry_plan::{CacheShape, Dtype, LayoutSpec};

    use super::*;

    /// Dealing pages to ranks changes who sends them, not what crosses.
    #[test]
    fn a_sharded_prefill_costs_what_a_whole_one_does() {
        let shape = CacheShape::mla(3, 96);
        let of = |prefill: &str| {
            let side =
                |spec: &str| spec.parse::<LayoutSpec>().unwrap().placement(&shape, Dtype::Bf16).unwrap();
            cost(&Pair::new(shape.clone(), side(prefill), side("tp=4,dcp=4,page=16")).unwrap())
        };
        let whole = of("tp=4,page=16");
        assert_eq!((whole.bytes, of("tp=4,shard=on,page=16")), (3 * 96 * 2 * TOKENS, whole));
        assert_eq!(of("cp=2,tp=2,shard=on,page=16"), whole);
    }
}
