use std::{fmt::Write as _, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, future, stream};
use inpod_types::{Enrollment, Failure};
use tokio::{sync::oneshot, time::Instant};

use super::Registry;
use crate::{
    checkpoint::Record,
    pod::{Pod, PodKey},
    tasks::task::{Command, Shared},
};

/// The time limit of all searches together, because each search reads about every process of the node. Pods not found
/// keep their workload in ztunnel and are searched again later.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(10);

const MAX_CONCURRENT_SEARCHES: usize = 4;

/// The number of pods that the failure of an adoption names.
const MAX_NAMED_PODS: usize = 8;

impl Registry {
    /// Records the pods that may be in the mesh without an ADD, with their netns if found.
    pub(crate) async fn adopt(&self) -> Result<(), Failure> {
        let until = Instant::now() + SEARCH_TIMEOUT;
        let unrecorded_pods = self.unrecorded_pods();
        let pods = unrecorded_pods.len();
        let adopted = stream::iter(unrecorded_pods)
            .map(|key| self.adopt_pod(key, until))
            .buffer_unordered(MAX_CONCURRENT_SEARCHES)
            .filter_map(|adopted| future::ready(adopted.err()));
        let failures: Vec<_> = adopted.collect().await;
        join_failures(&failures)?;
        if pods > 0 {
            let records = self.records();
            let without_netns = records.iter().filter(|it| it.has_unknown_netns()).count();
            tracing::info!(
                pods,
                without_netns,
                "Adopted the pods that ran before inpod"
            );
        }
        Ok(())
    }

    async fn adopt_pod(&self, key: PodKey, until: Instant) -> Result<(), Failure> {
        let (reply, answer) = oneshot::channel();
        self.dispatch(&key, Command::Adopt(until, reply));
        // A task that has ended had nothing to record.
        answer.await.unwrap_or(Ok(())).map_err(|failure| Failure {
            message: format!("pod {}/{}: {}", key.0, key.1, failure.message),
            ..failure
        })
    }

    fn unrecorded_pods(&self) -> Vec<PodKey> {
        let records = self.records();
        let inventory = self.shared.source.inventory();
        let pods = inventory.pods.iter();
        let unknown =
            pods.filter(|(_, pod)| may_be_enrolled(&self.shared, pod) && is_new(&records, pod));
        unknown.map(|(key, _)| key.clone()).collect()
    }
}

/// Joins the failures of several pods into one failure with the reason of the first.
fn join_failures(failures: &[Failure]) -> Result<(), Failure> {
    let Some(reason) = failures.first().map(|failure| failure.reason) else {
        return Ok(());
    };
    let named = failures.iter().take(MAX_NAMED_PODS);
    let mut message = named.map(Failure::to_string).collect::<Vec<_>>().join("; ");
    if let Some(more @ 1..) = failures.len().checked_sub(MAX_NAMED_PODS) {
        write!(message, "; and {more} more").unwrap_or_default();
    }
    Err(Failure::new(reason, message))
}

/// Returns whether another agent may have enrolled the pod. A pod without an address has no network yet, and its ADD is
/// still to come.
fn may_be_enrolled(shared: &Shared, pod: &Pod) -> bool {
    let wanted = || shared.decide(pod).enrollment == Enrollment::Ambient && !shared.is_disabled();
    // Discovery finds the pod of a sidecar; ztunnel keeps nothing for such a pod.
    let sidecar = shared.decide(pod).enrollment == Enrollment::Sidecar;
    let can = !pod.terminal && !pod.host_network && !sidecar;
    can && (pod.is_redirected() || (!pod.addresses.is_empty() && wanted()))
}

fn is_new(records: &[Arc<Record>], pod: &Pod) -> bool {
    !records.iter().any(|record| record.belongs_to(pod))
}

#[cfg(test)]
mod tests {
    use inpod_types::Reason;

    use super::*;

    #[test]
    fn the_failures_of_an_adoption_are_named_up_to_a_limit() {
        let failure = |n| Failure::new(Reason::CheckpointFailed, format!("pod shop/p{n}: full"));
        assert_eq!(join_failures(&[]), Ok(()));
        let joined =
            |count| join_failures(&(0..count).map(failure).collect::<Vec<_>>()).unwrap_err();
        let both = "pod shop/p0: full [CHECKPOINT_FAILED]; pod shop/p1: full [CHECKPOINT_FAILED]";
        assert_eq!(joined(2).message, both);
        let many = joined(MAX_NAMED_PODS + 3).message;
        assert!(many.ends_with("; and 3 more"), "{many}");
    }
}
