//! The contract suite of transports over this protocol.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{sync::Arc, time::Instant};

use kvferry_plan::Bytes;
use kvferry_transport::{Transport, contract, slots::SlotOptions};
use kvferry_transport_mooncake::start;

/// Small slots, and few.
#[test]
fn mooncake_tcp() {
    for (name, check) in contract::CHECKS {
        let started = Instant::now();
        check(&|setup| {
            let options = SlotOptions { slot: Bytes(64 << 10), slots: 4, staging: 4, window: 2, kept: 2 };
            Ok(Arc::new(start(setup, options)?) as Arc<dyn Transport>)
        });
        eprintln!("mooncake-tcp: {name} {:?}", started.elapsed());
    }
}
