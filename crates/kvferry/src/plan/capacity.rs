//! `kvferry plan --capacity`: which prompts pools of a size let in on the two sides, and what they take on each rank.

use std::fmt::Write;

use comfy_table::CellAlignment;
use kvferry_plan::{
    AdmissionPath, Axis, Capacity, Footprint, LongestPrompt, Pair, Placement, PoolLayout, PoolSize,
    RankFootprint, RankId, Unsupported,
};
use serde::Serialize;

use super::{
    PlanArgs, json,
    request::{Request, Side},
    text,
};
use crate::{
    failure::Failure,
    terminal::{self, Look, number, styled},
};

/// The words of the tables.
const WORDS: &str = "of a page: under dcp over all ranks; longest prompt: what is longer is refused at once, with both numbers; \
                     with ignore_eos and no prefix cache: requests with `ignore_eos`, where prefill has no prefix cache; pages, \
                     slots, bytes: of each of these ranks; generation words: one for each page and slot, by which it is seen \
                     whether it has changed hands; all: with each region rounded up to 4,096 bytes";

/// Longest sequence, where no model limits it.
const UNLIMITED: u64 = u64::MAX;

/// The two sides of a question.
pub(super) struct Answer {
    prefill: Footprint,
    decode: Footprint,
}

impl Answer {
    pub(super) fn to(request: &Request, args: &PlanArgs) -> Result<Self, Unsupported> {
        let wrong =
            |name: &str, axis, reason: String| Unsupported { axis, reason: format!("{name}: {reason}") };
        let placement = |name: &str, side: &Side| {
            side.placement.clone().map_err(|e| wrong(name, Axis::Placement, e.to_string()))
        };
        let (src, dst) = (placement("prefill", &request.prefill)?, placement("decode", &request.decode)?);
        let pair = Pair::with(request.shape.clone(), src, dst, request.dtypes)?;
        let footprint = |name: &str, placement: &Placement, longest: fn(&Capacity) -> LongestPrompt| {
            let (pages, pools) = pools(request, placement, args).map_err(|e| wrong(name, Axis::Size, e))?;
            let parts = placement.parts.clone();
            let capacity =
                Capacity { max_model_len: UNLIMITED, made_for: UNLIMITED, pages, parts, prefix_cache: true };
            Ok(Footprint::new(&capacity, longest(&capacity), &pools))
        };
        Ok(Self {
            prefill: footprint("prefill", pair.src(), LongestPrompt::prefill)?,
            decode: footprint("decode", pair.dst(), LongestPrompt::decode)?,
        })
    }

    /// The longest prompt that both let in.
    fn both(&self, path: AdmissionPath) -> u64 {
        self.prefill.longest_prompt.on(path).min(self.decode.longest_prompt.on(path))
    }

    pub(super) fn text(&self, request: &Request, args: &PlanArgs) -> String {
        let (prefill, decode) = (&request.prefill.label, &request.decode.label);
        let (model, kv) = (&request.model, text::kv(request));
        let head = format!(
            "{}: {prefill} → {decode}, pools of {} tokens, {model}{kv}",
            styled(Look::Strong, "capacity"),
            number(args.pool_tokens)
        );
        let mut said = terminal::wrapped(&head, 2) + "\n";
        let _ = writeln!(said, "{}\n{}", self.limits(), self.memory());
        let words = styled(Look::Dim, terminal::wrapped(WORDS, 0));
        let _ = writeln!(said, "{words}");
        said
    }

    fn limits(&self) -> comfy_table::Table {
        let mut table = terminal::table();
        table.set_header(["tokens", "prefill", "decode", "both"]);
        let mut row = |what: &str, of: &dyn Fn(&Footprint) -> u64, both: Option<u64>| {
            let [prefill, decode] = [&self.prefill, &self.decode].map(|side| number(of(side)));
            table.add_row([what.into(), prefill, decode, both.map(number).unwrap_or_default()]);
        };
        row("of the pool", &|side| side.pool_tokens, None);
        row("of a page", &|side| side.page_tokens, None);
        for (what, path) in [
            ("longest prompt", AdmissionPath::Normal),
            ("with ignore_eos and no prefix cache", AdmissionPath::IgnoreEos),
        ] {
            row(what, &|side| side.longest_prompt.on(path), Some(self.both(path)));
        }
        right(&mut table, 1..4);
        table
    }

    fn memory(&self) -> comfy_table::Table {
        let mut table = terminal::table();
        table.set_header(["side", "ranks", "pages", "slots", "what", "bytes of each"]);
        for (side, footprint) in [("prefill", &self.prefill), ("decode", &self.decode)] {
            let alike =
                |a: &RankFootprint, b: &RankFootprint| *a == RankFootprint { rank: a.rank, ..b.clone() };
            for ranks in footprint.ranks.chunk_by(alike) {
                let [first, ..] = ranks else { continue };
                let span = match ranks {
                    [first, .., last] => format!("{}-{}", first.rank, last.rank),
                    _ => first.rank.to_string(),
                };
                let parts = first.parts.iter().map(|held| (held.part.to_string(), held.bytes));
                let rest = [("generation words", first.generation_bytes), ("all", first.total_bytes)];
                let lines = parts.chain(rest.map(|(what, bytes)| (what.to_owned(), bytes)));
                let mut names = [side.into(), span, number(first.pages.into()), number(first.slots.into())];
                for (what, bytes) in lines {
                    table.add_row(names.into_iter().chain([what, number(bytes.0)]));
                    names = Default::default();
                }
            }
        }
        right(&mut table, [1, 2, 3, 5]);
        table
    }

    pub(super) fn json(&self, request: &Request) -> Result<String, Failure> {
        let side = |side: &'_ Side, footprint| SideOut { layout: side.label.clone(), footprint };
        json::print(&Document {
            model_shape: &request.model,
            longest_prompt: LongestPrompt::Prefill {
                normal: self.both(AdmissionPath::Normal),
                ignore_eos: self.both(AdmissionPath::IgnoreEos),
            },
            prefill: side(&request.prefill, &self.prefill),
            decode: side(&request.decode, &self.decode),
        })
    }
}

/// The pools of a side, by rank, and their pages.
fn pools(
    request: &Request,
    placement: &Placement,
    args: &PlanArgs,
) -> Result<(u32, Vec<PoolLayout>), String> {
    let pages = placement.pool_pages(args.pool_tokens).filter(|pages| *pages > 0).ok_or_else(|| {
        format!("--pool-tokens {}: a pool holds at least 1 token and less than 2^32 pages", args.pool_tokens)
    })?;
    let stateful = request.shape.parts.iter().any(|part| part.state.is_some());
    let size = PoolSize { pages, slots: if stateful { args.state_slots } else { 0 } };
    let pool = |rank| PoolLayout::with_slots(&request.shape, placement, RankId(rank), size);
    let pools = (0..placement.ranks()).map(pool).collect::<Result<_, _>>().map_err(|e| e.to_string())?;
    Ok((pages, pools))
}

/// Numbers stand at the right.
fn right(table: &mut comfy_table::Table, columns: impl IntoIterator<Item = usize>) {
    for column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

#[derive(Serialize)]
struct Document<'a> {
    model_shape: &'a str,
    /// That both sides let in.
    longest_prompt: LongestPrompt,
    prefill: SideOut<'a>,
    decode: SideOut<'a>,
}

#[derive(Serialize)]
struct SideOut<'a> {
    layout: String,
    #[serde(flatten)]
    footprint: &'a Footprint,
}
