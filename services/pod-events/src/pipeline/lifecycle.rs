//! The end of a sandbox, and its survival of a restarted netconfig.

use inpod_types::{Failure, Reason};

use super::{Pipeline, deadline_in, expected_netns};
use crate::{
    checkpoint::{Intent, Record},
    timeline::Timeline,
};

/// What runs in a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetnsState {
    /// Its netns is no more, or nothing leads to it.
    Gone,
    /// No process is in it.
    Empty,
    /// Only the sandbox's own process, which holds the netns for the containers.
    SandboxOnly,
    /// Containers run.
    InUse,
}

/// What became of a sandbox that was claimed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reclaimed {
    /// Everything is in place.
    Intact,
    /// Something was not, and is again.
    Repaired,
    /// The sandbox is no more.
    Gone,
}

impl Pipeline {
    /// What runs in a sandbox. Looks through its claim, or without one at its path; claims nothing.
    ///
    /// # Errors
    ///
    /// When netconfig is not there, or cannot tell.
    pub async fn netns_state(&self, record: &Record) -> Result<NetnsState, Failure> {
        if record.netns.path.as_os_str().is_empty() {
            return Ok(NetnsState::Gone);
        }
        let seen = match self.clients.inspect(&record.sandbox, deadline_in(2)).await {
            Err(failure) if failure.reason == Reason::ClaimUnknown => {
                self.clients
                    .inspect_path(&expected_netns(record), deadline_in(2))
                    .await
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

    /// Forgets a sandbox that has ended, everywhere. Its rules end with its netns.
    ///
    /// # Errors
    ///
    /// When one of the services could not be told.
    pub async fn forget(&self, record: &Record) -> Result<(), Failure> {
        if record.intent.has_effects() || record.netns_id.is_some() {
            let workload = self.remove_workload(record, deadline_in(2));
            let claim = self.clients.release(&record.sandbox, deadline_in(2));
            let (workload, claim) = tokio::join!(workload, claim);
            workload.and(claim)?;
        }
        Ok(self.checkpoint.remove(&record.sandbox)?)
    }

    /// Claims a sandbox's netns again for a restarted netconfig and mends its rules.
    ///
    /// # Errors
    ///
    /// As netconfig says.
    pub async fn reclaim(
        &self,
        record: &mut Record,
        log: &mut Timeline,
    ) -> Result<Reclaimed, Failure> {
        match self
            .clients
            .claim(
                &record.sandbox,
                &expected_netns(record),
                &record.addresses,
                deadline_in(5),
            )
            .await
        {
            Err(failure) if is_gone(failure.reason) => {
                if !self.locate_again(record).await? {
                    return Ok(Reclaimed::Gone);
                }
            }
            claimed => {
                let was_detached = record.is_detached();
                record.netns_id = Some(claimed?.id);
                if was_detached {
                    self.checkpoint.write(record)?;
                }
            }
        }
        if !matches!(
            record.intent,
            Intent::Enrolled { .. } | Intent::Announcing | Intent::Leaving { .. }
        ) {
            return Ok(Reclaimed::Intact);
        }
        let verified = self.clients.verify(record, deadline_in(5)).await?;
        let differences = verified.differences;
        let mut fingerprint = verified.fingerprint;
        if !differences.is_empty() {
            tracing::warn!(pod = %record.pod, ?differences, "Mending rules");
            fingerprint = self.clients.apply(record, deadline_in(5)).await?;
            log.note(format!(
                "mended rules, now {fingerprint}: {}",
                differences.join("; ")
            ));
        }
        // What is whole counts from now on, also where it is not what was written down: the netns may have changed.
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

/// Whether a netns is known to be no more.
fn is_gone(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::NetnsMissing | Reason::NetnsMismatch | Reason::NetnsNotANetns
    )
}
