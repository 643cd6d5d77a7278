//! The faults that a test can inject into requests and answers.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use hyper::{Method, Request};
use serde_json::Value;

/// The verb of a request to the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    List,
    Watch,
    Get,
    Create,
    Patch,
    /// A request of another kind, such as `/version`.
    Other,
    Any,
}

/// The fate of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Pass,
    /// Refuse the request with a code and a `Retry-After` in seconds.
    Refuse(u16, Option<u32>),
    /// Start the watch with an error event of this code.
    ErrorEvent(u16),
    Hang,
    /// Forward the request after this time.
    Wait(Duration),
    Reverse,
    /// Start the watch, then send nothing and keep the connection open.
    Silence,
    /// Start the watch, then send only bookmarks.
    Swallow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    Clean,
    Broken,
    /// Break the connection in the middle of the next event.
    MidEvent,
}

#[derive(Clone, Debug)]
pub struct Asked {
    pub verb: Verb,
    /// The resource: `pods`, `namespaces`, `nodes`, `events` for creations, or empty.
    pub resource: String,
    /// The query of the request, whose parts are separated by `&`.
    pub query: String,
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
            ["namespaces", _, "pods"] => (Verb::List, "pods"),
            ["nodes", _] if request.method() == Method::GET => (Verb::Get, "nodes"),
            ["nodes", _] if request.method() == Method::PATCH => (Verb::Patch, "nodes"),
            ["namespaces", _, "pods", _] if request.method() == Method::GET => (Verb::Get, "pods"),
            [.., "namespaces", _, "events"] if request.method() == Method::POST => {
                (Verb::Create, "events")
            }
            ["namespaces", _, "pods", ..] if request.method() == Method::PATCH => {
                (Verb::Patch, "pods")
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

pub(super) fn reversed(list: &[u8]) -> anyhow::Result<String> {
    let mut list: Value = serde_json::from_slice(list)?;
    let items = list.get_mut("items").and_then(Value::as_array_mut);
    items.context("a list has items")?.reverse();
    Ok(list.to_string())
}

/// Removes and returns the first complete line, including its line end.
pub(super) fn line(lines: &mut Vec<u8>) -> Option<Vec<u8>> {
    let end = lines.iter().position(|byte| *byte == b'\n')?;
    let rest = lines.split_off(end + 1);
    Some(std::mem::replace(lines, rest))
}

pub(super) fn is_bookmark(line: &[u8]) -> bool {
    let event: Option<Value> = serde_json::from_slice(line).ok();
    event.is_some_and(|event| event.get("type") == Some(&"BOOKMARK".into()))
}
