//! A pod that is wanted in the mesh and of which no verb was seen: it ran before us, or its ADD never reached us.

use std::time::Duration;

use tokio::time::Instant;
use workload::{Enrollment, Failure};

use super::{Shared, Task, inherit::unfound};
use crate::{checkpoint::Intent, pipeline::soon, pod::Pod};

/// How long a wanted pod with an address may be without a sandbox before it is looked for: between the DEL and the ADD
/// of a sandbox that is replaced, its status shows the address of the one before.
const PATIENCE: Duration = Duration::from_secs(2);

/// How many seconds one search may take.
const SEARCH: u64 = 5;

/// Whether a pod is to be in the mesh and runs.
pub(crate) fn is_missed(shared: &Shared, pod: &Pod) -> bool {
    let ends = pod.terminal || pod.is_terminating;
    let runs = !ends && !pod.host_network && !pod.addresses.is_empty();
    runs && shared.decide(pod).enrollment == Enrollment::Ambient && !shared.is_disabled()
}

impl Task {
    /// Finds the netns of a pod that has none recorded and is wanted in the mesh. What is found is recorded as a sandbox
    /// that the next steps enrol.
    pub(super) async fn look_for_stranger(&mut self) -> Result<(), Failure> {
        let inventory = self.shared.source.inventory();
        let pod = inventory
            .pod(&self.key)
            .filter(|pod| is_missed(&self.shared, pod));
        let Some(pod) = pod else {
            self.search_due = None;
            return Ok(());
        };
        let due = *self
            .search_due
            .get_or_insert_with(|| Instant::now() + PATIENCE);
        let wait = due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            self.wake_in(wait);
            return Ok(());
        }
        let pipeline = &self.shared.pipeline;
        let mut found = pipeline.find(&unfound(pod)?, soon(SEARCH)).await?;
        if !pod.is_redirected() {
            // Nothing but the claim is in place; what another agent put there would stay until ours takes its place.
            found.intent = Intent::Enrolling;
        }
        pipeline.checkpoint.write(&found)?;
        let note = format!(
            "no verb was seen for it, its netns was found: sandbox {}",
            found.sandbox
        );
        self.timeline.note(note);
        self.search_due = None;
        self.failure = None;
        self.records.push(found);
        Ok(())
    }
}
