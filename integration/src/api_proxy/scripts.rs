//! Faults for requests and answers.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use hyper::{Method, Request};
use serde_json::Value;

/// The verb of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    List,
    Watch,
    Get,
    Create,
    Patch,
    /// Anything else, such as `/version`.
    Other,
    Any,
}

/// The fate of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Pass,
    /// With a code and a `Retry-After` in seconds.
    Refuse(u16, Option<u32>),
    /// Start with an error event of this code.
    ErrorEvent(u16),
    Hang,
    /// Forward it after this time.
    Wait(Duration),
    Reverse,
    /// Start, then send nothing and stay open.
    Silence,
    /// Start, then send only bookmarks.
    Swallow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    Clean,
    Broken,
    /// Break in the middle of the next event.
    MidEvent,
}

#[derive(Clone, Debug)]
pub struct Asked {
    pub verb: Verb,
    /// `pods`, `namespaces`, `events` for creations, or empty.
    pub resource: String,
    /// Its parts are separated by `&`.
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

/// Includes the line's end.
pub(super) fn line(lines: &mut Vec<u8>) -> Option<Vec<u8>> {
    let end = lines.iter().position(|byte| *byte == b'\n')?;
    let rest = lines.split_off(end + 1);
    Some(std::mem::replace(lines, rest))
}

pub(super) fn is_bookmark(line: &[u8]) -> bool {
    let event: Option<Value> = serde_json::from_slice(line).ok();
    event.is_some_and(|event| event.get("type") == Some(&"BOOKMARK".into()))
}
