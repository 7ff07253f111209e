//! Metrics together with their descriptions, so that what is exported and what is documented cannot differ.

use std::fmt::Write as _;

use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use prometheus_client::{
    encoding::prometheus_text,
    metrics::{MetricType, histogram::Histogram},
    registry::{Metric, Registry, Unit},
};

/// Upper bounds of the buckets of everything that is measured in seconds.
const SECONDS: [f64; 16] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// An empty histogram of seconds.
pub(crate) fn seconds() -> Histogram {
    Histogram::new(SECONDS)
}

/// One metric, as the page shows it.
#[derive(Debug)]
struct Described {
    name: String,
    kind: &'static str,
    labels: &'static str,
    help: &'static str,
}

/// The metrics of one kind of process.
#[derive(Debug)]
pub(crate) struct Catalogue {
    registry: Registry,
    described: Vec<Described>,
}

impl Catalogue {
    pub(crate) fn new() -> Self {
        Self { registry: Registry::with_prefix("kvferry"), described: Vec::new() }
    }

    /// Adds a metric; `labels` are their names, separated by spaces, and `help` is a sentence without its full stop.
    pub(crate) fn add<M: Metric + Clone>(
        &mut self,
        name: &'static str,
        unit: Option<Unit>,
        labels: &'static str,
        help: &'static str,
        metric: M,
    ) -> M {
        let mut full = format!("kvferry_{name}");
        if let Some(unit) = &unit {
            full = format!("{full}_{}", unit.as_str());
        }
        let kind = match metric.metric_type() {
            MetricType::Counter => {
                full.push_str("_total");
                "counter"
            }
            MetricType::Histogram => "histogram",
            _ => "gauge",
        };
        self.described.push(Described { name: full, kind, labels, help });
        match unit {
            Some(unit) => self.registry.register_with_unit(name, help, unit, metric.clone()),
            None => self.registry.register(name, help, metric.clone()),
        }
        metric
    }

    /// All values, in the Prometheus text format 0.0.4.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = prometheus_text::encode(&mut text, &self.registry);
        text
    }

    /// All values as an HTTP answer.
    pub(crate) fn answer(&self) -> Response {
        ([(header::CONTENT_TYPE, prometheus_text::CONTENT_TYPE)], self.text()).into_response()
    }

    /// The descriptions as a Markdown table.
    pub(crate) fn table(&self) -> String {
        let mut table = String::from("| metric | type | labels | meaning |\n|---|---|---|---|\n");
        for Described { name, kind, labels, help } in &self.described {
            let labels: Vec<_> = labels.split_whitespace().map(|label| format!("`{label}`")).collect();
            let _ = writeln!(table, "| `{name}` | {kind} | {} | {help}. |", labels.join(", "));
        }
        table
    }
}
