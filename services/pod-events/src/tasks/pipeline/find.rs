//! Finds the netns of a pod for which no ADD was received.

use inpod_types::{Failure, Reason};
use tokio::time::Instant;

use super::Pipeline;
use crate::checkpoint::{Intent, Record};
use crate::clients::deadline_in;

impl Pipeline {
    /// Searches for a pod's netns. Returns the record of the sandbox, named after one of the pod's containers. If
    /// another agent redirected the pod (`is_foreign`), the redirection may consist of rules that inpod cannot replace.
    ///
    /// # Errors
    ///
    /// netconfig's failure, or `NETNS_NOT_FOUND` at once if no address is known to verify the netns.
    pub(crate) async fn find(
        &self,
        record: &Record,
        is_foreign: bool,
        deadline: Instant,
    ) -> Result<Record, Failure> {
        if record.addresses.is_empty() {
            let message = format!("no address of pod {} is known", record.pod);
            return Err(Failure::new(Reason::NetnsNotFound, message));
        }
        let found = self.clients.find_netns(record, deadline).await?;
        let is_legacy = is_foreign && found.only_legacy_nat && !record.redirection.is_sidecar();
        Ok(Record {
            intent: if is_legacy {
                Intent::Legacy
            } else {
                record.intent.clone()
            },
            sandbox: found.sandbox,
            netns: found.netns,
            netns_id: Some(found.id),
            revision: self.revisions.next(),
            ..record.clone()
        })
    }

    /// Searches again for the netns of a sandbox found through an ended process: other processes may still be in the
    /// netns. The sandbox keeps its name. Returns whether the netns still exists.
    pub(super) async fn locate_again(&self, record: &mut Record) -> Result<bool, Failure> {
        if !record.was_found() {
            return Ok(false);
        }
        let found = match self.find(record, false, deadline_in(5)).await {
            Err(failure) if failure.reason == Reason::NetnsNotFound => return Ok(false),
            found => found?,
        };
        if found.sandbox != record.sandbox {
            self.clients.release(&found.sandbox, deadline_in(2)).await?;
        }
        if found.netns_id != record.netns_id {
            return Ok(false);
        }
        record.netns = found.netns;
        self.checkpoint.write(record)?;
        let claim = self.clients.claim(record, deadline_in(5));
        claim.await.map(|_| true)
    }
}
