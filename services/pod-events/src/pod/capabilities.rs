//! Finds the containers of a pod that may set ztunnel's mark, and so bypass ztunnel.

use k8s_openapi::api::core::v1 as k8s;

/// `SO_MARK` needs either capability, NET_RAW since Linux 5.17 (socket(7)).
const NET_ADMIN: &str = "NET_ADMIN";
const NET_RAW: &str = "NET_RAW";

/// A container that runs as root, or may do so, with a capability for `SO_MARK`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkSetter {
    pub container: String,
    /// True if the manifest adds the capability. Otherwise the runtime's default may contain NET_RAW.
    pub is_declared: bool,
}

/// Returns the containers that can set marks, including init containers, whose processes may be gone.
pub(super) fn find_mark_setters(spec: &k8s::PodSpec) -> Vec<MarkSetter> {
    let pod = spec.security_context.as_ref();
    let user = pod.and_then(|it| it.run_as_user);
    let non_root = pod.and_then(|it| it.run_as_non_root);
    let inits = spec.init_containers.iter().flatten();
    let containers = spec.containers.iter().chain(inits);
    let containers = containers.map(|it| (&it.name, &it.security_context));
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let ephemeral = ephemeral.map(|it| (&it.name, &it.security_context));
    let setter = |(name, context): (&String, &Option<k8s::SecurityContext>)| {
        let context = context.clone().unwrap_or_default();
        let user = context.run_as_user.or(user);
        let non_root = context.run_as_non_root.or(non_root);
        // Without root, the runtime leaves the capabilities out of the effective set. If the manifest names no user, the
        // image decides.
        let allows_root = user.map_or_else(|| non_root != Some(true), |user| user == 0);
        allows_root.then(|| to_mark_setter(name, context))?
    };
    containers.chain(ephemeral).filter_map(setter).collect()
}

fn to_mark_setter(name: &str, context: k8s::SecurityContext) -> Option<MarkSetter> {
    let capabilities = context.capabilities.unwrap_or_default();
    let names_any = |list: Option<Vec<String>>, wanted: &[&str]| {
        let mut names = list.into_iter().flatten();
        names.any(|name| wanted.contains(&name.trim_start_matches("CAP_")))
    };
    let is_declared = context.privileged == Some(true)
        || names_any(capabilities.add, &[NET_ADMIN, NET_RAW, "ALL"]);
    let is_dropped = names_any(capabilities.drop, &[NET_RAW, "ALL"]);
    (is_declared || !is_dropped).then(|| MarkSetter {
        container: name.to_owned(),
        is_declared,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn is_declared(pod: &Value, container: &Value) -> Option<bool> {
        let spec = json!({
            "securityContext": pod,
            "containers": [{"name": "app", "securityContext": container}],
        });
        let found = find_mark_setters(&serde_json::from_value(spec).unwrap());
        assert!(found.iter().all(|it| it.container == "app"));
        found.first().map(|it| it.is_declared)
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
            assert_eq!(is_declared(&pod, &container), expected, "{pod} {container}");
        }
    }

    #[test]
    fn init_and_ephemeral_containers_are_mark_setters_too() {
        let spec = json!({"containers": [], "initContainers": [{"name": "init"}], "ephemeralContainers": [{"name": "debug"}]});
        let found = find_mark_setters(&serde_json::from_value(spec).unwrap());
        assert_eq!(found.len(), 2);
    }
}
