//! Builds the fields of Events other than the reason.

use inpod_types::{NodeName, PodRef};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::Reporter;

/// The API server's limits for note and instance of an Event (Event v1).
const MAX_NOTE_BYTES: usize = 1024;
const MAX_INSTANCE_BYTES: usize = 128;

/// Returns the source that `kubectl describe` shows for an Event, with the node as the instance.
pub fn reporter(controller: &str, node: &NodeName) -> Reporter {
    Reporter {
        controller: controller.to_owned(),
        instance: Some(truncate(node.as_str(), MAX_INSTANCE_BYTES).to_owned()),
    }
}

/// Refers to the pod that an Event is about.
pub fn regarding(pod: &PodRef) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace.to_string()),
        name: Some(pod.name.to_string()),
        uid: Some(pod.uid.to_string()),
        ..ObjectReference::default()
    }
}

/// Refers to a node, by the name also as UID, as the kubelet's Events do (`kubectl describe node` lists both).
pub fn regarding_node(node: &NodeName) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.to_string()),
        uid: Some(node.to_string()),
        ..ObjectReference::default()
    }
}

/// Truncates a note to the length that the API server accepts.
pub fn truncate_note(text: &str) -> String {
    truncate(text, MAX_NOTE_BYTES).to_owned()
}

fn truncate(text: &str, longest: usize) -> &str {
    let end = text.floor_char_boundary(longest);
    text.get(..end).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_has_no_more_than_the_server_takes_and_ends_with_a_whole_letter() {
        assert_eq!(truncate_note("short"), "short");
        assert_eq!(truncate_note(&"\u{e4}".repeat(2000)).len(), MAX_NOTE_BYTES);
        assert_eq!(
            truncate_note(&"\u{20ac}".repeat(2000)).len(),
            MAX_NOTE_BYTES - 1
        );
    }

    #[test]
    fn the_instance_of_a_reporter_is_its_node_as_far_as_there_is_room() {
        let name: NodeName = "n".repeat(200).parse().unwrap();
        let reporter = reporter("inpod.io/repair", &name);
        assert_eq!(reporter.controller, "inpod.io/repair");
        assert_eq!(reporter.instance.unwrap().len(), MAX_INSTANCE_BYTES);
    }
}
