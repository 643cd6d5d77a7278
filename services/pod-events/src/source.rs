//! A live view of this node's pods, from Kubernetes or from a directory of manifests.

mod directory;
mod kubernetes;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use inpod_kube::ClientError;
use inpod_types::NodeName;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, timeout_at},
};

use crate::{
    config::{Config, PodsFrom},
    inventory::Inventory,
    pod::PodKey,
};

pub use directory::DirectoryError;

/// The outcome of reading a pod past the watch.
#[derive(Clone, Debug)]
pub enum RefreshOutcome {
    /// The inventory, with everything that can be known of the pod and its namespace.
    Current(Arc<Inventory>),
    /// The pod is bound to another node, or to no node yet (`None`).
    OtherNode(Option<NodeName>),
    Unavailable(String),
}

/// The health of a source: up to date, or the reason why not. `None` until the source is up to date for the first time.
pub type Health = Option<Result<(), String>>;

#[derive(Clone, Debug)]
pub struct Source {
    inventory: watch::Receiver<Arc<Inventory>>,
    health: watch::Receiver<Health>,
    refresher: Refresher,
}

/// Reads current state past the watch.
#[derive(Clone, Debug)]
enum Refresher {
    Directory(mpsc::Sender<oneshot::Sender<()>>),
    Kubernetes(kubernetes::ApiReader),
}

#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    Kubernetes(#[from] ClientError),
}

/// The objects and labels to read.
#[derive(Clone, Debug)]
struct Scope {
    node: NodeName,
    namespace_labels: Arc<BTreeSet<String>>,
}

/// Publishes a value if it differs from the last one.
fn publish<T: PartialEq>(sender: &watch::Sender<T>, now: T) {
    sender.send_if_modified(|last| {
        let differs = *last != now;
        *last = now;
        differs
    });
}

const REREAD_TIMEOUT: Duration = Duration::from_secs(2);

impl Source {
    /// Reads a directory once, but does not wait for Kubernetes.
    ///
    /// # Errors
    ///
    /// If a directory cannot be read or watched, or the configuration of the Kubernetes client cannot be found.
    pub async fn open(config: &Config) -> Result<Self, SourceError> {
        let scope = Scope {
            node: config.node_name.clone(),
            namespace_labels: Arc::new(config.policy().namespace_keys()),
        };
        match &config.pods_from {
            PodsFrom::Directory(path) => {
                let watched = directory::watch(path.clone(), scope, directory::CHECK_INTERVAL);
                let (inventory, reread) = watched.await?;
                Ok(Self {
                    inventory,
                    // The loss of a directory is logged, and the known content is kept.
                    health: watch::channel(Some(Ok(()))).1,
                    refresher: Refresher::Directory(reread),
                })
            }
            PodsFrom::Kubernetes => {
                let server = kubernetes::client(config.kubeconfig()).await?;
                let (reader, inventory, health) = kubernetes::watch(server, scope);
                Ok(Self {
                    inventory,
                    health,
                    refresher: Refresher::Kubernetes(reader),
                })
            }
        }
    }

    /// Creates a source without files and requests, which only ever shows `inventory`.
    #[cfg(test)]
    pub(crate) fn in_memory(
        inventory: watch::Receiver<Arc<Inventory>>,
        health: watch::Receiver<Health>,
    ) -> Self {
        let refresher = Refresher::Directory(mpsc::channel(1).0);
        Self {
            inventory,
            health,
            refresher,
        }
    }

    pub(crate) fn client(&self) -> Option<kube::Client> {
        match &self.refresher {
            Refresher::Kubernetes(reader) => Some(reader.client()),
            Refresher::Directory(_) => None,
        }
    }

    pub fn inventory(&self) -> Arc<Inventory> {
        Arc::clone(&self.inventory.borrow())
    }

    pub fn changes(&self) -> watch::Receiver<Arc<Inventory>> {
        self.inventory.clone()
    }

    pub fn health(&self) -> watch::Receiver<Health> {
        self.health.clone()
    }

    /// Reads past the watch, for a pod that the watch has not shown yet, until `is_enough` holds or there is nothing
    /// more to read.
    pub async fn refresh(
        &self,
        key: &PodKey,
        until: Instant,
        is_enough: impl Fn(&Inventory) -> bool,
    ) -> RefreshOutcome {
        match &self.refresher {
            Refresher::Kubernetes(reader) => reader.refresh(key, until, is_enough).await,
            Refresher::Directory(reread) => {
                let (done, answer) = oneshot::channel();
                let request = async {
                    if reread.send(done).await.is_ok() {
                        // Without an answer, the source has ended, and the last inventory stays.
                        answer.await.unwrap_or_default();
                    }
                };
                let until = until.min(Instant::now() + REREAD_TIMEOUT);
                timeout_at(until, request).await.unwrap_or_default();
                RefreshOutcome::Current(self.inventory())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_equal_value_is_not_published() {
        let (sender, receiver) = watch::channel(Arc::new(1));
        publish(&sender, Arc::new(1));
        assert!(!receiver.has_changed().unwrap());
        publish(&sender, Arc::new(2));
        assert!(receiver.has_changed().unwrap());
    }
}
