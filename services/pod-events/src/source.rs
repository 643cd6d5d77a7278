//! Where pods come from, as everything downstream sees it.

mod directory;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use tokio::sync::{mpsc, oneshot, watch};
use workload::{NamespaceName, NodeName, PodName, PodUid};

use crate::{
    config::PodsFrom,
    pod::{Namespace, Pod},
};

pub use directory::DirectoryError;

/// A pod's name in its namespace: pods of one name succeed each other.
pub type PodKey = (NamespaceName, PodName);

/// What is known of this node's pods at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The pods of this node.
    pub pods: BTreeMap<PodKey, Pod>,
    /// Namespaces of which something is known.
    pub namespaces: BTreeMap<NamespaceName, Namespace>,
    /// Files that have said nothing yet that can be used: which pods they are about is not known.
    pub unusable: BTreeSet<PathBuf>,
}

impl Inventory {
    /// Whether a pod that is not known is not there. A file that broke after it could be used keeps what it said
    /// before, and leaves no gap.
    pub fn is_complete(&self) -> bool {
        self.unusable.is_empty()
    }

    /// The pod of a name.
    pub fn pod(&self, key: &PodKey) -> Option<&Pod> {
        self.pods.get(key)
    }

    /// The pod of a UID.
    pub fn pod_of_uid(&self, uid: &PodUid) -> Option<&Pod> {
        self.pods.values().find(|pod| pod.pod.uid == *uid)
    }

    /// A namespace; one of which nothing is known has no labels.
    pub fn namespace(&self, name: &NamespaceName) -> Namespace {
        let bare = || Namespace {
            name: name.clone(),
            dataplane_mode: None,
        };
        self.namespaces.get(name).cloned().unwrap_or_else(bare)
    }

    /// Whether a pod or its namespace is another than before.
    pub fn differs_at(&self, before: &Self, key: &PodKey) -> bool {
        self.pod(key) != before.pod(key)
            || self.namespaces.get(&key.0) != before.namespaces.get(&key.0)
    }
}

/// A live view of this node's pods.
#[derive(Clone, Debug)]
pub struct Source {
    inventory: watch::Receiver<Arc<Inventory>>,
    reread: mpsc::Sender<oneshot::Sender<()>>,
}

impl Source {
    /// Opens a source and reads it once.
    ///
    /// # Errors
    ///
    /// When it cannot be read or watched.
    pub async fn open(from: &PodsFrom, node: &NodeName) -> Result<Self, DirectoryError> {
        let PodsFrom::Directory(path) = from;
        let watched = directory::watch(path.clone(), node.clone(), directory::CHECK);
        let (inventory, reread) = watched.await?;
        Ok(Self { inventory, reread })
    }

    /// What is known now.
    pub fn inventory(&self) -> Arc<Inventory> {
        Arc::clone(&self.inventory.borrow())
    }

    /// What is known, now and after each change.
    pub fn changes(&self) -> watch::Receiver<Arc<Inventory>> {
        self.inventory.clone()
    }

    /// Looks again, past the watch: for a pod that is asked for before the watch has shown it. Bounded by `wait`.
    pub async fn refresh(&self, wait: Duration) {
        let (done, answer) = oneshot::channel();
        let asked = async {
            if self.reread.send(done).await.is_ok() {
                // An answer that does not come means that the source has ended: what is known stays.
                answer.await.unwrap_or_default();
            }
        };
        tokio::time::timeout(wait, asked).await.unwrap_or_default();
    }
}
