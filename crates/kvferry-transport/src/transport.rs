//! The trait that every back end implements, and what it is set up with.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use kvferry_arena::Arena;
use kvferry_plan::{Bytes, Descriptor, Generation, Incarnation, RankId, RoomKey};
use minicbor::{Decode, Encode};

use crate::{Done, Grant, Inject, Job, TransportError, TransportStats};

/// Who executes a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mover {
    /// The side that has the bytes pushes them; it opens the link.
    Source,
    /// The side that wants the bytes pulls them; it opens the link.
    Target,
}

/// The kind of memory behind a registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
#[non_exhaustive]
pub enum MemoryKind {
    /// The host's.
    #[default]
    #[n(0)]
    Host,
}

/// The number of a device among those of its memory kind; 0 for host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(transparent)]
pub struct DeviceId(#[n(0)] pub u32);

/// The memory of one local rank.
#[derive(Clone, Debug)]
pub struct Registration {
    /// The memory.
    pub arena: Arc<Arena>,
    /// What it is.
    pub kind: MemoryKind,
    /// Where it is.
    pub device: DeviceId,
}

impl Registration {
    /// Host memory.
    #[must_use]
    pub fn host(arena: Arc<Arena>) -> Self {
        Self { arena, kind: MemoryKind::Host, device: DeviceId(0) }
    }
}

/// The peer that a link is opened to, as the control plane knows it.
#[derive(Clone, Debug)]
pub struct PeerAddr {
    /// What the peer's [`Transport::endpoint`] said.
    pub endpoint: String,
    /// The start of the peer that is meant; another one at the same endpoint is refused.
    pub incarnation: Incarnation,
    /// The peer's layout. A transport that maps the peer's memory derives its pool layouts from it.
    pub descriptor: Arc<Descriptor>,
}

/// One process's end of a way to move bytes. Dropping it closes everything and joins its threads.
///
/// The life of a hand-off, `S` at the source and `T` at the target:
/// 1. both `register` the memory of their ranks, before any link is opened;
/// 2. the [`Mover`] opens a link to the other side's endpoint;
/// 3. `T` grants the room, and tells `S` its generation over the control plane;
/// 4. for each chunk and source rank the mover executes a [`Job`]; both sides end up with a [`crate::LegReport`] per
///    leg, the executing one through [`Done`], the target of a push through [`Grant::landed`]. The source of a pull
///    is told over the control plane and digests its memory with [`kvferry_arena::digest_plan`];
/// 5. `T` revokes the grant before it gives the room's pages to anybody else.
///
/// Methods do not wait for peers except where they say so. They may be called from several threads.
pub trait Transport: Send + Sync + fmt::Debug {
    /// Its name, as users write it: `tcp`.
    fn name(&self) -> &'static str;

    /// Who executes jobs and opens links.
    fn mover(&self) -> Mover;

    /// Where peers reach this end: `tcp://127.0.0.1:4711`, `shm://@kvferry-7-2a-0`, `mem://3`.
    fn endpoint(&self) -> String;

    /// Makes the memory of a local rank known, for both roles. Once per rank.
    ///
    /// # Errors
    /// When the rank has memory already, or the back end cannot use this kind of memory.
    fn register(&self, rank: RankId, memory: Registration) -> Result<(), TransportError>;

    /// Target: allows the room to be written.
    ///
    /// # Errors
    /// [`TransportError::Invalid`] when the room is granted to that peer already, a rank has no memory here, or the pages do not
    /// fit the pool or the tokens; [`TransportError::Busy`] when too many rooms are granted.
    fn grant(&self, grant: Grant) -> Result<(), TransportError>;

    /// Target: a fence. After it returns no byte of this grant is written any more, and frames for it are refused.
    /// Waits for at most one frame that is being copied. Without effect when the room is not granted with this
    /// generation.
    fn revoke(&self, key: RoomKey, generation: Generation);

    /// Mover: opens a link to a peer. Waits for the peer, up to [`Limits::connect`].
    ///
    /// # Errors
    /// [`TransportError::Endpoint`], [`TransportError::PeerGone`] when nobody answers in time,
    /// [`TransportError::Restarted`] when somebody else does.
    fn open(&self, peer: &PeerAddr) -> Result<Arc<dyn Link>, TransportError>;

    /// Ends the connections that this start of a peer opened to us: the control plane knows that it is gone, even
    /// where its machine or a stopped process keeps a connection open. Does not wait.
    fn forget(&self, peer: Incarnation);

    /// Counters.
    fn stats(&self) -> TransportStats;

    /// Ends everything: listener, connections, links, grants. A fence for all of them. Idempotent.
    fn close(&self);
}

/// A way to one peer. Jobs of a link are executed one after the other, in order. Dropping the last reference closes
/// it.
pub trait Link: Send + Sync + fmt::Debug {
    /// Queues a job. `done` is called exactly once, also when the job is cancelled or the link closed; never from
    /// inside this call.
    ///
    /// # Errors
    /// When the job is not accepted, with `done` dropped: [`TransportError::Closed`], [`TransportError::Busy`],
    /// [`TransportError::UnknownRank`].
    fn execute(&self, job: Job, done: Done) -> Result<(), TransportError>;

    /// Drops the room's jobs: after it returns this link touches no more memory for them. Their `done` gets
    /// [`TransportError::Cancelled`], unless they were complete already.
    fn cancel(&self, key: RoomKey);

    /// Closes the link: after it returns it touches no memory any more. What was queued gets
    /// [`TransportError::Closed`]. Idempotent.
    fn close(&self);
}

/// Bounds of a transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest wait for a peer to accept a link and answer its hello.
    pub connect: Duration,
    /// Longest time without any progress in the middle of a frame or while an answer is due.
    pub stall: Duration,
    /// Jobs that may wait on one link.
    pub jobs: usize,
    /// Accepted connections.
    pub connections: usize,
    /// Granted rooms.
    pub grants: usize,
    /// Bytes per second that one link moves at most, on the side that moves them: to leave a network to others, or
    /// to see a slow one. No bound when absent.
    pub rate: Option<Bytes>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            stall: Duration::from_secs(2),
            jobs: 4096,
            connections: 256,
            grants: 65_536,
            rate: None,
        }
    }
}

/// What a transport is started with.
#[derive(Clone, Debug)]
pub struct Setup {
    /// This process.
    pub incarnation: Incarnation,
    /// Where `tcp` listens; anything but a loopback address is refused.
    pub bind: IpAddr,
    /// A fault to commit when bytes land here.
    pub inject: Option<Inject>,
    /// Bounds.
    pub limits: Limits,
}

impl Setup {
    /// Loopback, no faults, default bounds.
    #[must_use]
    pub fn new(incarnation: Incarnation) -> Self {
        Self { incarnation, bind: Ipv4Addr::LOCALHOST.into(), inject: None, limits: Limits::default() }
    }
}
