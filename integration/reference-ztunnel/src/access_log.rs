//! Writes the access log, with a JSON line when a connection is accepted and another when the connection ends.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::listeners::{Direction, Listener};

/// A line of the log. Fields that are not known yet are null.
#[derive(Debug, Serialize)]
struct Line<'a> {
    /// The time in the format of RFC 3339, in UTC with microseconds.
    time: String,
    event: Event,
    /// The number of the connection since the process started, which links the two lines.
    connection: u64,
    uid: &'a str,
    listener: u16,
    direction: Direction,
    source: SocketAddr,
    original_destination: Option<SocketAddr>,
    /// The local address of the connection to the destination.
    upstream_source: Option<SocketAddr>,
    bytes_from_source: u64,
    bytes_from_destination: u64,
    peer_identity: Option<&'a str>,
    error: Option<&'a str>,
}

#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
enum Event {
    Accepted,
    Closed,
}

/// The log, which is a file or standard output. Each line is one write, so processes that append to the same file do
/// not mix lines.
#[derive(Clone)]
pub(crate) struct AccessLog(Arc<Inner>);

struct Inner {
    connections: AtomicU64,
    output: Mutex<Box<dyn Write + Send>>,
}

impl AccessLog {
    pub(crate) fn open(path: Option<&Path>) -> io::Result<Self> {
        let output: Box<dyn Write + Send> = match path {
            Some(path) => Box::new(OpenOptions::new().create(true).append(true).open(path)?),
            None => Box::new(io::stdout()),
        };
        Ok(Self(Arc::new(Inner {
            connections: AtomicU64::new(1),
            output: Mutex::new(output),
        })))
    }

    fn write(&self, line: &Line<'_>) {
        if let Err(error) = self.try_write(line) {
            tracing::warn!(%error, "failed to write the access log");
        }
    }

    fn try_write(&self, line: &Line<'_>) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(line)?;
        bytes.push(b'\n');
        let mut output = self.0.output.lock().unwrap_or_else(PoisonError::into_inner);
        output.write_all(&bytes)?;
        output.flush()
    }
}

/// The entry of a connection. Dropping the entry writes the last line, so a connection that is cut together with its
/// pod is logged.
pub(crate) struct Entry {
    log: AccessLog,
    connection: u64,
    uid: Arc<str>,
    listener: Listener,
    source: SocketAddr,
    original_destination: Option<SocketAddr>,
    upstream_source: Option<SocketAddr>,
    peer_identity: Option<String>,
    error: Option<String>,
    pub(crate) from_source: AtomicU64,
    pub(crate) from_destination: AtomicU64,
}

/// The facts that are known when a connection is accepted.
pub(crate) struct Accepted {
    pub(crate) uid: Arc<str>,
    pub(crate) listener: Listener,
    pub(crate) source: SocketAddr,
    /// The original destination, which is unknown on the HBONE port until the request is read.
    pub(crate) original_destination: Option<SocketAddr>,
}

impl Entry {
    pub(crate) fn accepted(log: AccessLog, accepted: Accepted) -> Self {
        let entry = Self {
            connection: log.0.connections.fetch_add(1, Ordering::Relaxed),
            log,
            uid: accepted.uid,
            listener: accepted.listener,
            source: accepted.source,
            original_destination: accepted.original_destination,
            upstream_source: None,
            peer_identity: None,
            // The text is replaced if the connection ends by itself.
            error: Some("cut by ztunnel".to_owned()),
            from_source: AtomicU64::new(0),
            from_destination: AtomicU64::new(0),
        };
        entry.write(Event::Accepted, None);
        entry
    }

    pub(crate) const fn destination_is(&mut self, destination: SocketAddr) {
        self.original_destination = Some(destination);
    }

    pub(crate) fn peer_is(&mut self, identity: Option<String>) {
        self.peer_identity = identity;
    }

    pub(crate) const fn connected_from(&mut self, upstream_source: SocketAddr) {
        self.upstream_source = Some(upstream_source);
    }

    pub(crate) fn close(mut self, error: Option<String>) {
        self.error = error;
    }

    fn write(&self, event: Event, error: Option<&str>) {
        self.log.write(&Line {
            time: now(),
            event,
            connection: self.connection,
            uid: &self.uid,
            listener: self.listener.port(),
            direction: self.listener.direction(),
            source: self.source,
            original_destination: self.original_destination,
            upstream_source: self.upstream_source,
            bytes_from_source: self.from_source.load(Ordering::Relaxed),
            bytes_from_destination: self.from_destination.load(Ordering::Relaxed),
            peer_identity: self.peer_identity.as_deref(),
            error,
        });
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.write(Event::Closed, self.error.as_deref());
    }
}

fn now() -> String {
    let mut text = String::new();
    let written = SystemTime.format_time(&mut Writer::new(&mut text));
    // Writing to a string does not fail.
    written.map_or_else(|_| String::new(), |()| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(use_entry: impl FnOnce(Entry)) -> Vec<serde_json::Value> {
        let file = tempfile::NamedTempFile::new().expect("tempfile");
        let log = AccessLog::open(Some(file.path())).expect("open");
        let accepted = Accepted {
            uid: "uid-1".into(),
            listener: Listener::Inbound,
            source: "10.0.0.1:40000".parse().expect("address"),
            original_destination: Some("10.0.0.2:8080".parse().expect("address")),
        };
        use_entry(Entry::accepted(log, accepted));
        let text = std::fs::read_to_string(file.path()).expect("read");
        let parse = |line| serde_json::from_str(line).expect("a JSON line");
        text.lines().map(parse).collect()
    }

    #[test]
    fn a_connection_leaves_two_lines() {
        let lines = lines(|entry| {
            entry.from_source.store(7, Ordering::Relaxed);
            entry.close(None);
        });
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["event"], "accepted");
        assert_eq!(lines[0]["listener"], 15006);
        assert_eq!(lines[0]["direction"], "inbound");
        assert_eq!(lines[0]["source"], "10.0.0.1:40000");
        assert_eq!(lines[0]["original_destination"], "10.0.0.2:8080");
        assert_eq!(lines[1]["event"], "closed");
        assert_eq!(lines[1]["bytes_from_source"], 7);
        assert!(lines[1]["error"].is_null());
        assert_eq!(lines[0]["connection"], lines[1]["connection"]);
    }

    #[test]
    fn a_connection_that_is_cut_says_so() {
        let lines = lines(drop);
        assert_eq!(lines[1]["event"], "closed");
        assert_eq!(lines[1]["error"], "cut by ztunnel");
    }

    #[test]
    fn the_time_is_rfc_3339() {
        let now = now();
        assert!(now.starts_with("20") && now.ends_with('Z'), "{now}");
    }
}
