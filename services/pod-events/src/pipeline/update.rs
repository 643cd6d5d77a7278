//! Other rules for a pod that stays in the mesh.

use inpod_types::Failure;

use super::{CancelReason, Pipeline, deadline_in};
use crate::{
    checkpoint::{Intent, Record},
    timeline::Timeline,
};

impl Pipeline {
    /// Applies a record's redirection in its claimed netns and writes it down. Rules that were applied and not written
    /// down are found to differ by whoever verifies next, and go back.
    ///
    /// # Errors
    ///
    /// As netconfig says; then the rules are what they were.
    pub async fn update(&self, record: Record, log: &mut Timeline) -> Result<Record, Failure> {
        let began = tokio::time::Instant::now();
        let fingerprint = self.clients.apply(&record, deadline_in(5)).await?;
        log.note_since(format!("changed rules, now {fingerprint}"), began);
        let updated = Record {
            intent: Intent::Enrolled { fingerprint },
            ..record
        };
        self.checkpoint.write(&updated)?;
        Ok(updated)
    }

    /// Has ztunnel told of a workload once more that it was told of before, as if for the first time.
    ///
    /// # Errors
    ///
    /// As the broker says, or with a passing reason when something else comes first: the wait for a ztunnel is given up
    /// then. The workload may not be in the desired set: to be called again until it succeeds.
    pub async fn readd_workload(
        &self,
        record: &mut Record,
        log: &mut Timeline,
        cancelled: impl Future<Output = CancelReason> + Send,
    ) -> Result<(), Failure> {
        let broker = self.broker()?;
        let began = tokio::time::Instant::now();
        let removal = self.revisions.next();
        // Later than the removal, also for a set that is sent after a crash.
        record.revision = self.revisions.next();
        self.checkpoint.write(record)?;
        let (clients, sandbox) = (&self.clients, &record.sandbox);
        clients
            .remove_workload(&broker, sandbox, removal, deadline_in(5))
            .await?;
        let workload = super::workload_of(record);
        tokio::select! {
            added = clients.add_workload(&broker, &workload, deadline_in(15)) => added?,
            reason = cancelled => return Err(reason.into()),
        }
        log.note_since("acknowledged by ztunnel once more", began);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
