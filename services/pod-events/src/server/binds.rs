//! `ListBinds`: the sockets of pods, and how enrollment changes them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use futures_util::future::join_all;
use inpod_proto::{
    Invalid, addresses_to, netconfig::v1::list_listeners_request::Target, podevents::v1 as wire,
    required,
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
    explain::{self, PodInfo, failure_to_wire},
    pod::Protocol,
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
    ports: BTreeMap<PodRef, BTreeSet<(Port, ServiceName)>>,
}

impl Query {
    fn parse(request: wire::ListBindsRequest) -> Result<Self, Invalid> {
        let too_many = |field, max| Invalid::new(field, format!("more than {max}"));
        if request.labels.len() > MAX_LABELS {
            return Err(too_many("labels", MAX_LABELS));
        }
        if request.service_ports.len() > MAX_PORTS {
            return Err(too_many("service_ports", MAX_PORTS));
        }
        let labels = request.labels.iter().map(|text| label(text));
        let labels = labels.collect::<Result<_, _>>()?;
        let mut ports: BTreeMap<PodRef, BTreeSet<_>> = BTreeMap::new();
        for port in request.service_ports {
            let (pod, port) = service_port(port).map_err(|it| it.within("service_ports"))?;
            ports.entry(pod).or_default().insert(port);
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
        self.labels.iter().all(has) && self.filter.matches(&explain::summary(known))
    }
}

/// Parses `KEY=VALUE` in the characters of Kubernetes labels.
fn label(text: &str) -> Result<(String, String), Invalid> {
    let is_plain = |text: &str, more: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || more.contains(c);
        text.len() <= 317 && text.chars().all(allowed)
    };
    let pair = text
        .split_once('=')
        .filter(|(key, value)| !key.is_empty() && is_plain(key, "-_./") && is_plain(value, "-_."));
    let (key, value) = pair.ok_or_else(|| Invalid::new("labels", "expected KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}

fn service_port(port: wire::ServicePort) -> Result<(PodRef, (Port, ServiceName)), Invalid> {
    let protocol = Some(port.protocol()).filter(|it| *it != Protocol::Unspecified);
    let protocol = protocol.ok_or_else(|| Invalid::new("protocol", "it is neither TCP nor UDP"))?;
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
        let known = self.pods(&query.filter.selection);
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
        let (ports, failure) = match self.sockets(known, until).await {
            Ok(sockets) => (ports.with_sockets(sockets, &network), None),
            Err(failure) => (ports.without_sockets(), Some(failure_to_wire(&failure))),
        };
        wire::PodBinds {
            ports,
            failure,
            addresses: addresses_to(&network.addresses),
            ..binds
        }
    }

    async fn sockets(&self, known: &PodInfo, until: Instant) -> Result<Vec<Socket>, Failure> {
        let deadline = until.min(Instant::now() + POD_TIMEOUT);
        if Instant::now() >= until {
            let message = "the caller's deadline passed before this pod was inspected";
            return Err(Failure::new(Reason::DeadlineExceeded, message));
        }
        let known_netns = known.current().filter(|record| !record.has_unknown_netns());
        if let Some(record) = known_netns.filter(|record| record.netns_id.is_some()) {
            let claim = Target::Sandbox((&record.sandbox).into());
            match self.clients().sockets(claim, deadline).await {
                // A restarted netconfig has no claims yet.
                Err(failure) if failure.reason == Reason::ClaimUnknown => {}
                listed => return listed,
            }
        }
        let netns = match known_netns {
            Some(record) => record.expected_netns(),
            None => self.registry.find_netns(known.shown(), deadline).await?,
        };
        let target = Target::Netns((&netns).into());
        self.clients().sockets(target, deadline).await
    }
}

/// Returns the ports that containers declare or Services target.
fn referenced_ports(known: &PodInfo, query: &Query) -> PortIndex {
    let mut ports = PortIndex::default();
    let declared = known.shown().into_iter().flat_map(|pod| &pod.ports);
    for port in declared.collect::<BTreeSet<_>>() {
        ports.add_container_port(port);
    }
    for (port, service) in query.ports.get(&known.pod).into_iter().flatten() {
        ports.add_service(*port, service.as_str());
    }
    ports
}

/// Returns the recorded and the shown addresses, because the runtime may report an address before the status shows it.
fn addresses(known: &PodInfo) -> Vec<IpAddr> {
    let recorded = known.current().map(|record| &record.addresses);
    let shown = known.shown().map(|pod| &pod.addresses);
    let all = recorded.into_iter().chain(shown).flatten();
    let all: BTreeSet<_> = all.copied().collect();
    all.into_iter().collect()
}

fn ztunnel(known: &PodInfo) -> Ztunnel {
    let has_sidecar = known.shown().is_some_and(|pod| pod.injection.is_some());
    match known.current() {
        Some(record) if record.redirection.is_sidecar() => Ztunnel::Never,
        Some(record) if record.intent.has_effects() => Ztunnel::Has,
        Some(_) | None if has_sidecar => Ztunnel::Never,
        Some(_) | None => Ztunnel::Needs,
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
        let ports = query.ports.into_values().flatten().map(|(port, _)| port);
        assert!(ports.eq([(Protocol::Tcp, 80), (Protocol::Udp, 80)]));
    }
}
