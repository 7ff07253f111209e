//! The one binary. Not for anything that a library user would want: that is in the crates below.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod child;
mod demo;
mod doctor;
mod failure;
mod model;
mod plan;
mod serve;
mod settings;
mod terminal;
mod traces;
mod transports;
mod up;

use std::{process::ExitCode, time::Duration};

use kvferry_plan::Blame;
use tracing_subscriber::EnvFilter;

use args::{Command, ModelCommand};
use failure::Failure;
use model::Progress;

fn main() -> ExitCode {
    let command = match args::parse(&std::env::args_os().collect::<Vec<_>>()) {
        Ok(command) => command,
        Err(failure) => {
            terminal::complain(&failure);
            return failure.exit_code();
        }
    };
    if let Err(failure) = log() {
        terminal::complain(&failure);
        return failure.exit_code();
    }
    // The TLS library asks for its cryptography before the first connection; nobody else has chosen one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match run(command).and_then(|code| terminal::written().map(|()| code)) {
        Ok(code) => code,
        Err(failure) => {
            terminal::complain(&failure);
            failure.exit_code()
        }
    }
}

/// Logs to stderr: what KVFERRY_LOG asks for, as text, or as JSON lines if KVFERRY_LOG_FORMAT says so.
fn log() -> Result<(), Failure> {
    let said = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
    let wanted = said("KVFERRY_LOG").unwrap_or_else(|| "warn".into());
    let filter = EnvFilter::builder().parse(&wanted).map_err(|why| {
        let help = "write a level (error, warn, info, debug, trace, off), or TARGET=LEVEL,...";
        Failure::caller(format!("KVFERRY_LOG={wanted}: {why}; {help}"))
    })?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(terminal::colours(&std::io::stderr()));
    match said("KVFERRY_LOG_FORMAT").as_deref() {
        None | Some("text") => log.init(),
        Some("json") => log.json().flatten_event(true).init(),
        Some(other) => {
            return Err(Failure::caller(format!("KVFERRY_LOG_FORMAT={other}: write `text` or `json`")));
        }
    }
    Ok(())
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        // Threads that a burst of rooms needed do not stay.
        .thread_keep_alive(Duration::from_millis(200))
        .build()
        .map_err(|e| Failure::new(Blame::Environment, format!("cannot start the runtime: {e}")))?;
    let result = match command {
        Command::Bench(command) => bench::run(&command, &runtime),
        Command::Demo(args) => runtime.block_on(demo::run(*args)),
        Command::Doctor(args) => runtime.block_on(doctor::run(args)),
        Command::Plan(args) => plan::run(&args),
        Command::Serve(args) => runtime.block_on(serve::run(*args)).map(|()| ExitCode::SUCCESS),
        Command::Up(args) => runtime.block_on(up::run(*args)).map(|()| ExitCode::SUCCESS),
        Command::Model(ModelCommand::Path { model }) => {
            model::path(&model).map(|path| terminal::line(path.display())).map(|()| ExitCode::SUCCESS)
        }
        Command::Model(ModelCommand::Pull { model }) => runtime
            .block_on(model::locate(&model, Progress::Shown))
            .and_then(|_| model::path(&model))
            .map(|path| terminal::line(path.display()))
            .map(|()| ExitCode::SUCCESS),
    };
    // A thread that still computes for a request that failed does not keep the process.
    runtime.shutdown_background();
    result
}
