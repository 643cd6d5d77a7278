//! Tracks this node's ztunnel pods and keeps the broker's allow-list in sync.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use inpod_types::{Backoff, Failure, PodUid};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use crate::{
    clients::{Clients, Instance},
    inventory::Inventory,
    labels::Selector,
    pod::PodKey,
    source::{Health, Source},
};

const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));

const SET_TIMEOUT: Duration = Duration::from_secs(10);

/// The ztunnel pods of an inventory, by the UIDs that cgroup names contain; for a static pod, the hash.
#[derive(Debug, Default)]
struct ZtunnelPods {
    seen: Arc<Inventory>,
    uids: BTreeMap<PodKey, PodUid>,
}

impl ZtunnelPods {
    /// Judges the pods that changed since the last call, because most changes are of other pods.
    fn update(&mut self, inventory: Arc<Inventory>, selector: &Selector) -> BTreeSet<PodUid> {
        for key in inventory.pods.differences(&self.seen.pods) {
            match inventory.pod(&key).filter(|pod| selector.selects(pod)) {
                Some(pod) => {
                    let uid = pod.runtime_uid.as_ref().unwrap_or(&pod.pod.uid);
                    self.uids.insert(key, uid.clone());
                }
                None => drop(self.uids.remove(&key)),
            }
        }
        self.seen = inventory;
        self.uids.values().cloned().collect()
    }
}

/// Sends the ztunnel pods to the broker after each change and each start of the broker.
pub(crate) async fn sync_ztunnels(
    clients: Clients,
    source: Source,
    selector: Selector,
    broker: watch::Receiver<Instance>,
) {
    let inputs = Inputs {
        inventory: source.changes(),
        health: source.health(),
        broker,
    };
    let set = |run: Arc<str>, pods: BTreeSet<PodUid>| {
        let clients = clients.clone();
        async move {
            let deadline = Instant::now() + SET_TIMEOUT;
            clients.set_ztunnels(&run, &pods, deadline).await
        }
    };
    inputs.run(&selector, set).await;
}

struct Inputs {
    inventory: watch::Receiver<Arc<Inventory>>,
    health: watch::Receiver<Health>,
    broker: watch::Receiver<Instance>,
}

impl Inputs {
    async fn run<F>(mut self, selector: &Selector, set: impl Fn(Arc<str>, BTreeSet<PodUid>) -> F)
    where
        F: Future<Output = Result<(), Failure>>,
    {
        // An incomplete first view would exclude a running ztunnel. Once complete, the view keeps the known pods.
        let is_complete = |health: &Health| matches!(health, Some(Ok(())));
        if self.health.wait_for(is_complete).await.is_err() {
            return;
        }
        let (mut sent, mut failures) = (None, 0);
        let mut ztunnels = ZtunnelPods::default();
        loop {
            let inventory = Arc::clone(&self.inventory.borrow_and_update());
            let pods = ztunnels.update(inventory, selector);
            let run = self.broker.borrow_and_update().clone();
            let due = run.map(|run| (run, pods));
            let (mut failed, wait) = (false, RETRY.delay(failures));
            if let Some((run, pods)) = due.clone().filter(|_| due != sent) {
                let count = pods.len();
                match set(run, pods).await {
                    Ok(()) => {
                        tracing::info!(
                            pods = count,
                            "Updated the list of ztunnel pods at the broker"
                        );
                        (sent, failures) = (due, 0);
                    }
                    Err(failure) => {
                        tracing::warn!(%failure, ?wait, "Could not update the list of ztunnel pods at the broker; will retry");
                        (failed, failures) = (true, failures + 1);
                    }
                }
            }
            let changed = tokio::select! {
                changed = self.inventory.changed() => changed,
                changed = self.broker.changed() => changed,
                () = sleep(wait), if failed => Ok(()),
            };
            if changed.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
