//! Lists the inputs of a decision.

use inpod_types::keys;

use super::{Policy, Selected};
use crate::{
    pod::{Labels, Namespace, Pod},
    redirection::PrivilegedRequest,
};

/// Collects names and values. A missing label has an empty value.
pub(super) fn collect(
    pod: &Pod,
    namespace: &Namespace,
    is_known: bool,
    policy: &Policy<'_>,
) -> Vec<(String, String)> {
    let selected = policy.selectors.select(&pod.labels, namespace, is_known);
    let mut inputs = labels(pod, namespace, is_known, policy);
    inputs.push((
        "enablement selector".to_owned(),
        matched(selected, policy.selectors.len()),
    ));
    inputs.extend(facts(pod, namespace, policy));
    if let Some(injection) = &pod.injection {
        let setting = "setting sidecar_redirection".to_owned();
        inputs.push((setting, policy.sidecars.to_string()));
        inputs.extend(injection.inputs());
    }
    if let Some(class) = &pod.runtime_class {
        let patterns: Vec<_> = policy.sandboxed.iter().map(ToString::to_string).collect();
        let setting = "setting sandboxed_runtime_classes".to_owned();
        inputs.push(("pod runtimeClassName".to_owned(), class.to_string()));
        inputs.push((setting, patterns.join(",")));
    }
    if policy.is_uninstalling {
        inputs.push(("inpod is being uninstalled".to_owned(), "true".to_owned()));
    }
    inputs.extend(permissions(pod, namespace, is_known, policy));
    inputs
}

fn labels(
    pod: &Pod,
    namespace: &Namespace,
    is_known: bool,
    policy: &Policy<'_>,
) -> Vec<(String, String)> {
    let input = |owner: &str, labels: &Labels, key: &String, missing: &str| {
        let value = match labels.get(key).map(String::as_str) {
            Some("") => "\"\"",
            value => value.unwrap_or(missing),
        };
        (format!("{owner} label {key}"), value.to_owned())
    };
    let namespace = namespace.all_labels();
    let unknown = if is_known { "" } else { "not known" };
    let demand = keys::REQUIRE.to_owned();
    let demands = pod.labels.contains_key(&demand);
    let of_pod = policy.selectors.pod_keys().into_iter();
    let of_pod = of_pod.chain(demands.then_some(demand));
    let of_pod = of_pod.map(|key| input("pod", &pod.labels, &key, ""));
    let of_namespace = policy.namespace_keys().into_iter();
    let of_namespace = of_namespace.map(|key| input("namespace", &namespace, &key, unknown));
    of_pod.chain(of_namespace).collect()
}

fn matched(selected: Selected, entries: usize) -> String {
    match selected {
        Selected::By { entry, .. } => format!("entry {entry} of {entries}"),
        Selected::Not { .. } => format!("none of {entries}"),
        Selected::Unknown => "depends on the namespace's labels".to_owned(),
    }
}

fn facts(pod: &Pod, namespace: &Namespace, policy: &Policy<'_>) -> [(String, String); 5] {
    [
        (
            format!("namespace annotation {}", keys::ON_UNKNOWN),
            namespace.on_unknown.clone().unwrap_or_default(),
        ),
        ("pod hostNetwork".to_owned(), pod.host_network.to_string()),
        (
            format!("pod annotation {}", keys::SIDECAR_STATUS),
            pod.injection.is_some().to_string(),
        ),
        ("pod is terminal".to_owned(), pod.terminal.to_string()),
        (
            "namespace is excluded".to_owned(),
            policy.excludes(namespace).to_string(),
        ),
    ]
}

fn permissions(
    pod: &Pod,
    namespace: &Namespace,
    is_known: bool,
    policy: &Policy<'_>,
) -> Vec<(String, String)> {
    let permitted = namespace.allows.or(policy.pods_may);
    let input = |request: PrivilegedRequest| {
        let value = if permitted.include(request.needs) {
            request.text
        } else if is_known {
            format!("{} (not permitted)", request.text)
        } else {
            format!("{} (not known whether permitted)", request.text)
        };
        (format!("pod annotation {}", request.annotation), value)
    };
    let mut inputs: Vec<_> = pod.requested.privileged().map(input).collect();
    if !inputs.is_empty() {
        inputs.push((
            format!("namespace annotation {}", keys::ALLOW),
            namespace.allows.names(),
        ));
        inputs.push(("setting pods_may".to_owned(), policy.pods_may.names()));
    }
    inputs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        decide::Selectors,
        redirection::{Permissions, Requested},
        testing::{namespace, pod, policy},
    };

    fn input(
        selectors: &str,
        is_known: bool,
        change: impl FnOnce(&mut Pod, &mut Namespace),
    ) -> Vec<(String, String)> {
        let (mut pod, mut namespace) = (pod("shop", "web"), namespace("shop"));
        change(&mut pod, &mut namespace);
        let selectors: Selectors = selectors.parse().unwrap();
        let policy = Policy {
            pods_may: Permissions::parse("keep-existing"),
            ..policy(&selectors)
        };
        collect(&pod, &namespace, is_known, &policy)
    }

    fn value<'a>(inputs: &'a [(String, String)], name: &str) -> Option<&'a str> {
        let input = inputs.iter().find(|(known, _)| known == name);
        input.map(|(_, value)| value.as_str())
    }

    #[test]
    fn only_labels_of_selectors_are_listed_with_their_values() {
        let selectors = "[{podSelector: {matchLabels: {a: b}}}, {namespaceSelector: {matchExpressions: [{key: c, operator: Exists}]}}]";
        let inputs = input(selectors, true, |pod, namespace| {
            pod.labels = [("a", "x"), ("z", "z")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into();
            namespace.labels = [("c".to_owned(), String::new())].into();
        });
        assert_eq!(value(&inputs, "pod label a"), Some("x"));
        assert_eq!(value(&inputs, "namespace label c"), Some("\"\""));
        assert_eq!(value(&inputs, "enablement selector"), Some("entry 2 of 2"));
        assert_eq!(value(&inputs, "pod label z"), None);
        assert_eq!(value(&inputs, "setting pods_may"), None);
        let inputs = input(selectors, false, |_, _| ());
        assert_eq!(value(&inputs, "namespace label c"), Some("not known"));
        let selector = value(&inputs, "enablement selector");
        assert_eq!(selector, Some("depends on the namespace's labels"));
    }

    #[test]
    fn a_runtime_class_is_listed_with_the_setting() {
        let inputs = |class: Option<&str>| {
            let pod = Pod {
                runtime_class: class.map(Into::into),
                ..pod("shop", "web")
            };
            let sandboxed = ["kata", "kata-*"].map(|text| text.parse().unwrap());
            let selectors = "[]".parse().unwrap();
            let policy = Policy {
                sandboxed: &sandboxed,
                ..policy(&selectors)
            };
            collect(&pod, &namespace("shop"), true, &policy)
        };
        let setting = "setting sandboxed_runtime_classes";
        let of_class = inputs(Some("runc"));
        assert_eq!(value(&of_class, "pod runtimeClassName"), Some("runc"));
        assert_eq!(value(&of_class, setting), Some("kata,kata-*"));
        let without = inputs(None);
        assert_eq!(value(&without, "pod runtimeClassName"), None);
        assert_eq!(value(&without, setting), None);
    }

    #[test]
    fn requested_settings_are_listed_with_their_permission() {
        let ask = |pod: &mut Pod| {
            let all = [
                (keys::EXCLUDE_OUTBOUND_PORTS, "5432"),
                (keys::KEEP_EXISTING_CONNECTIONS, "true"),
            ];
            let all = all.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
            pod.requested = Requested::from_annotations(Some(&all));
        };
        let excluded = format!("pod annotation {}", keys::EXCLUDE_OUTBOUND_PORTS);
        let kept = format!("pod annotation {}", keys::KEEP_EXISTING_CONNECTIONS);
        let inputs = input("[]", true, |pod, _| ask(pod));
        assert_eq!(value(&inputs, &excluded), Some("5432 (not permitted)"));
        assert_eq!(value(&inputs, &kept), Some("true"));
        assert_eq!(value(&inputs, "setting pods_may"), Some("keep-existing"));
        let inputs = input("[]", false, |pod, _| ask(pod));
        let unknown = Some("5432 (not known whether permitted)");
        assert_eq!(value(&inputs, &excluded), unknown);
        let inputs = input("[]", true, |pod, namespace| {
            ask(pod);
            namespace.allows = Permissions::parse("exclude");
        });
        assert_eq!(value(&inputs, &excluded), Some("5432"));
        let allow = format!("namespace annotation {}", keys::ALLOW);
        assert_eq!(value(&inputs, &allow), Some("exclude"));
    }
}
