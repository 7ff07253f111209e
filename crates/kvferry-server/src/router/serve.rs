//! The router as a process.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
};

use axum::{Router as Routes, routing::get};
use kvferry_engine::Voice;
use kvferry_plan::InstanceId;
use kvferry_registry::{Client, bind_loopback};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{
    admin::{self, Admin},
    backend::Pairs,
    view::View,
};
use crate::{ServerError, TraceSink, backend::Backend, openai::Api, telemetry::Telemetry};

/// What a router is started with.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// Its name.
    pub instance: InstanceId,
    /// What turns texts into tokens. Instances that run another model are not asked.
    pub voice: Voice,
    /// Where its HTTP port is opened; loopback only, port 0 takes a free one.
    pub listen: SocketAddr,
    /// URL of the registry, which may start later.
    pub registry: String,
    /// Who collects the spans of its requests.
    pub traces: Option<Arc<dyn TraceSink>>,
}

/// A router.
pub struct Router {
    admin: Arc<Admin>,
    listener: TcpListener,
    http: SocketAddr,
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Router").field("instance", &self.admin.instance).field("http", &self.http).finish()
    }
}

impl Router {
    /// Opens the port. Nobody is asked yet.
    ///
    /// # Errors
    /// [`ServerError::Bind`], [`ServerError::Registry`] when its URL is none.
    pub async fn start(config: RouterConfig) -> Result<Self, ServerError> {
        let registry = Client::new(&config.registry)?;
        let listener = bind_loopback(config.listen).await?;
        let http = listener.local_addr()?;
        let pairs = Arc::new(Pairs::new(
            View::new(registry, &config.voice),
            Arc::new(Telemetry::new("router", config.instance.clone(), &config.voice.name, config.traces)),
        ));
        let api = Api::new(config.voice, Arc::clone(&pairs) as Arc<dyn Backend>);
        Ok(Self { admin: Arc::new(Admin { instance: config.instance, pairs, api }), listener, http })
    }

    /// Base URL of the HTTP port.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.http)
    }

    /// Serves until `drain` is cancelled, then finishes the answers under way, for a bounded time.
    ///
    /// # Errors
    /// [`ServerError::Http`].
    pub async fn serve(self, drain: CancellationToken) -> Result<(), ServerError> {
        let Self { admin, listener, .. } = self;
        let pairs = Arc::clone(&admin.pairs);
        let routes = Routes::new()
            .route("/health", get(admin::health))
            .route("/ready", get(admin::ready))
            .route("/metrics", get(admin::metrics))
            .route("/debug/ledger", get(admin::ledger))
            .with_state(Arc::clone(&admin));
        let app = admin.api.app(routes);
        let late = admin.api.drained(&drain, || {
            pairs.draining.store(true, Ordering::Relaxed);
            tracing::info!(instance = %admin.instance, rooms = pairs.rooms(), "draining");
        });
        tokio::select! {
            () = admin.api.port(listener).serve(app, drain.cancelled()) => {}
            () = pairs.view.follow() => {}
            () = late => {}
        }
        Ok(())
    }
}
