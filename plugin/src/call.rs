//! One call: when it began, when it must be over, and by which id it is traced.

use std::{
    fs::File,
    io::Read as _,
    time::{Duration, Instant},
};

use inpod_cni::invocation::{Invocation, Verb};
use nix::unistd::alarm;

/// How long a call may take before its configuration has been read.
const UNCONFIGURED: Duration = Duration::from_secs(30);

/// How long a DEL may take: it tells the agent and goes, for the runtime tears the pod down meanwhile. A VERSION has
/// nobody to wait for at all.
const SHORT: Duration = Duration::from_secs(5);

/// By how much the kernel's timer comes later than the deadline.
const LAST_RESORT: Duration = Duration::from_secs(5);

/// One run of the process.
pub(crate) struct Call {
    began: Instant,
    /// When the runtime must have its answer.
    pub(crate) deadline: Instant,
    /// The id in `traceparent`, and in the log.
    pub(crate) trace: Option<Trace>,
}

impl Call {
    /// Starts the clock.
    pub(crate) fn begin(verb: Option<Verb>) -> Self {
        let limit = match verb {
            Some(Verb::Del | Verb::Version) => SHORT,
            None | Some(Verb::Add | Verb::Check | Verb::Gc | Verb::Status) => UNCONFIGURED,
        };
        let began = Instant::now();
        let mut call = Self {
            began,
            deadline: began,
            trace: Trace::random(),
        };
        call.limit(limit);
        call
    }

    /// Sets the deadline that the configuration asks for.
    pub(crate) fn limit_to(&mut self, invocation: &Invocation) {
        let Some(config) = invocation.config() else {
            return;
        };
        match invocation {
            Invocation::Del(_) => self.limit(config.settings.timeout.min(SHORT)),
            Invocation::Add(_)
            | Invocation::Check(_)
            | Invocation::Gc(_)
            | Invocation::Status(_)
            | Invocation::Version(_) => self.limit(config.settings.timeout),
        }
    }

    fn limit(&mut self, limit: Duration) {
        self.deadline = self.began + limit;
        // Every wait here ends at the deadline. What the kernel makes us wait for (a file system that hangs, a runtime
        // that does not read its pipe) does not: then the process dies, for its caller has long given up.
        let seconds = u32::try_from((limit + LAST_RESORT).as_secs()).unwrap_or(u32::MAX);
        alarm::set(seconds);
    }

    /// How long the call has taken.
    pub(crate) fn took(&self) -> Duration {
        self.began.elapsed()
    }

    /// How long it may still take, less a reserve for what comes after.
    pub(crate) fn left(&self, reserve: Duration) -> Duration {
        let left = self.deadline.saturating_duration_since(Instant::now());
        left.saturating_sub(reserve)
    }
}

/// A trace that begins here (W3C Trace Context, level 1).
pub(crate) struct Trace {
    /// Names the call in every process that it passes.
    pub(crate) id: String,
    parent: String,
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
        let (id, parent) = hex.split_at(32);
        Some(Self {
            id: id.to_owned(),
            parent: parent.to_owned(),
        })
    }

    /// The header's value: version 00, the trace, this process as the parent, sampled.
    pub(crate) fn parent_header(&self) -> String {
        format!("00-{}-{}-01", self.id, self.parent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trace_is_another_and_its_header_has_the_shape_of_the_spec() {
        let [one, other] = [Trace::random().unwrap(), Trace::random().unwrap()];
        assert_ne!(one.id, other.id);
        let header = one.parent_header();
        let lengths: Vec<usize> = header.split('-').map(str::len).collect();
        assert_eq!(lengths, [2, 32, 16, 2]);
        assert!(header.starts_with(&format!("00-{}-", one.id)) && header.ends_with("-01"));
    }
}
