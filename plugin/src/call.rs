//! One call: when it began, when it must be over, and by which id it is traced.

use std::{
    fs::File,
    io::Read as _,
    time::{Duration, Instant},
};

use inpod_cni::invocation::{Invocation, Verb};
use nix::unistd::alarm;

/// How long a call may take before its configuration has been read.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a DEL may take: it tells the agent and goes, for the runtime tears the pod down meanwhile. A VERSION has
/// nobody to wait for at all.
const SHORT_TIMEOUT: Duration = Duration::from_secs(5);

/// By how much the kernel's timer comes later than the deadline.
const ALARM_GRACE: Duration = Duration::from_secs(5);

/// One run of the process.
pub(crate) struct Call {
    started: Instant,
    /// When the runtime must have its answer.
    pub(crate) deadline: Instant,
    /// The id in `traceparent`, and in the log.
    pub(crate) trace: Option<Trace>,
}

impl Call {
    /// Starts the clock.
    pub(crate) fn start(verb: Option<Verb>) -> Self {
        let timeout = match verb {
            Some(Verb::Del | Verb::Version) => SHORT_TIMEOUT,
            None | Some(Verb::Add | Verb::Check | Verb::Gc | Verb::Status) => DEFAULT_TIMEOUT,
        };
        let started = Instant::now();
        let mut call = Self {
            started,
            deadline: started,
            trace: Trace::random(),
        };
        call.set_timeout(timeout);
        call
    }

    /// Sets the deadline that the configuration asks for.
    pub(crate) fn apply_timeout(&mut self, invocation: &Invocation) {
        let Some(config) = invocation.config() else {
            return;
        };
        match invocation {
            Invocation::Del(_) => self.set_timeout(config.settings.timeout.min(SHORT_TIMEOUT)),
            Invocation::Add(_)
            | Invocation::Check(_)
            | Invocation::Gc(_)
            | Invocation::Status(_)
            | Invocation::Version(_) => self.set_timeout(config.settings.timeout),
        }
    }

    fn set_timeout(&mut self, timeout: Duration) {
        self.deadline = self.started + timeout;
        // Every wait here ends at the deadline. What the kernel makes us wait for (a file system that hangs, a runtime
        // that does not read its pipe) does not: then the process dies, for its caller has long given up.
        let seconds = u32::try_from((timeout + ALARM_GRACE).as_secs()).unwrap_or(u32::MAX);
        alarm::set(seconds);
    }

    /// How long the call has taken.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// How long it may still take, less a reserve for what comes after.
    pub(crate) fn remaining(&self, reserve: Duration) -> Duration {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        remaining.saturating_sub(reserve)
    }
}

/// A trace that begins here (W3C Trace Context, level 1).
pub(crate) struct Trace {
    /// Names the call in every process that it passes.
    pub(crate) id: String,
    span_id: String,
}

impl Trace {
    /// A new trace; `None` where the host gives no random bytes, and the call goes untraced.
    fn random() -> Option<Self> {
        let mut bytes = [0; 24];
        File::open("/dev/urandom")
            .ok()?
            .read_exact(&mut bytes)
            .ok()?;
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let (id, span_id) = hex.split_at(32);
        Some(Self {
            id: id.to_owned(),
            span_id: span_id.to_owned(),
        })
    }

    /// The header's value: version 00, the trace, this process as the parent, sampled.
    pub(crate) fn traceparent(&self) -> String {
        format!("00-{}-{}-01", self.id, self.span_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trace_is_another_and_its_header_has_the_shape_of_the_spec() {
        let [one, other] = [Trace::random().unwrap(), Trace::random().unwrap()];
        assert_ne!(one.id, other.id);
        let header = one.traceparent();
        let lengths: Vec<usize> = header.split('-').map(str::len).collect();
        assert_eq!(lengths, [2, 32, 16, 2]);
        assert!(header.starts_with(&format!("00-{}-", one.id)) && header.ends_with("-01"));
    }
}
