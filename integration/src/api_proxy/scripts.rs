//! What a test may want of requests and answers.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use hyper::{Method, Request};
use serde_json::Value;

/// What a request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// A page of all objects of a kind.
    List,
    /// A watch.
    Watch,
    /// One object.
    Get,
    /// A new object.
    Create,
    /// Something else, as `/version`.
    Other,
    /// Any of these.
    Any,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// It is passed on.
    Pass,
    /// It is refused with a code, and with a `Retry-After` in seconds.
    Refuse(u16, Option<u32>),
    /// The watch begins, and its first event is an error with a code.
    ErrorEvent(u16),
    /// It is never answered.
    Hang,
    /// It is passed on after this time.
    Wait(Duration),
    /// The objects of the list come in the opposite order.
    Reverse,
    /// The watch begins, says nothing and does not end.
    Silence,
    /// The watch begins, and says nothing but bookmarks.
    Swallow,
}

/// How watches end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// As the server ends them.
    Clean,
    /// The connection breaks.
    Broken,
    /// The connection breaks in the middle of the next event.
    MidEvent,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Asked {
    /// What it was about.
    pub verb: Verb,
    /// The kind of object: `pods`, `namespaces`, of what is created `events`, or empty.
    pub resource: String,
    /// The query, with `&` between its parts.
    pub query: String,
    /// When.
    pub at: Instant,
}

impl Asked {
    pub(super) fn of<B>(request: &Request<B>, at: Instant) -> Self {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let path = request.uri().path();
        let parts: Vec<_> = path.trim_start_matches("/api/v1/").split('/').collect();
        let (verb, resource) = match parts.as_slice() {
            ["pods" | "namespaces"] if query.contains("watch=true") => (Verb::Watch, path),
            ["pods" | "namespaces"] => (Verb::List, path),
            ["namespaces", _] => (Verb::Get, "namespaces"),
            ["namespaces", _, "pods", _] => (Verb::Get, "pods"),
            [.., "namespaces", _, "events"] if request.method() == Method::POST => {
                (Verb::Create, "events")
            }
            _ => (Verb::Other, ""),
        };
        let resource = resource.rsplit('/').next().unwrap_or_default();
        Self {
            verb,
            resource: resource.to_owned(),
            query,
            at,
        }
    }

    pub(super) fn is(&self, verb: Verb, resource: &str) -> bool {
        (verb == Verb::Any || verb == self.verb) && (resource == "*" || resource == self.resource)
    }
}

/// A list in the opposite order.
pub(super) fn reversed(list: &[u8]) -> anyhow::Result<String> {
    let mut list: Value = serde_json::from_slice(list)?;
    let items = list.get_mut("items").and_then(Value::as_array_mut);
    items.context("a list has items")?.reverse();
    Ok(list.to_string())
}

/// Takes the first line, with its end.
pub(super) fn line(lines: &mut Vec<u8>) -> Option<Vec<u8>> {
    let end = lines.iter().position(|byte| *byte == b'\n')?;
    let rest = lines.split_off(end + 1);
    Some(std::mem::replace(lines, rest))
}

pub(super) fn is_bookmark(line: &[u8]) -> bool {
    let event: Option<Value> = serde_json::from_slice(line).ok();
    event.is_some_and(|event| event.get("type") == Some(&"BOOKMARK".into()))
}
