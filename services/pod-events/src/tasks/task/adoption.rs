//! Adoption of a pod that another agent enrolled, without an ADD to inpod.
//!
//! If the netns is not found at once, the pod is recorded without a netns. The desired set then names the pod without a
//! netns, and ztunnel keeps its workload. Such a record is named after the pod's UID, with an empty network name; the
//! pod's next sandbox supersedes the record.

use std::{sync::Arc, time::Duration};

use inpod_types::{Failure, InvalidIdentifier, NetnsRef, NetworkName, Reason, SandboxRef};
use tokio::time::Instant;

use super::{Step, Task};
use crate::{
    checkpoint::{Intent, Record},
    clients::deadline_in,
    pod::Pod,
    redirection::Redirection,
    tasks::plan::Action,
};

const SEARCH_SECONDS: u64 = 5;

/// The time for which a pod may stay without an address: after a reboot, the API server shows pods that the kubelet has
/// yet to start, and inpod receives their ADDs then.
const START_TIMEOUT: Duration = Duration::from_secs(60);

impl Task {
    /// Records the pod as enrolled, with its netns if the netns is found in time.
    pub(super) async fn adopt(&mut self, until: Instant) -> Result<(), Failure> {
        let inventory = self.shared.source.inventory();
        let Some(pod) = inventory.pod(&self.key) else {
            return Ok(());
        };
        if self.records.iter().any(|record| record.belongs_to(pod)) {
            return Ok(());
        }
        let pipeline = &self.shared.pipeline;
        let unlocated = Record {
            revision: pipeline.revisions.next(),
            redirection: self.shared.redirection_of(pod).unwrap_or_default(),
            ..record_without_netns(pod)?
        };
        let record = if unlocated.addresses.is_empty() {
            unlocated
        } else {
            let found = pipeline.find(&unlocated, pod.is_redirected(), until).await;
            self.failure = found.as_ref().err().cloned();
            found.unwrap_or(unlocated)
        };
        pipeline.checkpoint.write(&record)?;
        let known = if record.has_unknown_netns() {
            "is not known yet"
        } else {
            "was found"
        };
        self.timeline.note(format!(
            "ran before inpod, its netns {known}: sandbox {}",
            record.sandbox
        ));
        self.records.push(record.into());
        Ok(())
    }

    pub(super) fn needs_netns_lookup(&self, action: Action) -> bool {
        let acts = matches!(
            action,
            Action::Enroll | Action::StartWithdrawal | Action::GarbageCollect { .. }
        );
        acts && self
            .records
            .last()
            .is_some_and(|record| record.has_unknown_netns())
    }

    /// Replaces the current record with the record of the found sandbox. A gone or terminal pod without processes has
    /// ended.
    pub(super) async fn locate_netns(&mut self, action: Action) -> Result<Step, Failure> {
        let inventory = self.shared.source.inventory();
        let Some(record) = self.records.last_mut().map(Arc::make_mut) else {
            return Ok(Step::Done);
        };
        let pod = inventory
            .pod(&self.key)
            .filter(|pod| record.belongs_to(pod));
        if let Some(pod) = pod {
            record.addresses.clone_from(&pod.addresses);
        }
        let ended =
            matches!(action, Action::GarbageCollect { .. }) || pod.is_some_and(|pod| pod.terminal);
        let is_starting = record.addresses.is_empty() && !ended;
        if let Some(wait) = remaining_start(&mut self.start_due, is_starting, Instant::now()) {
            // The status may have shown the addresses of before the reboot.
            self.failure
                .take_if(|known| known.reason == Reason::NetnsNotFound);
            return Ok(Step::Wait(wait));
        }
        let pipeline = &self.shared.pipeline;
        let is_foreign = pod.is_some_and(Pod::is_redirected);
        let found = pipeline.find(record, is_foreign, deadline_in(SEARCH_SECONDS));
        let found = match found.await {
            Err(failure) if failure.reason == Reason::NetnsNotFound && ended => {
                return self.forget_current().await;
            }
            found => found?,
        };
        pipeline.checkpoint.write(&found)?;
        self.timeline
            .note(format!("its netns was found: sandbox {}", found.sandbox));
        self.failure = None;
        self.records.push(found.into());
        Ok(Step::Continue)
    }
}

/// Returns how long to wait for the address of a pod that is starting. `due` is the end of the wait.
fn remaining_start(due: &mut Option<Instant>, is_starting: bool, now: Instant) -> Option<Duration> {
    if !is_starting {
        *due = None;
        return None;
    }
    let due = *due.get_or_insert(now + START_TIMEOUT);
    Some(due.saturating_duration_since(now)).filter(|wait| !wait.is_zero())
}

pub(crate) fn record_without_netns(pod: &Pod) -> Result<Record, Failure> {
    let invalid = |error: InvalidIdentifier| Failure::new(Reason::Internal, error.to_string());
    Ok(Record {
        sandbox: SandboxRef {
            network_name: NetworkName::default(),
            container_id: pod.pod.uid.as_str().parse().map_err(invalid)?,
            ifname: "eth0".parse().map_err(invalid)?,
        },
        pod: pod.pod.clone(),
        service_account: pod.service_account.clone(),
        netns: NetnsRef::from_path(""),
        netns_id: None,
        addresses: pod.addresses.clone(),
        revision: inpod_types::Revision::default(),
        intent: Intent::Adopted,
        runtime_uid: pod.runtime_uid.clone(),
        admitted_unenrolled: false,
        redirection: Redirection::default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_without_an_address_is_awaited_for_a_minute() {
        let (start, mut due) = (Instant::now(), None);
        let mut wait_at = |seconds, is_starting| {
            let now = start + Duration::from_secs(seconds);
            remaining_start(&mut due, is_starting, now).map(|wait| wait.as_secs())
        };
        assert_eq!(wait_at(0, false), None);
        assert_eq!(wait_at(10, true), Some(60));
        assert_eq!(wait_at(40, true), Some(30));
        assert_eq!(wait_at(70, true), None, "its missing address is a failure");
        assert_eq!(wait_at(80, true), None);
        assert_eq!(wait_at(90, false), None, "it has an address");
        assert_eq!(wait_at(100, true), Some(60));
    }
}
