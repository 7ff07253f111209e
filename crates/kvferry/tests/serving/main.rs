//! Requests through a router over two prefill and two decode processes: right answers, and one error or none whatever
//! happens to the instances.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code)]
#[path = "../process/fleet.rs"]
mod fleet;

mod admission;
mod answers;
mod failures;
mod service;
