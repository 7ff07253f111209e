//! Tokens per CPU-second of the engine, beside llama.cpp on the same file. CPU time depends less on how busy the machine
//! is than wall time does. Not for throughput of batches.

mod llama;

pub(crate) use llama::INSTALL as LLAMA_CPP;

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use clap::Args;
use comfy_table::CellAlignment;
use kvferry_engine::{Engine, EngineConfig, Event, LoadOptions, Model, NoHandOff, Request, math::Arith};
use kvferry_plan::Blame;
use serde::Serialize;
use tokio::runtime::Runtime;

use super::{
    machine::{Machine, Spent, progress},
    numbers::median,
    print,
};
use crate::{
    failure::Failure,
    model::{self, Located, ModelRef, Progress},
    terminal,
};

#[derive(Args, Debug)]
pub(crate) struct EngineBench {
    /// Print one JSON object (docs/bench.md names its fields)
    #[arg(long)]
    json: bool,
    /// A GGUF file, `smollm2`, or `embedded:llama_tiny`
    #[arg(long, default_value = "smollm2")]
    model: ModelRef,
    /// Prompt tokens
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prompt: u32,
    /// Tokens decoded after the first
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    decode: u32,
    /// Interleaved repetitions whose medians are reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Folder with the npm package `node-llama-cpp`, whose prebuilt llama.cpp is measured too
    #[arg(long, value_name = "FOLDER")]
    llama_cpp: Option<PathBuf>,
}

/// Tokens per CPU-second.
#[derive(Clone, Copy, Debug, Default)]
struct Rates {
    prefill: f64,
    decode: f64,
}

#[derive(Debug, Serialize)]
struct Row {
    engine: &'static str,
    prefill_per_cpu_s: f64,
    decode_per_cpu_s: f64,
    /// As part of llama.cpp's, where that was measured.
    prefill_ratio: Option<f64>,
    decode_ratio: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Document {
    version: u32,
    machine: Machine,
    model: String,
    prompt_tokens: u32,
    decode_tokens: u32,
    rounds: u32,
    rows: Vec<Row>,
    /// Why llama.cpp is not among the rows.
    llama_cpp_missing: Option<String>,
}

pub(super) fn run(args: &EngineBench, runtime: &Runtime) -> Result<ExitCode, Failure> {
    if let Some(folder) = &args.llama_cpp {
        llama::check(folder)?;
    }
    let located = runtime.block_on(model::locate(&args.model, Progress::Shown))?;
    let (llama, missing) = match (&args.llama_cpp, &located) {
        (Some(folder), Located::At(file)) => {
            (Some(llama::Llama { folder: folder.clone(), file: file.clone() }), None)
        }
        (Some(_), Located::Embedded(_)) => (None, Some("a built-in model is no GGUF file".to_owned())),
        (None, _) => {
            (None, Some(format!("no --llama-cpp FOLDER was given; make one with `{}`", llama::INSTALL)))
        }
    };
    let ours = [Arith::Fast, Arith::Canonical].map(|arith| start(args, &located, arith));
    let [fast, canonical] = ours;
    let (fast, canonical) = (fast?, canonical?);
    let mut all: [Vec<Rates>; 3] = Default::default();
    // The first round warms up.
    for round in 0..=args.rounds {
        progress(format_args!("round {round} of {}", args.rounds));
        let found = [
            Some(measure(args, &fast)?),
            Some(measure(args, &canonical)?),
            llama.as_ref().map(|llama| llama.measure(args.prompt, args.decode)).transpose()?,
        ];
        for (all, rates) in all.iter_mut().zip(found) {
            all.extend(rates.filter(|_| round > 0));
        }
    }
    let middle = |all: &Vec<Rates>| Rates {
        prefill: median(&all.iter().map(|r| r.prefill).collect::<Vec<_>>()),
        decode: median(&all.iter().map(|r| r.decode).collect::<Vec<_>>()),
    };
    let theirs = llama.is_some().then(|| middle(&all[2]));
    let row = |engine, rates: Rates| Row {
        engine,
        prefill_per_cpu_s: rates.prefill,
        decode_per_cpu_s: rates.decode,
        prefill_ratio: theirs.map(|theirs| rates.prefill / theirs.prefill),
        decode_ratio: theirs.map(|theirs| rates.decode / theirs.decode),
    };
    let mut rows = vec![row("kvferry fast", middle(&all[0])), row("kvferry canonical", middle(&all[1]))];
    rows.extend(theirs.map(|theirs| row("llama.cpp", theirs)));
    let document = Document {
        version: 1,
        machine: Machine::here(),
        model: args.model.to_string(),
        prompt_tokens: args.prompt,
        decode_tokens: args.decode,
        rounds: args.rounds,
        rows,
        llama_cpp_missing: missing,
    };
    print(&document, args.json, show)?;
    Ok(ExitCode::SUCCESS)
}

fn start(args: &EngineBench, located: &Located, arith: Arith) -> Result<(Engine, u32), Failure> {
    let options = LoadOptions { arith, ..LoadOptions::default() };
    let model = Model::from_checkpoint(&located.open()?, options)?;
    let vocab = u32::try_from(model.config().vocab).unwrap_or(u32::MAX);
    let config = EngineConfig {
        pool_tokens: u64::from(args.prompt) + u64::from(args.decode) + 1,
        // Every round has to compute the same prompt again.
        prefix_cache: false,
        ..EngineConfig::default()
    };
    Ok((Engine::start(model, &config, Arc::new(NoHandOff))?, vocab))
}

fn measure(args: &EngineBench, (engine, vocab): &(Engine, u32)) -> Result<Rates, Failure> {
    let tokens = (0..args.prompt).map(|i| (i.wrapping_mul(7919) + 13) % vocab).collect();
    let request = Request { ignore_eos: true, ..Request::greedy(tokens, args.decode + 1) };
    let begin = Spent::now();
    let mut events = engine.generate(request)?;
    let (mut first, mut decoded) = (None, 0_u32);
    while let Some(event) = events.recv() {
        match event {
            Event::Token { .. } if first.is_none() => first = Some((begin.own(), Spent::now())),
            Event::Token { .. } => decoded += 1,
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    let (prefill, after) = first.ok_or_else(|| Failure::new(Blame::Us, "the engine gave no token"))?;
    let rate = |tokens: u32, seconds: f64| f64::from(tokens) / seconds.max(0.01);
    Ok(Rates { prefill: rate(args.prompt, prefill), decode: rate(decoded, after.own()) })
}

fn show(document: &Document) {
    let Document { machine, model, prompt_tokens, decode_tokens, rounds, .. } = document;
    terminal::paragraph(machine, 2);
    let what = format!("{model}: prefill of {prompt_tokens}, decode of {decode_tokens}");
    terminal::paragraph(format_args!("{what}, {rounds} interleaved rounds"), 2);
    let mut table = terminal::table();
    table.set_header(["tokens per CPU-second", "prefill", "decode", "of llama.cpp"]);
    for row in &document.rows {
        let ratio = row.prefill_ratio.zip(row.decode_ratio);
        table.add_row([
            row.engine.to_owned(),
            format!("{:.1}", row.prefill_per_cpu_s),
            format!("{:.1}", row.decode_per_cpu_s),
            ratio.map_or_else(|| "-".to_owned(), |(prefill, decode)| format!("{prefill:.2}, {decode:.2}")),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    terminal::line(table);
    if let Some(missing) = &document.llama_cpp_missing {
        terminal::paragraph(format_args!("llama.cpp: not measured: {missing}"), 2);
    }
}
