//! The `router` role: the OpenAI-compatible API over pairs of instances that the registry knows.
//!
//! A [`view`] is kept of the registry: who is there, and which prefill can serve which decode ([`fit`]: descriptors
//! agree, the planner accepts the two layouts, a transport is common), each answer computed once for two starts. A
//! request that no pair could ever hold is refused before a page is taken anywhere; for others the rule in [`choice`]
//! names the pair, and [`crate::InstancePair`] drives the room. An instance that cannot be reached is left out until it
//! starts again, and the request tries another pair under a new attempt.
//!
//! *Not* a queue: a request that has to wait does so at its decode instance, in order, holding nothing anywhere else.

mod admin;
mod backend;
mod choice;
mod fit;
mod seat;
mod serve;
mod view;

pub use admin::PairHealth;
pub use serve::{Router, RouterConfig};
