//! Finds the ports of this node's pods to which Services forward. EndpointSlices contain resolved ports, and pods that
//! are not ready, too.

use std::fmt::Debug;

use inpod_proto::{
    podevents::v1::{GetStatusRequest, PortProtocol, ServicePort},
    types::v1::PodRef,
};
use k8s_openapi::{
    NamespaceResourceScope,
    api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice},
};
use kube::{Api, Client, Resource, api::ListParams};
use tokio::time::timeout;

use crate::{
    arguments::BindsQuery,
    error::CommandError,
    kubernetes::{self, REQUEST_TIMEOUT},
    node::{Node, PodEvents},
};

/// The label that names the Service of a slice.
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";

const PAGE_SIZE: u32 = 500;

/// The ports found so far; `missing` is set if the list is incomplete.
#[derive(Debug, Default)]
pub(super) struct ServicePorts {
    pub(super) ports: Vec<ServicePort>,
    pub(super) missing: Option<CommandError>,
}

/// Reads the ports and reports an error of Kubernetes in the result, so that the other facts are still printed.
pub(super) async fn ports(node: &Node, query: &BindsQuery) -> Result<ServicePorts, CommandError> {
    let status = node.ask(GetStatusRequest {}, PodEvents::get_status).await?;
    let namespace = query.selector().map(|pod| pod.namespace);
    let namespace = namespace.filter(|namespace| !namespace.is_empty());
    let mut found = ServicePorts::default();
    let result = match kubernetes::connect(query.kubeconfig.as_deref()).await {
        Ok((client, _)) => {
            let query_ = Query {
                client,
                namespace: namespace.as_deref(),
                node: &status.node_name,
            };
            query_.all(&mut found.ports).await
        }
        Err(error) => Err(error),
    };
    found.missing = result.err();
    Ok(found)
}

struct Query<'a> {
    client: Client,
    /// The namespace to query; all namespaces if unset.
    namespace: Option<&'a str>,
    node: &'a str,
}

impl Query<'_> {
    async fn all(&self, ports: &mut Vec<ServicePort>) -> Result<(), CommandError> {
        let slices: Vec<EndpointSlice> = self.list("endpointslices").await?;
        let found = slices.iter();
        ports.extend(found.flat_map(|slice| service_ports(slice, self.node)));
        Ok(())
    }

    async fn list<K>(&self, what: &str) -> Result<Vec<K>, CommandError>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
        K: Clone + Debug + serde::de::DeserializeOwned,
    {
        let what = format!("list {what}");
        let api: Api<K> = match self.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let mut params = ListParams::default().limit(PAGE_SIZE);
        let mut all = Vec::new();
        loop {
            let late = |_| {
                kubernetes::error(
                    &what,
                    &format!("no answer within {} s", REQUEST_TIMEOUT.as_secs()),
                )
            };
            let page = timeout(REQUEST_TIMEOUT, api.list(&params))
                .await
                .map_err(late)?;
            let page = page.map_err(|error| kubernetes::error(&what, &describe_error(&error)))?;
            all.extend(page.items);
            match page.metadata.continue_.filter(|next| !next.is_empty()) {
                Some(next) => params = params.continue_token(&next),
                None => return Ok(all),
            }
        }
    }
}

/// Returns the message of the API server, which names the missing right.
fn describe_error(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error
        && !status.message.is_empty()
    {
        return status.message.clone();
    }
    error.to_string()
}

fn service_ports(slice: &EndpointSlice, node: &str) -> Vec<ServicePort> {
    let labels = slice.metadata.labels.as_ref();
    let Some(service) = labels.and_then(|labels| labels.get(SERVICE_NAME_LABEL)) else {
        return Vec::new();
    };
    let is_here = |at: &&Endpoint| at.node_name.as_deref().is_none_or(|name| name == node);
    let pods = slice
        .endpoints
        .iter()
        .flatten()
        .filter(is_here)
        .filter_map(pod);
    let ports: Vec<_> = slice
        .ports
        .iter()
        .flatten()
        .filter_map(parse_port)
        .collect();
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
        let found = service_ports(&slice(json!({SERVICE_NAME_LABEL: "web"})), "n1");
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
        assert_eq!(service_ports(&slice(json!({})), "n1"), []);
    }
}
