//! Withdraws a running pod: first the withdrawal is announced to peers, then new connections bypass the mesh, then the
//! rest is removed.

use inpod_proto::netconfig::v1::{RemovePhase, inspect_netns_request::Target};
use inpod_types::Failure;

use super::Pipeline;
use crate::clients::{InspectionScope, deadline_in};
use crate::{
    boottime::BootInstant,
    checkpoint::{Intent, Record},
    timeline::Timeline,
    trace,
};

impl Pipeline {
    pub(crate) fn start_withdrawal(
        &self,
        record: &mut Record,
        log: &mut Timeline,
    ) -> Result<(), Failure> {
        log.note("withdrawing: announcing it to peers");
        record.intent = Intent::Announcing;
        Ok(self.checkpoint.write(record)?)
    }

    pub(crate) fn start_propagation(
        &self,
        record: &mut Record,
        log: &mut Timeline,
    ) -> Result<(), Failure> {
        log.note("announced to peers, waiting until they learn it");
        record.intent = Intent::Leaving {
            since: BootInstant::now(),
        };
        Ok(self.checkpoint.write(record)?)
    }

    pub(crate) async fn drain(
        &self,
        record: &mut Record,
        log: &mut Timeline,
    ) -> Result<(), Failure> {
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

    /// Removes the rest once no captured connection is left, or at once if overdue. Returns whether the withdrawal is
    /// done.
    pub(crate) async fn finish(
        &self,
        record: &mut Record,
        log: &mut Timeline,
        overdue: bool,
    ) -> Result<bool, Failure> {
        let target = Target::Sandbox((&record.sandbox).into());
        let inspected = self
            .clients
            .inspect(target, InspectionScope::CapturedFlows, deadline_in(5))
            .await?;
        let flows = inspected.captured_flows;
        if flows > 0 && !overdue {
            return Ok(false);
        }
        self.withdraw_now(record).await?;
        log.note(format!("left the mesh, {flows} captured connections cut"));
        tracing::info!(pod = %record.pod, sandbox = %record.sandbox, cut = flows, trace_id = trace::current().id(), "Withdrew");
        Ok(true)
    }

    /// Removes workload, rules and claim of a sandbox that keeps running. A sidecar's rules stay: without the rules,
    /// the pod's traffic would bypass the proxy in plain text.
    ///
    /// # Errors
    ///
    /// The first failure. Calling again resumes with the rest.
    pub(crate) async fn withdraw_now(&self, record: &mut Record) -> Result<(), Failure> {
        let broker = self.broker_instance();
        // The rules are removed before the listeners: rules that redirect to a closed port make connections fail.
        if !record.redirection.is_sidecar() {
            self.remove_rules(record, deadline_in(5)).await?;
        }
        self.remove_workload(record, deadline_in(5)).await?;
        self.clients
            .release(&record.sandbox, deadline_in(5))
            .await?;
        self.check_same_broker(record, broker.as_deref())?;
        self.mark_out(record)
    }

    /// Keeps the redirection to a sidecar but releases the claim. The record keeps the identity of the netns, so that
    /// another netns at the same path is recognized.
    pub(crate) async fn detach(
        &self,
        record: &mut Record,
        log: &mut Timeline,
    ) -> Result<(), Failure> {
        self.clients
            .release(&record.sandbox, deadline_in(5))
            .await?;
        if !matches!(record.intent, Intent::Enrolled { .. }) {
            return self.mark_out(record);
        }
        record.netns = record.expected_netns();
        record.netns_id = None;
        log.note("the redirection to its sidecar stays, and is no longer managed");
        Ok(self.checkpoint.write(record)?)
    }
}
