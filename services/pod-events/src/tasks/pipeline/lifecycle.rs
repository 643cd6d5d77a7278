//! Detects the end of a sandbox, and claims sandboxes again for a restarted netconfig.

use inpod_proto::netconfig::v1::inspect_netns_request::Target;
use inpod_types::{Failure, Reason};

use super::Pipeline;
use crate::clients::{InspectionScope, deadline_in};
use crate::{
    checkpoint::{Intent, Record},
    timeline::Timeline,
};

/// The processes left in a sandbox's netns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum NetnsState {
    /// The netns no longer exists or cannot be reached.
    Gone,
    Empty,
    /// Only the sandbox's own process is left and holds the netns.
    SandboxOnly,
    InUse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reclaimed {
    Intact,
    Repaired,
    Gone,
}

impl Pipeline {
    /// Inspects a sandbox's netns through the claim or, without a claim, at the path. Claims nothing.
    pub(crate) async fn netns_state(&self, record: &Record) -> Result<NetnsState, Failure> {
        if record.netns.path.as_os_str().is_empty() {
            return Ok(NetnsState::Gone);
        }
        let processes = InspectionScope::Processes;
        let inspect = |target| self.clients.inspect(target, processes, deadline_in(2));
        let seen = match inspect(Target::Sandbox((&record.sandbox).into())).await {
            Err(failure) if failure.reason == Reason::ClaimUnknown => {
                inspect(Target::Netns((&record.expected_netns()).into())).await
            }
            seen => seen,
        };
        let seen = match seen {
            Err(failure) if is_gone(failure.reason) => return Ok(NetnsState::Gone),
            seen => seen?,
        };
        Ok(if !seen.path_intact {
            NetnsState::Gone
        } else if seen.processes.is_empty() {
            NetnsState::Empty
        } else if seen.processes.iter().all(|process| process.sandbox_own) {
            NetnsState::SandboxOnly
        } else {
            NetnsState::InUse
        })
    }

    /// Removes the workload, the claim and the record of an ended sandbox. The rules ended with the netns.
    pub(crate) async fn forget(&self, record: &Record) -> Result<(), Failure> {
        if !record.is_bare() {
            let broker = self.broker_instance();
            let workload = self.remove_workload(record, deadline_in(2));
            let claim = self.clients.release(&record.sandbox, deadline_in(2));
            let (workload, claim) = tokio::join!(workload, claim);
            workload.and(claim)?;
            self.check_same_broker(record, broker.as_deref())?;
        }
        Ok(self.checkpoint.remove(&record.sandbox)?)
    }

    /// Claims a netns again after a restart of netconfig, and repairs its rules.
    pub(crate) async fn reclaim(
        &self,
        record: &mut Record,
        log: &mut Timeline,
    ) -> Result<Reclaimed, Failure> {
        match self.clients.claim(record, deadline_in(5)).await {
            Err(failure) if is_gone(failure.reason) => {
                if !self.locate_again(record).await? {
                    return Ok(Reclaimed::Gone);
                }
            }
            claimed => {
                let was_unknown = record.netns_id.is_none();
                record.netns_id = Some(claimed?.id);
                if was_unknown {
                    self.checkpoint.write(record)?;
                }
            }
        }
        if record.intent == Intent::ServedLegacy {
            // No apply follows that would exempt its probes.
            let exempt = self.clients.exempt_probes(record, true, deadline_in(5));
            exempt.await?;
        }
        if !matches!(
            record.intent,
            Intent::Enrolled { .. } | Intent::Announcing | Intent::Leaving { .. }
        ) {
            return Ok(Reclaimed::Intact);
        }
        let verified = self.clients.verify(record, deadline_in(5)).await?;
        let leaves = record.intent.fingerprint().is_none();
        if leaves && verified.fingerprint.is_empty() {
            // Another agent may have enrolled the pod, and ztunnel never acknowledged the pod with rules of inpod.
            return Ok(Reclaimed::Intact);
        }
        let differences = verified.differences;
        let mut fingerprint = verified.fingerprint;
        if !differences.is_empty() {
            tracing::warn!(pod = %record.pod, ?differences, "Repairing rules");
            fingerprint = self.clients.apply(record, false, deadline_in(5)).await?;
            log.note(format!(
                "repaired rules, now {fingerprint}: {}",
                differences.join("; ")
            ));
        }
        // Intact rules count even if their fingerprint differs from the recorded fingerprint, because the netns may
        // have changed.
        let applied = record.intent.fingerprint();
        if applied.is_some_and(|applied| applied != fingerprint) {
            record.intent = Intent::Enrolled { fingerprint };
            self.checkpoint.write(record)?;
        }
        Ok(if differences.is_empty() {
            Reclaimed::Intact
        } else {
            Reclaimed::Repaired
        })
    }
}

/// Returns whether a failure proves that a netns is no longer at its path.
pub(crate) fn is_gone(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::NetnsMissing | Reason::NetnsMismatch | Reason::NetnsNotANetns
    )
}
