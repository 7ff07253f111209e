//! Sans-IO state machines of a hand-off, and the messages they exchange.
//!
//! Time and events go in, actions come out; nothing here reads a clock, opens a socket or spawns a task. A driver
//! (`kvferry-node`, or a simulation) owns one [`Source`] or [`Target`] per room, feeds it messages, reports of its
//! transports and the time, and carries out what [`Source::poll`] and [`Target::poll`] hand out.
//!
//! What the machines guarantee, whatever the driver's peer does:
//! * a room has one end. The target decides it; a source that gives up asks first ([`Abort`], answered by
//!   [`Closed`]), so both sides say the same unless the connection between them is lost;
//! * a room is complete only when every manifest is there, everything declared has landed with the same digests,
//!   and what landed is every byte the target owns;
//! * no wait is without a bound, and each bound runs on the progress of the side that is responsible;
//! * a room's pages are released only when every piece of work on them has reported and its movers are fenced.
//!
//! The crate is *not* for moving bytes (`kvferry-transport`) nor for tasks and sockets (`kvferry-node`).

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod action;
mod cause;
mod choice;
mod deadlines;
mod frame;
mod intake;
mod limits;
mod pairing;
mod source;
mod target;
mod time;
mod tombstones;
mod wire;

pub use action::{Action, Mover, Outcome, Received, Sent, Work};
pub use cause::{Cause, CauseKind, Side};
pub use choice::{Choice, choices};
pub use deadlines::Deadlines;
pub use frame::{MAX_HELLO, MAX_MESSAGE, WireError, decode, encode, frame_len};
pub use limits::Limits;
pub use pairing::{Pairing, PairingError, Peer};
pub use source::Source;
pub use target::{SourceProcess, Target, TargetRoom};
pub use time::Time;
pub use tombstones::Tombstones;
pub use wire::{
    Abort, Capabilities, Closed, Done, Endpoint, Final, FirstToken, Goodbye, Head, Heartbeat, Hello, Leg,
    Message, Offer, Open, PageRef, Prompt, Refuse, Settled, SlotRef,
};
