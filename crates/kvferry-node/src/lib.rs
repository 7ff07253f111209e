//! Drives sessions over transports with tokio.
