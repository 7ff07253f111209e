//! Memory for a target of these tests, at an invented address.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(dead_code, reason = "each test uses a part")]

use std::{
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use kvferry_plan::Bytes;
use kvferry_transport_mooncake::{Access, Address, Notification, Ranges, Region};

/// The first byte; that of no process.
pub(crate) const BASE: u64 = 0x10_0000_0000;

/// One region of which all is granted until it is revoked.
pub(crate) struct Memory {
    pub(crate) bytes: Mutex<Vec<u8>>,
    pub(crate) heard: Mutex<Vec<Notification>>,
    pub(crate) revoked: AtomicBool,
    /// Revokes itself when so many bytes of one write have landed.
    pub(crate) lands: usize,
}

impl Memory {
    pub(crate) fn new(len: usize) -> Self {
        let (bytes, heard) = (Mutex::new(vec![0; len]), Mutex::default());
        Self { bytes, heard, revoked: AtomicBool::new(false), lands: usize::MAX }
    }

    pub(crate) fn region(&self) -> Region {
        Region { address: Address(BASE), len: Bytes(self.bytes.lock().unwrap().len() as u64) }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    fn place(&self, at: Address, len: usize) -> Option<Range<usize>> {
        let offset = self.region().offset(at, Bytes(len as u64))?.index();
        (!self.revoked.load(Ordering::Acquire)).then_some(offset..offset + len)
    }
}

impl Ranges for Memory {
    fn advertised(&self) -> Vec<Region> {
        vec![self.region()]
    }

    fn grants(&self, _: Access, region: Region) -> bool {
        self.region().offset(region.address, region.len).is_some() && !self.revoked.load(Ordering::Acquire)
    }

    fn land(&self, at: Address, piece: &[u8]) -> bool {
        let Some(place) = self.place(at, piece.len()).filter(|place| place.start < self.lands) else {
            return false;
        };
        self.bytes.lock().unwrap()[place].copy_from_slice(piece);
        true
    }

    fn serve(&self, at: Address, piece: &mut [u8]) -> bool {
        let Some(place) = self.place(at, piece.len()) else { return false };
        piece.copy_from_slice(&self.bytes.lock().unwrap()[place]);
        true
    }

    fn notified(&self, notification: Notification) -> bool {
        let wanted = notification.message != "unwanted";
        if wanted {
            self.heard.lock().unwrap().push(notification);
        }
        wanted
    }
}

/// Bytes that tell where they belong.
pub(crate) fn pattern(step: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * step + 7) % 251) as u8).collect()
}
