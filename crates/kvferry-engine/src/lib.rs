//! CPU engine: models, KV pools, rank groups and a scheduler, made to prove KV hand-offs and to be useful on a
//! laptop.
//!
//! A [`Model`] is loaded once and shared. An [`Engine`] runs it in a layout (`tp`, `dcp`, page size ...): every rank
//! has its own pool, a [`kvferry_arena::Arena`], and its own share of the work; ranks are threads. One
//! scheduler thread owns pages and requests. Requests come whole ([`Engine::generate`]), or split over two
//! engines: [`Engine::prefill`] computes a prompt and reports every chunk to a [`HandOff`];
//! [`Engine::reserve`] and [`Engine::decode`] continue a prompt whose cache was put into the pool from outside.
//!
//! ```
//! use std::sync::Arc;
//! use kvferry_engine::{Engine, EngineConfig, Event, LoadOptions, Model, NoHandOff, Request, checkpoint};
//!
//! let model = Model::from_checkpoint(&checkpoint::embedded()?, LoadOptions::default())?;
//! let engine = Engine::start(model, &EngineConfig::default(), Arc::new(NoHandOff))?;
//! let events: Vec<Event> = engine.generate(Request::greedy(vec![180], 3))?.collect();
//! let ids: Vec<u32> = events
//!     .iter()
//!     .filter_map(|event| match event {
//!         Event::Token { id, .. } => Some(*id),
//!         _ => None,
//!     })
//!     .collect();
//! // What another implementation generates from the same weights.
//! assert_eq!(ids, [323, 52, 8]);
//! assert!(matches!(events.last(), Some(Event::Done { prompt_tokens_computed: 1, .. })));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! *Not* for moving caches between processes (`kvferry-node`): the engine neither plans nor transports, and reads
//! back by point queries what others moved.

#![deny(unsafe_code)]

mod batching;
pub mod chat;
pub mod checkpoint;
mod engine;
mod error;
mod fault;
mod forward;
mod handoff;
mod job;
mod lease;
mod limits;
mod mailbox;
pub mod math;
mod meeting;
mod model;
mod owners;
mod pages;
mod pool;
mod prefix;
mod profile;
mod ranks;
mod request;
mod rows;
mod sampler;
mod scheduler;
mod shares;
pub mod tokenizer;
mod voice;
mod weights;

pub use engine::{DecodeBatch, Engine, EngineConfig, EngineStats};
pub use error::EngineError;
pub use fault::Fault;
pub use handoff::{FirstToken, HandOff, NoHandOff};
pub use lease::RoomLease;
pub use model::{Attention, LatentEps, LoadOptions, Model};
pub use profile::{Phase, Profile};
pub use request::{Alternative, Answer, Event, Events, Request, Sampling, StopReason};
pub use rows::{Coordinate, PartRows, RankRows, Rows};
pub use voice::Voice;
