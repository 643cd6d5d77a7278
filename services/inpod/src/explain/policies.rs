//! Finds network policies without the port of HBONE: ztunnels connect to TCP port 15008 of a pod of the mesh.

use std::collections::BTreeMap;

use inpod_proto::types::v1::PodRef;
use inpod_types::redirection::INBOUND_HBONE_PORT;
use k8s_openapi::{
    api::networking::v1::{NetworkPolicyIngressRule, NetworkPolicyPort},
    apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};
use kube::core::{Selector, SelectorExt as _};
use serde_json::Value;

use crate::objects;

/// Returns a sentence about each network policy of the pod, unless a policy admits HBONE: policies are additive. The
/// objects are the pod and the policies of its namespace.
pub(super) fn closing(objects: &[Value], pod: &PodRef) -> Result<Vec<String>, String> {
    let labels = pod_labels(objects, pod)?;
    let mut closing = Vec::new();
    for object in objects.iter().filter(|object| is_in(object, pod)) {
        match objects::text(object, "/kind") {
            "NetworkPolicy" if !selects(object, &labels)? => {}
            "NetworkPolicy" if admits_hbone(object)? => return Ok(Vec::new()),
            "NetworkPolicy" => closing.push(describe(objects::text(object, "/metadata/name"))),
            "Pod" => {}
            _ => {
                let problem = "expected Pod or NetworkPolicy";
                return Err(objects::describe(object, "/kind", &problem));
            }
        }
    }
    Ok(closing)
}

fn describe(name: &str) -> String {
    format!(
        "The network policy {name} selects this pod and admits no TCP port {INBOUND_HBONE_PORT}, so ztunnels of other nodes and pods cannot reach it by HBONE: add an ingress rule for port {INBOUND_HBONE_PORT}."
    )
}

fn pod_labels(objects: &[Value], pod: &PodRef) -> Result<BTreeMap<String, String>, String> {
    let is_pod = |object: &&Value| {
        objects::text(object, "/kind") == "Pod"
            && objects::text(object, "/metadata/name") == pod.name
            && is_in(object, pod)
    };
    let found = objects.iter().find(is_pod);
    let missing = || format!("it has no Pod {}/{}", pod.namespace, pod.name);
    objects::labels(found.ok_or_else(missing)?)
}

fn is_in(object: &Value, pod: &PodRef) -> bool {
    objects::text(object, "/metadata/namespace") == pod.namespace
}

/// Returns whether the policy selects the pod for ingress. A policy without types is about ingress.
fn selects(policy: &Value, labels: &BTreeMap<String, String>) -> Result<bool, String> {
    let types: Vec<String> = objects::field(policy, "/spec/policyTypes")?;
    let pointer = "/spec/podSelector";
    let selector: LabelSelector = objects::field(policy, pointer)?;
    let selector = Selector::try_from(selector);
    let selector = selector.map_err(|error| objects::describe(policy, pointer, &error))?;
    let is_for_ingress = types.is_empty() || types.iter().any(|name| name == "Ingress");
    Ok(is_for_ingress && selector.matches(labels))
}

/// Returns whether any peer may reach TCP port 15008. A rule without ports is about every port.
fn admits_hbone(policy: &Value) -> Result<bool, String> {
    let rules: Vec<NetworkPolicyIngressRule> = objects::field(policy, "/spec/ingress")?;
    Ok(rules.iter().any(|rule| {
        let ports = rule.ports.as_deref().unwrap_or_default();
        ports.is_empty() || ports.iter().any(includes_hbone)
    }))
}

/// Returns whether the range includes TCP port 15008. No container of an enrolled pod listens there, so no named port is
/// 15008.
fn includes_hbone(range: &NetworkPolicyPort) -> bool {
    let is_tcp = range.protocol.as_deref().is_none_or(|name| name == "TCP");
    is_tcp
        && match &range.port {
            None => true,
            Some(IntOrString::Int(first)) => {
                (*first..=range.end_port.unwrap_or(*first)).contains(&i32::from(INBOUND_HBONE_PORT))
            }
            Some(IntOrString::String(_)) => false,
        }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod() -> Value {
        json!({
            "kind": "Pod",
            "metadata": {"namespace": "shop", "name": "web", "labels": {"app": "web", "tier": "1"}},
        })
    }

    fn policy(spec: &Value) -> Value {
        json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"namespace": "shop", "name": "closed"},
            "spec": spec,
        })
    }

    fn decide(objects: &[Value]) -> Result<Vec<String>, String> {
        let web = PodRef {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            uid: "u".to_owned(),
        };
        closing(objects, &web)
    }

    fn closes(spec: &Value) -> bool {
        !decide(&[pod(), policy(spec)]).unwrap().is_empty()
    }

    #[test]
    fn a_policy_closes_hbone_of_the_pods_that_it_selects() {
        for (selector, is_selected) in [
            (json!(null), true),
            (json!({}), true),
            (json!({"matchLabels": {"app": "web"}}), true),
            (json!({"matchLabels": {"app": "web", "tier": "2"}}), false),
            (expression("app", "In", &["db", "web"]), true),
            (expression("app", "In", &["db"]), false),
            (expression("app", "NotIn", &["db"]), true),
            (expression("app", "NotIn", &["web"]), false),
            (expression("zone", "NotIn", &["a"]), true),
            (expression("app", "Exists", &[]), true),
            (expression("zone", "Exists", &[]), false),
            (expression("zone", "DoesNotExist", &[]), true),
            (expression("app", "DoesNotExist", &[]), false),
        ] {
            let spec = json!({"podSelector": selector});
            assert_eq!(closes(&spec), is_selected, "{spec}");
        }
    }

    fn expression(key: &str, operator: &str, values: &[&str]) -> Value {
        json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]})
    }

    #[test]
    fn only_policies_for_ingress_close_hbone() {
        for (types, is_for_ingress) in [
            (json!(null), true),
            (json!([]), true),
            (json!(["Ingress"]), true),
            (json!(["Egress", "Ingress"]), true),
            (json!(["Egress"]), false),
        ] {
            let spec = json!({"podSelector": {}, "policyTypes": types});
            assert_eq!(closes(&spec), is_for_ingress, "{spec}");
        }
    }

    #[test]
    fn a_policy_admits_hbone_by_number_range_or_every_port() {
        for (ingress, is_closed) in [
            (json!([]), true),
            (json!([{}]), false),
            (json!([{"from": [{"podSelector": {}}]}]), false),
            (json!([{"ports": []}]), false),
            (json!([{"ports": [{"port": 15008}]}]), false),
            (
                json!([{"ports": [{"port": 15008, "protocol": "TCP"}]}]),
                false,
            ),
            (
                json!([{"ports": [{"port": 15008, "protocol": "UDP"}]}]),
                true,
            ),
            (json!([{"ports": [{"protocol": "TCP"}]}]), false),
            (json!([{"ports": [{"protocol": "UDP"}]}]), true),
            (json!([{"ports": [{"port": 8080}, {"port": 8443}]}]), true),
            (
                json!([{"ports": [{"port": 8080}]}, {"ports": [{"port": 15008}]}]),
                false,
            ),
            (
                json!([{"ports": [{"port": 15000, "endPort": 15008}]}]),
                false,
            ),
            (
                json!([{"ports": [{"port": 15000, "endPort": 15007}]}]),
                true,
            ),
            (
                json!([{"ports": [{"port": 15009, "endPort": 16000}]}]),
                true,
            ),
            (json!([{"ports": [{"port": "hbone"}]}]), true),
        ] {
            let spec = json!({"podSelector": {}, "ingress": ingress});
            assert_eq!(closes(&spec), is_closed, "{spec}");
        }
    }

    #[test]
    fn policies_are_additive_within_a_namespace() {
        let closed = policy(&json!({"podSelector": {}}));
        let sentences = decide(&[pod(), closed.clone()]).unwrap();
        assert_eq!(sentences.len(), 1, "{sentences:?}");
        let start = "The network policy closed selects this pod and admits no TCP port 15008, ";
        assert!(sentences[0].starts_with(start), "{sentences:?}");
        let mut open = policy(&json!({"podSelector": {}, "ingress": [{}]}));
        assert_eq!(decide(&[closed.clone(), open.clone(), pod()]), Ok(vec![]));
        let unrelated = json!({"podSelector": {"matchLabels": {"app": "db"}}, "ingress": [{}]});
        let both = decide(&[closed.clone(), policy(&unrelated), pod()]);
        assert_eq!(both.unwrap().len(), 1);
        open["metadata"]["namespace"] = json!("other");
        assert_eq!(decide(&[closed, open, pod()]).unwrap().len(), 1);
    }

    #[test]
    fn unusable_policies_are_named_with_the_field() {
        for (objects, problem) in [
            (vec![], "it has no Pod shop/web"),
            (
                vec![pod(), policy(&json!({"podSelector": []}))],
                "NetworkPolicy shop/closed: spec.podSelector: invalid",
            ),
            (
                vec![pod(), policy(&json!({"ingress": [{"ports": 3}]}))],
                "NetworkPolicy shop/closed: spec.ingress: invalid",
            ),
            (
                vec![
                    pod(),
                    policy(&json!({"podSelector": expression("app", "Near", &[])})),
                ],
                "NetworkPolicy shop/closed: spec.podSelector: ",
            ),
            (
                vec![
                    pod(),
                    json!({"kind": "Secret", "metadata": {"namespace": "shop", "name": "x"}}),
                ],
                "Secret shop/x: kind: expected",
            ),
        ] {
            let error = decide(&objects).unwrap_err();
            assert!(error.starts_with(problem), "{error}");
        }
    }
}
