//! Real processes under blows: killed, stopped and continued at every phase of a room, over both transports; clients
//! that leave; peers that do not fit; thousands of rooms; the drain. What is compared is the tokens (bit by bit with an
//! engine that runs alone) and everything that `GET /debug/ledger` counts.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod churn;
mod clients;
#[path = "../common/mod.rs"]
mod common;
mod drain;
mod fleet;
mod garbage;
mod late;
mod pairs;
mod phases;
mod refusals;
mod stranger;
mod unsupported;
