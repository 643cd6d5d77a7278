//! Spans that have begun and not yet ended.

use std::{
    borrow::Cow,
    fmt,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tonic::Code;
use tracing::field::{Field, Visit};

use super::wire::{self, KeyValue, Value};
use crate::Trace;

/// The flag of a sampled `traceparent` (W3C Trace Context, level 1).
const SAMPLED: u8 = 1;

/// The maximum number of characters of a value, which is truncated there.
const MAX_TEXT_CHARS: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpanContext {
    pub(super) trace: u128,
    pub(super) span: u64,
}

impl SpanContext {
    /// Returns `None` if the caller's trace is unsampled or has no span.
    pub(super) fn of_caller(trace: &Trace) -> Option<Self> {
        let mut parts = trace.header()?.split('-').skip(1);
        let context = Self {
            trace: u128::from_str_radix(parts.next()?, 16).ok()?,
            span: u64::from_str_radix(parts.next()?, 16).ok()?,
        };
        let flags = u8::from_str_radix(parts.next()?, 16).ok()?;
        (flags & SAMPLED != 0 && context.span != 0).then_some(context)
    }

    /// Formats the context as the value of `traceparent`.
    pub(super) fn header(self) -> String {
        let Self { trace, span } = self;
        format!("00-{trace:032x}-{span:016x}-{SAMPLED:02x}")
    }
}

#[derive(Debug)]
pub(super) struct OpenSpan {
    id: u64,
    /// The parent, in this process or at the caller. A span without a parent belongs to no trace and is not exported.
    parent: Option<SpanContext>,
    name: Cow<'static, str>,
    kind: i32,
    start: SystemTime,
    began: Instant,
    took: Option<Duration>,
    attributes: Vec<KeyValue>,
    status: Option<wire::Status>,
}

impl OpenSpan {
    pub(super) fn new(name: &'static str, enclosing: Option<SpanContext>) -> Self {
        Self {
            id: fastrand::u64(1..),
            parent: enclosing,
            name: Cow::Borrowed(name),
            kind: wire::INTERNAL,
            start: SystemTime::now(),
            began: Instant::now(),
            took: None,
            attributes: Vec::new(),
            status: None,
        }
    }

    /// Returns `None` if the span belongs to no trace.
    pub(super) fn context(&self) -> Option<SpanContext> {
        let trace = self.parent?.trace;
        Some(SpanContext {
            trace,
            span: self.id,
        })
    }

    /// Turns the span into the server span of a caller's call.
    pub(super) fn serve(&mut self, caller: SpanContext, path: &str) {
        self.parent = Some(caller);
        self.name = Cow::Owned(path.trim_start_matches('/').to_owned());
        self.kind = wire::SERVER;
        self.set_attribute("rpc.system", Value::Text("grpc".to_owned()));
    }

    /// Turns the span into the child of another span.
    pub(super) fn make_child(&mut self, parent: SpanContext, name: &'static str) {
        self.parent = Some(parent);
        self.name = Cow::Borrowed(name);
    }

    /// Ends the call. Every code but OK counts as an error, because a failed call fails a pod.
    pub(super) fn end(&mut self, code: Code, name: &str) {
        self.took = Some(self.began.elapsed());
        self.set_attribute("rpc.grpc.status_code", Value::Whole(i32::from(code).into()));
        self.status = (code != Code::Ok).then(|| wire::Status {
            message: name.to_owned(),
            code: wire::ERROR,
        });
    }

    /// Sets an attribute, replacing an earlier value of the same key.
    pub(super) fn set_attribute(&mut self, key: &str, value: Value) {
        self.attributes.retain(|known| known.key != key);
        self.attributes.push(KeyValue::new(key, value));
    }

    /// Sets an attribute to a text, truncated to the maximum length.
    pub(super) fn set_text_attribute(&mut self, key: &str, text: &str) {
        let text = text.chars().take(MAX_TEXT_CHARS).collect();
        self.set_attribute(key, Value::Text(text));
    }

    /// Returns the span for export, or `None` if the span belongs to no trace.
    pub(super) fn close(self) -> Option<wire::Span> {
        let parent = self.parent?;
        let took = self.took.unwrap_or_else(|| self.began.elapsed());
        let start = nanoseconds(self.start.duration_since(UNIX_EPOCH).unwrap_or_default());
        Some(wire::Span {
            trace_id: parent.trace.to_be_bytes().to_vec(),
            span_id: self.id.to_be_bytes().to_vec(),
            parent_span_id: parent.span.to_be_bytes().to_vec(),
            name: self.name.into_owned(),
            kind: self.kind,
            start_time_unix_nano: start,
            // The end is computed from the duration, because the wall clock may have been set back.
            end_time_unix_nano: start.saturating_add(nanoseconds(took)),
            attributes: self.attributes,
            status: self.status,
            flags: SAMPLED.into(),
        })
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Records fields as attributes, except the trace id, which every span has anyway.
impl Visit for OpenSpan {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() != "trace_id" {
            self.set_text_attribute(field.name(), value);
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set_attribute(field.name(), Value::Bool(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set_attribute(field.name(), Value::Whole(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match i64::try_from(value) {
            Ok(value) => self.record_i64(field, value),
            Err(_) => self.set_text_attribute(field.name(), &value.to_string()),
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set_attribute(field.name(), Value::Number(value));
    }
}
