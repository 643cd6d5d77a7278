//! The containers of a pod that can set ztunnel's mark, and so bypass ztunnel.

use k8s_openapi::api::core::v1 as k8s;

/// `SO_MARK` needs either capability, NET_RAW since Linux 5.17 (socket(7)).
const NET_ADMIN: &str = "NET_ADMIN";
const NET_RAW: &str = "NET_RAW";

/// A container that runs as root, or may do so, with a capability for `SO_MARK`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marker {
    pub container: String,
    /// True if the manifest adds the capability. Otherwise the runtime's default may contain NET_RAW.
    pub is_declared: bool,
}

/// Returns the containers that can set marks, including init containers, whose processes may be gone.
pub(super) fn markers(spec: &k8s::PodSpec) -> Vec<Marker> {
    let pod = spec.security_context.as_ref();
    let is_pods_root = is_root(
        pod.and_then(|it| it.run_as_user),
        pod.and_then(|it| it.run_as_non_root),
        true,
    );
    let inits = spec.init_containers.iter().flatten();
    let containers = spec.containers.iter().chain(inits);
    containers
        .filter_map(|it| marker(it, is_pods_root))
        .collect()
}

fn marker(container: &k8s::Container, is_pods_root: bool) -> Option<Marker> {
    let context = container.security_context.clone().unwrap_or_default();
    // Without root, the runtime leaves the capabilities out of the effective set.
    if !is_root(context.run_as_user, context.run_as_non_root, is_pods_root) {
        return None;
    }
    let capabilities = context.capabilities.unwrap_or_default();
    let names = |list: Option<Vec<String>>, wanted: &[&str]| {
        let mut names = list.into_iter().flatten();
        names.any(|name| wanted.contains(&name.trim_start_matches("CAP_")))
    };
    let is_declared =
        context.privileged == Some(true) || names(capabilities.add, &[NET_ADMIN, NET_RAW, "ALL"]);
    let is_dropped = names(capabilities.drop, &[NET_RAW, "ALL"]);
    (is_declared || !is_dropped).then(|| Marker {
        container: container.name.clone(),
        is_declared,
    })
}

/// The image decides if the manifest does not.
fn is_root(user: Option<i64>, non_root: Option<bool>, default: bool) -> bool {
    match (user, non_root) {
        (Some(user), _) => user == 0,
        (None, Some(true)) => false,
        (None, _) => default,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(pod: &Value, container: &Value) -> Option<bool> {
        let spec = json!({
            "securityContext": pod,
            "containers": [{"name": "app", "securityContext": container}],
        });
        let markers = markers(&serde_json::from_value(spec).unwrap());
        assert!(markers.iter().all(|it| it.container == "app"));
        markers.first().map(|it| it.is_declared)
    }

    #[test]
    fn a_container_can_set_marks_as_root_with_net_raw_or_net_admin() {
        let nothing = || json!({});
        for (pod, container, expected) in [
            (nothing(), nothing(), Some(false)),
            (
                nothing(),
                json!({"capabilities": {"drop": ["NET_RAW"]}}),
                None,
            ),
            (nothing(), json!({"capabilities": {"drop": ["ALL"]}}), None),
            (
                nothing(),
                json!({"capabilities": {"drop": ["CAP_NET_RAW"]}}),
                None,
            ),
            (
                nothing(),
                json!({"capabilities": {"drop": ["CHOWN"]}}),
                Some(false),
            ),
            (
                nothing(),
                json!({"capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]}}),
                Some(true),
            ),
            (
                nothing(),
                json!({"capabilities": {"add": ["NET_RAW"]}}),
                Some(true),
            ),
            (nothing(), json!({"privileged": true}), Some(true)),
            (nothing(), json!({"runAsUser": 1000}), None),
            (nothing(), json!({"runAsNonRoot": true}), None),
            (json!({"runAsUser": 1000}), nothing(), None),
            (json!({"runAsNonRoot": true}), nothing(), None),
            (
                json!({"runAsUser": 1000}),
                json!({"runAsUser": 0}),
                Some(false),
            ),
        ] {
            assert_eq!(of(&pod, &container), expected, "{pod} {container}");
        }
    }

    #[test]
    fn init_containers_count() {
        let spec = json!({"containers": [], "initContainers": [{"name": "init"}]});
        let markers = markers(&serde_json::from_value(spec).unwrap());
        assert_eq!(markers.len(), 1);
    }
}
