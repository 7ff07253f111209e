//! NIXL as a peer would use it.

use kvferry_transport::slots::{EngineError, EnginePeer, WriteId};
use kvferry_transport_nixl::NixlEngine;

use super::{naive::DescriptorEngine, peer::Descriptor};

/// An agent of its own.
pub(super) fn start() -> Result<Box<dyn DescriptorEngine>, EngineError> {
    Ok(Box::new(NixlEngine::new()?))
}

impl DescriptorEngine for NixlEngine {
    fn write_each(&mut self, peer: EnginePeer, request: &[Descriptor]) -> Result<WriteId, EngineError> {
        Self::write_each(self, peer, request)
    }
}
