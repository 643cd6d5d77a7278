//! A pod that is wanted in the mesh and of which no verb was seen: it ran before us, or its ADD never reached us.

use std::time::Duration;

use inpod_types::{Enrollment, Failure};
use tokio::time::Instant;

use super::{Shared, Task, adoption::record_without_netns};
use crate::{
    checkpoint::{Intent, Record},
    pipeline::deadline_in,
    pod::Pod,
    redirection::Redirection,
};

/// How long a wanted pod with an address may be without a sandbox before it is looked for: between the DEL and the ADD
/// of a sandbox that is replaced, its status shows the address of the one before.
const DISCOVERY_DELAY: Duration = Duration::from_secs(2);

/// How many seconds one search may take.
const SEARCH_SECONDS: u64 = 5;

/// Whether a pod is to be in the mesh and runs; `by_ztunnel`: also by ztunnel.
pub(crate) fn should_be_enrolled(shared: &Shared, pod: &Pod, by_ztunnel: bool) -> bool {
    let ends = pod.terminal || pod.is_terminating;
    let runs = !ends && !pod.host_network && !pod.addresses.is_empty();
    let joins = || {
        let enrollment = shared.decide(pod).enrollment;
        enrollment == Enrollment::Sidecar || (by_ztunnel && enrollment == Enrollment::Ambient)
    };
    runs && joins() && !shared.is_disabled()
}

impl Task {
    /// Finds the netns of a pod that has none recorded and is wanted in the mesh. What is found is recorded as a sandbox
    /// that the next steps enrol.
    pub(super) async fn discover(&mut self) -> Result<(), Failure> {
        let inventory = self.shared.source.inventory();
        let pod = inventory
            .pod(&self.key)
            .filter(|pod| should_be_enrolled(&self.shared, pod, true));
        let Some(pod) = pod else {
            self.discovery_due = None;
            return Ok(());
        };
        let due = *self
            .discovery_due
            .get_or_insert_with(|| Instant::now() + DISCOVERY_DELAY);
        let wait = due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            self.wake_in(wait);
            return Ok(());
        }
        let pipeline = &self.shared.pipeline;
        let desired = Record {
            redirection: self.redirection_for_discovery(pod)?,
            ..record_without_netns(pod)?
        };
        let mut found = pipeline.find(&desired, deadline_in(SEARCH_SECONDS)).await?;
        // Rules to a sidecar may be in place that are another agent's, or ours of before: a failure takes nothing back.
        if !pod.is_redirected() && !found.redirection.is_sidecar() {
            // Nothing but the claim is in place; what another agent put there would stay until ours takes its place.
            found.intent = Intent::Enrolling;
        }
        pipeline.checkpoint.write(&found)?;
        let note = format!(
            "no verb was seen for it, its netns was found: sandbox {}",
            found.sandbox
        );
        self.timeline.note(note);
        self.discovery_due = None;
        self.failure = None;
        self.records.push(found);
        Ok(())
    }

    /// What a pod with a sidecar asks for has to be understood before anything is recorded of it: what would be recorded
    /// else is a pod of ztunnel's, which looks again when it is enrolled.
    fn redirection_for_discovery(&self, pod: &Pod) -> Result<Redirection, Failure> {
        let enrollment = self.shared.decide(pod).enrollment;
        if enrollment == Enrollment::Sidecar {
            self.shared.redirection_for(pod, enrollment)
        } else {
            Ok(Redirection::default())
        }
    }
}
