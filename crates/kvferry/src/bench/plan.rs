//! The planner on recorded page lists: a dense source with pages of 64 tokens, and DCP over 4 ranks.

use std::{hint::black_box, process::ExitCode, time::Duration};

use comfy_table::CellAlignment;
use kvferry_plan::{
    Accepted, Assembly, Blame, CacheShape, Dtype, End, PageId, PageTable, Pair, Placement, RankId, Run,
    TokenMap, TokenRange,
};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{PlanBench, print};
use crate::{failure::Failure, terminal};

const RANKS: u32 = 4;
const PAGE: u32 = 64;
/// Calls whose median is reported.
const CALLS: usize = 301;

/// One request's pages, little-endian 32 bit numbers, and the sha256 of its rows over all ranks.
struct Input {
    name: &'static str,
    src: &'static [u8],
    dst: &'static [u8],
    /// Logical pages for the coverage of a source that is sharded over as many ranks.
    logical: &'static [u8],
    sha256: &'static str,
}

const INPUTS: [Input; 2] = [
    Input {
        name: "32k",
        src: include_bytes!("pages/bench_32k_src.i32"),
        dst: include_bytes!("pages/bench_32k_dst.i32"),
        logical: include_bytes!("pages/bench_32k_lpages.i32"),
        sha256: "5aebc64c0dc6cc03a2050444b281723d986abe7496706a940f2fef5186c58bda",
    },
    Input {
        name: "128k",
        src: include_bytes!("pages/bench_128k_src.i32"),
        dst: include_bytes!("pages/bench_128k_dst.i32"),
        logical: include_bytes!("pages/bench_128k_lpages.i32"),
        sha256: "ed64e55f8108559f52eb4f9b54bd1cb349a4a37c3b745be7363c14d34972f452",
    },
];

#[derive(Serialize)]
struct Measured {
    input: &'static str,
    tokens: u64,
    runs: usize,
    plan_us: f64,
    coverage_us: f64,
    sha256: String,
}

#[derive(Serialize)]
struct Document {
    inputs: Vec<Measured>,
}

pub(super) fn run(args: &PlanBench) -> Result<ExitCode, Failure> {
    let inputs = INPUTS.iter().map(measure).collect::<Result<Vec<_>, _>>()?;
    print(&Document { inputs }, args.json, show)?;
    Ok(ExitCode::SUCCESS)
}

fn show(document: &Document) {
    let mut table = terminal::table();
    table.set_header(["input", "tokens", "runs", "plan µs", "coverage µs", "rows"]);
    for m in &document.inputs {
        table.add_row([
            m.input.to_owned(),
            terminal::number(m.tokens),
            terminal::number(m.runs as u64),
            format!("{:.1}", m.plan_us),
            format!("{:.1}", m.coverage_us),
            "as recorded".to_owned(),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    terminal::line(table);
}

fn measure(input: &Input) -> Result<Measured, Failure> {
    let (src, dst, logical) = (table(input.src), table(input.dst), table(input.logical));
    let tokens = TokenRange::new(0, src.0.len() as u64 * u64::from(PAGE));
    let shape = CacheShape::mla(7, 576);
    let dense = Placement::single(&shape, PAGE, Dtype::Bf16);
    let dealt = |tokens| {
        let mut side = dense.clone();
        side.tp = RANKS;
        side.parts.iter_mut().for_each(|part| part.tokens = tokens);
        side
    };
    let dcp = dealt(TokenMap::Interleaved { ranks: RANKS, interleave: 1 });
    let pair = Pair::new(shape.clone(), dense.clone(), dcp)?;
    let plan = |rank| {
        let (src, dst) = (End { rank: RankId(0), table: &src }, End { rank, table: &dst });
        pair.plan(src, dst, tokens)
    };
    let sha256 = digest((0..RANKS).map(|rank| plan(RankId(rank))))?;
    if sha256 != input.sha256 {
        return Err(Failure::new(
            Blame::Us,
            format_args!("{}: the rows have sha256 {sha256}, not {}", input.name, input.sha256),
        ));
    }
    let sharded = dealt(TokenMap::PageSharded { ranks: RANKS });
    let sources = Pair::new(shape, sharded, dense)?;
    let cover = || -> Result<bool, Failure> {
        let mut assembly = Assembly::new(&sources, tokens);
        for rank in (0..RANKS).map(RankId) {
            let cover = sources.cover(End { rank, table: &logical }, tokens)?;
            let accepted = assembly.accept(&sources, rank, tokens, &cover);
            if accepted.map_err(|e| Failure::new(e.blame(), e))? != Accepted::New {
                return Ok(false);
            }
        }
        Ok(assembly.gap(&sources).is_none())
    };
    if !cover()? {
        return Err(Failure::new(
            Blame::Us,
            format_args!("{}: the shards do not cover the tokens", input.name),
        ));
    }
    Ok(Measured {
        input: input.name,
        tokens: tokens.len(),
        runs: plan(RankId(1))?.runs().len(),
        plan_us: median_us(|| plan(RankId(1)).is_ok()),
        coverage_us: median_us(|| cover().is_ok()),
        sha256,
    })
}

fn table(bytes: &[u8]) -> PageTable {
    let (numbers, _) = bytes.as_chunks::<4>();
    PageTable(numbers.iter().map(|n| PageId(u32::from_le_bytes(*n))).collect())
}

/// Over all ranks: source rows, then target rows, as little-endian 64 bit numbers.
fn digest(
    plans: impl Iterator<Item = Result<kvferry_plan::Plan, kvferry_plan::Unsupported>>,
) -> Result<String, Failure> {
    let mut hash = Sha256::new();
    for plan in plans {
        let rows: Vec<_> = plan?.runs().iter().flat_map(Run::expand).collect();
        rows.iter().for_each(|(_, src, _)| hash.update(src.0.to_le_bytes()));
        rows.iter().for_each(|(.., dst)| hash.update(dst.0.to_le_bytes()));
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// What this thread has computed so far: others that use the machine too are not counted.
fn thread_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    let part = |n: i64| u64::try_from(n).unwrap_or_default();
    Duration::from_secs(part(now.tv_sec)) + Duration::from_nanos(part(now.tv_nsec))
}

/// Microseconds of CPU of the middle one of many calls.
fn median_us<T>(mut call: impl FnMut() -> T) -> f64 {
    let mut times: Vec<f64> = (0..CALLS)
        .map(|_| {
            let begin = thread_time();
            black_box(call());
            (thread_time() - begin).as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times.get(CALLS / 2).copied().unwrap_or_default()
}
