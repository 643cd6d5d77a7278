use std::time::Duration;

use inpod_service::metrics::duration_histogram;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::review::Outcome;

type By = [(&'static str, &'static str); 1];

#[derive(Clone, Debug)]
pub struct Metrics {
    reviews: Family<By, Counter>,
    skips: Family<By, Counter>,
    duration: Histogram,
    reloads: Family<[(&'static str, &'static str); 2], Counter>,
    pub(crate) evictions: Counter,
    expiration: Gauge,
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            reviews: Family::default(),
            skips: Family::default(),
            duration: duration_histogram(),
            reloads: Family::default(),
            evictions: Counter::default(),
            expiration: Gauge::default(),
        };
        let help = "Reviews, by outcome: injected, unchanged (injected before), skipped, refused, other-kind, undecodable, bad-request, overloaded, failed";
        registry.register("reviews", help, metrics.reviews.clone());
        let help = "Pods that were not injected, by reason";
        registry.register("skips", help, metrics.skips.clone());
        let help = "Time from a request's head to its response";
        let duration = metrics.duration.clone();
        registry.register_with_unit("review_duration", help, Unit::Seconds, duration);
        let help = "Changes of certificate and configuration, by result";
        registry.register("reloads", help, metrics.reloads.clone());
        let help = "Idle connections that were closed in favor of a new one";
        registry.register("evictions", help, metrics.evictions.clone());
        let help = "Expiry of the certificate in use, the earliest of its chain, since 1970; 0 without a certificate";
        let name = "certificate_expiration_timestamp";
        registry.register_with_unit(name, help, Unit::Seconds, metrics.expiration.clone());
        metrics
    }

    pub(crate) fn reviewed(&self, outcome: Outcome, took: Duration) {
        self.reviews
            .get_or_create(&[("outcome", outcome.as_str())])
            .inc();
        if let Outcome::Skipped(reason) = outcome {
            self.skips.get_or_create(&[("why", reason.as_str())]).inc();
        }
        self.duration.observe(took.as_secs_f64());
    }

    /// Sets the expiry of the certificate, in seconds since 1970.
    pub(crate) fn set_certificate_expiration(&self, ends: u64) {
        self.expiration.set(ends.try_into().unwrap_or(i64::MAX));
    }

    pub(crate) fn reloaded(&self, what: &'static str, result: &'static str) {
        self.reloads
            .get_or_create(&[("what", what), ("result", result)])
            .inc();
    }
}
