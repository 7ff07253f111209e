//! Where Python is, and what an engine of the package is told by its environment.

use std::{env, path::PathBuf, process::Command, time::Duration};

use kvferry_transport::slots::EngineError;

/// The engine, in messages.
pub(super) const NAME: &str = "Mooncake's engine";
/// How the package is installed.
pub const INSTALL: &str = "install it into the active virtual environment with `python3 -m pip install \
                           mooncake-transfer-engine-non-cuda==0.3.13.post1`, and what it needs of the system with `apt-get \
                           install libibverbs1 libnuma1 libcurl4`; or name an interpreter that has it: \
                           KVFERRY_PYTHON=/path/to/python3";
const SCRIPT: &str = include_str!("sidecar.py");

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
pub(super) fn command() -> Command {
    let mut command = Command::new(interpreter());
    command.args(["-c", SCRIPT, &std::process::id().to_string()]);
    let seconds = |duration: Duration| duration.as_secs().to_string();
    // On a machine with RDMA devices the engine would take these, which nobody here has tried.
    command.env("MC_FORCE_TCP", "1");
    command.env("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds(STALLED));
    command.env("MC_TCP_STATUS_TIMEOUT_SEC", seconds(STALLED));
    command.env("MC_TRANSFER_TIMEOUT", seconds(GIVEN_UP));
    command.env("MC_TCP_ENABLE_CONNECTION_POOL", "1");
    // The most: beyond it requests fail at once.
    command.env("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535");
    command.env("MC_TCP_SLICE_SIZE", "1048576");
    if env::var_os("MC_LOG_LEVEL").is_none() {
        command.env("MC_LOG_LEVEL", "ERROR");
    }
    command
}
