//! Which pods of this node are ztunnels, and that the broker knows: it serves no other process.

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

/// The first and the longest wait before the broker is told again that could not be told.
const WAITS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];

/// How long the broker may take.
const TELL: Duration = Duration::from_secs(10);

/// Pods of a namespace with a label.
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
                "setting ztunnel_pods: \"{text}\" is not NAMESPACE/LABEL=VALUE, like istio-system/app=ztunnel"
            )
        })
    }
}

/// A label's name, with or without a prefix.
pub(crate) fn is_label(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_prefix(prefix) && is_name(name),
        None => is_name(text),
    }
}

/// A label's name, or a value that is not empty (Kubernetes, "Labels and Selectors": at most 63 letters, digits, `-`,
/// `_` and `.`, of which the first and the last are a letter or a digit).
pub(crate) fn is_name(text: &str) -> bool {
    let is_inside = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let mut bytes = text.bytes();
    text.len() <= 63
        && bytes.clone().all(is_inside)
        && is_edge(bytes.clone().next())
        && is_edge(bytes.next_back())
}

/// A label's prefix: a DNS subdomain.
fn is_prefix(text: &str) -> bool {
    let is_dns = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_part = |part: &str| is_name(part) && part.bytes().all(is_dns);
    text.len() <= 253 && text.split('.').all(is_part)
}

/// The ztunnels of the node. A change costs a look at the pods that it concerns.
#[derive(Debug, Default)]
struct Ztunnels {
    /// The inventory that the rest is about.
    seen: Inventory,
    /// As their cgroups call them: a static pod by its hash.
    found: BTreeMap<PodKey, PodUid>,
}

impl Ztunnels {
    fn follow(&mut self, now: &Inventory, selector: &Selector) {
        for key in now.pods.differences(&self.seen.pods) {
            match now.pod(&key).filter(|pod| selector.selects(pod)) {
                Some(pod) => {
                    let called = pod.runtime_uid.as_ref().unwrap_or(&pod.pod.uid);
                    self.found.insert(key, called.clone());
                }
                None => drop(self.found.remove(&key)),
            }
        }
        self.seen = now.clone();
    }

    fn uids(&self) -> BTreeSet<PodUid> {
        self.found.values().cloned().collect()
    }
}

/// Tells the broker after each start of it and at each change, for ever.
pub(crate) async fn keep_told(
    clients: Clients,
    source: Source,
    selector: Selector,
    broker: watch::Receiver<Instance>,
) {
    let seen = Seen {
        inventory: source.changes(),
        health: source.health(),
        broker,
    };
    let tell = |run: Arc<str>, pods: BTreeSet<PodUid>| {
        let clients = clients.clone();
        async move {
            let deadline = Instant::now() + TELL;
            clients.set_ztunnels(&run, &pods, deadline).await
        }
    };
    seen.follow(&selector, tell).await;
}

/// What decides what is told.
struct Seen {
    inventory: watch::Receiver<Arc<Inventory>>,
    health: watch::Receiver<Health>,
    broker: watch::Receiver<Instance>,
}

impl Seen {
    async fn follow<F>(
        mut self,
        selector: &Selector,
        tell: impl Fn(Arc<str>, BTreeSet<PodUid>) -> F,
    ) where
        F: Future<Output = Result<(), Failure>>,
    {
        // A view that was never whole would call a ztunnel a stranger; one that was keeps what it knew.
        let is_whole = |health: &Health| matches!(health, Some(Ok(())));
        if self.health.wait_for(is_whole).await.is_err() {
            return;
        }
        let [shortest, longest] = WAITS;
        let (mut told, mut wait) = (None, shortest);
        let mut ztunnels = Ztunnels::default();
        loop {
            let inventory = Arc::clone(&self.inventory.borrow_and_update());
            ztunnels.follow(&inventory, selector);
            let pods = ztunnels.uids();
            let run = self.broker.borrow_and_update().clone();
            let due = run.map(|run| (run, pods));
            let mut failed = false;
            if let Some((run, pods)) = due.clone().filter(|_| due != told) {
                let count = pods.len();
                match tell(run, pods).await {
                    Ok(()) => {
                        tracing::info!(pods = count, "Told the broker which pods are ztunnels");
                        (told, wait) = (due, shortest);
                    }
                    Err(failure) => {
                        tracing::warn!(%failure, ?wait, "Could not tell the broker which pods are ztunnels; once more");
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
