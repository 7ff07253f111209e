//! What a node holds right now: after the last room everything but the connections is back where it was.

use std::collections::BTreeMap;

use kvferry_plan::Bytes;
use serde::{Deserialize, Serialize};

/// A count of everything that a room may leave behind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// Rooms that this node sends.
    pub sending: u64,
    /// Rooms that this node receives.
    pub receiving: u64,
    /// Opens of peers for rooms that are not known here yet, or for which a link is being opened.
    pub waiting: u64,
    /// Rooms whose pages a reader may read.
    pub leases: u64,
    /// Rooms that may be written, over all transports.
    pub grants: u64,
    /// Pieces of work on links.
    pub jobs: u64,
    /// Control connections.
    pub connections: u64,
    /// Links opened to peers.
    pub links: u64,
    /// Links accepted from peers.
    pub accepted: u64,
    /// Landing slots that peers hold, on transports that have some.
    #[serde(default)]
    pub slots: u64,
    /// Landing slots that nobody may have: what is still on its way to them is not known.
    #[serde(default)]
    pub fenced_slots: u64,
    /// Blocks that are packed or on their way to landing slots.
    #[serde(default)]
    pub blocks: u64,
    /// Times that an engine was started again since the start, because all of its slots were fenced off.
    #[serde(default)]
    pub renewed: u64,
    /// Payload bytes that landed in the pools since the start.
    pub landed: Bytes,
    /// Ended rooms that are remembered.
    pub tombstones: u64,
    /// Faults committed on purpose since the start, by the node and all transports; one a room at most.
    pub faults: u64,
    /// Rooms completed since the start.
    pub completed: u64,
    /// Rooms that failed since the start, by kind of cause.
    pub failed: BTreeMap<String, u64>,
    /// Connections that ended since the start because the other end broke the protocol, by how. Control connections:
    /// `length` (absurd), `malformed`, `cut` (inside a message), `silent` (no hello), `hello` (something else came
    /// first), `full` (too many connections). Connections to a transport, with its name in front, as in
    /// `tcp.malformed`: `length`, `malformed`, `cut`, `stalled` (nothing came where something was due),
    /// `turned_away` (too many connections, meant for another start, or from another user).
    pub broken: BTreeMap<String, u64>,
    /// Peers refused since the start, by field.
    pub refused: BTreeMap<String, u64>,
}

impl Ledger {
    /// True when no room holds anything.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        let Self { sending, receiving, waiting, leases, grants, jobs, slots, blocks, .. } = *self;
        [sending, receiving, waiting, leases, grants, jobs, slots, blocks] == [0; 8]
    }
}
