//! Permissions at the API server.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::{
    list, manifests,
    rights::of_kind,
    table::{BINDINGS, OVER, RULES, Rule},
    text, words,
};

fn rules(object: &Value) -> BTreeSet<String> {
    let role = text(object, "/metadata/name");
    let line = |rule: &Value| {
        assert_eq!(rule.get("nonResourceURLs"), None, "{rule}");
        let group = words(&rule["apiGroups"]).join(",");
        let part = |key: &str| format!("{:?}", words(&rule[key]));
        format!(
            "{role} {group} {} {} {}",
            part("resources"),
            part("resourceNames"),
            part("verbs")
        )
    };
    list(object, "rules").iter().map(line).collect()
}

#[test]
fn nobody_has_a_verb_that_is_not_in_the_table() {
    let mut found = BTreeSet::new();
    for manifest in manifests() {
        for role in of_kind(&manifest, &["Role", "ClusterRole"]) {
            found.extend(rules(&role));
        }
    }
    let line = |(role, group, resources, names, verbs): &Rule| {
        format!("{role} {group} {resources:?} {names:?} {verbs:?}")
    };
    assert_eq!(found, RULES.iter().map(line).collect());
}

#[test]
fn a_role_is_bound_to_its_account_alone() {
    let mut found = BTreeSet::new();
    for manifest in manifests() {
        for binding in of_kind(&manifest, &["RoleBinding", "ClusterRoleBinding"]) {
            let role = text(&binding, "/roleRef/name").to_owned();
            for subject in list(&binding, "subjects") {
                assert_eq!(text(subject, "/kind"), "ServiceAccount");
                assert_eq!(text(subject, "/namespace"), "inpod-system");
                found.insert((role.clone(), text(subject, "/name").to_owned()));
            }
        }
    }
    let own = |(role, account): &(&str, &str)| ((*role).to_owned(), (*account).to_owned());
    assert_eq!(found, BINDINGS.iter().map(own).collect());
}

#[test]
fn nodes_are_patched_only_with_startup_taints() {
    for manifest in manifests() {
        let roles = of_kind(&manifest, &["ClusterRole"]).into_iter();
        let mut granted = roles.flat_map(|role| rules(&role));
        let is_right =
            |rule: String| rule.starts_with("inpod-pod-events") && rule.contains("[\"nodes\"]");
        let has_right = granted.any(is_right);
        let policies = of_kind(&manifest, &["ValidatingAdmissionPolicyBinding"]);
        let is_bound = policies
            .iter()
            .any(|binding| text(binding, "/spec/policyName") == "inpod-pod-events-node");
        let is_wanted = manifest == "startup-taints";
        assert_eq!([has_right, is_bound], [is_wanted; 2], "{manifest}");
    }
}

#[test]
fn repair_has_the_verb_of_a_way_only_where_that_is_on() {
    let lines = |manifest: &str| -> BTreeSet<String> {
        let roles = of_kind(manifest, &["ClusterRole"]).into_iter();
        let own = roles.filter(|role| text(role, "/metadata/name") == "inpod-repair");
        own.flat_map(|role| rules(&role)).collect()
    };
    let base = lines("repair");
    assert_eq!(base.len(), 2, "{base:?}");
    for (manifest, resource, verb) in OVER {
        let all = lines(manifest);
        assert!(all.is_superset(&base), "{manifest}");
        let more: Vec<_> = all.difference(&base).collect();
        let wanted = format!("inpod-repair  {:?} {:?} {:?}", [resource], [""; 0], [verb]);
        assert_eq!(more, [&wanted], "{manifest}");
    }
}
