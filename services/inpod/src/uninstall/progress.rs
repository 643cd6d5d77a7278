//! Determines the progress of each node from the Nodes and the agent's pods.

use std::{collections::BTreeMap, fmt};

use inpod_service::{UninstallMode, uninstall::RECEIPT_PREFIX};
use k8s_openapi::api::core::v1::{ContainerStatus, Node, Pod};

const CONTAINERS: [&str; 2] = ["installer", "pod-events"];

/// By how many seconds the clock of a node may differ from the client's.
const MAX_CLOCK_SKEW: i64 = 60;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NodeProgress {
    /// All containers have finished; holds their results.
    Done(Vec<String>),
    /// Some containers have not finished; holds their names.
    Waiting(Vec<&'static str>),
    /// The node is neither done nor running; holds the reason.
    Unreachable(&'static str),
}

impl NodeProgress {
    pub(super) fn is_waiting(&self) -> bool {
        matches!(self, Self::Waiting(_))
    }
}

impl fmt::Display for NodeProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done(receipts) => write!(f, "done ({})", receipts.join("; ")),
            Self::Waiting(parts) => write!(f, "waiting for {}", parts.join(" and ")),
            Self::Unreachable(why) => write!(f, "unreachable: {why}"),
        }
    }
}

/// Returns the progress by node, from the receipts for this mode since the request.
pub(super) fn progress_by_node(
    nodes: &[Node],
    pods: &[Pod],
    mode: UninstallMode,
    since: i64,
) -> BTreeMap<String, NodeProgress> {
    let progress = |node: &Node| {
        let name = node.metadata.name.clone().unwrap_or_default();
        let here = pods
            .iter()
            .filter(|pod| node_of(pod) == Some(name.as_str()));
        let progress = progress_of(is_ready(node), &here.collect::<Vec<_>>(), mode, since);
        (name, progress)
    };
    nodes.iter().map(progress).collect()
}

fn progress_of(is_ready: bool, pods: &[&Pod], mode: UninstallMode, since: i64) -> NodeProgress {
    let done = CONTAINERS.map(|part| {
        let mut receipts = pods
            .iter()
            .filter_map(|pod| receipt(pod, part, mode, since));
        (part, receipts.next())
    });
    let missing: Vec<_> = done
        .iter()
        .filter(|(_, receipt)| receipt.is_none())
        .map(|(part, _)| *part)
        .collect();
    if missing.is_empty() {
        let results = done
            .into_iter()
            .filter_map(|(part, receipt)| Some(format!("{part}: {}", receipt?)));
        return NodeProgress::Done(results.collect());
    }
    // A finished node counts as done, Ready or not, so only unfinished nodes get here.
    match (is_ready, pods.is_empty()) {
        (false, _) => NodeProgress::Unreachable("its Node is not Ready"),
        (true, true) => NodeProgress::Unreachable("it has no pod of the agent"),
        (true, false) => NodeProgress::Waiting(missing),
    }
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

fn is_ready(node: &Node) -> bool {
    let conditions = node
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Returns the result that the container `part` reported in its receipt.
fn receipt(pod: &Pod, part: &str, mode: UninstallMode, since: i64) -> Option<String> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let status = statuses.iter().find(|status| status.name == part)?;
    let results = ended(status).filter_map(|ended| {
        let at = ended.finished_at.as_ref().map(|at| at.0.as_second());
        let is_recent = at.is_none_or(|at| at + MAX_CLOCK_SKEW >= since);
        let message = ended.message.as_ref().filter(|_| is_recent)?;
        let line = message
            .lines()
            .find_map(|line| line.strip_prefix(RECEIPT_PREFIX))?;
        let (reported, done) = line.split_once(';').unwrap_or((line, ""));
        (reported.trim() == mode.as_str()).then(|| done.trim().to_owned())
    });
    results.last()
}

fn ended(
    status: &ContainerStatus,
) -> impl Iterator<Item = &k8s_openapi::api::core::v1::ContainerStateTerminated> {
    let states = [status.last_state.as_ref(), status.state.as_ref()];
    states
        .into_iter()
        .flatten()
        .filter_map(|state| state.terminated.as_ref())
}

/// Returns the image of the installer, for the command that handles a node manually.
pub(super) fn installer_image(pods: &[Pod]) -> String {
    let containers = pods
        .iter()
        .filter_map(|pod| pod.spec.as_ref())
        .flat_map(|spec| &spec.containers);
    let mut installers = containers.filter(|container| container.name == "installer");
    let image = installers.find_map(|container| container.image.clone());
    image.unwrap_or_else(|| "INSTALLER_IMAGE".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const SINCE: i64 = 1_767_225_600;

    fn node(name: &str, ready: &str) -> Node {
        let object = json!({"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": ready}]}});
        serde_json::from_value(object).unwrap()
    }

    fn ended(container: &str, message: &str, at: &str) -> Value {
        let ended = json!({"exitCode": 0, "message": message, "finishedAt": at});
        json!({"name": container, "image": "i", "imageID": "", "ready": false, "restartCount": 1, "lastState": {"terminated": ended}})
    }

    fn pod(node: &str, statuses: &Value) -> Pod {
        let object = json!({
            "metadata": {"name": "inpod-x"},
            "spec": {"nodeName": node, "containers": [{"name": "installer", "image": "registry/installer:1"}]},
            "status": {"containerStatuses": statuses},
        });
        serde_json::from_value(object).unwrap()
    }

    fn of(nodes: &[Node], pods: &[Pod]) -> Vec<NodeProgress> {
        progress_by_node(nodes, pods, UninstallMode::Uninstall, SINCE)
            .into_values()
            .collect()
    }

    const NOW: &str = "2026-01-01T00:01:00Z";

    #[test]
    fn a_node_has_left_when_both_parts_say_so() {
        let installer = ended(
            "installer",
            "inpod left: uninstall; chain and binary reverted",
            NOW,
        );
        let events = ended(
            "pod-events",
            "a last word\ninpod left: uninstall; 3 pods withdrawn\n",
            NOW,
        );
        let nodes = [node("a", "True")];
        assert_eq!(
            of(&nodes, &[pod("a", &json!([installer]))]),
            [NodeProgress::Waiting(vec!["pod-events"])]
        );
        let both = pod("a", &json!([installer, events]));
        let results = [
            "installer: chain and binary reverted",
            "pod-events: 3 pods withdrawn",
        ];
        assert_eq!(
            of(&nodes, &[both]),
            [NodeProgress::Done(results.map(str::to_owned).into())]
        );
        // Split topologies have a pod per container.
        let apart = [pod("a", &json!([installer])), pod("a", &json!([events]))];
        assert!(matches!(
            of(&nodes, &apart).as_slice(),
            [NodeProgress::Done(_)]
        ));
        // The node is not Ready any more.
        assert!(matches!(
            of(&[node("a", "False")], &apart).as_slice(),
            [NodeProgress::Done(_)]
        ));
    }

    #[test]
    fn a_receipt_of_another_mode_or_of_an_earlier_time_is_none() {
        let both = |message: &str, at: &str| {
            let parts = CONTAINERS.map(|part| ended(part, message, at));
            of(&[node("a", "True")], &[pod("a", &json!(parts))])
        };
        let awaited = [NodeProgress::Waiting(CONTAINERS.into())];
        assert_eq!(both("inpod left: handover; done", NOW), awaited);
        assert_eq!(
            both("inpod left: uninstall; done", "2025-12-31T23:00:00Z"),
            awaited
        );
        assert_eq!(both("killed", NOW), awaited);
        // Clocks may differ slightly.
        let close = both("inpod left: uninstall; done", "2025-12-31T23:59:30Z");
        assert!(
            matches!(close.as_slice(), [NodeProgress::Done(_)]),
            "{close:?}"
        );
    }

    #[test]
    fn a_node_that_nobody_hears_on_is_not_waited_for() {
        let nodes = [node("a", "Unknown"), node("b", "True")];
        let found = of(
            &nodes,
            &[pod("a", &json!([])), pod("elsewhere", &json!([]))],
        );
        let reasons = ["its Node is not Ready", "it has no pod of the agent"];
        assert_eq!(found, reasons.map(NodeProgress::Unreachable));
    }

    #[test]
    fn the_image_to_leave_by_hand_with_is_the_installer_s() {
        assert_eq!(
            installer_image(&[pod("a", &json!([]))]),
            "registry/installer:1"
        );
        assert_eq!(installer_image(&[]), "INSTALLER_IMAGE");
    }
}
