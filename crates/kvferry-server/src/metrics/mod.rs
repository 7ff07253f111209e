//! What `GET /metrics` tells: one typed struct per kind of process, each metric described where it is made. The page
//! `docs/metrics.md` is written from these descriptions. Not for deciding when to count (`telemetry`).

mod catalogue;
mod instance;
mod labels;
mod page;
mod registry;

pub(crate) use catalogue::{Catalogue, seconds};
pub(crate) use instance::{Ended, InstanceMetrics};
pub(crate) use labels::{
    Bounded, BuildLabels, FailureLabels, KindLabels, LinkLabels, OutcomeLabels, PeerLabels, RefusalLabels,
    StageLabels, StateLabels,
};
pub use page::metrics_page;
pub(crate) use registry::RegistryMetrics;
