//! Discovery of a pod that is to be in the mesh without an ADD: the pod ran before inpod, or the ADD never arrived.

use std::time::Duration;

use inpod_types::{Enrollment, Failure};
use tokio::time::Instant;

use super::{Shared, Task, adoption::record_without_netns};
use crate::{
    checkpoint::{Intent, Record},
    clients::deadline_in,
    pod::Pod,
    redirection::Redirection,
};

/// The time for which a pod with an address may lack a sandbox before its netns is searched: between DEL and ADD of a
/// replaced sandbox, the pod's status still shows the previous address.
pub(crate) const DISCOVERY_DELAY: Duration = Duration::from_secs(2);

const SEARCH_SECONDS: u64 = 5;

/// Returns whether a running pod should be enrolled. A pod that would be enrolled with ztunnel counts only if
/// `by_ztunnel` is set.
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
    /// Finds the netns of a pod without a record, and records a sandbox that the next steps enroll.
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
        let mut found = pipeline
            .find(&desired, pod.is_redirected(), deadline_in(SEARCH_SECONDS))
            .await?;
        // Sidecar rules may be in place, from another agent or an earlier inpod: a failed enrollment
        // must not remove them.
        if !pod.is_redirected() && !found.redirection.is_sidecar() {
            // Only the claim is inpod's; another agent's rules stay until inpod's rules replace them.
            found.intent = Intent::Enrolling;
        }
        pipeline.checkpoint.write(&found)?;
        let note = format!(
            "no ADD was received for it, its netns was found: sandbox {}",
            found.sandbox
        );
        self.timeline.note(note);
        self.discovery_due = None;
        self.failure = None;
        self.records.push(found.into());
        Ok(())
    }

    /// Returns the redirection for the record of a discovered pod. A sidecar's redirection must be valid, or the pod
    /// would be recorded as ambient. An ambient redirection is determined again when the pod is enrolled.
    fn redirection_for_discovery(&self, pod: &Pod) -> Result<Redirection, Failure> {
        let enrollment = self.shared.decide(pod).enrollment;
        if enrollment == Enrollment::Sidecar {
            self.shared.redirection_for(pod, enrollment)
        } else {
            Ok(Redirection::default())
        }
    }
}
