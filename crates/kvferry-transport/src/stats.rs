//! What a transport has done and holds.

use std::collections::BTreeMap;

use kvferry_plan::Bytes;

use crate::Refusal;

/// Counters since the transport started, and what it holds now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransportStats {
    /// Payload bytes that this side pushed.
    pub sent: Bytes,
    /// Payload bytes written to local pools, pushed here or pulled.
    pub landed: Bytes,
    /// Frames (pushes) or page sweeps (pulls) that landed.
    pub frames: u64,
    /// Legs that landed completely.
    pub legs: u64,
    /// Legs and frames refused, by cause.
    pub refused: BTreeMap<Refusal, u64>,
    /// Payload bytes that came for refused legs and were dropped.
    pub dropped: Bytes,
    /// Connections ended because the other end did not speak the protocol, in the hello or later.
    pub malformed: u64,
    /// Connections ended because the other end stalled.
    pub stalled: u64,
    /// Connections turned away because too many were open, or were for another start of this process.
    pub turned_away: u64,
    /// Faults injected.
    pub faults: u64,
    /// Now: accepted connections.
    pub connections: u64,
    /// Now: open links.
    pub links: u64,
    /// Now: granted rooms.
    pub grants: u64,
    /// Now: jobs accepted and not done.
    pub jobs: u64,
}
