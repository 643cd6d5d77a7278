//! Which Services lead to which ports of this node's pods, by their EndpointSlices: named ports are resolved in them, and
//! pods that are not ready are in them too.

use inpod_proto::{
    podevents::v1::{GetStatusRequest, PortProtocol, ServicePort},
    types::v1::PodRef,
};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice};
use kube::{Api, api::ListParams};
use tokio::time::timeout;

use crate::{
    arguments::BindsQuery,
    ask::{Node, POD_EVENTS},
    error::AskError,
    kubernetes::{ANSWER, failed, reach},
};

/// The label that names a slice's Service.
const SERVICE: &str = "kubernetes.io/service-name";

/// How many slices are asked for at once.
const PAGE: u32 = 500;

const WHAT: &str = "list endpointslices";

/// The ports of this node's pods.
pub(super) async fn ports(node: &Node, query: &BindsQuery) -> Result<Vec<ServicePort>, AskError> {
    let mut client = node.pod_events();
    let status = client.get_status(node.request(GetStatusRequest {}));
    let here = node.answer(POD_EVENTS, status).await?.node_name;
    let (client, _) = reach(query.kubeconfig.as_deref()).await?;
    let namespace = query.pod.as_ref().map(|pod| pod.namespace.as_str());
    let slices = match namespace.filter(|namespace| !namespace.is_empty()) {
        Some(namespace) => Api::<EndpointSlice>::namespaced(client, namespace),
        None => Api::all(client),
    };
    let slices = list(&slices).await?;
    Ok(slices.iter().flat_map(|slice| of(slice, &here)).collect())
}

async fn list(api: &Api<EndpointSlice>) -> Result<Vec<EndpointSlice>, AskError> {
    let (mut all, mut how) = (Vec::new(), ListParams::default().limit(PAGE));
    loop {
        let late = |_| failed(WHAT, &format!("no answer within {} s", ANSWER.as_secs()));
        let page = timeout(ANSWER, api.list(&how)).await.map_err(late)?;
        let page = page.map_err(|error| failed(WHAT, &error))?;
        all.extend(page.items);
        match page.metadata.continue_.filter(|next| !next.is_empty()) {
            Some(next) => how = how.continue_token(&next),
            None => return Ok(all),
        }
    }
}

/// Those of one slice that are of a node.
fn of(slice: &EndpointSlice, node: &str) -> Vec<ServicePort> {
    let labels = slice.metadata.labels.as_ref();
    let Some(service) = labels.and_then(|labels| labels.get(SERVICE)) else {
        return Vec::new();
    };
    let is_here = |at: &&Endpoint| at.node_name.as_deref().is_none_or(|name| name == node);
    let pods = slice
        .endpoints
        .iter()
        .flatten()
        .filter(is_here)
        .filter_map(pod);
    let ports: Vec<_> = slice.ports.iter().flatten().filter_map(port).collect();
    let of_pod = |pod: PodRef| {
        let port = |(protocol, port): &(PortProtocol, u32)| ServicePort {
            pod: Some(pod.clone()),
            service: service.clone(),
            protocol: (*protocol).into(),
            port: *port,
        };
        ports.iter().map(port).collect::<Vec<_>>()
    };
    pods.flat_map(of_pod).collect()
}

fn pod(endpoint: &Endpoint) -> Option<PodRef> {
    let target = endpoint.target_ref.as_ref()?;
    if target.kind.as_deref() != Some("Pod") {
        return None;
    }
    Some(PodRef {
        namespace: target.namespace.clone()?,
        name: target.name.clone()?,
        uid: target.uid.clone()?,
    })
}

/// One that is a number, and TCP or UDP.
fn port(port: &EndpointPort) -> Option<(PortProtocol, u32)> {
    let protocol = match port.protocol.as_deref() {
        None | Some("TCP") => PortProtocol::Tcp,
        Some("UDP") => PortProtocol::Udp,
        Some(_) => return None,
    };
    let number = u16::try_from(port.port?).ok();
    let number = number.filter(|number| *number > 0)?;
    Some((protocol, number.into()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn endpoint(name: &str, node: Option<&str>, kind: &str) -> serde_json::Value {
        json!({
            "addresses": ["10.0.0.2"],
            "nodeName": node,
            "conditions": {"ready": false},
            "targetRef": {"kind": kind, "namespace": "shop", "name": name, "uid": "u"},
        })
    }

    #[test]
    fn a_slice_leads_to_the_pods_of_the_node_by_number() {
        let slice = |labels: serde_json::Value| -> EndpointSlice {
            serde_json::from_value(json!({
                "addressType": "IPv4",
                "metadata": {"namespace": "shop", "name": "web-x", "labels": labels},
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
                    {"addresses": ["10.0.0.9"], "nodeName": "n1"},
                ],
            }))
            .unwrap()
        };
        let found = of(&slice(json!({SERVICE: "web"})), "n1");
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
        assert_eq!(of(&slice(json!({})), "n1"), []);
    }
}
