//! Where finished spans go: to an OpenTelemetry collector, over OTLP/HTTP, if the environment names one. The standard
//! variables (`OTEL_EXPORTER_OTLP_ENDPOINT` and its relatives) are the only configuration.

use std::sync::Arc;

use kvferry_server::TraceSink;

/// The variables that name a collector.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];

fn wanted() -> bool {
    ENDPOINTS.iter().any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
}

/// The way to the collector, for as long as this lives.
#[derive(Debug, Default)]
pub(crate) struct Traces {
    #[cfg(feature = "otel")]
    exporter: Option<Arc<otel::Exporter>>,
}

#[cfg(not(feature = "otel"))]
impl Traces {
    /// Who collects spans: nobody.
    pub(crate) fn sink(&self) -> Option<Arc<dyn TraceSink>> {
        None
    }

    /// Says so when a collector is wanted that this binary cannot reach.
    pub(crate) fn from_env(_instance: &str) -> Self {
        if wanted() {
            tracing::warn!(
                "{} is set, but this binary was built without OpenTelemetry; build it with: cargo build --release --features otel",
                ENDPOINTS[0]
            );
        }
        Self::default()
    }

    /// Sends what is left.
    pub(crate) async fn finish(self) {}
}

#[cfg(feature = "otel")]
impl Traces {
    /// Who collects spans, if anybody does.
    pub(crate) fn sink(&self) -> Option<Arc<dyn TraceSink>> {
        self.exporter.clone().map(|exporter| exporter as Arc<dyn TraceSink>)
    }

    /// Connects to the collector that the environment names, if it names one.
    pub(crate) fn from_env(instance: &str) -> Self {
        let exporter = wanted().then(|| otel::Exporter::new(instance)).transpose();
        let exporter = exporter.unwrap_or_else(|error| {
            // Serving goes on without being seen.
            tracing::warn!(%error, "no spans will be exported; check the OTEL_* variables");
            None
        });
        Self { exporter: exporter.map(Arc::new) }
    }

    /// Sends what is left, for a bounded time.
    pub(crate) async fn finish(self) {
        if let Some(exporter) = self.exporter {
            // A thread that still waits for the collector does not keep the process.
            let _ = tokio::task::spawn_blocking(move || exporter.finish()).await;
        }
    }
}

#[cfg(feature = "otel")]
mod otel {
    use std::time::Duration;

    use kvferry_server::{Span, SpanValue, TraceSink};
    use opentelemetry::{
        InstrumentationScope, KeyValue, Value,
        trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceState},
    };
    use opentelemetry_otlp::{ExporterBuildError, SpanExporter};
    use opentelemetry_sdk::{
        Resource,
        trace::{BatchSpanProcessor, SpanData, SpanProcessor},
    };

    /// For the last spans.
    const FINISH: Duration = Duration::from_secs(2);

    /// Batches spans and sends them, on a thread of its own.
    #[derive(Debug)]
    pub(super) struct Exporter {
        processor: BatchSpanProcessor,
        scope: InstrumentationScope,
    }

    impl Exporter {
        pub(super) fn new(instance: &str) -> Result<Self, ExporterBuildError> {
            let exporter = SpanExporter::builder().with_http().build()?;
            let mut processor = BatchSpanProcessor::builder(exporter).build();
            // OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come last and win.
            let resource = Resource::builder_empty()
                .with_service_name("kvferry")
                .with_attribute(KeyValue::new("service.instance.id", instance.to_owned()))
                .with_detector(Box::new(opentelemetry_sdk::resource::EnvResourceDetector::new()));
            let resource = match std::env::var("OTEL_SERVICE_NAME") {
                Ok(name) if !name.is_empty() => resource.with_service_name(name),
                _ => resource,
            };
            processor.set_resource(&resource.build());
            let scope =
                InstrumentationScope::builder("kvferry").with_version(env!("CARGO_PKG_VERSION")).build();
            Ok(Self { processor, scope })
        }

        pub(super) fn finish(&self) {
            if let Err(error) = self.processor.shutdown_with_timeout(FINISH) {
                tracing::warn!(%error, "the last spans were not exported");
            }
        }
    }

    impl TraceSink for Exporter {
        fn collect(&self, spans: Vec<Span>) {
            for span in spans {
                let flags = if span.context.sampled { TraceFlags::SAMPLED } else { TraceFlags::NOT_SAMPLED };
                let context = SpanContext::new(
                    span.context.trace.into(),
                    span.context.span.into(),
                    flags,
                    false,
                    TraceState::default(),
                );
                let value = |value| match value {
                    SpanValue::Count(count) => Value::I64(i64::try_from(count).unwrap_or(i64::MAX)),
                    SpanValue::Seconds(seconds) => Value::F64(seconds),
                    SpanValue::Text(text) => Value::from(text),
                };
                let attributes = span.attributes.into_iter();
                self.processor.on_end(SpanData {
                    span_context: context,
                    parent_span_id: span.parent.map_or(SpanId::INVALID, SpanId::from),
                    parent_span_is_remote: span.remote_parent,
                    span_kind: if span.remote_parent { SpanKind::Server } else { SpanKind::Internal },
                    name: span.name.into(),
                    start_time: span.began,
                    end_time: span.ended,
                    attributes: attributes.map(|(key, v)| KeyValue::new(key, value(v))).collect(),
                    dropped_attributes_count: 0,
                    events: Default::default(),
                    links: Default::default(),
                    status: span.error.map_or(Status::Unset, Status::error),
                    instrumentation_scope: self.scope.clone(),
                });
            }
        }
    }
}
