//! Metrics of gRPC calls, by method and status code.

use std::borrow::Cow;

use inpod_proto::class_of;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};
use tokio::time::Instant;
use tonic::Code;

use super::duration_histogram;

type ByMethod = [(&'static str, Cow<'static, str>); 1];
type ByMethodAndCode = [(&'static str, Cow<'static, str>); 2];
type ByClass = [(&'static str, &'static str); 1];

#[derive(Clone, Debug)]
pub(crate) struct Calls {
    requests: Family<ByMethodAndCode, Counter>,
    durations: Family<ByMethod, Histogram, fn() -> Histogram>,
    in_flight: Gauge,
    refused_calls: Family<ByClass, Counter>,
    refused_connections: Counter,
}

impl Calls {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let calls = Self {
            requests: Family::default(),
            durations: Family::new_with_constructor(duration_histogram),
            in_flight: Gauge::default(),
            refused_calls: Family::default(),
            refused_connections: Counter::default(),
        };
        let help = "Completed calls by gRPC code; CANCELLED if the caller disconnected";
        registry.register("grpc_requests", help, calls.requests.clone());
        let help = "Time from the arrival of a call to the response of its handler; for a stream, until it is opened";
        let durations = calls.durations.clone();
        registry.register_with_unit("grpc_request_duration", help, Unit::Seconds, durations);
        let help = "Calls in flight that count towards max_calls";
        registry.register("grpc_in_flight", help, calls.in_flight.clone());
        let help = "Calls rejected because the caller was not authorized, by class of the call";
        registry.register("refused_calls", help, calls.refused_calls.clone());
        let help = "Connections rejected because of their peer";
        registry.register(
            "refused_connections",
            help,
            calls.refused_connections.clone(),
        );
        calls
    }

    /// Measures a call until [`OpenCall::end`], and records CANCELLED if the call is dropped first.
    pub(crate) fn begin(&self, path: &str) -> OpenCall {
        OpenCall {
            calls: self.clone(),
            method: method_of(path),
            began: Instant::now(),
            code: Some(Code::Cancelled),
        }
    }

    pub(crate) fn in_flight(&self) -> &Gauge {
        &self.in_flight
    }

    pub(crate) fn refuse_call(&self, class: &'static str) {
        self.refused_calls.get_or_create(&[("class", class)]).inc();
    }

    pub(crate) fn refuse_connection(&self) {
        self.refused_connections.inc();
    }
}

#[derive(Debug)]
pub(crate) struct OpenCall {
    calls: Calls,
    method: Cow<'static, str>,
    began: Instant,
    code: Option<Code>,
}

impl OpenCall {
    /// Records the duration until the handler's response, after which a stream may continue.
    pub(crate) fn answered(&self) {
        let seconds = self.began.elapsed().as_secs_f64();
        let labels = [("method", self.method.clone())];
        self.calls.durations.get_or_create(&labels).observe(seconds);
    }

    /// Records the status code of the call; a later code is ignored.
    pub(crate) fn end(&mut self, code: Code) {
        if self.code.take().is_some() {
            let labels = [
                ("method", self.method.clone()),
                ("code", Cow::Borrowed(name_of(code))),
            ];
            self.calls.requests.get_or_create(&labels).inc();
        }
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
    }
}

/// Returns `Service/Method` without the package, or `other` for an undeclared method: callers choose the names of such
/// methods, so there could be any number of labels.
fn method_of(path: &str) -> Cow<'static, str> {
    let short = || path.rsplit_once('.').map(|(_, short)| short.to_owned());
    match class_of(path).and_then(|_| short()) {
        Some(short) => Cow::Owned(short),
        None => Cow::Borrowed("other"),
    }
}

fn name_of(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_that_nobody_declared_makes_no_label_of_its_own() {
        let declared = "/inpod.netconfig.v1.NetconfigService/ApplyRules";
        assert_eq!(method_of(declared), "NetconfigService/ApplyRules");
        assert_eq!(method_of("/grpc.health.v1.Health/Check"), "Health/Check");
        for invented in [
            "/inpod.netconfig.v1.NetconfigService/Invented",
            "/grpc.health.v1.Health/Invented",
            "/grpc.reflection.v1.ServerReflection/Invented",
            "/whatever",
            "",
        ] {
            assert_eq!(method_of(invented), "other", "{invented}");
        }
    }

    #[test]
    fn a_call_is_counted_once_with_its_first_code_and_a_dropped_one_as_cancelled() {
        let mut registry = Registry::default();
        let calls = Calls::register(&mut registry);
        let path = "/grpc.health.v1.Health/Check";
        let mut ended = calls.begin(path);
        ended.end(Code::NotFound);
        ended.end(Code::Ok);
        drop(ended);
        drop(calls.begin(path));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for (code, count) in [("NOT_FOUND", 1), ("CANCELLED", 1)] {
            let line =
                format!("grpc_requests_total{{method=\"Health/Check\",code=\"{code}\"}} {count}\n");
            assert!(text.contains(&line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("code=\"OK\""), "{text}");
    }
}
