//! Exports spans to an OpenTelemetry collector by OTLP over gRPC.
//!
//! An exported span belongs to a caller's sampled trace: the span of a call, a [`child_span`] of the call, or any span
//! inside another exported span. The log contains the attributes, too. In builds without the feature `otlp`,
//! `without_otlp.rs` replaces this module.

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
use layer::{current_context, update_span};
use open::SpanContext;

pub(crate) use export::ExporterBuilder;
pub(crate) use layer::Layer;

/// The target of spans that are only exported and never logged.
pub(crate) const EXPORT_ONLY_TARGET: &str = "inpod::part";

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Settings {
    #[serde(deserialize_with = "config::parsed")]
    otlp_endpoint: Endpoint,
    /// The name of the node, for services with this setting.
    node_name: Option<String>,
}

/// Marks a span as the server side of a caller's call.
pub(crate) fn serve(span: &Span, caller: &Trace, path: &str) {
    if let Some(caller) = SpanContext::of_caller(caller) {
        update_span(span, |open| open.serve(caller, path));
    }
}

/// Returns `None` if the current span is not exported as part of the trace.
pub(crate) fn current_traceparent(trace: &Trace) -> Option<String> {
    let (caller, here) = (SpanContext::of_caller(trace)?, current_context()?);
    (here.trace == caller.trace).then(|| here.header())
}

/// Starts a span that ends on drop, or an empty span if the trace is not exported.
pub fn child_span(name: &'static str, trace: &Trace) -> Span {
    let Some(parent) = SpanContext::of_caller(trace) else {
        return Span::none();
    };
    let span = tracing::info_span!(target: EXPORT_ONLY_TARGET, parent: None, "part");
    update_span(&span, |open| open.make_child(parent, name));
    span
}

/// Sets an attribute of the current span to a value that the log contains, too.
pub fn record_attribute(key: &'static str, value: &dyn fmt::Display) {
    update_span(&Span::current(), |open| {
        open.set_text_attribute(key, &value.to_string());
    });
}

/// Keeps the span of a call, because the status code arrives within another span.
#[derive(Debug)]
pub(crate) struct Call(Span);

impl Call {
    pub(crate) fn current() -> Self {
        Self(Span::current())
    }

    pub(crate) fn end(&self, code: Code, name: &str) {
        update_span(&self.0, |open| open.end(code, name));
    }
}

/// Returns a layer and the receiver of its exported spans.
#[cfg(test)]
pub(crate) fn test_layer() -> (Layer, tokio::sync::mpsc::Receiver<wire::Span>) {
    let (queue, waiting) = export::queue(64);
    (Layer(queue), waiting)
}

#[cfg(test)]
mod tests;
