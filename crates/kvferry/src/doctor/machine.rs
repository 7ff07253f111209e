//! What the operating system gives: cores, memory, shared memory, sockets, limits.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
};

use kvferry_arena::Arena;
use kvferry_engine::math;
use kvferry_plan::{CacheShape, Dtype, LayoutSpec, PoolLayout, RankId};

use super::{Finding, State};

/// Below this nothing runs but the built-in model.
const LITTLE_MEMORY: u64 = 1 << 30;
/// Descriptors that a small cluster's process may need.
const DESCRIPTORS: u64 = 1024;

pub(super) fn look() -> Vec<Finding> {
    vec![
        cores(),
        memory(),
        simd(),
        shared_memory(),
        locked_memory(),
        huge_pages(),
        loopback(),
        descriptors(),
        congestion(),
    ]
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// A file of this process's control group (version 2), wherever that is mounted.
fn cgroup(file: &str) -> Option<String> {
    let own = read("/proc/self/cgroup")?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?.trim_start_matches('/').to_owned();
    let mounted = Path::new("/sys/fs/cgroup");
    // In a container the own group may be mounted as the root.
    read(mounted.join(path).join(file)).or_else(|| read(mounted.join(file)))
}

fn cores() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let limit = cgroup("cpu.max").and_then(|text| {
        let (quota, period) = text.split_once(' ')?;
        Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
    });
    let says = match limit {
        Some(limit) => format!("{cores} usable, limited to {limit:.1} by the control group"),
        None => format!("{cores} usable"),
    };
    Finding::new("cores", State::Ok, says)
}

fn memory() -> Finding {
    let info = read("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok()
    };
    let (total, mut free) = (kib("MemTotal").unwrap_or(0) << 10, kib("MemAvailable").unwrap_or(0) << 10);
    let bytes = |file| cgroup(file)?.parse::<u64>().ok();
    let mut says = format!("{} of {} available", size(free), size(total));
    if let (Some(most), Some(used)) = (bytes("memory.max"), bytes("memory.current")) {
        // What the group has cached in files is given back when it is needed.
        let cached = cgroup("memory.stat").and_then(|stat| {
            stat.lines().find_map(|line| line.strip_prefix("inactive_file "))?.parse::<u64>().ok()
        });
        free = free.min(most.saturating_sub(used.saturating_sub(cached.unwrap_or(0))));
        says = format!("{says}; the control group allows {}, {} of it free", size(most), size(free));
    }
    if free >= LITTLE_MEMORY {
        return Finding::new("memory", State::Ok, says);
    }
    Finding::new("memory", State::Missing, says)
        .remedy("end other programs, raise the limit, or use --model embedded:needle_kimi")
}

/// In GiB, or in MiB below one.
#[expect(clippy::cast_precision_loss, reason = "for people")]
fn size(bytes: u64) -> String {
    let (unit, bits) = if bytes < 1 << 30 { ("MiB", 20) } else { ("GiB", 30) };
    format!("{:.1} {unit}", bytes as f64 / f64::from(1 << bits))
}

fn simd() -> Finding {
    Finding::new(
        "instruction set",
        State::Ok,
        format!("the engine computes with {}", math::instruction_set()),
    )
}

/// Makes what every pool is: a sealed memory file, mapped.
fn shared_memory() -> Finding {
    let arena = || {
        let shape = CacheShape::gqa(1, 1, 8);
        let placement = LayoutSpec::default().placement(&shape, Dtype::F32).map_err(|e| e.to_string())?;
        let layout = PoolLayout::new(&shape, &placement, RankId(0), 1).map_err(|e| e.to_string())?;
        Arena::new("doctor", layout).map_err(|e| e.to_string())
    };
    match arena() {
        Ok(_) => Finding::new("shared memory", State::Ok, "memory files can be made, sealed and mapped"),
        Err(why) => Finding::new("shared memory", State::Missing, why)
            .remedy("use Linux 3.17 or later, and allow memfd_create and F_ADD_SEALS (a seccomp profile may forbid them)"),
    }
}

/// A soft limit of this process; `None` is no limit.
fn limit(name: &str) -> Option<Option<u64>> {
    let limits = read("/proc/self/limits")?;
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    let soft = line.split_whitespace().next()?;
    Some(if soft == "unlimited" { None } else { Some(soft.parse().ok()?) })
}

fn locked_memory() -> Finding {
    let says = match limit("Max locked memory") {
        None => "not known".into(),
        Some(None) => "unlimited".into(),
        Some(Some(bytes)) => format!("{} may be locked", size(bytes)),
    };
    Finding::new(
        "locked memory",
        State::Info,
        format!("{says}; only RDMA transports of later versions need it"),
    )
}

fn huge_pages() -> Finding {
    let sizes: Vec<String> = std::fs::read_dir("/sys/kernel/mm/hugepages")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let free = read(entry.path().join("free_hugepages"))?;
            Some(format!(
                "{free} of {}",
                entry.file_name().to_string_lossy().trim_start_matches("hugepages-")
            ))
        })
        .collect();
    let says = match sizes.is_empty() {
        true => "not known here".into(),
        false => format!("free: {}", sizes.join(", ")),
    };
    Finding::new("huge pages", State::Info, format!("{says}; pools use ordinary pages"))
}

/// Sends a byte over loopback and back.
fn loopback() -> Finding {
    let echo = || -> std::io::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut there = TcpStream::connect(listener.local_addr()?)?;
        let (mut here, _) = listener.accept()?;
        there.write_all(&[7])?;
        here.read_exact(&mut [0])
    };
    match echo() {
        Ok(()) => Finding::new("loopback", State::Ok, "ports on 127.0.0.1 can be opened and reached"),
        Err(why) => Finding::new("loopback", State::Missing, why.to_string())
            .remedy("bring the interface up: ip link set lo up"),
    }
}

fn descriptors() -> Finding {
    match limit("Max open files") {
        Some(Some(files)) if files < DESCRIPTORS => {
            Finding::new("open files", State::Missing, format!("{files} at most"))
                .remedy(format!("ulimit -n {}", 4 * DESCRIPTORS))
        }
        Some(Some(files)) => Finding::new("open files", State::Ok, format!("{files} at most")),
        _ => Finding::new("open files", State::Ok, "no limit"),
    }
}

fn congestion() -> Finding {
    let at = Path::new("/proc/sys/net/ipv4");
    let all = read(at.join("tcp_available_congestion_control")).unwrap_or_else(|| "not known".into());
    let used = read(at.join("tcp_congestion_control")).unwrap_or_else(|| "not known".into());
    let says = format!("{used} by default, of {all}; `--transport tcp` sets cubic on its own, or else reno");
    Finding::new("TCP congestion control", State::Info, says)
}
