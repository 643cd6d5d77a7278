//! Resolves the pod of an ADD and decides on its enrollment.
//!
//! The functions run outside the pod's task, which never waits: a lookup at the API server may take as long as the
//! caller waits.

use std::{collections::BTreeMap, time::Duration};

use inpod_cni::enrolled::EnrolledNamespaces;
use inpod_types::{Enrollment, Failure, InvalidIdentifier, PodRef, PodUid, Reason, keys};
use tokio::time::Instant;

use crate::{
    decide::{Decision, Demand, OnUnknown, decide_from, on_unknown},
    inventory::Inventory,
    pod::{Pod, PodKey},
    redirection::{Permissions, Requested},
    source::RefreshOutcome,
    tasks::task::{AddCall, Shared, is_permission_known},
};

#[derive(Clone, Debug)]
pub(crate) enum Resolved {
    Pod(Pod, Decision),
    /// The decision for the pod is unknown, but the pod may start.
    AdmittedUnenrolled {
        pod: Pod,
        why: String,
    },
}

/// Finds the pod of an ADD and decides on its enrollment. Queries the API server only if the view is not enough.
///
/// # Errors
///
/// If there is no such pod, if the pod differs from the runtime's, if the decision is unknown and the pod has to wait, or
/// if the pod would stay outside a mesh that it has to be in.
pub(crate) async fn resolve(
    shared: &Shared,
    key: &PodKey,
    call: &AddCall,
) -> Result<Resolved, Failure> {
    resolve_undemanded(shared, key, call).await?.check_demand()
}

/// Resolves an ADD regardless of a demand.
async fn resolve_undemanded(
    shared: &Shared,
    key: &PodKey,
    call: &AddCall,
) -> Result<Resolved, Failure> {
    let policy = shared.policy();
    let decided = |inventory: &Inventory| {
        let pod = find_pod(inventory, key, call.uid.as_ref())?;
        let decision = decide_from(inventory, pod, &policy);
        (decision.enrollment != Enrollment::Unknown).then(|| Resolved::Pod(pod.clone(), decision))
    };
    let enough = |inventory: &Inventory| {
        decided(inventory).filter(|it| it.has_known_permissions(inventory, policy.pods_may))
    };
    if let Some(resolved) = enough(&shared.source.inventory()) {
        return Ok(resolved);
    }
    let is_enough = |inventory: &Inventory| enough(inventory).is_some();
    let until = call.work_deadline.max(Instant::now());
    match shared.source.refresh(key, until, is_enough).await {
        RefreshOutcome::Current(inventory) => {
            decided(&inventory).ok_or_else(|| refusal(shared, &inventory, key, call))
        }
        RefreshOutcome::OtherNode(node) => {
            let (namespace, name) = key;
            let place = node.map_or_else(|| "no node".to_owned(), |node| format!("node {node}"));
            let here = &shared.config.node_name;
            let message = format!("pod {namespace}/{name} is bound to {place}, this is {here}");
            Err(Failure::new(Reason::PodOtherNode, message).at_field("pod"))
        }
        RefreshOutcome::Unavailable(why) => decided(&shared.source.inventory())
            .map_or_else(|| admit_unenrolled(shared, key, call, why), Ok),
    }
}

impl Resolved {
    /// Refuses a pod that stays outside the mesh against a demand.
    fn check_demand(self) -> Result<Self, Failure> {
        match &self {
            Self::Pod(pod, decision) if decision.is_unmet() => {
                let message = format!(
                    "the label {} of pod {}/{} or its namespace demands the mesh, which the pod cannot join",
                    keys::REQUIRE,
                    pod.pod.namespace,
                    pod.pod.name
                );
                Err(Failure::new(decision.reason, message))
            }
            Self::Pod(..) | Self::AdmittedUnenrolled { .. } => Ok(self),
        }
    }

    pub(crate) fn enrollment(&self) -> Enrollment {
        match self {
            Self::Pod(_, decision) => decision.enrollment,
            Self::AdmittedUnenrolled { .. } => Enrollment::Unknown,
        }
    }

    /// Returns whether the permissions of requested settings are known, if the permissions matter.
    fn has_known_permissions(&self, inventory: &Inventory, pods_may: Permissions) -> bool {
        match self {
            Self::Pod(pod, decision) if decision.enrollment == Enrollment::Ambient => {
                is_permission_known(inventory, pod, pods_may)
            }
            Self::Pod(..) | Self::AdmittedUnenrolled { .. } => true,
        }
    }
}

/// Finds the pod with the runtime's UID or, without a UID, a pod that is not terminal.
fn find_pod<'a>(inventory: &'a Inventory, key: &PodKey, uid: Option<&PodUid>) -> Option<&'a Pod> {
    let matches = |pod: &&Pod| uid.map_or(!pod.terminal, |uid| pod.has_uid(uid));
    inventory.pod(key).filter(matches)
}

fn refusal(shared: &Shared, inventory: &Inventory, key: &PodKey, call: &AddCall) -> Failure {
    let (namespace, name) = key;
    let node = &shared.config.node_name;
    match inventory.pod(key) {
        None => {
            let gap = inventory.describe_gap();
            let message = format!("no pod {namespace}/{name} is known on node {node}{gap}");
            Failure::new(Reason::PodUnknown, message).at_field("pod")
        }
        Some(pod) if find_pod(inventory, key, call.uid.as_ref()).is_some() => {
            let gap = inventory
                .gaps
                .first()
                .map_or("no source shows it", String::as_str);
            let message = format!(
                "the labels of namespace {} are not known: {gap}",
                pod.pod.namespace
            );
            Failure::new(Reason::NamespaceUnknown, message).at_field("pod.namespace")
        }
        Some(pod) if call.uid.is_some() => {
            let message = format!(
                "pod {namespace}/{name} has UID {}, not the one the runtime named",
                pod.pod.uid
            );
            Failure::new(Reason::PodUidMismatch, message).at_field("pod.uid")
        }
        Some(_) => {
            let message = format!("pod {namespace}/{name} has ended, and the runtime names no UID");
            Failure::new(Reason::PodUnknown, message).at_field("pod")
        }
    }
}

/// Decides whether a pod whose decision is unknown may start.
fn admit_unenrolled(
    shared: &Shared,
    key: &PodKey,
    call: &AddCall,
    why: String,
) -> Result<Resolved, Failure> {
    let inventory = shared.source.inventory();
    let (namespace, name) = key;
    let known = inventory.namespaces.get(namespace);
    let is_demanded = known.is_some_and(|known| Demand::of_namespace(known).is_made());
    let is_excluded = shared.config.exclude_namespaces.contains(namespace) && !is_demanded;
    let list = EnrolledNamespaces::read(&shared.config.plugin_state_dir);
    let is_listed = list.ok().flatten().map(|list| list.contains(namespace));
    let policy = on_unknown(known, is_listed);
    if policy == OnUnknown::Closed && !is_excluded {
        let message = format!(
            "it is not known whether pod {namespace}/{name} is to be in the mesh, and pods of its namespace wait: {why}"
        );
        return Err(Failure::new(Reason::SourceUnavailable, message).retry_after(RETRY_AFTER));
    }
    let shown = find_pod(&inventory, key, call.uid.as_ref()).cloned();
    let pod = shown.map_or_else(|| placeholder_pod(key, call), Ok)?;
    Ok(Resolved::AdmittedUnenrolled { pod, why })
}

fn placeholder_pod((namespace, name): &PodKey, call: &AddCall) -> Result<Pod, Failure> {
    let invalid = |error: InvalidIdentifier| {
        Failure::new(Reason::InvalidField, error.to_string()).at_field("sandbox.container_id")
    };
    // Without a UID from the runtime, the container id stands in until the source shows the pod.
    let stand_in = || call.sandbox.container_id.as_str().parse().map_err(invalid);
    Ok(Pod {
        pod: PodRef {
            namespace: namespace.clone(),
            name: name.clone(),
            uid: call.uid.clone().map_or_else(stand_in, Ok)?,
        },
        service_account: "default".parse().map_err(invalid)?,
        node: None,
        labels: BTreeMap::new(),
        host_network: false,
        runtime_class: None,
        injection: None,
        terminal: false,
        runtime_uid: None,
        requested: Requested::default(),
        addresses: Vec::new(),
        redirection: None,
        in_mesh: None,
        is_gated: false,
        is_ready: false,
        is_terminating: false,
        ports: Vec::new(),
        mark_setters: Vec::new(),
    })
}

const RETRY_AFTER: Duration = Duration::from_secs(5);
