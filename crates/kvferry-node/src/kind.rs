//! The back ends that a node knows, by name.

use std::{fmt, str::FromStr, sync::Arc};

use kvferry_transport::{Mem, Setup, Shm, Tcp, Transport, TransportError, slots::SlotOptions};

/// A way to move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum TransportKind {
    /// Both sides in one process.
    Mem,
    /// Two processes of one host.
    Shm,
    /// TCP.
    Tcp,
    /// NVIDIA NIXL, whose library is loaded when this is started.
    Nixl,
    /// Mooncake's own engine, of its Python package, in processes of its own.
    Mooncake,
    /// Mooncake's TCP protocol.
    MooncakeTcp,
}

impl TransportKind {
    /// All of them, in kvferry's own order, which decides where two sides want different ones.
    pub const ALL: [Self; 6] =
        [Self::Mem, Self::Shm, Self::Tcp, Self::Nixl, Self::MooncakeTcp, Self::Mooncake];

    /// As users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mem => "mem",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
            Self::MooncakeTcp => "mooncake-tcp",
        }
    }

    /// Starts this end.
    ///
    /// # Errors
    /// As [`Tcp::new`], [`Shm::new`], [`kvferry_transport_nixl::start`], [`kvferry_transport_mooncake::start`] and
    /// [`kvferry_transport_mooncake::sidecar::start`].
    pub fn start(self, setup: Setup) -> Result<Arc<dyn Transport>, TransportError> {
        Ok(match self {
            Self::Mem => Arc::new(Mem::new(setup)),
            Self::Shm => Arc::new(Shm::new(setup)?),
            Self::Tcp => Arc::new(Tcp::new(setup)?),
            Self::Nixl => Arc::new(kvferry_transport_nixl::start(setup, SlotOptions::default())?),
            Self::Mooncake => {
                Arc::new(kvferry_transport_mooncake::sidecar::start(setup, SlotOptions::default())?)
            }
            Self::MooncakeTcp => Arc::new(kvferry_transport_mooncake::start(setup, SlotOptions::default())?),
        })
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TransportKind {
    type Err = String;

    /// ```
    /// use kvferry_node::TransportKind;
    /// assert_eq!("nixl".parse(), Ok(TransportKind::Nixl));
    /// assert!("rdma".parse::<TransportKind>().unwrap_err().contains("`shm`"));
    /// ```
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.to_string() == text).ok_or_else(|| {
            let names = Self::ALL.map(|kind| format!("`{kind}`")).join(", ");
            format!("`{text}` is not a transport; use one of {names}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_all_is_that_of_two_sides_that_disagree() {
        let ours = TransportKind::ALL.map(TransportKind::name);
        let mut theirs = ours;
        theirs.reverse();
        for (a, b) in [(ours, theirs), (theirs, ours)] {
            let found: Vec<_> = kvferry_session::choices(&a, &b).iter().map(|c| c.transport).collect();
            assert_eq!(found, ours);
        }
    }
}
