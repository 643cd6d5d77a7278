//! Pods and namespaces from the API server: a watch on this node's pods, one on the metadata of all namespaces, and a
//! single question for a pod that is asked for before the watch has shown it.
//!
//! A watch that ends is taken up where it stood. Where that cannot be, everything is listed anew, and until then what was
//! known stays and the inventory says that it is not complete. How soon a server that is gone, hangs or keeps silent is
//! noticed is documented in `follow` and `pulse`: at once, within 30 s and within 65 s.

mod client;
mod follow;
mod layer;
mod lookup;
mod pace;
mod pulse;

use std::{
    collections::BTreeSet,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
};

use inpod_types::{NamespaceName, with_causes};
use k8s_openapi::api::core::v1 as k8s;
use kube::{Api, core::PartialObjectMeta};
use tokio::sync::watch;

use super::{Health, Inventory, PodKey, Scope};
use crate::pod::{Namespace, Pod};
use client::Reached;
use follow::{Follower, PAGE_OF_METADATA, PAGE_OF_OBJECTS, Told};
use layer::{Layer, News, Progress, Seen};
use pulse::Pulse;

pub(super) use client::client;
pub(super) use lookup::Lookup;

/// Everything that is known, and who is told.
#[derive(Debug)]
struct Known {
    store: Mutex<Store>,
    inventory: watch::Sender<Arc<Inventory>>,
    health: watch::Sender<Health>,
}

#[derive(Debug)]
struct Store {
    pods: Layer<PodKey, Pod>,
    namespaces: Layer<NamespaceName, Namespace>,
    gaps: Arc<BTreeSet<String>>,
    /// The labels of namespaces that are read.
    read: Arc<BTreeSet<String>>,
}

/// What `watch` gives: the way to ask past the watch, what is known, and how well.
type Watched = (
    Lookup,
    watch::Receiver<Arc<Inventory>>,
    watch::Receiver<Health>,
);

/// Begins to watch this node's pods and all namespaces. Returns at once, before anything is known.
pub(super) fn watch(Reached { client, pace }: Reached, scope: Scope) -> Watched {
    let store = Store::new(Arc::clone(&scope.namespace_labels));
    let known = Arc::new(Known {
        inventory: watch::Sender::new(Arc::new(store.inventory())),
        health: watch::Sender::new(None),
        store: Mutex::new(store),
    });
    let pulse = Arc::new(Pulse::new());
    let pods = Follower {
        api: Api::<k8s::Pod>::all(client.clone()),
        fields: Some(format!("spec.nodeName={}", scope.node)),
        page: PAGE_OF_OBJECTS,
        known: Arc::clone(&known),
        pulse: Arc::clone(&pulse),
        pace: pace.clone(),
        take: |store, told| take(&mut store.pods, "pods", told, seen_pod),
        version: None,
    };
    let namespaces = Follower {
        api: Api::<PartialObjectMeta<k8s::Namespace>>::all(client.clone()),
        fields: None,
        page: PAGE_OF_METADATA,
        known: Arc::clone(&known),
        pulse: Arc::clone(&pulse),
        pace: pace.clone(),
        take: |store, told| {
            let read = Arc::clone(&store.read);
            let seen = |object| seen_namespace(object, &read);
            take(&mut store.namespaces, "namespaces", told, seen);
        },
        version: None,
    };
    tokio::spawn(inpod_service::vital("pods", pods.follow()));
    tokio::spawn(inpod_service::vital("namespaces", namespaces.follow()));
    tokio::spawn(inpod_service::vital("pulse", pulse.feel(client.clone())));
    let (inventory, health) = (known.inventory.subscribe(), known.health.subscribe());
    let lookup = Lookup::new(client, pace, scope, known);
    tokio::spawn(inpod_service::vital("lookup", lookup.clone().confirm()));
    (lookup, inventory, health)
}

fn take<O, K, V>(layer: &mut Layer<K, V>, what: &str, told: Told<O>, seen: impl Fn(O) -> Seen<K, V>)
where
    K: Ord + Hash + Clone,
    V: Clone + PartialEq,
{
    match told {
        Told::Listing => layer.begin_list(),
        Told::Listed(objects) => objects.into_iter().for_each(|it| layer.list(seen(it))),
        Told::Whole(at) => layer.finish_list(at),
        Told::Resumed => layer.resume(),
        Told::Applied(object) => layer.apply(seen(object)),
        Told::Deleted(object) => layer.delete(seen(object)),
        Told::Lost(why) => layer.lose(format!("cannot watch {what}: {why}")),
    }
}

fn seen_pod(pod: k8s::Pod) -> Seen<PodKey, Pod> {
    let meta = &pod.metadata;
    let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "?".to_owned());
    Seen {
        title: format!("Pod {}/{}", name(&meta.namespace), name(&meta.name)),
        version: version(meta.resource_version.as_deref()),
        parsed: Pod::try_from(pod)
            .map(|pod| ((pod.pod.namespace.clone(), pod.pod.name.clone()), pod))
            .map_err(|error| with_causes(&error)),
    }
}

fn seen_namespace(
    meta: PartialObjectMeta<k8s::Namespace>,
    read: &BTreeSet<String>,
) -> Seen<NamespaceName, Namespace> {
    let metadata = meta.metadata;
    let name = metadata.name.clone().unwrap_or_else(|| "?".to_owned());
    Seen {
        title: format!("Namespace {name}"),
        version: version(metadata.resource_version.as_deref()),
        parsed: Namespace::of(
            k8s::Namespace {
                metadata,
                ..k8s::Namespace::default()
            },
            read,
        )
        .map(|namespace| (namespace.name.clone(), namespace))
        .map_err(|error| with_causes(&error)),
    }
}

/// Versions of one kind of object can be compared as numbers; what is no number is older than everything.
fn version(text: Option<&str>) -> u64 {
    text.and_then(|text| text.parse().ok()).unwrap_or_default()
}

impl Known {
    /// Changes what is known, and tells it where that is news.
    fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut store);
        let (pods, namespaces) = (store.pods.news(), store.namespaces.news());
        if pods == News::default() && namespaces == News::default() {
            return result;
        }
        if pods.gaps || namespaces.gaps {
            store.gaps = Arc::new(store.find_gaps());
        }
        self.inventory.send_replace(Arc::new(store.inventory()));
        let health = store.health();
        self.health.send_if_modified(|told| {
            let differs = *told != health;
            *told = health;
            differs
        });
        result
    }
}

impl Store {
    fn new(read: Arc<BTreeSet<String>>) -> Self {
        let mut store = Self {
            pods: Layer::new(),
            namespaces: Layer::new(),
            gaps: Arc::default(),
            read,
        };
        store.gaps = Arc::new(store.find_gaps());
        store
    }

    fn inventory(&self) -> Inventory {
        Inventory {
            pods: self.pods.known().clone(),
            namespaces: self.namespaces.known().clone(),
            gaps: Arc::clone(&self.gaps),
            namespaces_exist: true,
        }
    }

    fn find_gaps(&self) -> BTreeSet<String> {
        let progress = [
            ("the pods of this node", self.pods.progress()),
            ("the namespaces", self.namespaces.progress()),
        ];
        let pending = progress
            .iter()
            .filter_map(|(what, progress)| match progress {
                Progress::InSync => None,
                Progress::Listing => Some(format!("{what} have not been listed yet")),
                Progress::Lost(why) => Some(why.clone()),
            });
        let unusable = self
            .pods
            .unusable()
            .iter()
            .chain(self.namespaces.unusable());
        let unusable = unusable.map(|title| format!("{title} cannot be used"));
        pending.chain(unusable).collect()
    }

    fn health(&self) -> Health {
        match (self.pods.progress(), self.namespaces.progress()) {
            (Progress::Lost(why), _) | (_, Progress::Lost(why)) => Some(Err(why.clone())),
            (Progress::InSync, Progress::InSync) => Some(Ok(())),
            (Progress::Listing, _) | (_, Progress::Listing) => None,
        }
    }
}
