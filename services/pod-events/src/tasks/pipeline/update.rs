//! Updates a pod that stays in the mesh.

use inpod_types::Failure;

use super::{CancelReason, Pipeline};
use crate::clients::deadline_in;
use crate::{
    checkpoint::{Intent, Record},
    timeline::Timeline,
};

impl Pipeline {
    /// Applies a record's redirection and checkpoints the record. `require_listeners` refuses rules to a port without
    /// ztunnel's listener. If the checkpoint fails, the next verification finds the new rules to differ and reverts
    /// them.
    ///
    /// # Errors
    ///
    /// netconfig's failure; the rules are unchanged then.
    pub(crate) async fn update(
        &self,
        record: Record,
        require_listeners: bool,
        log: &mut Timeline,
    ) -> Result<Record, Failure> {
        let began = tokio::time::Instant::now();
        let apply = self
            .clients
            .apply(&record, require_listeners, deadline_in(5));
        let fingerprint = apply.await?;
        log.note_since(format!("changed rules, now {fingerprint}"), began);
        let updated = Record {
            intent: Intent::Enrolled { fingerprint },
            ..record
        };
        self.checkpoint.write(&updated)?;
        Ok(updated)
    }

    /// Sends a workload to ztunnel again like a new workload.
    ///
    /// # Errors
    ///
    /// The broker's failure, or a transient reason if a command for the pod cancels the wait. The workload may not be
    /// served then, so the caller has to repeat the call until success.
    pub(crate) async fn readd_workload(
        &self,
        record: &mut Record,
        log: &mut Timeline,
        cancelled: impl Future<Output = CancelReason> + Send,
    ) -> Result<(), Failure> {
        let broker = self.broker()?;
        let began = tokio::time::Instant::now();
        let removal = self.revisions.next();
        // The new revision is later than the removal, even in a set sent after a crash.
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
        log.note_since("acknowledged by ztunnel again", began);
        Ok(())
    }
}
