//! The metrics of a service, served on its gRPC socket.
//!
//! Names begin with `inpod_<component>_`, and `process_*` metrics carry the component as a label, so that the texts of
//! several services can be joined.

mod aggregate;
mod calls;
mod fetch;
mod observable_gauge;
mod process;
mod scrape;

pub use aggregate::AggregatedMetrics;
pub(crate) use calls::{Calls, OpenCall};
pub use fetch::fetch;
pub use observable_gauge::ObservableGauge;
pub use scrape::{RenderMetrics, serve};

use std::{
    borrow::Cow,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    encoding::text,
    metrics::{gauge::ConstGauge, histogram::Histogram, info::Info},
    registry::{Registry, Unit},
};

use crate::{Readiness, Service};

/// The media type of the text that [`Metrics::text`] returns.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The path of the metrics on every gRPC socket.
pub const PATH: &str = "/metrics";

/// The metrics of this process, cheap to clone.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    prefix: Arc<str>,
    calls: Calls,
}

impl Metrics {
    /// Registers metrics of version, start time, process, conditions and calls.
    pub(crate) fn new(service: &Service, readiness: &Readiness) -> Self {
        let mut registry = Registry::default();
        let component = (Cow::Borrowed("component"), Cow::Borrowed(service.name));
        registry
            .sub_registry_with_label(component)
            .register_collector(Box::new(process::Process));
        let prefix = format!("inpod_{}", service.name.replace('-', "_"));
        let own = registry.sub_registry_with_prefix(&prefix);
        let version = Info::new([("version", service.version)]);
        own.register("build", "Version of the process", version);
        let start = ConstGauge::new(seconds_since_1970());
        let help = "Start time of the process, since 1970";
        own.register_with_unit("start_time", help, Unit::Seconds, start);
        own.register_collector(Box::new(readiness.clone()));
        let calls = Calls::register(own);
        Self {
            registry: Arc::new(Mutex::new(registry)),
            prefix: prefix.into(),
            calls,
        }
    }

    /// Registers metrics below the service's prefix. Each metric is registered once, because names must be unique.
    pub fn register<T>(&self, add: impl FnOnce(&mut Registry) -> T) -> T {
        add(self.lock().sub_registry_with_prefix(&*self.prefix))
    }

    /// Renders all metrics as OpenMetrics text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail, but a failing collector leaves a text without end marker.
        if let Err(error) = text::encode(&mut text, &self.lock()) {
            tracing::error!(%error, "Cannot write the metrics");
        }
        text
    }

    pub(crate) fn calls(&self) -> &Calls {
        &self.calls
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates a histogram of seconds, from half a millisecond (a step of a handover) to 30 s (a whole ADD).
pub fn duration_histogram() -> Histogram {
    Histogram::new([
        0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
        30.0,
    ])
}

fn seconds_since_1970() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_tells_its_version_its_start_its_process_and_its_conditions() {
        let service = Service {
            name: "ztunnel-broker",
            about: "",
            version: "1.2.3",
            keys: &[],
        };
        let readiness = Readiness::default();
        readiness.require("seeded", "not yet");
        let metrics = Metrics::new(&service, &readiness);
        metrics.register(|registry| {
            let read = || [("live", 2), ("gone", 0)];
            registry.register_collector(ObservableGauge::by_label(
                "phase", "sessions", "Ztunnels", read,
            ));
            registry.register_collector(ObservableGauge::new("workloads", "Pods", || 7));
        });
        let text = metrics.text();
        for line in [
            "inpod_ztunnel_broker_build_info{version=\"1.2.3\"} 1",
            "inpod_ztunnel_broker_ready 0",
            "inpod_ztunnel_broker_condition{name=\"seeded\"} 0",
            "inpod_ztunnel_broker_sessions{phase=\"live\"} 2",
            "inpod_ztunnel_broker_workloads 7",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert!(
            text.contains("process_resident_memory_bytes{component=\"ztunnel-broker\"} "),
            "{text}"
        );
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
