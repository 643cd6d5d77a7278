//! Ports of Services without an EndpointSlice, because the Service is new or no controller runs. Selects pods and
//! resolves named ports like the endpoint slice controller (kubernetes, pkg/api/v1/pod `FindPort`: by name and
//! protocol, of containers and of restartable init containers).

use std::collections::{BTreeMap, BTreeSet};

use inpod_proto::{
    podevents::v1::{PortProtocol, ServicePort},
    types::v1::PodRef,
};
use k8s_openapi::{
    api::core::v1::{Container, Pod, Service, ServicePort as Declared},
    apimachinery::pkg::util::intstr::IntOrString,
};

use super::services::{number, protocol};

pub(super) type Name = (String, String);

/// Returns the Services that select pods but have no slice yet.
pub(super) fn without_slices(services: Vec<Service>, known: &BTreeSet<Name>) -> Vec<Service> {
    let lacks_slice = |service: &Service| {
        let name = name(service);
        selector(service).is_some() && name.is_some_and(|name| !known.contains(&name))
    };
    services.into_iter().filter(lacks_slice).collect()
}

/// Returns the ports of `pods` that the Services target.
pub(super) fn ports(services: &[Service], pods: &[Pod]) -> Vec<ServicePort> {
    let pairs = services.iter().flat_map(|service| {
        let chosen = pods.iter().filter(move |pod| selects(service, pod));
        chosen.map(move |pod| (service, pod))
    });
    pairs
        .flat_map(|(service, pod)| ports_of(service, pod))
        .collect()
}

fn name(service: &Service) -> Option<Name> {
    let metadata = &service.metadata;
    Some((metadata.namespace.clone()?, metadata.name.clone()?))
}

/// Returns the selector of a Service, unless the selector is empty or the Service is an ExternalName, whose selector
/// has no effect (core/v1, ServiceSpec).
fn selector(service: &Service) -> Option<&BTreeMap<String, String>> {
    let spec = service.spec.as_ref()?;
    let is_name = spec.type_.as_deref() == Some("ExternalName");
    let selector = spec.selector.as_ref()?;
    (!is_name && !selector.is_empty()).then_some(selector)
}

fn selects(service: &Service, pod: &Pod) -> bool {
    let labels = pod.metadata.labels.as_ref();
    let has = |(key, value): (&String, &String)| {
        labels.is_some_and(|labels| labels.get(key) == Some(value))
    };
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    let has_ended = matches!(phase, Some("Succeeded" | "Failed"));
    let same_namespace = service.metadata.namespace == pod.metadata.namespace;
    same_namespace && !has_ended && selector(service).is_some_and(|wanted| wanted.iter().all(has))
}

fn ports_of(service: &Service, pod: &Pod) -> Vec<ServicePort> {
    let metadata = &pod.metadata;
    let who = (&metadata.namespace, &metadata.name, &metadata.uid);
    let (Some(namespace), Some(name), Some(uid)) = who else {
        return Vec::new();
    };
    let declared = service
        .spec
        .iter()
        .flat_map(|spec| spec.ports.iter().flatten());
    let port = |declared: &Declared| {
        let protocol = protocol(declared.protocol.as_deref())?;
        Some(ServicePort {
            pod: Some(PodRef {
                namespace: namespace.clone(),
                name: name.clone(),
                uid: uid.clone(),
            }),
            service: service.metadata.name.clone()?,
            protocol: protocol.into(),
            port: target(declared, protocol, pod)?,
        })
    };
    declared.filter_map(port).collect()
}

/// Returns the port of the pod to which the Service forwards: the Service's own port unless the Service names a target
/// port.
fn target(declared: &Declared, of: PortProtocol, pod: &Pod) -> Option<u32> {
    match &declared.target_port {
        // A target port of zero is unset (core/v1, SetDefaults_Service).
        None | Some(IntOrString::Int(0)) => number(declared.port),
        Some(IntOrString::Int(port)) => number(*port),
        Some(IntOrString::String(name)) => containers(pod)
            .flat_map(|container| container.ports.iter().flatten())
            .filter(|port| port.name.as_ref() == Some(name))
            .find(|port| protocol(port.protocol.as_deref()) == Some(of))
            .and_then(|port| number(port.container_port)),
    }
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let is_native_sidecar =
        |container: &&Container| container.restart_policy.as_deref() == Some("Always");
    let spec = || pod.spec.iter();
    let native = spec().flat_map(|spec| spec.init_containers.iter().flatten());
    let all = spec().flat_map(|spec| &spec.containers);
    all.chain(native.filter(is_native_sidecar))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[expect(
        clippy::needless_pass_by_value,
        reason = "a test hands over what it made"
    )]
    fn service(name: &str, spec: Value) -> Service {
        let metadata = json!({"namespace": "shop", "name": name});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "a test hands over what it made"
    )]
    fn pod(name: &str, labels: Value, phase: &str) -> Pod {
        let ports = json!([
            {"name": "http", "containerPort": 8080},
            {"name": "dns", "containerPort": 5353, "protocol": "UDP"},
        ]);
        let native = json!({"name": "side", "restartPolicy": "Always", "ports": [{"name": "side", "containerPort": 7000}]});
        let once = json!({"name": "once", "ports": [{"name": "once", "containerPort": 7001}]});
        serde_json::from_value(json!({
            "metadata": {"namespace": "shop", "name": name, "uid": "u", "labels": labels},
            "spec": {"containers": [{"name": "app", "ports": ports}], "initContainers": [once, native]},
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    fn found(services: &[Service], pods: &[Pod]) -> Vec<(String, String, PortProtocol, u32)> {
        let row = |it: &ServicePort| {
            let pod = it.pod.as_ref().unwrap().name.clone();
            (it.service.clone(), pod, it.protocol(), it.port)
        };
        ports(services, pods).iter().map(row).collect()
    }

    #[test]
    fn a_selector_chooses_running_pods_of_its_namespace_that_have_all_its_labels() {
        let spec = json!({"selector": {"app": "web", "tier": "a"}, "ports": [{"port": 80}]});
        let web = service("web", spec);
        let mut far = pod("far", json!({"app": "web", "tier": "a"}), "Running");
        far.metadata.namespace = Some("other".to_owned());
        let pods = [
            pod(
                "one",
                json!({"app": "web", "tier": "a", "x": "y"}),
                "Running",
            ),
            pod("new", json!({"app": "web", "tier": "a"}), "Pending"),
            pod("half", json!({"app": "web"}), "Running"),
            pod("done", json!({"app": "web", "tier": "a"}), "Succeeded"),
            far,
        ];
        let names: Vec<_> = found(&[web], &pods).into_iter().map(|it| it.1).collect();
        assert_eq!(names, ["one", "new"]);
    }

    #[test]
    fn a_target_is_a_number_a_name_or_the_port_itself() {
        let ports = json!([
            {"port": 80, "targetPort": "http"},
            {"port": 81, "targetPort": 9090},
            {"port": 82},
            {"port": 83, "targetPort": 0},
            {"port": 53, "targetPort": "dns", "protocol": "UDP"},
            {"port": 54, "targetPort": "dns"},
            {"port": 84, "targetPort": "side"},
            {"port": 85, "targetPort": "once"},
            {"port": 86, "targetPort": "nobody"},
            {"port": 87, "protocol": "SCTP"},
        ]);
        let spec = json!({"selector": {"app": "web"}, "ports": ports});
        let pods = [pod("one", json!({"app": "web"}), "Running")];
        let numbers: Vec<_> = found(&[service("web", spec)], &pods)
            .into_iter()
            .map(|(_, _, protocol, port)| (protocol, port))
            .collect();
        let wanted = [
            (PortProtocol::Tcp, 8080),
            (PortProtocol::Tcp, 9090),
            (PortProtocol::Tcp, 82),
            (PortProtocol::Tcp, 83),
            (PortProtocol::Udp, 5353),
            (PortProtocol::Tcp, 7000),
        ];
        assert_eq!(numbers, wanted);
    }

    #[test]
    fn those_with_a_slice_are_told_by_it_and_those_that_choose_nothing_are_not_looked_for() {
        let chooses = json!({"selector": {"app": "web"}});
        let services = vec![
            service("bare", chooses.clone()),
            service("sliced", chooses.clone()),
            service("manual", json!({})),
            service("empty", json!({"selector": {}})),
            service(
                "far",
                json!({"type": "ExternalName", "selector": {"app": "web"}}),
            ),
        ];
        let known = BTreeSet::from([("shop".to_owned(), "sliced".to_owned())]);
        let bare = without_slices(services, &known);
        let names: Vec<_> = bare
            .iter()
            .filter_map(|it| it.metadata.name.as_deref())
            .collect();
        assert_eq!(names, ["bare"]);
    }
}
