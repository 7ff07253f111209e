//! One long prompt and where its time goes. Not for decode, nor for several requests.

use std::{collections::BTreeMap, process::ExitCode, sync::Arc, time::Instant};

use comfy_table::CellAlignment;
use kvferry_engine::{
    Engine, EngineConfig, Event, LoadOptions, Model, NoHandOff, Phase, Profile, math::Arith,
};
use kvferry_plan::LayoutSpec;
use serde::Serialize;
use tokio::runtime::Runtime;

use super::{
    super::{
        machine::{Machine, Spent},
        numbers::median,
        only_works, print,
        rounds::Rounds,
    },
    EngineBench, open, rate, request,
};
use crate::{
    failure::Failure,
    model::{self, Located, Progress},
    terminal,
};

/// As many ranks as the smallest machine has cores.
const RANKS: u32 = 2;
/// Prompt tokens of a step.
const CHUNK: u32 = 512;

#[derive(Debug, Serialize)]
struct Row {
    arith: &'static str,
    prefill_per_cpu_s: f64,
    prefill_per_s: f64,
    /// By what it went to, as part of the time of both ranks; a rank that waits for a core spends time too.
    parts: BTreeMap<&'static str, f64>,
    /// Of all ranks.
    workspace_mib: f64,
    /// Of a rank.
    attention_mib: f64,
}

#[derive(Debug, Serialize)]
struct Document {
    version: u32,
    machine: Machine,
    model: String,
    prompt_tokens: u32,
    ranks: u32,
    chunk_tokens: u32,
    rounds: u32,
    rows: Vec<Row>,
}

/// One prompt.
struct Run {
    cpu: f64,
    wall: f64,
    profile: Profile,
}

pub(super) fn run(args: &EngineBench, runtime: &Runtime) -> Result<ExitCode, Failure> {
    let located = runtime.block_on(model::locate(&args.model(), Progress::Shown))?;
    let modes = [(Arith::Fast, "fast"), (Arith::Canonical, "canonical")];
    let engines = modes
        .iter()
        .map(|(arith, name)| Ok((*name, start(args, &located, *arith)?, Vec::new())))
        .collect::<Result<Vec<_>, Failure>>();
    let mut engines = engines?;
    let mut under_way = Rounds::new(args.rounds * modes.len() as u32);
    for round in 1..=args.rounds {
        for (name, engine, runs) in &mut engines {
            under_way.begin(*name, round);
            runs.push(measure(args.prompt(), engine)?);
        }
    }
    drop(under_way);
    let row = |(arith, engine, runs): &(&'static str, (Engine, u32), Vec<Run>)| {
        let middle = |of: &dyn Fn(&Run) -> f64| median(&runs.iter().map(of).collect::<Vec<_>>());
        let part =
            |run: &Run, phase| run.profile.spent(phase).as_secs_f64() / run.profile.total().as_secs_f64();
        Row {
            arith,
            prefill_per_cpu_s: middle(&|run| rate(args.prompt(), run.cpu)),
            prefill_per_s: middle(&|run| rate(args.prompt(), run.wall)),
            parts: Phase::ALL.map(|phase| (phase.name(), middle(&|run| part(run, phase)))).into(),
            workspace_mib: engine.0.stats().workspace_bytes as f64 / f64::from(1 << 20),
            attention_mib: engine.0.profile().attention_bytes as f64 / f64::from(1 << 20),
        }
    };
    let document = Document {
        version: 1,
        machine: Machine::here(),
        model: args.model().to_string(),
        prompt_tokens: args.prompt(),
        ranks: RANKS,
        chunk_tokens: CHUNK,
        rounds: args.rounds,
        rows: engines.iter().map(row).collect(),
    };
    print(&document, args.json, show)?;
    Ok(ExitCode::SUCCESS)
}

fn start(args: &EngineBench, located: &Located, arith: Arith) -> Result<(Engine, u32), Failure> {
    let options = LoadOptions { arith, ..LoadOptions::default() };
    let (prompt, tokens) = (args.prompt(), 1);
    let model = Model::from_checkpoint(&open(args, located, tokens)?, options)?;
    let vocab = u32::try_from(model.config().vocab).unwrap_or(u32::MAX);
    let config = EngineConfig {
        layout: LayoutSpec { tp: RANKS, ..LayoutSpec::default() },
        chunk: CHUNK,
        max_model_len: Some(prompt + tokens),
        pool_tokens: u64::from(prompt) + u64::from(tokens),
        // Every round has to compute the same prompt again.
        prefix_cache: false,
        profile: true,
        ..EngineConfig::default()
    };
    Ok((Engine::start(model, &config, Arc::new(NoHandOff))?, vocab))
}

fn measure(prompt: u32, (engine, vocab): &(Engine, u32)) -> Result<Run, Failure> {
    let (begin, wall, before) = (Spent::now(), Instant::now(), engine.profile());
    for event in engine.generate(request(prompt, *vocab, 1))? {
        if let Event::Failed(error) = event {
            return Err(error.into());
        }
    }
    let profile = engine.profile().since(&before);
    Ok(Run { cpu: begin.own(), wall: wall.elapsed().as_secs_f64(), profile })
}

fn show(document: &Document) {
    let Document { machine, model, prompt_tokens, ranks, chunk_tokens, rows, .. } = document;
    terminal::paragraph(machine, 2);
    let steps = format!("{ranks} ranks, steps of {chunk_tokens}");
    let prompt = terminal::number((*prompt_tokens).into());
    terminal::paragraph(format_args!("{model}: prefill of {prompt}, {steps}"), 2);
    let mut table = terminal::table();
    table.set_header([String::new()].into_iter().chain(rows.iter().map(|row| row.arith.to_owned())));
    let mut line = |what: &str, of: &dyn Fn(&Row) -> String| {
        table.add_row([what.to_owned()].into_iter().chain(rows.iter().map(of)));
    };
    line("tokens per CPU-second", &|row| format!("{:.0}", row.prefill_per_cpu_s));
    line("tokens per second", &|row| format!("{:.0}", row.prefill_per_s));
    for phase in Phase::ALL {
        let part = |row: &Row| row.parts.get(phase.name()).copied().unwrap_or_default();
        line(&phase.name().replace('_', " "), &|row| format!("{:.1} %", part(row) * 100.0));
    }
    line("memory of both ranks", &|row| format!("{:.0} MiB", row.workspace_mib));
    line("attention's part, one rank", &|row| format!("{:.0} MiB", row.attention_mib));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    terminal::line(table);
    terminal::paragraph(
        "meetings: ranks wait for each other and add up; docs/bench.md has the other parts",
        2,
    );
    if rows.iter().any(|row| f64::from(*prompt_tokens) / row.prefill_per_cpu_s < Spent::FEW) {
        only_works("So little CPU time");
    }
}
