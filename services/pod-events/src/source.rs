//! The source of pods: a live view of this node's pods, from Kubernetes or from a directory of manifests.

mod directory;
mod kubernetes;
mod shared_map;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use inpod_kube::ClientError;
use inpod_types::{NamespaceName, NodeName, PodName, PodUid};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, timeout_at},
};

use crate::{
    config::{Config, PodsFrom},
    pod::{Namespace, Pod},
};

pub use directory::DirectoryError;
pub use shared_map::SharedMap;

/// A pod's namespace and name. Several pods may have the same key one after the other.
pub type PodKey = (NamespaceName, PodName);

/// A snapshot of this node's pods. Cheap to clone, since clones share their unchanged parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    pub pods: SharedMap<PodKey, Pod>,
    pub namespaces: SharedMap<NamespaceName, Namespace>,
    /// The gaps in the view, one sentence each.
    pub gaps: Arc<BTreeSet<String>>,
    /// True if every pod's namespace must be known. This is so in Kubernetes; in a directory, a missing namespace
    /// is one without labels.
    pub namespaces_required: bool,
}

impl Inventory {
    /// Returns whether the view is complete, so that a pod that is missing from it does not exist.
    pub fn is_complete(&self) -> bool {
        self.gaps.is_empty()
    }

    /// Returns whether the labels of a namespace are unknown.
    pub fn is_namespace_unknown(&self, name: &NamespaceName) -> bool {
        !self.namespaces.contains_key(name) && (self.namespaces_required || !self.is_complete())
    }

    pub fn pod(&self, key: &PodKey) -> Option<&Pod> {
        self.pods.get(key)
    }

    /// Returns the pod with this UID or, for a static pod, with this hash.
    pub fn pod_of_uid(&self, uid: &PodUid) -> Option<&Pod> {
        self.pods.values().find(|pod| pod.has_uid(uid))
    }

    /// Returns a namespace; an unknown one has no labels.
    pub fn namespace(&self, name: &NamespaceName) -> Namespace {
        let known = self.namespaces.get(name).cloned();
        known.unwrap_or_else(|| Namespace::unlabeled(name.clone()))
    }

    /// Returns the pods to evaluate again: those that changed, those whose namespace changed and, if the view became
    /// complete or incomplete, all of them.
    pub fn affected_since(&self, before: &Self) -> BTreeSet<PodKey> {
        let changes = self.changes_since(before);
        let mut affected: BTreeSet<_> = changes.pods.into_iter().collect();
        if changes.completeness || !changes.namespaces.is_empty() {
            let is_affected =
                |key: &&PodKey| changes.completeness || changes.namespaces.contains(&key.0);
            affected.extend(self.pods.keys().filter(is_affected).cloned());
        }
        affected
    }

    /// Returns the differences from an earlier inventory. The cost depends on the number of changes alone.
    pub fn changes_since(&self, before: &Self) -> Changes {
        let namespaces = self.namespaces.differences(&before.namespaces);
        Changes {
            pods: self.pods.differences(&before.pods),
            namespaces: namespaces.into_iter().collect(),
            completeness: self.is_complete() != before.is_complete(),
        }
    }
}

/// The differences between two inventories.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Pods that were added, changed or removed.
    pub pods: Vec<PodKey>,
    /// Namespaces that were added, changed or removed.
    pub namespaces: BTreeSet<NamespaceName>,
    /// True if only one of the two is complete, which affects every pod.
    pub completeness: bool,
}

/// The outcome of reading a pod past the watch.
#[derive(Clone, Debug)]
pub enum RefreshOutcome {
    /// All that can be known of the pod and its namespace.
    Current(Arc<Inventory>),
    /// The pod exists, but is bound to another node, or to none yet (`None`).
    OtherNode(Option<NodeName>),
    /// The source did not answer, for this reason.
    Unavailable(String),
}

/// The state of the view: up to date, or the reason why not. `None` until it is up to date for the first time.
pub type Health = Option<Result<(), String>>;

/// A live view of this node's pods.
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

/// The reason why a source cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    Kubernetes(#[from] ClientError),
}

/// The selection of objects and labels to read.
#[derive(Clone, Debug)]
struct Scope {
    /// The node whose pods are read.
    node: NodeName,
    /// The namespace labels that are kept.
    namespace_labels: Arc<BTreeSet<String>>,
}

/// The timeout of a reread of the directory.
const REREAD_TIMEOUT: Duration = Duration::from_secs(2);

impl Source {
    /// Opens the source that the settings name. Reads a directory once, but does not wait for Kubernetes.
    ///
    /// # Errors
    ///
    /// When a directory cannot be read or watched, or the configuration of the Kubernetes client cannot be found.
    pub async fn open(config: &Config) -> Result<Self, SourceError> {
        let scope = Scope {
            node: config.node_name.clone(),
            namespace_labels: Arc::new(config.enablement_selectors.namespace_keys().clone()),
        };
        match &config.pods_from {
            PodsFrom::Directory(path) => {
                let watched = directory::watch(path.clone(), scope, directory::CHECK_INTERVAL);
                let (inventory, reread) = watched.await?;
                Ok(Self {
                    inventory,
                    // The loss of a directory is logged, and its content is kept.
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

    /// Returns the client of the API server that the pods come from.
    pub(crate) fn client(&self) -> Option<kube::Client> {
        match &self.refresher {
            Refresher::Kubernetes(reader) => Some(reader.client()),
            Refresher::Directory(_) => None,
        }
    }

    pub fn inventory(&self) -> Arc<Inventory> {
        Arc::clone(&self.inventory.borrow())
    }

    /// Returns the current inventory and each later one.
    pub fn changes(&self) -> watch::Receiver<Arc<Inventory>> {
        self.inventory.clone()
    }

    /// Returns the current health and each later change of it.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.health.clone()
    }

    /// Reads past the watch, for a pod that the watch has not shown yet, until `is_enough` holds or there is
    /// nothing more to read.
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
                        // No answer means that the source has ended; its last view stays.
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
