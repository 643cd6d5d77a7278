//! Tracks this node's ztunnel pods and keeps the broker's allow-list in sync.

use std::{
    collections::{BTreeMap, BTreeSet},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use inpod_types::{Failure, NamespaceName, PodUid};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use crate::{
    clients::Clients,
    pod::Pod,
    source::{Health, Inventory, PodKey, Source},
    sync::Instance,
};

/// The first and the longest delay between attempts.
const RETRY_INTERVAL: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];

const SET_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    namespace: NamespaceName,
    label: String,
    value: String,
}

impl Selector {
    fn selects(&self, pod: &Pod) -> bool {
        pod.pod.namespace == self.namespace && pod.labels.get(&self.label) == Some(&self.value)
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(namespace, rest)| {
            let (label, value) = rest.split_once('=')?;
            (is_label(label) && is_name(value)).then_some(Self {
                namespace: namespace.parse().ok()?,
                label: label.to_owned(),
                value: value.to_owned(),
            })
        });
        parsed.ok_or_else(|| {
            format!(
                "setting ztunnel_pods: \"{text}\" is not NAMESPACE/LABEL=VALUE, for example istio-system/app=ztunnel"
            )
        })
    }
}

/// Accepts label keys with or without a prefix.
pub(crate) fn is_label(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_prefix(prefix) && is_name(name),
        None => is_name(text),
    }
}

/// Accepts label names and nonempty label values: at most 63 letters, digits, `-`, `_` and `.`, with a letter or
/// digit at both ends (Kubernetes, "Labels and Selectors").
pub(crate) fn is_name(text: &str) -> bool {
    let is_inside = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let mut bytes = text.bytes();
    text.len() <= 63
        && bytes.clone().all(is_inside)
        && is_edge(bytes.clone().next())
        && is_edge(bytes.next_back())
}

/// Accepts a label prefix, which is a DNS subdomain.
fn is_prefix(text: &str) -> bool {
    let is_dns = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_part = |part: &str| is_name(part) && part.bytes().all(is_dns);
    text.len() <= 253 && text.split('.').all(is_part)
}

/// The node's ztunnel pods, updated incrementally.
#[derive(Debug, Default)]
struct Ztunnels {
    inventory: Inventory,
    /// UIDs as in cgroup names; for a static pod, its hash.
    found: BTreeMap<PodKey, PodUid>,
}

impl Ztunnels {
    fn update(&mut self, now: &Inventory, selector: &Selector) {
        for key in now.pods.differences(&self.inventory.pods) {
            match now.pod(&key).filter(|pod| selector.selects(pod)) {
                Some(pod) => {
                    let uid = pod.runtime_uid.as_ref().unwrap_or(&pod.pod.uid);
                    self.found.insert(key, uid.clone());
                }
                None => drop(self.found.remove(&key)),
            }
        }
        self.inventory = now.clone();
    }

    fn uids(&self) -> BTreeSet<PodUid> {
        self.found.values().cloned().collect()
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
        // An incomplete first view would exclude a running ztunnel. Once complete, the view keeps what it knew.
        let is_complete = |health: &Health| matches!(health, Some(Ok(())));
        if self.health.wait_for(is_complete).await.is_err() {
            return;
        }
        let [shortest, longest] = RETRY_INTERVAL;
        let (mut sent, mut wait) = (None, shortest);
        let mut ztunnels = Ztunnels::default();
        loop {
            let inventory = Arc::clone(&self.inventory.borrow_and_update());
            ztunnels.update(&inventory, selector);
            let pods = ztunnels.uids();
            let run = self.broker.borrow_and_update().clone();
            let due = run.map(|run| (run, pods));
            let mut failed = false;
            if let Some((run, pods)) = due.clone().filter(|_| due != sent) {
                let count = pods.len();
                match set(run, pods).await {
                    Ok(()) => {
                        tracing::info!(
                            pods = count,
                            "Updated the list of ztunnel pods at the broker"
                        );
                        (sent, wait) = (due, shortest);
                    }
                    Err(failure) => {
                        tracing::warn!(%failure, ?wait, "Could not update the list of ztunnel pods at the broker; will retry");
                        failed = true;
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
            if failed {
                wait = longest.min(wait * 2);
            }
        }
    }
}

#[cfg(test)]
mod tests;
