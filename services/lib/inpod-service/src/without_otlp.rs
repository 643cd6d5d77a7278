//! What stands for `otlp` in a build without that feature: no span is made, kept or sent.

use std::{fmt, str::FromStr};

use serde::Deserialize;
use tonic::Code;
use tracing::Span;

use crate::{Metrics, Service, Trace, config};

pub(crate) use tracing_subscriber::layer::Identity as Layer;

/// The target of spans that are made for export alone; here none are.
pub(crate) const PART: &str = "inpod::part";

/// Where spans go: nowhere. Anything else is refused.
#[derive(Clone, Copy, Debug)]
struct Nowhere;

impl FromStr for Nowhere {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = "this binary was built without the cargo feature otlp, which exports spans";
        text.is_empty().then_some(Self).ok_or(refused)
    }
}

/// What the settings say of it.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Settings {
    #[serde(deserialize_with = "config::parsed")]
    otlp_endpoint: Nowhere,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Spans;

impl Spans {
    pub(crate) fn new(settings: Settings) -> Self {
        let Settings {
            otlp_endpoint: Nowhere,
        } = settings;
        Self
    }

    pub(crate) fn layer(self) -> Option<Layer> {
        None
    }

    pub(crate) fn export(self, _: &Service, _: &str, _: &Metrics) -> Exporter {
        Exporter
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Exporter;

impl Exporter {
    pub(crate) async fn flush(self) {}
}

pub(crate) fn serve(_: &Span, _: &Trace, _: &str) {}

pub(crate) fn here(_: &Trace) -> Option<String> {
    None
}

/// A part of what is done on behalf of a trace, as a span of its own where spans are exported: not in this build.
pub fn child_span(_: &'static str, _: &Trace) -> Span {
    Span::none()
}

/// Says something of the span that this runs in where spans are exported: not in this build.
pub fn record_attribute(_: &'static str, _: &dyn fmt::Display) {}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Call;

impl Call {
    pub(crate) fn current() -> Self {
        Self
    }

    pub(crate) fn end(self, _: Code, _: &str) {}
}
