//! Mooncake's own engine as a peer would use it.

use kvferry_transport::slots::{EngineError, EnginePeer, WriteId};
use kvferry_transport_mooncake::sidecar::{SidecarEngine, Tuned};

use super::{naive::DescriptorEngine, peer::Descriptor};

/// An engine of its own.
pub(super) fn start() -> Result<Box<dyn DescriptorEngine>, EngineError> {
    Ok(Box::new(SidecarEngine::new(Tuned::AsShipped)?))
}

impl DescriptorEngine for SidecarEngine {
    fn write_each(&mut self, peer: EnginePeer, request: &[Descriptor]) -> Result<WriteId, EngineError> {
        Self::write_each(self, peer, request)
    }
}
