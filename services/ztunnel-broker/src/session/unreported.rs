//! Changes of workloads that watchers have not received yet. Most changes follow one another within milliseconds: the
//! response is reported at once, and earlier changes only if the response takes long.

use std::time::{Duration, Instant};

use inpod_types::{PodUid, SandboxRef};

use super::{Phase, Session};
use crate::desired::Changes;

const REPORT_DELAY: Duration = Duration::from_secs(1);

impl Session {
    pub fn note_change(&mut self, uid: &PodUid, sandbox: &SandboxRef) {
        if !matches!(self.phase, Phase::Connected) {
            self.unreported.insert(uid.clone(), sandbox.clone());
        }
    }

    /// Returns all changes unless a response is due soon.
    pub fn take_unreported(&mut self, now: Instant) -> Changes {
        if self.report_at().is_some_and(|at| now < at) {
            return Changes::new();
        }
        std::mem::take(&mut self.unreported)
    }

    /// Returns until when changes wait for the response to the message in flight.
    pub(super) fn report_at(&self) -> Option<Instant> {
        let in_flight = self.in_flight.as_ref();
        let in_flight = in_flight.filter(|_| !self.unreported.is_empty())?;
        Some(in_flight.since + REPORT_DELAY)
    }
}
