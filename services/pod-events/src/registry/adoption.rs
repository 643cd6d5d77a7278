//! What ran on this node before us.

use std::time::Duration;

use futures_util::{StreamExt as _, future, stream};
use inpod_types::{Enrollment, Failure};
use tokio::{sync::oneshot, time::Instant};

use super::Registry;
use crate::{
    checkpoint::Record,
    pod::Pod,
    source::PodKey,
    task::{Command, Shared},
};

/// How long the pods of before are looked for, all together. A search reads about every process of the node: what is
/// not found by then ztunnel is asked to keep, and it is looked for again later.
const SEARCH: Duration = Duration::from_secs(10);

/// How many searches are made at once.
const AT_ONCE: usize = 4;

impl Registry {
    /// Writes down the pods that may be in the mesh although no verb was seen for them, with their netns as far as
    /// those are found.
    ///
    /// # Errors
    ///
    /// When one cannot be written down.
    pub(crate) async fn inherit(&self) -> Result<(), Failure> {
        let until = Instant::now() + SEARCH;
        let strangers = self.strangers();
        let pods = strangers.len();
        let inherited = stream::iter(strangers)
            .map(|key| self.inherit_pod(key, until))
            .buffer_unordered(AT_ONCE)
            .filter_map(|inherited| future::ready(inherited.err()));
        let failures: Vec<_> = inherited.collect().await;
        if let Some(failure) = failures.into_iter().next() {
            return Err(failure);
        }
        if pods > 0 {
            let records = self.records();
            let unfound = records.iter().filter(|it| it.has_unknown_netns()).count();
            tracing::info!(pods, unfound, "Took over the pods that ran before");
        }
        Ok(())
    }

    async fn inherit_pod(&self, key: PodKey, until: Instant) -> Result<(), Failure> {
        let (reply, answer) = oneshot::channel();
        self.ask(&key, Command::Inherit(until, reply));
        // A task that has ended had nothing to write down.
        answer.await.unwrap_or(Ok(()))
    }

    fn strangers(&self) -> Vec<PodKey> {
        let records = self.records();
        let inventory = self.shared.source.inventory();
        let pods = inventory.pods.iter();
        let unknown = pods.filter(|(_, pod)| may_be_in(&self.shared, pod) && is_new(&records, pod));
        unknown.map(|(key, _)| key.clone()).collect()
    }
}

/// A pod without an address has no network yet, and its ADD is to come.
fn may_be_in(shared: &Shared, pod: &Pod) -> bool {
    let wanted = || shared.decide(pod).enrollment == Enrollment::Ambient && !shared.is_disabled();
    // A pod with a sidecar is found without ztunnel knowing of it.
    let sidecar = shared.decide(pod).enrollment == Enrollment::Sidecar;
    let can = !pod.terminal && !pod.host_network && !sidecar;
    can && (pod.is_redirected() || (!pod.addresses.is_empty() && wanted()))
}

fn is_new(records: &[Record], pod: &Pod) -> bool {
    !records.iter().any(|record| record.belongs_to(pod))
}
