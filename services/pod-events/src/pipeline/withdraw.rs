//! Out of the mesh while the pod runs: peers first, then new connections, then the rest.

use inpod_proto::netconfig::v1::RemovePhase;
use inpod_types::Failure;

use super::{Pipeline, deadline_in, expected_netns};
use crate::{
    boottime::BootInstant,
    checkpoint::{Intent, Record},
    timeline::Timeline,
    trace,
};

impl Pipeline {
    /// Writes down that peers are to be told that the pod leaves.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn start_withdrawal(&self, record: &mut Record, log: &mut Timeline) -> Result<(), Failure> {
        log.note("leaving: peers are told");
        record.intent = Intent::Announcing;
        Ok(self.checkpoint.write(record)?)
    }

    /// Writes down that peers were told that the pod leaves.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn start_propagation(
        &self,
        record: &mut Record,
        log: &mut Timeline,
    ) -> Result<(), Failure> {
        log.note("peers were told, and learn it");
        record.intent = Intent::Leaving {
            since: BootInstant::now(),
        };
        Ok(self.checkpoint.write(record)?)
    }

    /// Lets new connections go direct.
    ///
    /// # Errors
    ///
    /// As netconfig says.
    pub async fn drain(&self, record: &mut Record, log: &mut Timeline) -> Result<(), Failure> {
        let flows = self
            .clients
            .remove_rules(&record.sandbox, RemovePhase::Drain, deadline_in(5))
            .await?;
        log.note(format!("draining {flows} captured connections"));
        record.intent = Intent::Draining {
            since: BootInstant::now(),
        };
        Ok(self.checkpoint.write(record)?)
    }

    /// Takes the rest away once no captured connection is left, or at once. Tells whether it is done.
    ///
    /// # Errors
    ///
    /// As the services say.
    pub async fn finish(
        &self,
        record: &mut Record,
        log: &mut Timeline,
        overdue: bool,
    ) -> Result<bool, Failure> {
        let flows = self
            .clients
            .inspect(&record.sandbox, deadline_in(5))
            .await?
            .captured_flows;
        if flows > 0 && !overdue {
            return Ok(false);
        }
        self.withdraw_now(record).await?;
        log.note(format!("left the mesh, {flows} captured connections cut"));
        tracing::info!(pod = %record.pod, sandbox = %record.sandbox, cut = flows, trace_id = trace::current().id(), "Withdrew");
        Ok(true)
    }

    /// Takes workload, rules and claim of a sandbox away, which lives on. The rules of a pod with a sidecar stay: its
    /// proxy is in it, and without them its traffic would go around that in plain text.
    ///
    /// # Errors
    ///
    /// As the services say; what is left is tried again by calling again.
    pub async fn withdraw_now(&self, record: &mut Record) -> Result<(), Failure> {
        // Rules that point at a closed port refuse connections.
        if !record.redirection.is_sidecar() {
            self.remove_rules(record, deadline_in(5)).await?;
        }
        self.remove_workload(record, deadline_in(5)).await?;
        self.clients
            .release(&record.sandbox, deadline_in(5))
            .await?;
        self.mark_out(record)
    }

    /// Leaves the redirection to a sidecar where it is and looks after it no more: its claim goes. What another netns at
    /// its path would be told by stays written down.
    ///
    /// # Errors
    ///
    /// As netconfig says, or when it cannot be written.
    pub async fn detach(&self, record: &mut Record, log: &mut Timeline) -> Result<(), Failure> {
        self.clients
            .release(&record.sandbox, deadline_in(5))
            .await?;
        if !matches!(record.intent, Intent::Enrolled { .. }) {
            // Nothing of ours is in place.
            return self.mark_out(record);
        }
        record.netns = expected_netns(record);
        record.netns_id = None;
        log.note("its sidecar's redirection stays, and is not looked after");
        Ok(self.checkpoint.write(record)?)
    }
}
