//! Bounds of both roles.

use std::time::Duration;

/// Bounds of a peer, a lane or a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest wait for a connection, and for the whole of a control message.
    pub connect: Duration,
    /// Longest time without any progress in the middle of a request or while an answer is due.
    pub stall: Duration,
    /// Target: how long a connection may be open without a request.
    pub idle: Duration,
    /// Target: connections, on each of its two ports.
    pub connections: usize,
    /// Lane: requests that may be under way.
    pub window: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            stall: Duration::from_secs(5),
            idle: Duration::from_secs(60),
            connections: 64,
            window: 256,
        }
    }
}
