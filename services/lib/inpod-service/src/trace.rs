//! The trace context of a call.

use std::sync::Arc;

use http::HeaderMap;

/// The header with the trace context (W3C Trace Context, level 1).
pub const TRACEPARENT: &str = "traceparent";

/// A caller's `traceparent`, if any. An invalid value is not passed on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace(Option<Arc<str>>);

impl Trace {
    pub fn from_headers(headers: &HeaderMap) -> Self {
        let value = headers.get(TRACEPARENT);
        value
            .and_then(|value| value.to_str().ok())
            .map_or_else(Self::default, Self::parse)
    }

    /// Accepts only version 00 (level 1): version, trace, parent and flags in lower-case hexadecimal.
    fn parse(text: &str) -> Self {
        let parts: Vec<&str> = text.split('-').collect();
        let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
        let is_hex = |part: &&str| {
            part.bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let is_trace =
            lengths == [2, 32, 16, 2] && parts.first() == Some(&"00") && parts.iter().all(is_hex);
        // In the specification, an id of all zeros is invalid.
        let is_valid = parts
            .get(1)
            .is_some_and(|id| id.bytes().any(|byte| byte != b'0'));
        Self((is_trace && is_valid).then(|| text.into()))
    }

    /// Returns the trace id, which the log lines of all processes share.
    pub fn id(&self) -> Option<&str> {
        self.0.as_deref()?.split('-').nth(1)
    }

    /// Returns the header for calls on the caller's behalf.
    pub fn header(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn of(text: &str) -> Trace {
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, text.parse().unwrap());
        Trace::from_headers(&headers)
    }

    #[test]
    fn a_traceparent_is_passed_on_as_it_came_and_names_its_trace() {
        let text = format!("00-{ID}-00f067aa0ba902b7-01");
        let trace = of(&text);
        assert_eq!((trace.id(), trace.header()), (Some(ID), Some(&*text)));
    }

    #[test]
    fn what_is_no_traceparent_is_none() {
        let zeros = "0".repeat(32);
        for text in [
            String::new(),
            "00".to_owned(),
            format!("01-{ID}-00f067aa0ba902b7-01"),
            format!("00-{}-00f067aa0ba902b7-01", ID.to_uppercase()),
            format!("00-{zeros}-00f067aa0ba902b7-01"),
            format!("00-{ID}-00f067aa0ba902b7-01-more"),
            format!("00-{ID}x-00f067aa0ba902b-01"),
        ] {
            assert_eq!(of(&text), Trace::default(), "{text}");
        }
    }
}
