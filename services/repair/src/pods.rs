//! Watches the pods of this node, reduced to the fields used by this service.

use std::{collections::BTreeMap, pin::pin, sync::Arc, time::Duration};

use futures_util::StreamExt as _;
use inpod_service::Readiness;
use inpod_types::{PodRef, PodUid, keys, with_causes};
use k8s_openapi::api::core::v1 as k8s;
use kube::{
    Api, Client,
    runtime::watcher::{self, DefaultBackoff, Event, watcher},
};
use tokio::{sync::watch, time::sleep};

use crate::{
    config::Config,
    detect::{Criteria, FailedInit},
};

pub const CONDITION: &str = "pods";

/// The time after which the server ends a watch and the next watch begins. A watch that is silent for much longer is
/// dead.
const WATCH_TIMEOUT_SECONDS: u32 = 60;

const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub pod: PodRef,
    /// The last seen `resourceVersion`.
    pub version: String,
    /// The value of the label for broken pods, if the label is set.
    pub label: Option<String>,
    /// The deletion of the pod was requested, or its containers have ended for good.
    pub is_ending: bool,
    pub failed_init: Option<FailedInit>,
    /// The condition `inpod.io/InMesh` is True.
    pub is_in_mesh: bool,
}

impl Pod {
    /// Reduces a pod; returns `None` if the metadata is invalid, which the API server prevents.
    pub fn of(pod: &k8s::Pod, criteria: &Criteria, label: &str) -> Option<Self> {
        let meta = &pod.metadata;
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        let has_ended = matches!(phase, Some("Succeeded" | "Failed"));
        Some(Self {
            pod: PodRef {
                namespace: meta.namespace.as_deref()?.parse().ok()?,
                name: meta.name.as_deref()?.parse().ok()?,
                uid: meta.uid.as_deref()?.parse().ok()?,
            },
            version: meta.resource_version.clone().unwrap_or_default(),
            label: meta.labels.as_ref().and_then(|all| all.get(label).cloned()),
            is_ending: meta.deletion_timestamp.is_some() || has_ended,
            failed_init: criteria.find(pod),
            is_in_mesh: pod.status.as_ref().is_some_and(is_in_mesh),
        })
    }
}

fn is_in_mesh(status: &k8s::PodStatus) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    conditions.any(|condition| condition.type_ == keys::IN_MESH && condition.status == "True")
}

pub(crate) type Pods = BTreeMap<PodUid, Arc<Pod>>;

/// Starts the watch, whose receiver holds the pods of this node.
pub(crate) fn start(
    client: Client,
    config: &Config,
    conditions: Readiness,
) -> watch::Receiver<Pods> {
    let mut wanted = watcher::Config::default()
        .fields(&config.fields())
        .timeout(WATCH_TIMEOUT_SECONDS);
    if let Some(labels) = config.labels() {
        wanted = wanted.labels(labels);
    }
    let (known, pods) = watch::channel(Pods::new());
    let pod_watcher = PodWatcher {
        criteria: config.criteria(),
        label: config.label().key,
        known,
        listed: Pods::new(),
        conditions,
    };
    tokio::spawn(inpod_service::abort_on_panic(
        "pods",
        pod_watcher.run(Api::all(client), wanted),
    ));
    pods
}

struct PodWatcher {
    criteria: Criteria,
    label: String,
    known: watch::Sender<Pods>,
    listed: Pods,
    conditions: Readiness,
}

impl PodWatcher {
    /// Runs the watch, and starts a failed watch again with a list: on a node whose pods do not change, a resumed watch
    /// would not show that the API server is available again.
    async fn run(mut self, api: Api<k8s::Pod>, wanted: watcher::Config) {
        let mut delays = DefaultBackoff::default();
        loop {
            let error = self.watch_until_error(&api, &wanted).await;
            let why = format!("cannot watch the pods of this node: {error}");
            self.conditions.set(CONDITION, Err(why));
            sleep(delays.next().unwrap_or(MAX_RETRY_DELAY)).await;
        }
    }

    /// Handles events until the watch fails, and returns the error as text.
    async fn watch_until_error(&mut self, api: &Api<k8s::Pod>, wanted: &watcher::Config) -> String {
        let mut events = pin!(watcher(api.clone(), wanted.clone()));
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => self.handle(event),
                Err(error) => return with_causes(&error),
            }
        }
        "the watch has ended".to_owned()
    }

    fn handle(&mut self, event: Event<k8s::Pod>) {
        match event {
            // The event comes before the first request, so the API server has not responded yet.
            Event::Init => {
                self.listed.clear();
                return;
            }
            Event::InitApply(pod) => {
                self.listed.extend(self.read(&pod));
                return;
            }
            Event::InitDone => {
                self.known.send_replace(std::mem::take(&mut self.listed));
            }
            Event::Apply(pod) => self
                .known
                .send_modify(|known| known.extend(self.read(&pod))),
            Event::Delete(pod) => {
                if let Some((uid, _)) = self.read(&pod) {
                    self.known.send_modify(|known| drop(known.remove(&uid)));
                }
            }
        }
        self.conditions.set(CONDITION, Ok(()));
    }

    fn read(&self, pod: &k8s::Pod) -> Option<(PodUid, Arc<Pod>)> {
        let pod = Pod::of(pod, &self.criteria, &self.label)?;
        Some((pod.pod.uid.clone(), Arc::new(pod)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object(uid: &str, change: &Value) -> k8s::Pod {
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "web", "namespace": "shop", "uid": uid, "resourceVersion": "7"},
            "status": {"phase": "Pending"},
        });
        for (pointer, value) in change.as_object().unwrap() {
            let (parent, name) = pointer.rsplit_once('/').unwrap();
            pod.pointer_mut(parent).unwrap()[name] = value.clone();
        }
        serde_json::from_value(pod).unwrap()
    }

    fn read(change: &Value) -> Pod {
        Pod::of(&object("uid-1", change), &Criteria::default(), "broken").unwrap()
    }

    #[test]
    fn a_pod_is_read_as_far_as_it_matters() {
        let pod = read(&json!({}));
        assert_eq!(
            (pod.version.as_str(), pod.label, pod.is_ending),
            ("7", None, false)
        );
        let labelled = read(&json!({"/metadata/labels": {"broken": "true"}}));
        assert_eq!(labelled.label.as_deref(), Some("true"));
        for ending in [
            json!({"/metadata/deletionTimestamp": "2026-01-01T00:00:00Z"}),
            json!({"/status/phase": "Failed"}),
            json!({"/status/phase": "Succeeded"}),
        ] {
            assert!(read(&ending).is_ending, "{ending}");
        }
        assert!(!read(&json!({"/status/phase": "Running"})).is_ending);
        for (kind, status, is_in_mesh) in [
            ("inpod.io/InMesh", "True", true),
            ("inpod.io/InMesh", "False", false),
            ("inpod.io/InMesh", "Unknown", false),
            ("Ready", "True", false),
        ] {
            let conditions = json!([{"type": kind, "status": status}]);
            let pod = read(&json!({"/status/conditions": conditions}));
            assert_eq!(pod.is_in_mesh, is_in_mesh, "{kind} {status}");
        }
    }

    fn pod_watcher() -> (PodWatcher, watch::Receiver<Pods>) {
        let (known, pods) = watch::channel(Pods::new());
        let pod_watcher = PodWatcher {
            criteria: Criteria::default(),
            label: "broken".to_owned(),
            known,
            listed: Pods::new(),
            conditions: Readiness::default(),
        };
        (pod_watcher, pods)
    }

    #[test]
    fn a_list_takes_the_place_of_what_was_known_when_it_is_whole() {
        let (mut pod_watcher, pods) = pod_watcher();
        let uids = |pods: &watch::Receiver<Pods>| {
            pods.borrow()
                .keys()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
        };
        let object = |uid| object(uid, &json!({}));
        pod_watcher.handle(Event::Init);
        pod_watcher.handle(Event::InitApply(object("a")));
        assert!(uids(&pods).is_empty());
        pod_watcher.handle(Event::InitDone);
        pod_watcher.handle(Event::Apply(object("b")));
        assert_eq!(uids(&pods), ["a", "b"]);
        pod_watcher.handle(Event::Init);
        pod_watcher.handle(Event::InitApply(object("c")));
        assert_eq!(uids(&pods), ["a", "b"], "a list that is not whole");
        pod_watcher.handle(Event::InitDone);
        assert_eq!(uids(&pods), ["c"]);
        pod_watcher.handle(Event::Delete(object("c")));
        assert!(uids(&pods).is_empty());
    }

    #[test]
    fn a_list_without_an_answer_yet_does_not_meet_the_condition() {
        let (mut pod_watcher, _pods) = pod_watcher();
        pod_watcher
            .conditions
            .set(CONDITION, Err("no route".into()));
        let ok = |pod_watcher: &PodWatcher| pod_watcher.conditions.all()[CONDITION].ok;
        pod_watcher.handle(Event::Init);
        assert!(!ok(&pod_watcher));
        pod_watcher.handle(Event::InitApply(object("a", &json!({}))));
        assert!(!ok(&pod_watcher));
        pod_watcher.handle(Event::InitDone);
        assert!(ok(&pod_watcher));
    }

    #[test]
    fn a_pod_of_the_same_name_is_another_one() {
        let (mut pod_watcher, pods) = pod_watcher();
        pod_watcher.handle(Event::Apply(object("old", &json!({}))));
        pod_watcher.handle(Event::Apply(object("new", &json!({}))));
        pod_watcher.handle(Event::Delete(object("old", &json!({}))));
        assert_eq!(pods.borrow().len(), 1);
    }
}
