//! The registry role: membership and the admin endpoints on one port.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{Json, Router, routing::get};
use kvferry_registry::{Guarded, Store, router_over};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{ServerError, metrics::RegistryMetrics, process::ProcessCounts, ready::Ready};

/// Serves a registry on `listener` until `drain` is cancelled.
///
/// # Errors
/// [`ServerError::Http`].
pub async fn serve_registry(listener: TcpListener, drain: CancellationToken) -> Result<(), ServerError> {
    let server = Guarded::new(listener, Guarded::CONNECTIONS, Guarded::SILENCE);
    let offences = server.offences();
    let ledger =
        async move || Json::<Value>(json!({ "broken": offences.counts(), "process": ProcessCounts::now() }));
    let store = Arc::new(Mutex::new(Store::default()));
    let (metrics, asked) = (Arc::new(RegistryMetrics::new()), Arc::clone(&store));
    let app = Router::new()
        .route(
            "/health",
            get(async || Json(json!({ "status": "ok", "role": "registry", "ready": true, "reason": null }))),
        )
        .route("/ready", get(async || Ready::from(Ok(()))))
        .route(
            "/metrics",
            get(async move || {
                let groups = asked.lock().unwrap_or_else(PoisonError::into_inner).groups(Instant::now());
                metrics.refresh(&groups);
                metrics.catalogue().answer()
            }),
        )
        .route("/debug/ledger", get(ledger))
        .merge(router_over(store));
    let drained = async {
        drain.cancelled().await;
        // For what is being answered. Members keep connections open; the next heartbeat tells them.
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    tokio::select! {
        () = server.serve(app) => {}
        () = drained => {}
    }
    Ok(())
}
