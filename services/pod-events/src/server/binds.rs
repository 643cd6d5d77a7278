//! `ListBinds`: the sockets of pods, and how enrollment changes them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use futures_util::future::join_all;
use inpod_proto::{
    Invalid, addresses_to, podevents::v1 as wire, required, types::v1::Failure as WireFailure,
};
use inpod_types::{Failure, PodRef, Reason, ServiceName};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};
use tonic::Request;

use super::{Server, parse_field, selection::Filter};
use crate::{
    binds::{PodNetwork, Port, PortIndex, Socket, Ztunnel},
    checkpoint::{Intent, Record},
    explain::{self, PodInfo},
    pod::{Pod, Protocol},
    task::{record_without_netns, should_be_enrolled},
};

const POD_TIMEOUT: Duration = Duration::from_secs(2);

/// The part of the caller's time reserved for the response.
const REPLY_RESERVE: Duration = Duration::from_millis(500);

const MAX_CONCURRENT_PODS: usize = 16;

const MAX_LABELS: usize = 64;
const MAX_PORTS: usize = 16_384;

#[derive(Debug)]
struct Query {
    filter: Filter,
    labels: Vec<(String, String)>,
    ports: BTreeMap<PodRef, Vec<(Port, ServiceName)>>,
}

impl Query {
    fn parse(request: wire::ListBindsRequest) -> Result<Self, Invalid> {
        let labels = request.labels.iter().map(|text| label(text));
        if request.labels.len() > MAX_LABELS {
            return Err(Invalid::new("labels", format!("more than {MAX_LABELS}")));
        }
        if request.service_ports.len() > MAX_PORTS {
            let message = format!("more than {MAX_PORTS}");
            return Err(Invalid::new("service_ports", message));
        }
        let labels = labels.collect::<Result<_, _>>()?;
        let mut ports: BTreeMap<PodRef, Vec<_>> = BTreeMap::new();
        for port in request.service_ports {
            let (pod, port) = service_port(port).map_err(|it| it.within("service_ports"))?;
            ports.entry(pod).or_default().push(port);
        }
        let filter = Filter::parse(wire::ListPodsRequest {
            pod: request.pod,
            states: request.states,
            desired: request.desired,
            amiss: request.amiss,
            let_through: request.let_through,
        })?;
        Ok(Self {
            filter,
            labels,
            ports,
        })
    }

    fn matches(&self, known: &PodInfo) -> bool {
        let has = |(key, value): &(String, String)| {
            let labels = known.shown().map(|pod| &pod.labels);
            labels.and_then(|labels| labels.get(key)) == Some(value)
        };
        self.filter.selection.matches(known)
            && self.labels.iter().all(has)
            && self.filter.matches(&explain::summary(known))
    }
}

/// Parses `KEY=VALUE` in the characters of Kubernetes labels.
fn label(text: &str) -> Result<(String, String), Invalid> {
    let is_plain = |text: &str, more: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || more.contains(c);
        text.len() <= 317 && text.chars().all(allowed)
    };
    let pair = text.split_once('=');
    let pair = pair
        .filter(|(key, value)| !key.is_empty() && is_plain(key, "-_./") && is_plain(value, "-_."));
    let (key, value) = pair.ok_or_else(|| Invalid::new("labels", "expected KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}

fn service_port(port: wire::ServicePort) -> Result<(PodRef, (Port, ServiceName)), Invalid> {
    let protocol = match port.protocol() {
        wire::PortProtocol::Tcp => Protocol::Tcp,
        wire::PortProtocol::Udp => Protocol::Udp,
        wire::PortProtocol::Unspecified => {
            return Err(Invalid::new("protocol", "it is neither TCP nor UDP"));
        }
    };
    let number = u16::try_from(port.port).ok().filter(|number| *number > 0);
    let number = number.ok_or_else(|| Invalid::new("port", "it is not from 1 to 65535"))?;
    let service = parse_field("service", &port.service)?;
    Ok((required("pod", port.pod)?, ((protocol, number), service)))
}

impl Server {
    /// Lists the binds of the selected pods. A failed inspection of a pod does not affect the other pods.
    pub(super) async fn binds(
        &self,
        request: Request<wire::ListBindsRequest>,
    ) -> Result<Vec<wire::PodBinds>, Failure> {
        let until = inpod_service::deadline(&request);
        let until = until.checked_sub(REPLY_RESERVE).unwrap_or(until);
        let query = Query::parse(request.into_inner())?;
        let keys = self.keys(&query.filter.selection).into_iter();
        let known = keys.filter_map(|key| self.pod_info(&key));
        let known: Vec<_> = known.filter(|known| query.matches(known)).collect();
        let permits = Semaphore::new(MAX_CONCURRENT_PODS);
        let binds = known.iter().map(|known| async {
            let _permit = timeout_at(until, permits.acquire()).await;
            self.binds_of(known, &query, until).await
        });
        Ok(join_all(binds).await)
    }

    async fn binds_of(&self, known: &PodInfo, query: &Query, until: Instant) -> wire::PodBinds {
        let summary = explain::summary(known);
        let binds = wire::PodBinds {
            pod: summary.pod,
            desired: summary.desired,
            reason: summary.reason,
            state: summary.state,
            ..wire::PodBinds::default()
        };
        if known
            .shown()
            .is_some_and(|pod| pod.host_network || pod.terminal)
        {
            return binds;
        }
        let ports = referenced_ports(known, query);
        let network = PodNetwork {
            addresses: addresses(known),
            ztunnel: ztunnel(known),
        };
        let addresses = addresses_to(&network.addresses);
        match self.sockets(known, until).await {
            Ok(sockets) => wire::PodBinds {
                ports: ports.with_sockets(sockets, &network),
                addresses,
                ..binds
            },
            Err(failure) => wire::PodBinds {
                ports: ports.without_sockets(),
                failure: Some(WireFailure {
                    message: failure.message.clone(),
                    ..(&failure).into()
                }),
                addresses,
                ..binds
            },
        }
    }

    async fn sockets(&self, known: &PodInfo, until: Instant) -> Result<Vec<Socket>, Failure> {
        let deadline = until.min(Instant::now() + POD_TIMEOUT);
        if Instant::now() >= until {
            let message = "the caller's deadline passed before this pod was inspected";
            return Err(Failure::new(Reason::DeadlineExceeded, message));
        }
        match known.current().filter(|record| !record.has_unknown_netns()) {
            Some(record) => self.clients().sockets(record, deadline).await,
            None => {
                let netns = self
                    .clients()
                    .locate(self.undiscovered_record(known)?, deadline)
                    .await?;
                self.clients().sockets_at(&netns, deadline).await
            }
        }
    }

    /// Returns a record that locates the netns of a pod without a record. Refuses a pod that is to join the mesh,
    /// because the pod's task is already searching for the netns and keeps it.
    fn undiscovered_record(&self, known: &PodInfo) -> Result<Record, Failure> {
        let not_found_yet = |message: &str| Failure::new(Reason::SandboxAwaited, message);
        let pod = known.shown();
        let pod = pod.ok_or_else(|| not_found_yet("the pod's netns is not known"))?;
        if should_be_enrolled(&self.shared, pod, true) {
            let message = "the pod is to join the mesh; the search for its netns is in progress";
            return Err(not_found_yet(message).retry_after(POD_TIMEOUT));
        }
        if pod.addresses.is_empty() {
            return Err(not_found_yet(
                "no ADD was seen for the pod, and its status has no address",
            ));
        }
        record_without_netns(pod)
    }
}

/// Returns the ports that containers declare or Services target.
fn referenced_ports(known: &PodInfo, query: &Query) -> PortIndex {
    let mut ports = PortIndex::default();
    let declared = known.shown().into_iter().flat_map(|pod| &pod.ports);
    declared.for_each(|port| ports.add_container_port(port));
    for (port, service) in query.ports.get(&known.pod).into_iter().flatten() {
        ports.add_service(*port, service.as_str());
    }
    ports
}

/// Returns the recorded and the shown addresses, because the runtime may report an address before the status shows it.
fn addresses(known: &PodInfo) -> Vec<IpAddr> {
    let recorded = known.current().into_iter();
    let recorded = recorded.flat_map(|record| &record.addresses);
    let shown = known.shown().into_iter().flat_map(|pod| &pod.addresses);
    let all: BTreeSet<_> = recorded.chain(shown).copied().collect();
    all.into_iter().collect()
}

fn ztunnel(known: &PodInfo) -> Ztunnel {
    let has_sidecar = |pod: &Pod| pod.injection.is_some();
    if known
        .current()
        .is_some_and(|record| record.redirection.is_sidecar())
    {
        return Ztunnel::Never;
    }
    match known.current().map(|record| &record.intent) {
        None | Some(Intent::Out) if known.shown().is_some_and(has_sidecar) => Ztunnel::Never,
        None | Some(Intent::Out) => Ztunnel::Needs,
        Some(_) => Ztunnel::Has,
    }
}

#[cfg(test)]
mod tests {
    use inpod_proto::types::v1::PodRef as WireRef;

    use super::*;

    fn build_port(port: u32, protocol: wire::PortProtocol, service: &str) -> wire::ServicePort {
        wire::ServicePort {
            pod: Some(WireRef {
                namespace: "shop".into(),
                name: "web".into(),
                uid: "u".into(),
            }),
            service: service.to_owned(),
            protocol: protocol.into(),
            port,
        }
    }

    fn refused(request: wire::ListBindsRequest) -> String {
        Query::parse(request).unwrap_err().field().to_owned()
    }

    #[test]
    fn invalid_fields_of_a_request_are_named() {
        let tcp = wire::PortProtocol::Tcp;
        for (invalid, field) in [
            (build_port(0, tcp, "web"), "service_ports.port"),
            (build_port(65_536, tcp, "web"), "service_ports.port"),
            (
                build_port(80, wire::PortProtocol::Unspecified, "web"),
                "service_ports.protocol",
            ),
            (build_port(80, tcp, "Web/"), "service_ports.service"),
            (
                wire::ServicePort {
                    pod: None,
                    ..build_port(80, tcp, "web")
                },
                "service_ports.pod",
            ),
        ] {
            let request = wire::ListBindsRequest {
                service_ports: vec![invalid],
                ..Default::default()
            };
            assert_eq!(refused(request), field);
        }
        for labels in [
            vec!["app".to_owned()],
            vec!["=x".to_owned()],
            vec!["a=b c".to_owned()],
            vec!["a=b".to_owned(); 65],
        ] {
            let request = wire::ListBindsRequest {
                labels,
                ..Default::default()
            };
            assert_eq!(refused(request), "labels");
        }
        let request = wire::ListBindsRequest {
            service_ports: vec![build_port(80, tcp, "web"); MAX_PORTS + 1],
            ..Default::default()
        };
        assert_eq!(refused(request), "service_ports");
    }

    #[test]
    fn services_are_assigned_to_the_pod_that_they_target() {
        let request = wire::ListBindsRequest {
            labels: vec!["app=web".to_owned(), "empty=".to_owned()],
            service_ports: vec![
                build_port(80, wire::PortProtocol::Tcp, "web"),
                build_port(80, wire::PortProtocol::Udp, "web"),
            ],
            ..Default::default()
        };
        let query = Query::parse(request).unwrap();
        assert_eq!(query.labels.len(), 2);
        let ports: Vec<_> = query
            .ports
            .into_values()
            .flatten()
            .map(|(port, _)| port)
            .collect();
        assert_eq!(ports, [(Protocol::Tcp, 80), (Protocol::Udp, 80)]);
    }
}
