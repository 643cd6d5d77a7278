//! Exempts the kubelet's probes of a pod with rules of another agent or of an earlier inpod, until inpod applies its own.
//!
//! Such rules let probes pass only while a set on the node has the pod's address. Another agent removes its set when the
//! agent ends, and inpod's own rules may wait for ztunnel even longer.

use inpod_types::{Failure, SandboxRef};

use super::Task;
use crate::{
    checkpoint::{Intent, Record},
    clients::deadline_in,
    tasks::pipeline::is_gone,
};

/// An exemption that netconfig has confirmed, or its absence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProbeExemption {
    sandbox: SandboxRef,
    is_exempt: bool,
}

impl Task {
    /// Exempts the probes of the current sandbox, if its rules need the exemption. Needs no broker.
    pub(super) async fn exempt_probes(&mut self) -> Result<(), Failure> {
        let inventory = self.shared.source.inventory();
        let Some(record) = self.records.last() else {
            return Ok(());
        };
        let pod = inventory.pod(&self.key);
        let Some(pod) = pod.filter(|pod| record.belongs_to(pod)) else {
            return Ok(());
        };
        let Some(is_exempt) = exemption_before_rules(record, pod.is_redirected()) else {
            return Ok(());
        };
        let desired = Some(ProbeExemption {
            sandbox: record.sandbox.clone(),
            is_exempt,
        });
        // Every task is woken once netconfig is synced.
        let is_synced = self.shared.synced().netconfig.is_some();
        if self.probe_exemption == desired || !is_synced {
            return Ok(());
        }
        let clients = &self.shared.pipeline.clients;
        let set = clients.exempt_probes(record, is_exempt, deadline_in(5));
        match set.await {
            Ok(()) => self.probe_exemption = desired,
            // The enrollment handles the end of the netns.
            Err(failure) if is_gone(failure.reason) => {}
            Err(failure) => return Err(failure),
        }
        Ok(())
    }
}

/// Returns whether a sandbox without inpod's rules needs the exemption, or `None` if the exemption stays as it is. A
/// sandbox of a CNI call has no rules yet, although its pod may have the annotation, as after a reboot. The
/// annotation shows whether another agent's rules are in place; rules in legacy tables need no annotation to stay.
fn exemption_before_rules(record: &Record, is_redirected: bool) -> Option<bool> {
    let is_captured = is_redirected || record.is_legacy();
    let may_be_exempt = is_captured || record.intent == Intent::Adopted;
    let has_rules = record.was_found() || record.is_legacy();
    (may_be_exempt && has_rules && !record.redirection.is_sidecar()).then_some(is_captured)
}

#[cfg(test)]
mod tests {
    use inpod_types::NetworkName;

    use super::*;
    use crate::testing::record;

    fn exemption(intent: Intent, is_redirected: bool) -> Option<bool> {
        let mut record = Record {
            intent,
            ..record("c1")
        };
        record.sandbox.network_name = NetworkName::default();
        exemption_before_rules(&record, is_redirected)
    }

    #[test]
    fn probe_exemption_leaves_sandboxes_of_cni_calls_to_the_apply() {
        let record = Record {
            intent: Intent::Enrolling,
            ..record("c1")
        };
        assert_eq!(exemption_before_rules(&record, true), None);
    }

    #[test]
    fn probe_exemption_follows_the_annotation_of_adopted_pods() {
        assert_eq!(exemption(Intent::Adopted, true), Some(true));
        assert_eq!(exemption(Intent::Adopted, false), Some(false));
        assert_eq!(exemption(Intent::Enrolling, true), Some(true));
        assert_eq!(exemption(Intent::Enrolling, false), None);
    }

    #[test]
    fn probe_exemption_of_legacy_rules_needs_no_annotation() {
        for intent in [Intent::Legacy, Intent::ServedLegacy] {
            assert_eq!(exemption(intent, false), Some(true));
        }
    }
}
