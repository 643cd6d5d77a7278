//! A span that has not ended.

use std::{
    borrow::Cow,
    fmt,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tonic::Code;
use tracing::field::{Field, Visit};

use super::wire::{self, KeyValue, Value};
use crate::Trace;

/// The flag of a `traceparent` whose trace is recorded (W3C Trace Context, level 1).
const SAMPLED: u8 = 1;

/// As many characters of a text are exported.
const LONGEST: usize = 256;

/// A place in a trace: a span of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The trace's id.
    pub(super) trace: u128,
    /// The span's.
    pub(super) span: u64,
}

impl Place {
    /// Where a caller stands in its trace. None for one that is not sampled, and for one that names no span.
    pub(super) fn of(trace: &Trace) -> Option<Self> {
        let mut parts = trace.header()?.split('-').skip(1);
        let place = Self {
            trace: u128::from_str_radix(parts.next()?, 16).ok()?,
            span: u64::from_str_radix(parts.next()?, 16).ok()?,
        };
        let flags = u8::from_str_radix(parts.next()?, 16).ok()?;
        (flags & SAMPLED != 0 && place.span != 0).then_some(place)
    }

    /// As a `traceparent`.
    pub(super) fn header(self) -> String {
        let Self { trace, span } = self;
        format!("00-{trace:032x}-{span:016x}-{SAMPLED:02x}")
    }
}

/// A span that has not ended.
#[derive(Debug)]
pub(super) struct Open {
    id: u64,
    /// The span that this one is a part of, here or at the caller. Without one it is in no trace and is not exported.
    parent: Option<Place>,
    name: Cow<'static, str>,
    kind: i32,
    start: SystemTime,
    began: Instant,
    took: Option<Duration>,
    attributes: Vec<KeyValue>,
    status: Option<wire::Status>,
}

impl Open {
    /// One that begins now.
    pub(super) fn new(name: &'static str, enclosing: Option<Place>) -> Self {
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

    /// Its own place, if it is in a trace.
    pub(super) fn place(&self) -> Option<Place> {
        let trace = self.parent?.trace;
        Some(Place {
            trace,
            span: self.id,
        })
    }

    /// It is a caller's call.
    pub(super) fn serve(&mut self, caller: Place, path: &str) {
        self.parent = Some(caller);
        self.name = Cow::Owned(path.trim_start_matches('/').to_owned());
        self.kind = wire::SERVER;
        self.say("rpc.system", Value::Text("grpc".to_owned()));
    }

    /// It is a part of something.
    pub(super) fn belong(&mut self, parent: Place, name: &'static str) {
        self.parent = Some(parent);
        self.name = Cow::Borrowed(name);
    }

    /// Its call was answered. Whatever code is not OK is an error: a verb that fails fails a pod.
    pub(super) fn end(&mut self, code: Code, name: &str) {
        self.took = Some(self.began.elapsed());
        self.say("rpc.grpc.status_code", Value::Whole(i32::from(code).into()));
        self.status = (code != Code::Ok).then(|| wire::Status {
            message: name.to_owned(),
            code: wire::ERROR,
        });
    }

    /// Says something of it; what was said under the same key before is replaced.
    pub(super) fn say(&mut self, key: &str, value: Value) {
        self.attributes.retain(|known| known.key != key);
        self.attributes.push(KeyValue::new(key, value));
    }

    /// Says a text, of which the beginning is enough.
    pub(super) fn say_text(&mut self, key: &str, text: &str) {
        let text = text.chars().take(LONGEST).collect();
        self.say(key, Value::Text(text));
    }

    /// The span, ended; none where it is in no trace.
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
            // Not the clock at its end, which may have been set back meanwhile.
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

/// The fields of a span become what is said of it. The trace's id is the span's own already.
impl Visit for Open {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() != "trace_id" {
            self.say_text(field.name(), value);
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.say(field.name(), Value::Bool(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.say(field.name(), Value::Whole(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match i64::try_from(value) {
            Ok(value) => self.record_i64(field, value),
            Err(_) => self.say_text(field.name(), &value.to_string()),
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.say(field.name(), Value::Number(value));
    }
}
