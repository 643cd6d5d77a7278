//! A pod that is redirected to its own proxy. It stays so for the life of its sandbox: the proxy is in it as long, and
//! without the rules its traffic would go around that in plain text (DECISIONS 54).

use inpod_service::Leave;
use inpod_types::{Enrollment, SandboxRef};

use super::Task;
use crate::{
    checkpoint::{Intent, Record},
    plan::Desired,
    pod::Pod,
};

impl Task {
    /// What is wanted of a sandbox that is redirected to its sidecar, or about to be.
    pub(super) fn desired_for_sidecar(
        &self,
        record: &Record,
        pod: &Pod,
        enrollment: Enrollment,
    ) -> Desired {
        let is_applied = matches!(record.intent, Intent::Enrolled { .. });
        if enrollment == Enrollment::Sidecar {
            let in_sync = self.is_in_sync(record, pod, enrollment);
            Desired::In { in_sync }
        } else if is_applied && !self.shared.leave_mode.is(Leave::Uninstall) {
            Desired::In { in_sync: true }
        } else {
            let is_claimed = record.netns_id.is_some();
            Desired::Detached { is_claimed }
        }
    }

    /// What was let alone on a node that was to be left is looked after again where inpod stays.
    pub(super) fn reattach(&mut self) {
        let is_uninstalling = self.shared.leave_mode.is(Leave::Uninstall);
        self.unclaimed |= !is_uninstalling && self.records.last().is_some_and(Record::is_detached);
    }

    /// Whether a sandbox has something in place that leads elsewhere than an enrollment would.
    pub(super) fn is_redirected_elsewhere(
        &self,
        sandbox: &SandboxRef,
        enrollment: Enrollment,
    ) -> bool {
        let known = self.index_of(sandbox).and_then(|at| self.records.get(at));
        let to_sidecar = enrollment == Enrollment::Sidecar;
        known.is_some_and(|record| {
            let ends = matches!(record.intent, Intent::Deleting { .. });
            record.intent.has_effects() && !ends && record.redirection.is_sidecar() != to_sidecar
        })
    }
}
