//! Drives hand-offs with tokio: a [`Node`] is one process's end of them, as source and as target.
//!
//! A prefill instance calls [`Node::send`] and tells the handle what it has computed; a decode instance calls
//! [`Node::receive`] with the address of the prefill node. Both await an outcome, which resolves only when nobody
//! reads or writes the room's pages any more.
//!
//! Rooms are decided by the machines of `kvferry-session`; this crate gives them connections, clocks and threads.
//! It is *not* for finding peers (`kvferry-registry`) nor for producing or using the bytes (`kvferry-engine`).

#![forbid(unsafe_code)]

mod config;
mod connection;
mod core;
mod error;
mod fault;
mod kind;
mod lane;
mod ledger;
mod node;
mod observe;
mod room;
mod work;

pub use config::{Limits, NodeConfig};
pub use error::{NodeError, RoomError};
pub use fault::SourceFault;
pub use kind::TransportKind;
pub use kvferry_session::{Cause, CauseKind, Choice, FirstToken, Prompt, Side, choices};
pub use kvferry_transport::Inject;
pub use ledger::Ledger;
pub use node::Node;
pub use observe::{Moment, Observer};
pub use room::{
    PeerAddr, PeerTransport, Receipt, Receive, ReceiveHandle, SourceHandle, SourceReceipt, SourceRoom,
};
