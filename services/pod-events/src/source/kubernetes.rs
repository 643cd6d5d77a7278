//! Pods and namespaces from the API server: a watch on this node's pods, one on the metadata of all namespaces, and a
//! single question for a pod that is asked for before the watch has shown it.
//!
//! A watch that fails is begun anew with a list, so that it is known when everything is known again. Meanwhile what was
//! known stays, and the inventory says that it is not complete.

mod client;
mod layer;
mod lookup;

use std::{
    collections::BTreeSet,
    fmt,
    hash::Hash,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1 as k8s;
use kube::{
    Api, Client, Resource,
    core::PartialObjectMeta,
    runtime::watcher::{self, Config, Event, watcher},
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use workload::{NamespaceName, NodeName};

use super::{Health, Inventory, PodKey};
use crate::pod::{Namespace, Pod};
use layer::{Layer, News, Progress, Seen};

pub use client::KubernetesError;
pub(super) use client::client;
pub(super) use lookup::Lookup;

/// Between two attempts to watch, the wait doubles from the first to the second, less up to a half by chance.
const WAITS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(10)];

/// A watch that has held for so long begins with the shortest wait again.
const STEADY: Duration = Duration::from_secs(10);

/// How long a watch may last before the server ends it and it is taken up where it stood, in seconds. A connection that
/// has gone dead unseen is found out after that.
const WATCH_SECONDS: u32 = 120;

/// Objects in one page of a list: what is held of it before it is stripped.
const PAGE: u32 = 100;

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
}

/// What `watch` gives: the way to ask past the watch, what is known, and how well.
type Watched = (
    Lookup,
    watch::Receiver<Arc<Inventory>>,
    watch::Receiver<Health>,
);

/// Begins to watch this node's pods and all namespaces. Returns at once, before anything is known.
pub(super) fn watch(client: Client, node: NodeName) -> Watched {
    let store = Store::new();
    let known = Arc::new(Known {
        inventory: watch::Sender::new(Arc::new(store.inventory())),
        health: watch::Sender::new(None),
        store: Mutex::new(store),
    });
    let config = Config::default().timeout(WATCH_SECONDS).page_size(PAGE);
    let of_node = config.clone().fields(&format!("spec.nodeName={node}"));
    tokio::spawn(follow(
        Api::<k8s::Pod>::all(client.clone()),
        of_node,
        Arc::clone(&known),
        |store, event| take(&mut store.pods, event, seen_pod),
        |store, why| store.pods.lose(format!("cannot watch pods: {why}")),
    ));
    tokio::spawn(follow(
        Api::<PartialObjectMeta<k8s::Namespace>>::all(client.clone()),
        config,
        Arc::clone(&known),
        |store, event| take(&mut store.namespaces, event, seen_namespace),
        |store, why| {
            store
                .namespaces
                .lose(format!("cannot watch namespaces: {why}"));
        },
    ));
    let (inventory, health) = (known.inventory.subscribe(), known.health.subscribe());
    let lookup = Lookup::new(client, node, known);
    tokio::spawn(lookup.clone().confirm());
    (lookup, inventory, health)
}

/// Watches one kind for ever. A list that comes in is told when it is whole.
async fn follow<K>(
    api: Api<K>,
    config: Config,
    known: Arc<Known>,
    take: fn(&mut Store, Event<K>),
    lose: fn(&mut Store, &str),
) where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
{
    let [shortest, longest] = WAITS;
    let mut wait = shortest;
    loop {
        let began = Instant::now();
        let mut events = pin!(watcher(api.clone(), config.clone()));
        let error = loop {
            match events.next().await {
                Some(Ok(event)) => known.change(|store| take(store, event)),
                Some(Err(error)) => break told(error),
                None => break "the watch has ended".to_owned(),
            }
        };
        known.change(|store| lose(store, &error));
        if began.elapsed() >= STEADY {
            wait = shortest;
        }
        sleep(by_chance(wait)).await;
        wait = longest.min(wait * 2);
    }
}

/// Between a half and the whole of a wait: the agents of a cluster that lost one server do not come back at once. The
/// first list of a process waits for nobody, since an ADD waits for it.
fn by_chance(wait: Duration) -> Duration {
    wait / 2 + (wait / 2).mul_f64(fastrand::f64())
}

fn take<O, K, V>(layer: &mut Layer<K, V>, event: Event<O>, seen: fn(O) -> Seen<K, V>)
where
    K: Ord + Hash + Clone,
    V: Clone + PartialEq,
{
    match event {
        Event::Init => layer.begin_list(),
        Event::InitApply(object) => layer.list(seen(object)),
        Event::InitDone => layer.finish_list(),
        Event::Apply(object) => layer.apply(seen(object)),
        Event::Delete(object) => layer.delete(seen(object)),
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
            .map_err(|error| chain(&error)),
    }
}

fn seen_namespace(meta: PartialObjectMeta<k8s::Namespace>) -> Seen<NamespaceName, Namespace> {
    let metadata = meta.metadata;
    let name = metadata.name.clone().unwrap_or_else(|| "?".to_owned());
    Seen {
        title: format!("Namespace {name}"),
        version: version(metadata.resource_version.as_deref()),
        parsed: Namespace::try_from(k8s::Namespace {
            metadata,
            ..k8s::Namespace::default()
        })
        .map(|namespace| (namespace.name.clone(), namespace))
        .map_err(|error| chain(&error)),
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
    fn new() -> Self {
        let mut store = Self {
            pods: Layer::new(),
            namespaces: Layer::new(),
            gaps: Arc::default(),
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

/// An error and its causes, as far as each says something new.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// What an API call or a watch failed of, for people. A refusal names verb and resource.
fn told(error: watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => told_of_api(&error),
        watcher::Error::WatchError(status) => told_of_api(&kube::Error::Api(status)),
        watcher::Error::NoResourceVersion => chain(&error),
    }
}

fn told_of_api(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return format!("the API server answers {}: {}", status.code, status.message);
    }
    format!("the API server does not answer: {}", chain(error))
}
