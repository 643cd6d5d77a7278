//! Pods with a sidecar stay redirected until the sandbox ends, like their proxy: without the rules, their traffic would
//! bypass the proxy in plain text (decision 54).

use inpod_service::UninstallMode;
use inpod_types::{Enrollment, SandboxRef};

use super::Task;
use crate::{
    checkpoint::{Intent, Record},
    pod::Pod,
    tasks::plan::Desired,
};

impl Task {
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
        } else if is_applied && !self.shared.leave_mode.is(UninstallMode::Uninstall) {
            Desired::In { in_sync: true }
        } else {
            let is_claimed = record.netns_id.is_some();
            Desired::Detached { is_claimed }
        }
    }

    /// Manages a pod again that a cancelled uninstall had detached.
    pub(super) fn reattach(&mut self) {
        let is_uninstalling = self.shared.leave_mode.is(UninstallMode::Uninstall);
        self.unclaimed |= !is_uninstalling
            && self
                .records
                .last()
                .is_some_and(|record| record.is_detached());
    }

    /// Returns whether an enrollment would use a different proxy.
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
