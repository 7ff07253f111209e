//! Where Python is, and what an engine of the package is told by its environment.

use std::{env, path::PathBuf, process::Command, time::Duration};

use kvferry_transport::slots::EngineError;

/// The engine, in messages.
pub(super) const NAME: &str = "Mooncake's engine";
/// How the package is installed.
pub const INSTALL: &str = "install it into the active virtual environment with `python3 -m pip install --no-deps \
                           mooncake-transfer-engine-non-cuda==0.3.13.post1`, and what it needs of the system with `apt-get \
                           install libibverbs1 libnuma1 libcurl4`; or name an interpreter that has it: \
                           KVFERRY_PYTHON=/path/to/python3";
const SCRIPT: &str = include_str!("sidecar.py");

/// What an engine is best at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tuned {
    /// Few large blocks that are wanted one after the other: they go over one connection to each peer.
    Blocks,
    /// Anything: as the package has it.
    AsShipped,
}

/// Settings of the engine. Requests beyond those that may be queued fail at once; 65,535 is the most.
const SETTINGS: [(&str, &str); 3] = [
    ("MC_LOG_LEVEL", "ERROR"),
    ("MC_TCP_ENABLE_CONNECTION_POOL", "1"),
    ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
];

/// A peer that takes nothing for so long has a write fail. The engine gives up a write by itself before it says that it
/// failed only while this is shorter than [`GIVEN_UP`]: otherwise it goes on reading what is no longer its own.
const STALLED: Duration = Duration::from_secs(10);
/// The longest that a write may take.
pub(super) const GIVEN_UP: Duration = Duration::from_secs(30);

/// The interpreter.
pub(super) fn interpreter() -> PathBuf {
    let named = env::var_os("KVFERRY_PYTHON").map(PathBuf::from);
    let active = || env::var_os("VIRTUAL_ENV").map(|folder| PathBuf::from(folder).join("bin/python3"));
    named.or_else(active).unwrap_or_else(|| "python3".into())
}

pub(super) fn missing(reason: String) -> EngineError {
    EngineError::Missing { engine: NAME, reason, remedy: INSTALL }
}

/// An engine for this process.
pub(super) fn command(tuned: Tuned) -> Command {
    let mut command = Command::new(interpreter());
    command.args(["-c", SCRIPT]);
    let seconds = |duration: Duration| duration.as_secs().to_string();
    // What a write that failed still does depends on these; and with RDMA nobody here has tried it.
    for (name, value) in [
        ("MC_FORCE_TCP", "1".into()),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds(STALLED)),
        ("MC_TCP_STATUS_TIMEOUT_SEC", seconds(STALLED)),
        ("MC_TRANSFER_TIMEOUT", seconds(GIVEN_UP)),
    ] {
        command.env(name, value);
    }
    // Whoever has set one of these knows better.
    let lanes = (tuned == Tuned::Blocks).then_some(("MC_TCP_LANES_PER_PEER", "1"));
    for (name, value) in SETTINGS.into_iter().chain(lanes) {
        if env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    command
}
