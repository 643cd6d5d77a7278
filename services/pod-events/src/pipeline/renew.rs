//! Other rules for a pod that stays in the mesh.

use workload::Failure;

use super::{Pipeline, soon};
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
    pub async fn renew(&self, record: Record, log: &mut Timeline) -> Result<Record, Failure> {
        let began = tokio::time::Instant::now();
        let fingerprint = self.agents.apply(&record, soon(5)).await?;
        log.note_since(format!("changed rules, now {fingerprint}"), began);
        let renewed = Record {
            intent: Intent::Enrolled { fingerprint },
            ..record
        };
        self.checkpoint.write(&renewed)?;
        Ok(renewed)
    }

    /// Has ztunnel told of a workload once more that it was told of before, as if for the first time.
    ///
    /// # Errors
    ///
    /// As the broker says. The workload is in the desired set again all the same, unless the broker was restarted
    /// meanwhile, which is given the set.
    pub async fn hand_over_again(
        &self,
        record: &mut Record,
        log: &mut Timeline,
    ) -> Result<(), Failure> {
        let broker = self.broker()?;
        let began = tokio::time::Instant::now();
        self.remove_workload(record, soon(5)).await?;
        record.revision = self.revisions.next();
        self.checkpoint.write(record)?;
        let workload = super::workload_of(record);
        self.agents
            .add_workload(&broker, &workload, soon(15))
            .await?;
        log.note_since("acknowledged by ztunnel once more", began);
        Ok(())
    }
}
