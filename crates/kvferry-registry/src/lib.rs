//! Who is there: leased membership over HTTP, with JSON that a person can read.
//!
//! Each process of an instance registers a [`Member`] and renews it by heartbeat; one that falls silent for a lease is
//! gone. The processes start in any order; together they make a [`Group`], which is ready when every rank is there. The
//! rules live in [`Store`], which is told the time and does no I/O; [`router`] puts it behind HTTP, [`Client`]
//! asks over HTTP and [`Registration`] keeps one member registered, whichever process starts first.
//!
//! | request | answer |
//! |---|---|
//! | `PUT /v1/members/{instance}` with a [`Member`] | 200 [`Granted`]; 400 when it makes no sense; 409 when an older start, another record, or another role asks |
//! | `POST /v1/members/{instance}/heartbeat` with a [`Heartbeat`] | 200 [`Granted`]; 404: register again |
//! | `GET /v1/members` | 200 [`Members`] |
//! | `GET /v1/instances` | 200 [`Groups`] |
//! | `GET /v1/instances/{instance}` | 200 [`Group`]; 503 while only some of its ranks are there; 404 |
//! | `DELETE /v1/members/{instance}` with a [`Heartbeat`] | 204, also when nobody was there |
//!
//! It is *not* the place where two instances decide whether they fit each other (they compare descriptors when
//! they pair), nor where requests are routed. Only loopback addresses are accepted.

#![forbid(unsafe_code)]

#[cfg(feature = "client")]
mod client;
#[cfg(feature = "server")]
mod guarded;
#[cfg(feature = "client")]
mod http;
mod member;
#[cfg(feature = "server")]
mod server;
mod store;

#[cfg(feature = "client")]
pub use client::{Client, ClientError, Registration, State};
#[cfg(feature = "server")]
pub use guarded::{Bounds, Guarded, Offences, Refuse};
#[cfg(feature = "client")]
pub use http::loopback_http;
pub use member::{
    Granted, Group, Groups, Heartbeat, Member, Members, Problem, Role, check_instance, loopback_url,
};
#[cfg(feature = "server")]
pub use server::{BindError, bind_loopback, refuse, router, router_over};
pub use store::{LEASE, Refusal, Store};

/// How often a member renews its lease.
pub const HEARTBEAT: std::time::Duration = std::time::Duration::from_millis(500);
