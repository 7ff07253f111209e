//! The HTTP client of everything that speaks to a loopback port.

use std::{sync::Arc, time::Duration};

/// A builder of clients that speak plain HTTP to processes of this machine: no proxy, and no certificate is trusted.
/// Its TLS part is set up here, because the library panics when it has to choose one and several could be chosen
/// somewhere in the program.
///
/// # Errors
/// When the TLS library refuses its own defaults.
pub fn loopback_http() -> Result<reqwest::ClientBuilder, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    Ok(reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        // One idle connection serves all: how many stay does not depend on how many were needed at once.
        .pool_max_idle_per_host(1)
        // Sooner than any of our ports gives an idle connection up.
        .pool_idle_timeout(Duration::from_secs(4))
        .connect_timeout(Duration::from_secs(2))
        .no_proxy())
}
