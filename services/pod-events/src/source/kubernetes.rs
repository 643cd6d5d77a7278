//! Pods and namespaces from the API server: a watch on this node's pods, a watch on the metadata of all namespaces, and
//! single GETs for pods that the watch has not shown yet.
//!
//! A watch resumes from its last resource version. If the watch cannot resume, everything is listed again; until then
//! the known objects are kept and the inventory is incomplete. A server that is gone is noticed at once, a hanging
//! server and a watch without events within 195 s (see `list_watch`).

mod client;
mod get;
mod list_watch;
mod response_limit;
mod retry_after;
mod store;

use std::{
    collections::BTreeSet,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
};

use inpod_types::{NamespaceName, with_causes};
use k8s_openapi::api::core::v1 as k8s;
use kube::{Api, core::PartialObjectMeta};
use tokio::sync::watch;

use super::{Health, Inventory, PodKey, Scope, publish};
use crate::pod::{Namespace, Pod};
use client::Connection;
use list_watch::{PAGE_OF_METADATA, PAGE_OF_OBJECTS, Position, Reflector, Update};
use store::{Observed, Progress, Store};

pub(super) use client::client;
pub(super) use get::ApiReader;

/// Any namespace, within which the API server reads a pod by its name as the key.
const KEYED_NAMESPACE: &str = "kube-system";

/// The known objects, and the channels that publish them.
#[derive(Debug)]
struct Cache {
    stores: Mutex<Stores>,
    inventory: watch::Sender<Arc<Inventory>>,
    health: watch::Sender<Health>,
}

#[derive(Debug)]
struct Stores {
    pods: Store<PodKey, Pod>,
    namespaces: Store<NamespaceName, Namespace>,
    namespace_labels: Arc<BTreeSet<String>>,
}

/// The reader for single objects, the inventory, and its health.
type WatchHandles = (
    ApiReader,
    watch::Receiver<Arc<Inventory>>,
    watch::Receiver<Health>,
);

/// Starts the watches and returns before anything is known.
pub(super) fn watch(
    Connection {
        client,
        retry_after,
    }: Connection,
    scope: Scope,
) -> WatchHandles {
    let stores = Stores::new(Arc::clone(&scope.namespace_labels));
    let cache = Arc::new(Cache {
        inventory: watch::Sender::new(Arc::new(stores.inventory())),
        health: watch::Sender::new(None),
        stores: Mutex::new(stores),
    });
    let pods = Reflector {
        api: Api::<k8s::Pod>::all(client.clone()),
        keyed: Api::namespaced(client.clone(), KEYED_NAMESPACE),
        fields: Some(format!("spec.nodeName={}", scope.node)),
        page: PAGE_OF_OBJECTS,
        cache: Arc::clone(&cache),
        retry_after: retry_after.clone(),
        apply: |stores, update| apply_update(&mut stores.pods, "pods", update, observe_pod),
        position: Position::Unknown,
    };
    let namespaces = Reflector {
        api: Api::<PartialObjectMeta<k8s::Namespace>>::all(client.clone()),
        keyed: Api::all(client.clone()),
        fields: None,
        page: PAGE_OF_METADATA,
        cache: Arc::clone(&cache),
        retry_after: retry_after.clone(),
        apply: |stores, update| {
            let namespace_labels = Arc::clone(&stores.namespace_labels);
            let observe = |object| observe_namespace(object, &namespace_labels);
            apply_update(&mut stores.namespaces, "namespaces", update, observe);
        },
        position: Position::Unknown,
    };
    tokio::spawn(inpod_service::abort_on_panic("pods", pods.run()));
    tokio::spawn(inpod_service::abort_on_panic(
        "namespaces",
        namespaces.run(),
    ));
    let (inventory, health) = (cache.inventory.subscribe(), cache.health.subscribe());
    let reader = ApiReader::new(client, retry_after, scope, cache);
    tokio::spawn(inpod_service::abort_on_panic(
        "reader",
        reader.clone().confirm_fetched(),
    ));
    (reader, inventory, health)
}

fn apply_update<O, K, V>(
    store: &mut Store<K, V>,
    what: &str,
    update: Update<O>,
    observe: impl Fn(O) -> Observed<K, V>,
) where
    K: Ord + Hash + Clone,
    V: Clone + PartialEq,
{
    match update {
        Update::ListStarted => store.begin_list(),
        Update::ListPage(objects) => objects
            .into_iter()
            .for_each(|it| store.add_listed(observe(it))),
        Update::ListComplete(at) => store.finish_list(at),
        // The events of a resumed watch cover everything since the connection was lost.
        Update::Resumed => store.set_progress(Progress::InSync),
        Update::Applied(object) => store.apply(observe(object)),
        Update::Deleted(object) => store.delete(observe(object)),
        Update::Lost(why) => {
            store.set_progress(Progress::Lost(format!("cannot watch {what}: {why}")));
        }
    }
}

fn observe_pod(pod: k8s::Pod) -> Observed<PodKey, Pod> {
    let meta = &pod.metadata;
    let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "?".to_owned());
    Observed {
        title: format!("Pod {}/{}", name(&meta.namespace), name(&meta.name)),
        version: parse_version(meta.resource_version.as_deref()),
        parsed: Pod::try_from(pod)
            .map(|pod| ((pod.pod.namespace.clone(), pod.pod.name.clone()), pod))
            .map_err(|error| with_causes(&error)),
    }
}

fn observe_namespace(
    meta: PartialObjectMeta<k8s::Namespace>,
    namespace_labels: &BTreeSet<String>,
) -> Observed<NamespaceName, Namespace> {
    let metadata = meta.metadata;
    let name = metadata.name.clone().unwrap_or_else(|| "?".to_owned());
    Observed {
        title: format!("Namespace {name}"),
        version: parse_version(metadata.resource_version.as_deref()),
        parsed: Namespace::of(
            k8s::Namespace {
                metadata,
                ..k8s::Namespace::default()
            },
            namespace_labels,
        )
        .map(|namespace| (namespace.name.clone(), namespace))
        .map_err(|error| with_causes(&error)),
    }
}

/// Parses a resource version. Resource versions of the same kind are comparable as numbers; anything else counts as
/// oldest.
fn parse_version(text: Option<&str>) -> u64 {
    text.and_then(|text| text.parse().ok()).unwrap_or_default()
}

impl Cache {
    /// Changes the stores, and publishes the inventory if anything differs.
    fn update<T>(&self, change: impl FnOnce(&mut Stores) -> T) -> T {
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut stores);
        publish(&self.inventory, Arc::new(stores.inventory()));
        publish(&self.health, stores.health());
        result
    }
}

impl Stores {
    fn new(namespace_labels: Arc<BTreeSet<String>>) -> Self {
        Self {
            pods: Store::new(),
            namespaces: Store::new(),
            namespace_labels,
        }
    }

    fn inventory(&self) -> Inventory {
        Inventory {
            pods: self.pods.objects(),
            namespaces: self.namespaces.objects(),
            gaps: Arc::new(self.find_gaps()),
            namespaces_required: true,
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
