//! Where pods come from, as everything downstream sees it.

mod directory;
mod kubernetes;
mod shared_map;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use inpod_kube::ReachError;
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

/// A pod's name in its namespace: pods of one name succeed each other.
pub type PodKey = (NamespaceName, PodName);

/// What is known of this node's pods at one moment. Cheap to copy: copies share what they have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The pods of this node.
    pub pods: SharedMap<PodKey, Pod>,
    /// Namespaces of which something is known.
    pub namespaces: SharedMap<NamespaceName, Namespace>,
    /// What keeps the view from being whole, a sentence each.
    pub gaps: Arc<BTreeSet<String>>,
    /// Whether a namespace that is not here is unknown: in Kubernetes every pod has one. In a directory it has no labels.
    pub namespaces_exist: bool,
}

impl Inventory {
    /// Whether a pod that is not known is not there.
    pub fn is_complete(&self) -> bool {
        self.gaps.is_empty()
    }

    /// Whether nothing is known of a namespace, its labels may be any.
    pub fn is_silent_on(&self, name: &NamespaceName) -> bool {
        !self.namespaces.contains_key(name) && (self.namespaces_exist || !self.is_complete())
    }

    /// The pod of a name.
    pub fn pod(&self, key: &PodKey) -> Option<&Pod> {
        self.pods.get(key)
    }

    /// The pod of a UID, or of a static pod's hash.
    pub fn pod_of_uid(&self, uid: &PodUid) -> Option<&Pod> {
        self.pods.values().find(|pod| pod.is_called(uid))
    }

    /// A namespace; one of which nothing is known has no labels.
    pub fn namespace(&self, name: &NamespaceName) -> Namespace {
        let known = self.namespaces.get(name).cloned();
        known.unwrap_or_else(|| Namespace::bare(name.clone()))
    }

    /// The pods of which something else is to be concluded than before: they or their namespaces changed, or it is known
    /// now that everything is known, or no more.
    pub fn touched_since(&self, before: &Self) -> BTreeSet<PodKey> {
        let changes = self.since(before);
        let mut touched: BTreeSet<_> = changes.pods.into_iter().collect();
        if changes.completeness || !changes.namespaces.is_empty() {
            let is_concerned =
                |key: &&PodKey| changes.completeness || changes.namespaces.contains(&key.0);
            touched.extend(self.pods.keys().filter(is_concerned).cloned());
        }
        touched
    }

    /// What is otherwise than it was, found without a look at what is not.
    pub fn since(&self, before: &Self) -> Changes {
        let namespaces = self.namespaces.differences(&before.namespaces);
        Changes {
            pods: self.pods.differences(&before.pods),
            namespaces: namespaces.into_iter().collect(),
            completeness: self.is_complete() != before.is_complete(),
        }
    }
}

/// What is otherwise in one inventory than in an earlier one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Pods that came, went or say something else.
    pub pods: Vec<PodKey>,
    /// Namespaces likewise.
    pub namespaces: BTreeSet<NamespaceName>,
    /// Whether only one of the two is complete: something else is to be concluded of every pod.
    pub completeness: bool,
}

/// What a look past the watch has shown.
#[derive(Clone, Debug)]
pub enum Learnt {
    /// Everything that there is to know of the pod and its namespace.
    Known(Arc<Inventory>),
    /// There is such a pod, bound to another node or, `None`, to none yet.
    Elsewhere(Option<NodeName>),
    /// Nobody answered: this is why.
    Unanswered(String),
}

/// Whether the view is up to date, or why not; `None` before it was for the first time.
pub type Health = Option<Result<(), String>>;

/// A live view of this node's pods.
#[derive(Clone, Debug)]
pub struct Source {
    inventory: watch::Receiver<Arc<Inventory>>,
    health: watch::Receiver<Health>,
    looks: Looks,
}

/// How a look past the watch is had.
#[derive(Clone, Debug)]
enum Looks {
    Directory(mpsc::Sender<oneshot::Sender<()>>),
    Kubernetes(kubernetes::Lookup),
}

/// Why there is no source.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A directory.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// Kubernetes.
    #[error(transparent)]
    Kubernetes(#[from] ReachError),
}

/// What is read.
#[derive(Clone, Debug)]
struct Scope {
    /// Only pods of this node.
    node: NodeName,
    /// Only these labels of namespaces.
    namespace_labels: Arc<BTreeSet<String>>,
}

/// How long a file may take to be read past the watch.
const REREAD: Duration = Duration::from_secs(2);

impl Source {
    /// Opens the source that the settings name. A directory is read once; Kubernetes need not answer yet.
    ///
    /// # Errors
    ///
    /// When a directory cannot be read or watched, or it cannot be known how to reach Kubernetes.
    pub async fn open(config: &Config) -> Result<Self, SourceError> {
        let scope = Scope {
            node: config.node_name.clone(),
            namespace_labels: Arc::new(config.enablement_selectors.namespace_keys().clone()),
        };
        match &config.pods_from {
            PodsFrom::Directory(path) => {
                let watched = directory::watch(path.clone(), scope, directory::CHECK);
                let (inventory, reread) = watched.await?;
                Ok(Self {
                    inventory,
                    // A directory that is lost is logged, and what it said stays.
                    health: watch::channel(Some(Ok(()))).1,
                    looks: Looks::Directory(reread),
                })
            }
            PodsFrom::Kubernetes => {
                let server = kubernetes::client(config.kubeconfig()).await?;
                let (lookup, inventory, health) = kubernetes::watch(server, scope);
                Ok(Self {
                    inventory,
                    health,
                    looks: Looks::Kubernetes(lookup),
                })
            }
        }
    }

    /// The way to the API server that the pods come from.
    pub(crate) fn client(&self) -> Option<kube::Client> {
        match &self.looks {
            Looks::Kubernetes(lookup) => Some(lookup.client()),
            Looks::Directory(_) => None,
        }
    }

    /// What is known now.
    pub fn inventory(&self) -> Arc<Inventory> {
        Arc::clone(&self.inventory.borrow())
    }

    /// What is known, now and after each change.
    pub fn changes(&self) -> watch::Receiver<Arc<Inventory>> {
        self.inventory.clone()
    }

    /// Whether the view is up to date, now and after each change.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.health.clone()
    }

    /// Looks past the watch, for a pod that is asked for before the watch has shown it, until `is_enough` is shown or
    /// there is no more to see.
    pub async fn refresh(
        &self,
        key: &PodKey,
        until: Instant,
        is_enough: impl Fn(&Inventory) -> bool,
    ) -> Learnt {
        match &self.looks {
            Looks::Kubernetes(lookup) => lookup.look(key, until, is_enough).await,
            Looks::Directory(reread) => {
                let (done, answer) = oneshot::channel();
                let asked = async {
                    if reread.send(done).await.is_ok() {
                        // An answer that does not come means that the source has ended: what is known stays.
                        answer.await.unwrap_or_default();
                    }
                };
                let until = until.min(Instant::now() + REREAD);
                timeout_at(until, asked).await.unwrap_or_default();
                Learnt::Known(self.inventory())
            }
        }
    }
}
