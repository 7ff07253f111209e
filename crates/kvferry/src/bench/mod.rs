//! `kvferry bench`: measurements that anybody can repeat. Not for numbers that depend on a model or a peer.

mod plan;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::failure::Failure;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// How long the planner takes for one rank of a DCP4 relayout, and the coverage check of a sharded source
    ///
    /// Medians in microseconds on one thread, over page lists that are built in. Exit status 1 when the rows that the
    /// plans expand to are not the recorded ones.
    Plan(PlanBench),
}

#[derive(Args, Debug)]
pub(crate) struct PlanBench {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(command: &BenchCommand) -> Result<ExitCode, Failure> {
    match command {
        BenchCommand::Plan(args) => plan::run(args),
    }
}
