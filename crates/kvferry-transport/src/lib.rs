//! How the bytes of a plan get from one process to another.
//!
//! A [`Transport`] is one process's end: it holds the registered memory of its ranks, *grants* rooms that may be
//! written, and opens [`Link`]s to peers. A [`Job`] is one chunk of one source rank, with one [`Leg`] per target
//! rank. Who executes it is the transport's own matter, [`Mover`]: over `tcp` and `mem` the source pushes, over `shm`
//! the target pulls. The other process hears of it through its grant, or through the control plane.
//!
//! | back end | mover | for |
//! |---|---|---|
//! | `mem` | source | both sides in one process: tests |
//! | `shm` | target | two processes of one host |
//! | `tcp` | source | anything else; loopback until connections are authenticated |
//! | [`slots`] | source | engines of others that move blocks between registered memory |
//!
//! Rules that hold for every back end, and that [`contract`] checks:
//! * A sender never names an address. What is written, and where, follows from the target's own grant.
//! * [`Transport::revoke`] and [`Link::close`] are fences: after they return no byte moves.
//! * Every queue and every wait is bounded. A peer that stalls, dies or talks nonsense costs its own link only.
//! * Both sides digest what they hold, the source from its own memory, the target from its pool.
//!
//! *Not* for deciding what to move (`kvferry-plan`), for agreeing on it (`kvferry-session`) or for retrying.

#![forbid(unsafe_code)]

pub mod contract;
mod error;
mod grant;
mod inbound;
mod inject;
mod job;
mod listener;
mod local;
pub mod loopback;
mod mem;
mod push;
mod queue;
mod room;
mod shm;
pub mod slots;
mod socket;
mod stats;
mod tcp;
mod transport;
mod wire;

pub use error::{Refusal, TransportError};
pub use grant::{Grant, Landed};
pub use inject::Inject;
pub use job::{Done, Job, Leg, LegReport};
pub use mem::Mem;
pub use shm::Shm;
pub use stats::TransportStats;
pub use tcp::Tcp;
pub use transport::{DeviceId, Limits, Link, MemoryKind, Mover, PeerAddr, Registration, Setup, Transport};
