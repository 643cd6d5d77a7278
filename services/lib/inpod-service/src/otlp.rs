//! Spans for a collector of OpenTelemetry, by OTLP over gRPC.
//!
//! A span is exported if it is made on behalf of a caller whose trace is sampled: a call, a part of what is done for it
//! ([`child_span`]), or whatever span is made within one of these. What is said of it is what the log says too. Without the
//! cargo feature `otlp`, `without_otlp.rs` stands here.

mod endpoint;
mod export;
mod layer;
mod open;
pub mod wire;

use std::fmt;

use serde::Deserialize;
use tonic::Code;
use tracing::Span;

use crate::{Trace, config};
use endpoint::Endpoint;
use layer::{change, innermost};
use open::Place;

pub(crate) use export::Spans;
pub(crate) use layer::Layer;

/// The target of spans that are made for export alone: the log does not show them.
pub(crate) const PART: &str = "inpod::part";

/// What the settings say of it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Settings {
    #[serde(deserialize_with = "config::parsed")]
    otlp_endpoint: Endpoint,
    /// Of services that have this setting.
    node_name: Option<String>,
}

/// A span is a caller's call.
pub(crate) fn serve(span: &Span, caller: &Trace, path: &str) {
    if let Some(caller) = Place::of(caller) {
        change(span, |open| open.serve(caller, path));
    }
}

/// The `traceparent` of the span that this runs in, if that is exported as one of the trace.
pub(crate) fn here(trace: &Trace) -> Option<String> {
    let (caller, here) = (Place::of(trace)?, innermost()?);
    (here.trace == caller.trace).then(|| here.header())
}

/// A part of what is done on behalf of a trace, as a span of its own from now until it is dropped. Does nothing where
/// the trace is not exported.
pub fn child_span(name: &'static str, trace: &Trace) -> Span {
    let Some(parent) = Place::of(trace) else {
        return Span::none();
    };
    let span = tracing::info_span!(target: PART, parent: None, "part");
    change(&span, |open| open.belong(parent, name));
    span
}

/// Says something of the span that this runs in, for whoever reads exported spans: what the log says as well.
pub fn record_attribute(key: &'static str, value: &dyn fmt::Display) {
    change(&Span::current(), |open| {
        open.say_text(key, &value.to_string());
    });
}

/// The span of a call, whose code comes when the call's span is no longer the one that this runs in.
#[derive(Debug)]
pub(crate) struct Call(Span);

impl Call {
    /// The one that this runs in.
    pub(crate) fn current() -> Self {
        Self(Span::current())
    }

    /// It ended.
    pub(crate) fn end(&self, code: Code, name: &str) {
        change(&self.0, |open| open.end(code, name));
    }
}

/// A layer, and what it exports.
#[cfg(test)]
pub(crate) fn listening() -> (Layer, tokio::sync::mpsc::Receiver<wire::Span>) {
    let (queue, waiting) = export::queue(64);
    (Layer(queue), waiting)
}

#[cfg(test)]
mod tests;
