//! What a process and its sidecar say to each other: JSON objects, one in a packet. Memory comes with its descriptor.

use std::{
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
        SocketType, recv, sendmsg, socketpair,
    },
};
use serde::{Deserialize, Serialize};

use crate::Address;

/// Of a packet.
const LONGEST: usize = 1 << 16;

/// Told to the sidecar.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order<'a> {
    /// Map this at this address; when it is open, others may write it.
    Memory { address: Address, length: u64, open: bool },
    /// Write one block.
    Write { id: u64, peer: &'a str, source: Address, target: Address, length: u64 },
    /// Write many, in one request: sources, targets and lengths are words of the memory that comes with it.
    Batch { id: u64, peer: &'a str, count: usize },
    /// Tell another sidecar something.
    Notify { peer: &'a str, mailbox: Address, message: &'a str },
    /// Say what was heard.
    Listen {},
}

/// Said by the sidecar.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Report {
    /// There is no package, or another one.
    Missing { reason: String },
    /// The engine runs.
    Ready(Ready),
    /// Others may write this memory.
    Registered { address: Address },
    /// What has come since it was asked last.
    Heard { messages: Vec<String> },
    /// All bytes of these writes are there.
    Settled { ids: Vec<u64> },
    /// A write failed.
    Failed { id: u64, reason: String },
}

/// An engine that runs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Ready {
    /// Its control port.
    pub(super) port: u16,
    /// Where notifications go.
    pub(super) mailbox: Address,
    /// Name and version of the package.
    pub(super) package: String,
}

/// Both ends.
pub(super) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Never waits: a sidecar that does not take what it is told has failed.
pub(super) fn send(socket: &OwnedFd, order: &Order<'_>, with: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let packet = serde_json::to_vec(order).map_err(|_| Errno::INVAL)?;
    let fds: Vec<_> = with.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(&packet)], &mut control, flags).map(drop)
}

/// A packet that is there, as far as it is understood; `None` at the end.
pub(super) fn receive(socket: &OwnedFd) -> Result<Option<Report>, String> {
    let mut packet = vec![0; LONGEST];
    match recv(socket, &mut packet[..], RecvFlags::DONTWAIT) {
        // Also with orders that it has not read.
        Ok((0, _)) | Err(Errno::CONNRESET) => Ok(None),
        Ok((len, _)) => {
            let said = packet.get(..len).unwrap_or_default();
            serde_json::from_slice(said).map(Some).map_err(|error| format!("it says nonsense: {error}"))
        }
        Err(error) => Err(format!("it cannot be heard: {error}")),
    }
}
