//! What a peer hands to an engine for a plan: a request with a descriptor for each piece that lies in a row on both
//! sides. Calls recorded from SGLang 0.5.23 hold it to what such a peer does (`tests.rs`). *Not* what our own transports
//! do: they move blocks.

#[cfg(test)]
mod tests;

use kvferry_plan::{Bytes, Flat, Pair, Part, Plan, Region, Unit};
use kvferry_transport::slots::BlockSpan;

/// From where to where.
pub(super) type Descriptor = (BlockSpan, BlockSpan);

/// The memory of a rank as it is registered: regions lie at their offsets in the span.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entries<'a> {
    pub(super) regions: &'a [Region],
    pub(super) span: BlockSpan,
}

/// A descriptor for each row. Whole rows that happen to lie side by side share one; tokens whose heads are cut never do.
/// `None` when the plan leaves what is registered.
pub(super) fn rows(pair: &Pair, plan: &Plan, from: Entries<'_>, to: Entries<'_>) -> Option<Vec<Descriptor>> {
    let all = pieces(plan, from.regions, to.regions);
    let spans = (from.span, to.span);
    if cuts_heads(pair, plan) {
        described(plan, all, spans)
    } else {
        described(plan, Flat::joined(all), spans)
    }
}

/// A descriptor for each target page, or what of one lies in a row, when the rows have been packed into a block before, in
/// the plan's order. `from` is where they were packed from.
pub(super) fn packed(
    plan: &Plan,
    from: &[Region],
    block: BlockSpan,
    to: Entries<'_>,
) -> Option<Vec<Descriptor>> {
    let mut used = 0;
    let all = pieces(plan, from, to.regions).map(|piece| {
        let src = Bytes(used);
        used += piece.len.0;
        Flat { src, cast: None, ..piece }
    });
    described(plan, Flat::joined(all), (block, to.span))
}

/// Where both sides have a different tensor parallelism, a peer cuts the heads of each token by itself.
fn cuts_heads(pair: &Pair, plan: &Plan) -> bool {
    let headed = |part| matches!(part, Part::Key | Part::Value | Part::DraftKey | Part::DraftValue);
    pair.src().tp != pair.dst().tp && plan.groups().iter().any(|group| headed(group.part))
}

fn pieces<'a>(plan: &'a Plan, from: &'a [Region], to: &'a [Region]) -> impl Iterator<Item = Flat> + 'a {
    let of = |regions: &'a [Region], unit: &Unit<'_>| {
        regions.iter().find(|region| (region.layer, region.part) == (unit.layer, unit.part))
    };
    plan.units().flat_map(move |unit| {
        let both = of(from, &unit).zip(of(to, &unit));
        both.into_iter().flat_map(move |(from, to)| unit.pieces(from, to))
    })
}

fn described(
    plan: &Plan,
    pieces: impl Iterator<Item = Flat>,
    (from, to): (BlockSpan, BlockSpan),
) -> Option<Vec<Descriptor>> {
    let mut bytes = 0;
    let described = pieces.map(|piece| {
        bytes += piece.len.0;
        from.part(piece.src, piece.src_len()).zip(to.part(piece.dst, piece.len))
    });
    let described = described.collect::<Option<Vec<_>>>()?;
    (Bytes(bytes) == plan.bytes()).then_some(described)
}
