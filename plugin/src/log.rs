//! Writes a JSON line per call to stderr, from where the runtime copies the line to the runtime's log, and keeps the line for
//! the agent if the agent has not answered the call.

use std::{
    io::{self, Write as _},
    path::Path,
};

use inpod_cni::{
    call_log::Line,
    config::{DEFAULT_STATE_DIR, Level},
    error::{CniError, ErrorCode},
    invocation::Invocation,
    spool,
};

use crate::{call::Call, output::Outcome};

pub(crate) struct Report<'a> {
    pub(crate) call: &'a Call,
    pub(crate) verb: Option<&'a str>,
    pub(crate) invocation: Option<&'a Invocation>,
    pub(crate) outcome: &'a Result<Outcome, CniError>,
    /// Contains an error if the reply did not reach the runtime.
    pub(crate) printed: &'a io::Result<()>,
}

impl Report<'_> {
    /// Ignores errors, because a failing log must not fail the call.
    pub(crate) fn write(&self) {
        let settings = self
            .invocation
            .and_then(Invocation::config)
            .map(|config| &config.settings);
        let threshold = settings.map_or(Level::Info, |settings| settings.log_level);
        let (level, message) = self.summary();
        if level > threshold {
            return;
        }
        let line = self.line(level, message);
        if let Ok(mut text) = serde_json::to_vec(&line) {
            text.push(b'\n');
            let _ignored = io::stderr().write_all(&text);
        }
        if !self.is_in_agents_log(level) {
            let default = Path::new(DEFAULT_STATE_DIR);
            let state_dir = settings.map_or(default, |settings| &settings.state_dir);
            let _ignored = line.keep(state_dir);
        }
    }

    /// Returns whether the agent has answered the call as usual, and logged the call.
    fn is_in_agents_log(&self, level: Level) -> bool {
        let is_usual = |outcome: &Outcome| level == Level::Info && outcome.cause.is_empty();
        self.printed.is_ok() && self.outcome.as_ref().is_ok_and(is_usual)
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

    fn line(&self, level: Level, message: &str) -> Line {
        let sandbox = self.invocation.and_then(Invocation::sandbox);
        let pod = self.invocation.and_then(Invocation::pod);
        let trace = self.call.trace.as_ref();
        let line = Line {
            level: level_name(level).to_owned(),
            message: message.to_owned(),
            time_unix_ms: spool::now_unix_ms(),
            took_ms: u64::try_from(self.call.elapsed().as_millis()).unwrap_or(u64::MAX),
            verb: self.verb.map(str::to_owned),
            sandbox: sandbox.map(ToString::to_string),
            pod: pod.map(ToString::to_string),
            code: self.outcome.as_ref().err().map(|error| error.code.number()),
            error: String::new(),
            trace_id: trace.map(|trace| trace.id.clone()),
        };
        line.with_error(&self.cause())
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
