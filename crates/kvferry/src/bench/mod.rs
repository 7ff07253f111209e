//! `kvferry bench`: measurements that anybody can repeat. Not for numbers that depend on a model or a peer.

mod chart;
mod engine;
mod machine;
mod memory;
mod numbers;
mod plan;
mod rounds;
mod serve;
mod transfer;

pub(crate) use engine::LLAMA_CPP;

use std::{path::Path, process::ExitCode};

use clap::{Args, Subcommand};
use kvferry_plan::Blame;
use serde::Serialize;
use tokio::runtime::Runtime;

use crate::{failure::Failure, terminal};

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// How long the planner takes for one rank of a DCP4 relayout, and the coverage check of a sharded source
    ///
    /// Medians in microseconds on one thread, over page lists that are built in. Exit status 1 when the rows that the
    /// plans expand to are not the recorded ones.
    Plan(PlanBench),
    /// How fast transports move a cache between two layouts, as part of what the machine can do
    ///
    /// Both ends run in this process, over their own pools. Next to each way its ceiling is measured in the same run,
    /// in turns, with the same bytes and memory: `tcp` against one raw loopback connection, `shm` against the bare
    /// copies in one sweep. Both sides must say the same of what was moved, else the exit status is 1.
    Transfer(transfer::TransferBench),
    /// Tokens per CPU-second of the engine, in both arithmetic modes, beside llama.cpp on the same file
    ///
    /// One rank, one request, attention as the model has it; also decode batches in both forms. llama.cpp is measured on
    /// one thread through a prebuilt library; the last line says how to get it when it is not there. With --long: one
    /// long prompt on two ranks instead, without llama.cpp.
    Engine(engine::EngineBench),
    /// How much memory a rank's cache takes with KV sharding, and the context that fits into it
    ///
    /// Starts engines with a pool for one long sequence and reads what they have allocated, sharded and not: latent rows over
    /// TP ranks, keys and values over prefill CP ranks. Exit status 1 when a rank has more than its share, one page and
    /// the scratch.
    Memory(memory::MemoryBench),
    /// What an application feels: prefill and decode behind a router, beside one process that does both
    ///
    /// Starts both on this machine and asks them in turns: time to the first token, time per further token, throughput,
    /// and the part of the hand-off that prefill does not hide. Cells with more than 16384 prompt tokens in flight are
    /// left out, and named.
    Serve(serve::ServeBench),
}

#[derive(Args, Debug)]
pub(crate) struct PlanBench {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(command: &BenchCommand, runtime: &Runtime) -> Result<ExitCode, Failure> {
    match command {
        BenchCommand::Plan(args) => plan::run(args),
        BenchCommand::Engine(args) => engine::run(args, runtime),
        BenchCommand::Memory(args) => memory::run(args, runtime),
        BenchCommand::Serve(args) => serve::run(args, runtime),
        BenchCommand::Transfer(args) => transfer::run(args),
    }
}

/// Prints what was measured: one JSON object, or as `show` does for people.
fn print<T: Serialize>(document: &T, json: bool, show: impl FnOnce(&T)) -> Result<(), Failure> {
    if json {
        terminal::line(serde_json::to_string(document).map_err(|e| Failure::new(Blame::Us, e))?);
    } else {
        show(document);
    }
    Ok(())
}

/// Under figures of a size that is only for trying.
fn only_works(size: &str) {
    terminal::paragraph(format_args!("{size}: this shows that it works, not how fast it is"), 2);
}

/// Finds out whether a picture can be written before anything is measured for it.
fn check_svg(path: Option<&Path>) -> Result<(), Failure> {
    let Some(path) = path else { return Ok(()) };
    let file = std::fs::File::options().append(true).create(true).open(path);
    file.map(drop).map_err(|e| cannot_write(path, &e))
}

fn write_svg(path: &Path, svg: &str) -> Result<(), Failure> {
    std::fs::write(path, svg).map_err(|e| cannot_write(path, &e))
}

fn cannot_write(path: &Path, why: &std::io::Error) -> Failure {
    Failure::caller(format_args!("--svg {}: {why}; name a file that can be written", path.display()))
}
