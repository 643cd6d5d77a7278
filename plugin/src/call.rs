use std::{
    fs::File,
    io::Read as _,
    time::{Duration, Instant},
};

use inpod_cni::invocation::{Invocation, Verb};
use nix::unistd::alarm;

/// Applies until the configuration, which sets the timeout of the call, has been read.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// The timeout of DEL and VERSION. A DEL only reports the end of a pod that the runtime tears down meanwhile.
const SHORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The delay between the deadline and the kernel's alarm, which kills a hanging process.
const ALARM_GRACE: Duration = Duration::from_secs(5);

pub(crate) struct Call {
    started: Instant,
    pub(crate) deadline: Instant,
    pub(crate) trace: Option<Trace>,
}

impl Call {
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
        // Every wait of this process ends at the deadline, unless the process blocks in the kernel (a hanging file
        // system, a full pipe to the runtime). SIGALRM then kills the process, whose caller has given up long ago.
        let seconds = u32::try_from((timeout + ALARM_GRACE).as_secs()).unwrap_or(u32::MAX);
        alarm::set(seconds);
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the time left until the deadline, less a reserve for later steps.
    pub(crate) fn remaining(&self, reserve: Duration) -> Duration {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        remaining.saturating_sub(reserve)
    }
}

/// A new trace context, made for this call (W3C Trace Context, level 1).
pub(crate) struct Trace {
    pub(crate) id: String,
    span_id: String,
}

impl Trace {
    /// Returns `None` if the host provides no random bytes, in which case the call is untraced.
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

    /// Formats version 00, trace id, span id and the sampled flag as a `traceparent` header.
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
