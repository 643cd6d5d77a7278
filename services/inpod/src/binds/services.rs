//! Finds the ports of this node's pods to which Services forward. EndpointSlices contain resolved ports, and pods that
//! are not ready, too.

use inpod_proto::{
    podevents::v1::{PortProtocol, ServicePort},
    types::v1::PodRef,
};
use inpod_types::{NamespaceName, PodName, PodUid, ServiceName};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort};
use serde_json::Value;

use crate::objects;

/// The label that names the Service of a slice.
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";

/// The limit of ListBindsRequest.
const MAX_PORTS: usize = 16_384;

/// Returns the ports of the node's pods in EndpointSlices.
pub(super) fn ports(slices: &[Value], node: &str) -> Result<Vec<ServicePort>, String> {
    let mut ports = Vec::new();
    for slice in slices {
        ports.extend(slice_ports(slice, node)?);
        if ports.len() > MAX_PORTS {
            return Err(format!(
                "more than {MAX_PORTS} ports of Services on the node {node}; choose one namespace"
            ));
        }
    }
    Ok(ports)
}

fn slice_ports(slice: &Value, node: &str) -> Result<Vec<ServicePort>, String> {
    if objects::text(slice, "/kind") != "EndpointSlice" {
        let problem = "expected EndpointSlice";
        return Err(objects::describe(slice, "/kind", &problem));
    }
    let labels = objects::labels(slice)?;
    let service = labels.get(SERVICE_NAME_LABEL);
    // Users may create slices with labels beyond the valid names of Services.
    let Some(service) = service.filter(|name| name.parse::<ServiceName>().is_ok()) else {
        return Ok(Vec::new());
    };
    let endpoints: Vec<Endpoint> = objects::field(slice, "/endpoints")?;
    let ports: Vec<EndpointPort> = objects::field(slice, "/ports")?;
    let ports: Vec<_> = ports.iter().filter_map(parse_port).collect();
    let is_here = |at: &&Endpoint| at.node_name.as_deref().is_none_or(|name| name == node);
    let pods = endpoints.iter().filter(is_here).filter_map(pod);
    let of_pod = |pod: PodRef| {
        let port = |(protocol, port): &(PortProtocol, u32)| ServicePort {
            pod: Some(pod.clone()),
            service: service.clone(),
            protocol: (*protocol).into(),
            port: *port,
        };
        ports.iter().map(port).collect::<Vec<_>>()
    };
    Ok(pods.flat_map(of_pod).collect())
}

/// Returns the pod of an endpoint, if the reference is valid: the API server does not validate references.
fn pod(endpoint: &Endpoint) -> Option<PodRef> {
    let target = endpoint.target_ref.as_ref()?;
    if target.kind.as_deref() != Some("Pod") {
        return None;
    }
    let (namespace, name, uid) = (
        target.namespace.as_ref()?,
        target.name.as_ref()?,
        target.uid.as_ref()?,
    );
    namespace.parse::<NamespaceName>().ok()?;
    name.parse::<PodName>().ok()?;
    uid.parse::<PodUid>().ok()?;
    Some(PodRef {
        namespace: namespace.clone(),
        name: name.clone(),
        uid: uid.clone(),
    })
}

/// Returns the port if its number is valid and its protocol is TCP or UDP.
fn parse_port(port: &EndpointPort) -> Option<(PortProtocol, u32)> {
    Some((protocol(port.protocol.as_deref())?, number(port.port?)?))
}

/// Parses a protocol, which defaults to TCP (core/v1, ServicePort). Returns `None` for protocols that inpod does not
/// list.
fn protocol(name: Option<&str>) -> Option<PortProtocol> {
    match name {
        None | Some("TCP") => Some(PortProtocol::Tcp),
        Some("UDP") => Some(PortProtocol::Udp),
        Some(_) => None,
    }
}

/// Returns the number if it is a valid port.
fn number(port: i32) -> Option<u32> {
    let number = u16::try_from(port).ok().filter(|number| *number > 0)?;
    Some(number.into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn endpoint(name: &str, node: Option<&str>, kind: &str) -> Value {
        json!({
            "addresses": ["10.0.0.2"],
            "nodeName": node,
            "conditions": {"ready": false},
            "targetRef": {"kind": kind, "namespace": "shop", "name": name, "uid": "u"},
        })
    }

    fn slice(service: &str) -> Value {
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "addressType": "IPv4",
            "metadata": {"namespace": "shop", "name": "web-x", "labels": {SERVICE_NAME_LABEL: service}},
            "ports": [
                {"name": "http", "port": 8080, "protocol": "TCP"},
                {"name": "dns", "port": 53, "protocol": "UDP"},
                {"name": "sctp", "port": 9, "protocol": "SCTP"},
                {"name": "none"},
            ],
            "endpoints": [
                endpoint("here", Some("n1"), "Pod"),
                endpoint("there", Some("n2"), "Pod"),
                endpoint("machine", Some("n1"), "VM"),
                endpoint("No/Pod", Some("n1"), "Pod"),
                {"addresses": ["10.0.0.9"], "nodeName": "n1"},
            ],
        })
    }

    #[test]
    fn a_slice_leads_to_the_pods_of_the_node_by_number() {
        let found = ports(&[slice("web")], "n1").unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|it| {
                (
                    it.pod.as_ref().unwrap().name.as_str(),
                    it.service.as_str(),
                    it.protocol(),
                    it.port,
                )
            })
            .collect();
        let wanted = [
            ("here", "web", PortProtocol::Tcp, 8080),
            ("here", "web", PortProtocol::Udp, 53),
        ];
        assert_eq!(found, wanted);
        let mut unlabeled = slice("web");
        unlabeled["metadata"]["labels"] = Value::Null;
        assert_eq!(ports(&[unlabeled, slice("No/Service")], "n1"), Ok(vec![]));
    }

    #[test]
    fn unusable_slices_are_named_with_the_field() {
        for (field, value, problem) in [
            ("kind", json!("Pod"), "Pod shop/web-x: kind: expected"),
            ("ports", json!([{"port": "http"}]), "ports: invalid type"),
            ("endpoints", json!({}), "endpoints: invalid type"),
        ] {
            let mut slice = slice("web");
            slice[field] = value;
            let error = ports(&[slice], "n1").unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
        let many = vec![slice("web"); MAX_PORTS / 2 + 1];
        let error = ports(&many, "n1").unwrap_err();
        assert!(error.starts_with("more than 16384 ports"), "{error}");
        assert_eq!(ports(&many[1..], "n1").unwrap().len(), MAX_PORTS);
    }
}
