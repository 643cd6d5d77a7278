//! Writes one JSON line per call to stderr, from where the runtime copies the line to its own log.

use std::io::{self, Write as _};

use inpod_cni::{
    config::Level,
    error::{CniError, ErrorCode},
    invocation::Invocation,
    spool,
};
use serde::Serialize;

use crate::{call::Call, output::Outcome};

#[derive(Serialize)]
struct Line<'a> {
    level: &'static str,
    message: &'a str,
    time_unix_ms: u64,
    took_ms: u128,
    #[serde(skip_serializing_if = "Option::is_none")]
    verb: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<u32>,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<&'a str>,
}

pub(crate) struct Report<'a> {
    pub(crate) call: &'a Call,
    pub(crate) verb: Option<&'a str>,
    pub(crate) invocation: Option<&'a Invocation>,
    pub(crate) outcome: &'a Result<Outcome, CniError>,
    /// Contains an error if the reply did not reach the runtime.
    pub(crate) printed: &'a io::Result<()>,
}

impl Report<'_> {
    pub(crate) fn write(&self) {
        let config = self.invocation.and_then(Invocation::config);
        let threshold = config.map_or(Level::Info, |config| config.settings.log_level);
        let (level, message) = self.summary();
        if level <= threshold {
            write(&self.line(level, message));
        }
    }

    fn summary(&self) -> (Level, &'static str) {
        match self.outcome {
            _ if self.printed.is_err() => (Level::Error, "Cannot write the reply to stdout"),
            Ok(outcome) => (outcome.level, outcome.message),
            Err(error) if error.code == ErrorCode::TryAgainLater => {
                (Level::Warn, "Asked the runtime to retry later")
            }
            Err(_) => (Level::Error, "Failed the call"),
        }
    }

    fn line<'a>(&'a self, level: Level, message: &'a str) -> Line<'a> {
        let sandbox = self.invocation.and_then(Invocation::sandbox);
        let pod = self.invocation.and_then(Invocation::pod);
        Line {
            level: level_name(level),
            message,
            time_unix_ms: spool::now_unix_ms(),
            took_ms: self.call.elapsed().as_millis(),
            verb: self.verb,
            sandbox: sandbox.map(ToString::to_string),
            pod: pod.map(ToString::to_string),
            code: self.outcome.as_ref().err().map(|error| error.code.number()),
            error: self.cause(),
            trace_id: self.call.trace.as_ref().map(|trace| trace.id.as_str()),
        }
    }

    fn cause(&self) -> String {
        match (self.printed, self.outcome) {
            (Err(error), _) => error.to_string(),
            (Ok(()), Ok(outcome)) => outcome.cause.clone(),
            (Ok(()), Err(error)) => error.msg.clone(),
        }
    }
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::Error => "ERROR",
        Level::Warn => "WARN",
        Level::Info => "INFO",
        Level::Debug | Level::Trace => "DEBUG",
    }
}

/// Writes a line and ignores errors, because a failing log must not fail the call.
fn write(line: &Line<'_>) {
    if let Ok(mut text) = serde_json::to_vec(line) {
        text.push(b'\n');
        let _ignored = io::stderr().write_all(&text);
    }
}
