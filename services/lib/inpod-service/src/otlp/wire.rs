//! The messages of OTLP that are sent and answered, of our own writing; on the wire they are those of the packages
//! `opentelemetry.proto.{collector.trace,trace,resource,common}.v1`. What inpod never says is left out.

use prost::{Message, Oneof};

/// The method that takes spans.
pub const EXPORT: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// `ExportTraceServiceRequest`: spans of one or more processes.
#[derive(Clone, PartialEq, Message)]
pub struct ExportRequest {
    /// By process.
    #[prost(message, repeated, tag = "1")]
    pub resource_spans: Vec<ResourceSpans>,
}

/// `ExportTraceServiceResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct ExportResponse {
    /// There where not all spans were taken.
    #[prost(message, optional, tag = "1")]
    pub partial_success: Option<PartialSuccess>,
}

/// `ExportTracePartialSuccess`.
#[derive(Clone, PartialEq, Message)]
pub struct PartialSuccess {
    /// How many spans were not taken.
    #[prost(int64, tag = "1")]
    pub rejected_spans: i64,
    /// Why.
    #[prost(string, tag = "2")]
    pub error_message: String,
}

/// Spans of one process.
#[derive(Clone, PartialEq, Message)]
pub struct ResourceSpans {
    /// The process.
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    /// By what made them.
    #[prost(message, repeated, tag = "2")]
    pub scope_spans: Vec<ScopeSpans>,
}

/// A process.
#[derive(Clone, PartialEq, Message)]
pub struct Resource {
    /// What is said of it.
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<KeyValue>,
}

/// Spans of one maker.
#[derive(Clone, PartialEq, Message)]
pub struct ScopeSpans {
    /// The maker.
    #[prost(message, optional, tag = "1")]
    pub scope: Option<Scope>,
    /// The spans.
    #[prost(message, repeated, tag = "2")]
    pub spans: Vec<Span>,
}

/// `InstrumentationScope`: what made the spans.
#[derive(Clone, PartialEq, Message)]
pub struct Scope {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its version.
    #[prost(string, tag = "2")]
    pub version: String,
}

/// Something that took time in a trace.
#[derive(Clone, PartialEq, Message)]
pub struct Span {
    /// The trace: 16 bytes, not all of them 0.
    #[prost(bytes = "vec", tag = "1")]
    pub trace_id: Vec<u8>,
    /// This span: 8 bytes, not all of them 0.
    #[prost(bytes = "vec", tag = "2")]
    pub span_id: Vec<u8>,
    /// The span that it is a part of; empty for a root.
    #[prost(bytes = "vec", tag = "4")]
    pub parent_span_id: Vec<u8>,
    /// What was done.
    #[prost(string, tag = "5")]
    pub name: String,
    /// [`INTERNAL`] or [`SERVER`].
    #[prost(int32, tag = "6")]
    pub kind: i32,
    /// When it began, in nanoseconds since 1970.
    #[prost(fixed64, tag = "7")]
    pub start_time_unix_nano: u64,
    /// When it ended, in nanoseconds since 1970.
    #[prost(fixed64, tag = "8")]
    pub end_time_unix_nano: u64,
    /// What is said of it, each key once.
    #[prost(message, repeated, tag = "9")]
    pub attributes: Vec<KeyValue>,
    /// How it ended; none where nothing went wrong.
    #[prost(message, optional, tag = "15")]
    pub status: Option<Status>,
    /// The flags of `traceparent` in the lowest byte.
    #[prost(fixed32, tag = "16")]
    pub flags: u32,
}

/// `SPAN_KIND_INTERNAL`: done within a process.
pub const INTERNAL: i32 = 1;

/// `SPAN_KIND_SERVER`: done for a caller.
pub const SERVER: i32 = 2;

/// How a span ended.
#[derive(Clone, PartialEq, Message)]
pub struct Status {
    /// Why it failed.
    #[prost(string, tag = "2")]
    pub message: String,
    /// [`ERROR`]; 0 where nothing is said.
    #[prost(int32, tag = "3")]
    pub code: i32,
}

/// `STATUS_CODE_ERROR`.
pub const ERROR: i32 = 2;

/// Something that is said.
#[derive(Clone, PartialEq, Message)]
pub struct KeyValue {
    /// Of what.
    #[prost(string, tag = "1")]
    pub key: String,
    /// What.
    #[prost(message, optional, tag = "2")]
    pub value: Option<AnyValue>,
}

/// A value.
#[derive(Clone, PartialEq, Message)]
pub struct AnyValue {
    /// The value.
    #[prost(oneof = "Value", tags = "1, 2, 3, 4")]
    pub value: Option<Value>,
}

/// What a value may be.
#[derive(Clone, PartialEq, Oneof)]
pub enum Value {
    /// A text.
    #[prost(string, tag = "1")]
    Text(String),
    /// Yes or no.
    #[prost(bool, tag = "2")]
    Bool(bool),
    /// A whole number.
    #[prost(int64, tag = "3")]
    Whole(i64),
    /// Any number.
    #[prost(double, tag = "4")]
    Number(f64),
}

impl KeyValue {
    /// Says something.
    pub fn new(key: &str, value: Value) -> Self {
        Self {
            key: key.to_owned(),
            value: Some(AnyValue { value: Some(value) }),
        }
    }
}

#[cfg(test)]
mod tests;
