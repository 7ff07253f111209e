//! Tokens per CPU-second of the engine, beside llama.cpp on the same file, and of both forms of decode steps. CPU time
//! depends less on how busy the machine is than wall time does. Not for throughput of a service (`bench serve`).

mod llama;
mod long;

pub(crate) use llama::INSTALL as LLAMA_CPP;

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use clap::Args;
use comfy_table::CellAlignment;
use kvferry_engine::{
    DecodeBatch, Engine, EngineConfig, Event, LoadOptions, Model, NoHandOff, Request,
    checkpoint::{Checkpoint, Embedded},
    math::Arith,
};
use kvferry_plan::Blame;
use serde::Serialize;
use tokio::runtime::Runtime;

use super::{
    machine::{Machine, Spent},
    numbers::{counted, median},
    only_works, print,
    rounds::Rounds,
};
use crate::{
    failure::Failure,
    model::{self, Located, ModelRef, Progress},
    terminal::{self, number},
};

#[derive(Args, Debug)]
pub(crate) struct EngineBench {
    /// Print one JSON object (docs/bench.md names its fields)
    #[arg(long)]
    json: bool,
    /// One long prompt, on two ranks, and where its time goes
    ///
    /// In both arithmetic modes: tokens per CPU-second, the parts of attention, linear attention, projections, experts and
    /// so on, and the memory that is computed in.
    #[arg(long, conflicts_with_all = ["decode", "llama_cpp"])]
    long: bool,
    /// smollm2, a GGUF file, a Hugging Face folder, hf:owner/repo/file, or embedded:needle_kimi [default: smollm2; with
    /// --long embedded:needle_kimi]
    #[arg(long)]
    model: Option<ModelRef>,
    /// Prompt tokens [default: 512; with --long 32768]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prompt: Option<u32>,
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

/// Requests that generate together, where forms of steps are compared.
const BATCHES: [u32; 3] = [1, 5, 8];
/// Tokens of their prompts, all of which are computed in one step.
const SHORT: u32 = 16;

/// Decode in both forms, fast arithmetic.
#[derive(Debug, Serialize)]
struct FormRow {
    requests: u32,
    fixed_per_cpu_s: f64,
    eager_per_cpu_s: f64,
    /// Fixed as part of eager.
    ratio: f64,
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
    decode_batch: Vec<FormRow>,
    /// Why llama.cpp is not among the rows.
    llama_cpp_missing: Option<String>,
}

impl EngineBench {
    fn model(&self) -> ModelRef {
        let usual = if self.long { ModelRef::Embedded(Embedded::NeedleKimi) } else { ModelRef::SmolLm2 };
        self.model.clone().unwrap_or(usual)
    }

    fn prompt(&self) -> u32 {
        self.prompt.unwrap_or(if self.long { 32_768 } else { 512 })
    }
}

pub(super) fn run(args: &EngineBench, runtime: &Runtime) -> Result<ExitCode, Failure> {
    if args.long {
        return long::run(args, runtime);
    }
    if let Some(folder) = &args.llama_cpp {
        llama::check(folder)?;
    }
    let located = runtime.block_on(model::locate(&args.model(), Progress::Shown))?;
    let (llama, missing) = match (&args.llama_cpp, &located) {
        (Some(folder), Located::At(file)) => {
            (Some(llama::Llama { folder: folder.clone(), file: file.clone() }), None)
        }
        (Some(_), Located::Embedded(_)) => (None, Some("a built-in model is no GGUF file".to_owned())),
        (None, _) => {
            (None, Some(format!("no --llama-cpp FOLDER was given; make one with\n  {}", llama::INSTALL)))
        }
    };
    let ours = [Arith::Fast, Arith::Canonical].map(|arith| start(args, &located, arith));
    let [fast, canonical] = ours;
    let (fast, canonical) = (fast?, canonical?);
    let forms = [DecodeBatch::Fixed, DecodeBatch::Eager].map(|form| start_form(args, &fast, form));
    let [fixed, eager] = forms;
    let forms = [fixed?, eager?];
    let mut of_forms = BATCHES.map(|_| [Vec::new(), Vec::new()]);
    let mut all: [Vec<Rates>; 3] = Default::default();
    let mut under_way = Rounds::new(args.rounds + 1);
    // The first round warms up.
    for round in 0..=args.rounds {
        under_way.begin("engine", round);
        let found = [
            Some(measure(args, &fast)?),
            Some(measure(args, &canonical)?),
            llama.as_ref().map(|llama| llama.measure(args.prompt(), args.decode)).transpose()?,
        ];
        for (all, rates) in all.iter_mut().zip(found) {
            all.extend(rates.filter(|_| round > 0));
        }
        for (requests, all) in BATCHES.into_iter().zip(&mut of_forms) {
            for (engine, all) in forms.iter().zip(all) {
                let rate = measure_batch(args, engine, fast.1, requests)?;
                all.extend((round > 0).then_some(rate));
            }
        }
    }
    drop(under_way);
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
    let decode_batch = BATCHES.into_iter().zip(&of_forms).map(|(requests, [fixed, eager])| {
        let (fixed, eager) = (median(fixed), median(eager));
        let ratio = fixed / eager.max(f64::MIN_POSITIVE);
        FormRow { requests, fixed_per_cpu_s: fixed, eager_per_cpu_s: eager, ratio }
    });
    let document = Document {
        version: 1,
        machine: Machine::here(),
        model: args.model().to_string(),
        prompt_tokens: args.prompt(),
        decode_tokens: args.decode,
        rounds: args.rounds,
        rows,
        decode_batch: decode_batch.collect(),
        llama_cpp_missing: missing,
    };
    print(&document, args.json, show)?;
    Ok(ExitCode::SUCCESS)
}

/// Opens a model that has room for the prompt and so many tokens after it.
fn open(args: &EngineBench, located: &Located, after: u32) -> Result<Checkpoint, Failure> {
    let checkpoint = located.open()?;
    let (prompt, most) = (args.prompt(), checkpoint.config().longest_possible());
    if most.checked_sub(after).is_some_and(|room| prompt <= room) {
        return Ok(checkpoint);
    }
    let remedy = match most.checked_sub(after) {
        Some(room @ 1..) => format!("use --prompt {room} at most"),
        _ => "use a smaller --decode".to_owned(),
    };
    let model = args.model();
    Err(Failure::caller(format_args!(
        "--prompt {prompt}, and {} after it: {model} was made for {most} in all; {remedy}",
        counted(after.into(), "token")
    )))
}

fn start(args: &EngineBench, located: &Located, arith: Arith) -> Result<(Engine, u32), Failure> {
    let options = LoadOptions { arith, ..LoadOptions::default() };
    let tokens = args.decode + 1;
    let model = Model::from_checkpoint(&open(args, located, tokens)?, options)?;
    let vocab = u32::try_from(model.config().vocab).unwrap_or(u32::MAX);
    let config = EngineConfig {
        max_model_len: Some(args.prompt() + tokens),
        pool_tokens: u64::from(args.prompt()) + u64::from(tokens),
        // Every round has to compute the same prompt again.
        prefix_cache: false,
        ..EngineConfig::default()
    };
    Ok((Engine::start(model, &config, Arc::new(NoHandOff))?, vocab))
}

/// An engine of the same model with room for the largest batch.
fn start_form(args: &EngineBench, (same, _): &(Engine, u32), form: DecodeBatch) -> Result<Engine, Failure> {
    let most = BATCHES.into_iter().max().unwrap_or(1);
    let config = EngineConfig {
        pool_tokens: u64::from(most) * (u64::from(SHORT) + u64::from(args.decode) + 17),
        prefix_cache: false,
        decode_batch: form,
        ..EngineConfig::default()
    };
    Ok(Engine::start(Arc::clone(same.model()), &config, Arc::new(NoHandOff))?)
}

/// Tokens per CPU-second of requests that generate together, after the first token of each.
fn measure_batch(args: &EngineBench, engine: &Engine, vocab: u32, requests: u32) -> Result<f64, Failure> {
    let tokens = |request: u32| (0..SHORT).map(|i| (i.wrapping_mul(7919) + 13 * request) % vocab).collect();
    let mut all = (0..requests)
        .map(|request| {
            let request = Request::greedy(tokens(request), args.decode + 1);
            engine.generate(Request { ignore_eos: true, ..request })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let (mut after, mut decoded) = (None, 0_u32);
    for first in [true, false] {
        for events in &mut all {
            while let Some(event) = events.recv() {
                match event {
                    Event::Token { .. } if first => break,
                    Event::Token { .. } => decoded += 1,
                    Event::Failed(error) => return Err(error.into()),
                    _ => {}
                }
            }
        }
        after.get_or_insert_with(Spent::now);
    }
    let spent = after.map_or(0.0, |after| after.own());
    Ok(f64::from(decoded) / spent.max(0.01))
}

fn measure(args: &EngineBench, (engine, vocab): &(Engine, u32)) -> Result<Rates, Failure> {
    let begin = Spent::now();
    let mut events = engine.generate(request(args.prompt(), *vocab, args.decode + 1))?;
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
    Ok(Rates { prefill: rate(args.prompt(), prefill), decode: rate(decoded, after.own()) })
}

/// A prompt that does not repeat soon, and goes on whatever the model says.
fn request(prompt: u32, vocab: u32, tokens: u32) -> Request {
    let prompt = (0..prompt).map(|i| (i.wrapping_mul(7919) + 13) % vocab).collect();
    Request { ignore_eos: true, ..Request::greedy(prompt, tokens) }
}

fn rate(tokens: u32, seconds: f64) -> f64 {
    f64::from(tokens) / seconds.max(0.01)
}

fn show(document: &Document) {
    let Document { machine, model, prompt_tokens, decode_tokens, rounds, .. } = document;
    terminal::paragraph(machine, 2);
    let [prefill, decode] = [*prompt_tokens, *decode_tokens].map(|tokens| number(tokens.into()));
    let rounds = counted((*rounds).into(), "interleaved round");
    terminal::paragraph(format_args!("{model}: prefill of {prefill}, decode of {decode}, {rounds}"), 2);
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
    let mut table = terminal::table();
    table.set_header(["decode, tokens per CPU-second", "fixed", "eager", "fixed / eager"]);
    for row in &document.decode_batch {
        let requests = format!("{} at once", counted(row.requests.into(), "request"));
        let rates = [row.fixed_per_cpu_s, row.eager_per_cpu_s].map(|rate| format!("{rate:.1}"));
        let [fixed, eager] = rates;
        table.add_row([requests, fixed, eager, format!("{:.2}", row.ratio)]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    terminal::line(table);
    let few = |tokens: &u32, rate: f64| f64::from(*tokens) / rate < Spent::FEW;
    if document
        .rows
        .iter()
        .any(|row| few(prompt_tokens, row.prefill_per_cpu_s) || few(decode_tokens, row.decode_per_cpu_s))
    {
        only_works("So little CPU time");
    }
    if let Some(missing) = &document.llama_cpp_missing {
        terminal::paragraph(format_args!("llama.cpp: not measured: {missing}"), 2);
    }
}
