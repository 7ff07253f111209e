//! Where a measurement ran, and what it spent.

use std::{fmt, thread};

use serde::Serialize;

/// What a reader has to know of the machine to compare.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    cpu: String,
    cores: usize,
    memory_gib: u64,
    /// Processes that wanted to run in the last minute, on average: above `cores`, the figures are a busy machine's.
    load: f64,
    debug_build: bool,
}

impl Machine {
    pub(super) fn here() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let value = |text: &str, key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key).map(str::to_owned));
            line.map(|line| line.trim_start_matches([' ', '\t', ':']).trim().to_owned())
        };
        let kib = value(&read("/proc/meminfo"), "MemTotal").unwrap_or_default();
        let kib: u64 = kib.split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
        let load = read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok());
        Self {
            cpu: value(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".into()),
            cores: thread::available_parallelism().map_or(1, usize::from),
            memory_gib: kib.div_ceil(1 << 20),
            load: load.unwrap_or(0.0),
            debug_build: cfg!(debug_assertions),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, cores, memory_gib, load, debug_build } = self;
        write!(f, "{cpu}, {cores} cores, {memory_gib} GiB, load {load:.1}")?;
        if *debug_build { f.write_str(", debug build") } else { Ok(()) }
    }
}

/// CPU seconds of this process and of the children that it has now, at some moment, in hundredths: good for sums, not for one
/// short run.
pub(super) struct Spent(f64);

impl Spent {
    /// Seconds below which hundredths say nothing.
    pub(super) const FEW: f64 = 0.05;

    pub(super) fn now() -> Self {
        // Each thread has its own children.
        let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let children =
            threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
        let children: Vec<String> = children
            .flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
            .collect();
        let ticks = ticks("self") + children.iter().map(|child| ticks(child)).sum::<f64>();
        // Linux counts in hundredths for everybody, whatever its own clock.
        Self(ticks / 100.0)
    }

    /// CPU seconds since then.
    pub(super) fn own(&self) -> f64 {
        Self::now().0 - self.0
    }
}

/// User and system time of a process.
fn ticks(process: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // Behind the name, which may contain anything: state is the first field, user time the twelfth.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11);
    fields.take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum()
}
