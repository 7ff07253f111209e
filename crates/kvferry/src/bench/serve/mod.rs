//! What an application feels of disaggregation: time to the first token, time per further token and throughput of one
//! prefill and one decode instance behind a router, beside one process that does both. Not for tuning an engine: both
//! sides run the same one.

mod client;
mod cluster;

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use comfy_table::CellAlignment;
use serde::Serialize;
use tokio::runtime::Runtime;

use super::{
    chart::{Bar, Chart, Group},
    check_svg,
    machine::Machine,
    numbers::{median, ratio},
    only_works, print,
    rounds::Rounds,
    write_svg,
};
use crate::{
    args::TransportArg,
    failure::Failure,
    model::{self, ModelRef, Progress},
    terminal,
    transports::caution_of,
};
use client::{Wave, wave};
use cluster::Cluster;

/// Prompt tokens that may be in flight at once; cells with more are left out.
const IN_FLIGHT: u32 = 16 << 10;
/// Cells with more prompt tokens in flight run once.
const ONCE: u32 = 2 << 10;

#[derive(Args, Debug)]
pub(crate) struct ServeBench {
    /// Print one JSON object (docs/bench.md names its fields)
    #[arg(long)]
    json: bool,
    /// Also draw the ratios of the times to the first token into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// A GGUF file, `smollm2`, or `embedded:llama_tiny`
    #[arg(long, default_value = "smollm2")]
    model: ModelRef,
    /// Prompt lengths in tokens
    #[arg(long, value_delimiter = ',', default_value = "128,1024,4096", value_parser = clap::value_parser!(u32).range(1..=IN_FLIGHT as i64))]
    prompts: Vec<u32>,
    /// Requests at once
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32", value_parser = clap::value_parser!(u32).range(1..=256))]
    concurrency: Vec<u32>,
    /// Tokens of each answer
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=1024))]
    max_tokens: u32,
    /// Interleaved repetitions of cells with at most 2048 prompt tokens in flight; larger cells run once
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// How caches are handed over
    #[arg(long, value_enum, default_value_t = TransportArg::Shm)]
    transport: TransportArg,
    /// Prompts of 16 and 48 tokens, 1 and 2 at once, 4 tokens each, one round: that it works
    #[arg(long)]
    quick: bool,
}

/// One side of a cell: medians.
#[derive(Clone, Copy, Debug, Serialize)]
struct Side {
    ttft_ms: f64,
    per_token_ms: f64,
    tokens_per_s: f64,
}

#[derive(Debug, Serialize)]
struct Cell {
    prompt_tokens: u32,
    concurrency: u32,
    rounds: u32,
    pd: Side,
    mono: Side,
    ttft_ratio: f64,
    ttft_ratio_lowest: f64,
    ttft_ratio_highest: f64,
    per_token_ratio: f64,
    throughput_ratio: f64,
    /// From the end of prefill's computation until decode has everything, mean of the rooms.
    exposed_ms: Option<f64>,
}

#[derive(Debug, Serialize)]
struct LeftOut {
    prompt_tokens: u32,
    concurrency: u32,
    because: String,
}

#[derive(Debug, Serialize)]
struct Document {
    version: u32,
    machine: Machine,
    model: String,
    transport: String,
    max_tokens: u32,
    cells: Vec<Cell>,
    left_out: Vec<LeftOut>,
}

pub(super) fn run(args: &ServeBench, runtime: &Runtime) -> Result<ExitCode, Failure> {
    check_svg(args.svg.as_deref())?;
    let document = runtime.block_on(measure(args))?;
    if let Some(path) = &args.svg {
        write_svg(path, &draw(&document))?;
    }
    print(&document, args.json, |document| {
        show(document);
        if args.quick {
            only_works("--quick");
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn measure(args: &ServeBench) -> Result<Document, Failure> {
    let (prompts, concurrency, max_tokens, rounds) = if args.quick {
        (vec![16, 48], vec![1, 2], 4, 1)
    } else {
        (args.prompts.clone(), args.concurrency.clone(), args.max_tokens, args.rounds)
    };
    let located = model::locate(&args.model, Progress::Shown).await?;
    let most =
        prompts.iter().flat_map(|p| concurrency.iter().map(move |c| p * c)).filter(|n| *n <= IN_FLIGHT);
    let widest = concurrency.iter().max().copied().unwrap_or(1);
    // Room for every prompt and answer, and for pages that are not full.
    let pool = most.max().unwrap_or(0) + widest * (max_tokens + 64);
    caution_of(args.transport);
    let cluster = Cluster::start(&located, args.transport, pool).await?;
    let (mut cells, mut left_out, mut seed) = (Vec::new(), Vec::new(), 0);
    let rounds_of = |prompt: u32, at_once: u32| match prompt * at_once {
        tokens if tokens > IN_FLIGHT => 0,
        tokens if tokens > ONCE => 1,
        _ => rounds,
    };
    // One more for each length: its first request warms up.
    let of_length = |prompt: &u32| 1 + concurrency.iter().map(|c| rounds_of(*prompt, *c)).sum::<u32>();
    let mut under_way = Rounds::new(prompts.iter().map(of_length).sum());
    for &prompt in &prompts {
        for &at_once in &concurrency {
            if prompt * at_once > IN_FLIGHT {
                let because = format!("more than {IN_FLIGHT} prompt tokens in flight");
                left_out.push(LeftOut { prompt_tokens: prompt, concurrency: at_once, because });
                continue;
            }
            let (mut pd, mut mono) = (Vec::new(), Vec::new());
            let before = cluster.exposed().await;
            for round in 0..=rounds_of(prompt, at_once) {
                if round == 0 && at_once != concurrency[0] {
                    continue;
                }
                under_way.begin(format_args!("{at_once} x {prompt} tokens"), round);
                seed += 1;
                let asked = |side| wave(side, prompt, at_once, max_tokens, seed);
                // In turns also within a round: neither side always finds the machine as the other left it.
                let (a, b) = if round % 2 == 0 {
                    let a = asked(&cluster.router).await?;
                    (a, asked(&cluster.mono).await?)
                } else {
                    let b = asked(&cluster.mono).await?;
                    (asked(&cluster.router).await?, b)
                };
                if round > 0 {
                    pd.push(a);
                    mono.push(b);
                }
            }
            let exposed = cluster.exposed().await.zip(before).and_then(|(after, before)| {
                let rooms = after.count - before.count;
                (rooms > 0.0).then(|| (after.seconds - before.seconds) / rooms * 1e3)
            });
            cells.push(cell((prompt, at_once), &pd, &mono, exposed));
        }
    }
    cluster.stop().await;
    Ok(Document {
        version: 1,
        machine: Machine::here(),
        model: args.model.to_string(),
        transport: crate::args::name_of(&args.transport),
        max_tokens,
        cells,
        left_out,
    })
}

fn cell((prompt, concurrency): (u32, u32), pd: &[Wave], mono: &[Wave], exposed_ms: Option<f64>) -> Cell {
    let middle = |waves: &[Wave], of: fn(&Wave) -> f64| median(&waves.iter().map(of).collect::<Vec<_>>());
    let side = |waves: &[Wave]| Side {
        ttft_ms: middle(waves, |w| w.ttft_ms),
        per_token_ms: middle(waves, |w| w.per_token_ms),
        tokens_per_s: middle(waves, |w| w.tokens_per_s),
    };
    let ratios = |of: fn(&Wave) -> f64| pd.iter().zip(mono).map(|(a, b)| of(a) / of(b)).collect::<Vec<_>>();
    let ttft = ratios(|w| w.ttft_ms);
    Cell {
        prompt_tokens: prompt,
        concurrency,
        rounds: pd.len() as u32,
        pd: side(pd),
        mono: side(mono),
        ttft_ratio: median(&ttft),
        ttft_ratio_lowest: ttft.iter().copied().fold(f64::INFINITY, f64::min),
        ttft_ratio_highest: ttft.iter().copied().fold(0.0, f64::max),
        per_token_ratio: median(&ratios(|w| w.per_token_ms)),
        throughput_ratio: median(&ratios(|w| w.tokens_per_s)),
        exposed_ms,
    }
}

fn show(document: &Document) {
    let Document { machine, model, transport, max_tokens, .. } = document;
    terminal::paragraph(machine, 2);
    let what = format!("{model}, {max_tokens} tokens each; PD: one prefill, one decode over {transport}");
    terminal::paragraph(format_args!("{what}; mono: one process"), 2);
    let mut table = terminal::table();
    table.set_header([
        "at once\nx tokens",
        "TTFT\nPD ms",
        "TTFT\nmono",
        "TTFT\nPD/mono",
        "token\nPD ms",
        "token\nmono",
        "tok/s\nratio",
        "exposed\nms",
    ]);
    for cell in &document.cells {
        let Cell { pd, mono, .. } = cell;
        table.add_row([
            format!("{} x {}", cell.concurrency, cell.prompt_tokens),
            format!("{:.0}", pd.ttft_ms),
            format!("{:.0}", mono.ttft_ms),
            ratio(cell.ttft_ratio, cell.ttft_ratio_lowest, cell.ttft_ratio_highest),
            format!("{:.1}", pd.per_token_ms),
            format!("{:.1}", mono.per_token_ms),
            format!("{:.2}", cell.throughput_ratio),
            cell.exposed_ms.map_or_else(|| "-".into(), |ms| format!("{ms:.1}")),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    terminal::line(table);
    for LeftOut { prompt_tokens, concurrency, because } in &document.left_out {
        terminal::line(format_args!("left out: {concurrency} x {prompt_tokens} tokens ({because})"));
    }
}

fn draw(document: &Document) -> String {
    let bar = |cell: &Cell| Bar {
        label: format!("{} at once", cell.concurrency),
        value: cell.ttft_ratio,
        low: cell.ttft_ratio_lowest,
        high: cell.ttft_ratio_highest,
        mark: None,
        series: 0,
    };
    let groups = document.cells.chunk_by(|a, b| a.prompt_tokens == b.prompt_tokens).map(|cells| Group {
        name: format!("prompts of {} tokens", cells.first().map_or(0, |cell| cell.prompt_tokens)),
        bars: cells.iter().map(bar).collect(),
    });
    let note = format!("{}; {} over {}", document.machine, document.model, document.transport);
    let chart = Chart {
        title: "kvferry bench serve: time to the first token, disaggregated / one process",
        note: &note,
        one: Some("equal"),
        mark: None,
        series: &["median; the line goes from the lowest to the highest round"],
        groups: groups.collect(),
    };
    chart.draw()
}
