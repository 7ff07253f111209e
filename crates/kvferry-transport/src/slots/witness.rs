//! Whether a process of this machine has ended. *Not* a judgement by time or silence: what cannot be seen to have ended
//! counts as alive.

use std::{fs, os::fd::OwnedFd};

use minicbor::{Decode, Encode};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
};

/// A process, as it names itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(super) struct ProcessId {
    #[n(0)]
    pid: u32,
    /// The boot and the namespace in which the number means something.
    #[n(1)]
    place: String,
    /// When it started, in the kernel's ticks.
    #[n(2)]
    started: u64,
}

impl ProcessId {
    pub(super) fn of(pid: u32) -> Self {
        Self { pid, place: place(), started: started(pid).unwrap_or_default() }
    }
}

fn place() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Sees a process end.
#[derive(Debug)]
pub(super) struct Witness(OwnedFd);

impl Witness {
    /// For a process that can be seen from here and is the one that is meant.
    pub(super) fn new(process: &ProcessId) -> Option<Self> {
        let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw)?;
        let fd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Looked at after it was opened, so it is of the process that is held.
        (ProcessId::of(process.pid) == *process && process.started > 0).then_some(Self(fd))
    }

    /// True once all of its threads have ended.
    pub(super) fn gone(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1))
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_gone_when_it_has_ended() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let id = ProcessId::of(child.id());
        let witness = Witness::new(&id).unwrap();
        assert!(!witness.gone());
        assert!(
            Witness::new(&ProcessId { started: id.started + 1, ..id.clone() }).is_none(),
            "another start"
        );
        assert!(Witness::new(&ProcessId { place: "elsewhere".into(), ..id.clone() }).is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(witness.gone());
        assert!(Witness::new(&id).is_none());
    }
}
