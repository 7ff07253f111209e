//! Facade: the crates of kvferry under one name, for programs that embed it. The binary of this package is the same
//! system as a command: `kvferry demo`, `kvferry serve`, `kvferry model`.
//!
//! ```
//! use kvferry::plan::{CacheShape, Dtype, LayoutSpec};
//! let spec: LayoutSpec = "tp=4,dcp=4,page=64".parse().unwrap();
//! let placement = spec.placement(&CacheShape::mla(61, 576), Dtype::Bf16).unwrap();
//! assert_eq!(placement.ranks(), 4);
//! ```

#![forbid(unsafe_code)]

pub use kvferry_arena as arena;
pub use kvferry_engine as engine;
pub use kvferry_node as node;
pub use kvferry_plan as plan;
pub use kvferry_registry as registry;
pub use kvferry_server as server;
pub use kvferry_session as session;
pub use kvferry_transport as transport;
