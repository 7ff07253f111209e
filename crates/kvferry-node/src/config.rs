//! What a node is started with.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use kvferry_arena::Arena;
use kvferry_plan::{Descriptor, Incarnation, InstanceId, RankId};
use kvferry_transport::Inject;

use crate::{SourceFault, TransportKind};

/// Bounds of a node.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Of its rooms.
    pub rooms: kvferry_session::Limits,
    /// Of its transports.
    pub transport: kvferry_transport::Limits,
    /// Between two heartbeats on a control connection.
    pub heartbeat: Duration,
    /// Heartbeats in a row that a peer may miss before it is dead.
    pub missed: u32,
    /// For a control connection and the first messages on it.
    pub handshake: Duration,
    /// For which a transport over which no link to a peer came about is left out, where the pair has another.
    pub relink: Duration,
    /// For the rooms that are open at a shutdown to end by themselves.
    pub drain: Duration,
    /// Accepted control connections.
    pub connections: usize,
    /// Bytes that may wait to be sent to one peer; a peer that does not read them is given up.
    pub outbox: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            rooms: kvferry_session::Limits::default(),
            transport: kvferry_transport::Limits::default(),
            heartbeat: Duration::from_millis(200),
            missed: 3,
            handshake: Duration::from_secs(1),
            relink: Duration::from_secs(10),
            drain: Duration::from_secs(5),
            connections: 1024,
            outbox: 64 << 20,
        }
    }
}

/// What a node is started with.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The instance's name.
    pub instance: InstanceId,
    /// This start of it; drawn when absent.
    pub incarnation: Option<Incarnation>,
    /// Where the control plane listens; a loopback address, port 0 for any free one.
    pub bind: SocketAddr,
    /// What the instance caches and how.
    pub descriptor: Descriptor,
    /// The ranks of the instance that live in this process, ascending; all of them when absent.
    pub hosts: Option<Vec<RankId>>,
    /// The pools of those ranks, in their order.
    pub arenas: Vec<Arc<Arena>>,
    /// The transports to start, each once, in the order in which they are wanted: what a pair makes of the lists of both
    /// sides, [`kvferry_session::choices`] says.
    pub transports: Vec<TransportKind>,
    /// Takes and compares digests. Off only to show what would happen without.
    pub digest: bool,
    /// A fault to commit when bytes land here.
    pub inject: Option<Inject>,
    /// A fault to commit in what is sent from here.
    pub fault: Option<SourceFault>,
    /// Bounds.
    pub limits: Limits,
}
