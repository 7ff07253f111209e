//! The registry role: membership and the admin endpoints on one port.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Json, Router,
    http::{Method, StatusCode, Uri},
    routing::get,
};
use kvferry_registry::{Bounds, Guarded, Store, refuse, router_over};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{ServerError, metrics::RegistryMetrics, process::ProcessCounts, ready::Ready};

/// How long a registry that was told to end waits for the answers that it gives, which take no time.
const DRAIN: Duration = Duration::from_secs(2);

/// Serves a registry on `listener` until `drain` is cancelled.
///
/// # Errors
/// [`ServerError::Http`].
pub async fn serve_registry(listener: TcpListener, drain: CancellationToken) -> Result<(), ServerError> {
    let server = Guarded::new(listener, Bounds::REGISTRY, refuse);
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
        .merge(router_over(store))
        .fallback(async |uri: Uri| {
            let text =
                format!("there is no {} here; served are /v1/instances, /v1/members and /health", uri.path());
            refuse(StatusCode::NOT_FOUND, text)
        })
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            refuse(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not take {method}", uri.path()))
        });
    let late = async {
        drain.cancelled().await;
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        () = server.serve(app, drain.cancelled()) => {}
        () = late => {}
    }
    Ok(())
}
