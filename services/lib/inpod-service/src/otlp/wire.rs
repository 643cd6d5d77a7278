//! Messages of `opentelemetry.proto.{collector.trace,trace,resource,common}.v1`, written by hand without the fields
//! that inpod never sets.

use prost::{Message, Oneof};

pub const EXPORT: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// `ExportTraceServiceRequest`, with spans of one or more processes.
#[derive(Clone, PartialEq, Message)]
pub struct ExportRequest {
    #[prost(message, repeated, tag = "1")]
    pub resource_spans: Vec<ResourceSpans>,
}

/// `ExportTraceServiceResponse`, with the result of an export.
#[derive(Clone, PartialEq, Message)]
pub struct ExportResponse {
    /// Set only if the collector rejected spans.
    #[prost(message, optional, tag = "1")]
    pub partial_success: Option<PartialSuccess>,
}

/// `ExportTracePartialSuccess`, with the number of rejected spans.
#[derive(Clone, PartialEq, Message)]
pub struct PartialSuccess {
    #[prost(int64, tag = "1")]
    pub rejected_spans: i64,
    #[prost(string, tag = "2")]
    pub error_message: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    pub scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Resource {
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    pub scope: Option<Scope>,
    #[prost(message, repeated, tag = "2")]
    pub spans: Vec<Span>,
}

/// `InstrumentationScope`, the library that created the spans.
#[derive(Clone, PartialEq, Message)]
pub struct Scope {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub version: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Span {
    /// 16 bytes, of which at least one is not 0.
    #[prost(bytes = "vec", tag = "1")]
    pub trace_id: Vec<u8>,
    /// 8 bytes, of which at least one is not 0.
    #[prost(bytes = "vec", tag = "2")]
    pub span_id: Vec<u8>,
    /// The id of the parent, empty for a root span.
    #[prost(bytes = "vec", tag = "4")]
    pub parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    pub name: String,
    /// Either [`INTERNAL`] or [`SERVER`].
    #[prost(int32, tag = "6")]
    pub kind: i32,
    #[prost(fixed64, tag = "7")]
    pub start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    pub end_time_unix_nano: u64,
    /// The attributes, in which each key occurs once.
    #[prost(message, repeated, tag = "9")]
    pub attributes: Vec<KeyValue>,
    /// The error, unset if the operation succeeded.
    #[prost(message, optional, tag = "15")]
    pub status: Option<Status>,
    /// The flags of `traceparent`, in the lowest byte.
    #[prost(fixed32, tag = "16")]
    pub flags: u32,
}

/// `SPAN_KIND_INTERNAL`: an operation within a process.
pub const INTERNAL: i32 = 1;

/// `SPAN_KIND_SERVER`: an operation for a remote caller.
pub const SERVER: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub struct Status {
    #[prost(string, tag = "2")]
    pub message: String,
    /// [`ERROR`] for a failed span, or 0 if unset.
    #[prost(int32, tag = "3")]
    pub code: i32,
}

/// `STATUS_CODE_ERROR`, the code of a failed span.
pub const ERROR: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub struct KeyValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(message, optional, tag = "2")]
    pub value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub struct AnyValue {
    #[prost(oneof = "Value", tags = "1, 2, 3, 4")]
    pub value: Option<Value>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Value {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(bool, tag = "2")]
    Bool(bool),
    #[prost(int64, tag = "3")]
    Whole(i64),
    #[prost(double, tag = "4")]
    Number(f64),
}

impl KeyValue {
    pub fn new(key: &str, value: Value) -> Self {
        Self {
            key: key.to_owned(),
            value: Some(AnyValue { value: Some(value) }),
        }
    }
}

#[cfg(test)]
mod tests;
