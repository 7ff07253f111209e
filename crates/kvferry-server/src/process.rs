//! What the operating system says this process holds.

use serde::{Deserialize, Serialize};

/// Counts from `/proc/self`; 0 where that is not to be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessCounts {
    /// Open file descriptors.
    pub(crate) descriptors: usize,
    /// Those of them that are sockets.
    pub(crate) sockets: usize,
    /// Threads.
    pub(crate) threads: usize,
}

impl ProcessCounts {
    /// Counts now. The descriptor that counting itself needs is left out.
    pub(crate) fn now() -> Self {
        let links: Vec<_> = std::fs::read_dir("/proc/self/fd")
            .into_iter()
            .flatten()
            .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
            .collect();
        let own = |link: &&std::path::PathBuf| !link.starts_with("/proc");
        Self {
            descriptors: links.iter().filter(own).count(),
            sockets: links.iter().filter(|link| link.to_string_lossy().starts_with("socket:")).count(),
            threads: std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_socket_is_counted() {
        let before = ProcessCounts::now();
        let held: Vec<_> = (0..20).map(|_| std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        let after = ProcessCounts::now();
        assert!(after.sockets >= before.sockets + held.len(), "{before:?} {after:?}");
        assert!(after.descriptors >= after.sockets && after.threads >= 1);
    }
}
