//! What pods bind, asked by people.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use futures_util::future::join_all;
use inpod_proto::{
    Invalid, addresses_to, podevents::v1 as wire, required, types::v1::Failure as Told,
};
use inpod_types::{Failure, PodRef, Reason, ServiceName};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};
use tonic::Request;

use super::{Server, selection::Filter, text};
use crate::{
    binds::{Place, Port, Protocol, Socket, Spoken, Ztunnel},
    checkpoint::{Intent, Record},
    explain::{self, Known},
    pod::Pod,
    task::{record_without_netns, should_be_enrolled},
};

/// How long one pod may take.
const EACH: Duration = Duration::from_secs(2);

/// What is kept back of the caller's time for the answer.
const RESERVE: Duration = Duration::from_millis(500);

/// How many pods are looked into at once.
const AT_ONCE: usize = 16;

/// How much of each a request may hold.
const MOST_LABELS: usize = 64;
const MOST_PORTS: usize = 16_384;

/// What is asked for.
#[derive(Debug)]
struct Query {
    filter: Filter,
    labels: Vec<(String, String)>,
    ports: BTreeMap<PodRef, Vec<(Port, ServiceName)>>,
}

impl Query {
    fn parse(request: wire::ListBindsRequest) -> Result<Self, Invalid> {
        let labels = request.labels.iter().map(|text| label(text));
        if request.labels.len() > MOST_LABELS {
            return Err(Invalid::new("labels", format!("more than {MOST_LABELS}")));
        }
        if request.service_ports.len() > MOST_PORTS {
            let message = format!("more than {MOST_PORTS}");
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

    fn takes(&self, known: &Known) -> bool {
        let has = |(key, value): &(String, String)| {
            let labels = known.shown().map(|pod| &pod.labels);
            labels.and_then(|labels| labels.get(key)) == Some(value)
        };
        self.filter.selection.is_of(known)
            && self.labels.iter().all(has)
            && self.filter.takes(&explain::summary(known))
    }
}

/// `KEY=VALUE`, each of the letters that Kubernetes allows in labels.
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
    let service = text("service", &port.service)?;
    Ok((required("pod", port.pod)?, ((protocol, number), service)))
}

impl Server {
    /// What each pod binds that is asked for. One that cannot be looked into hinders no other.
    pub(super) async fn binds(
        &self,
        request: Request<wire::ListBindsRequest>,
    ) -> Result<Vec<wire::PodBinds>, Failure> {
        let until = inpod_service::deadline(&request);
        let until = until.checked_sub(RESERVE).unwrap_or(until);
        let query = Query::parse(request.into_inner())?;
        let keys = self.keys(&query.filter.selection).into_iter();
        let known = keys.filter_map(|key| self.known(&key));
        let known: Vec<_> = known.filter(|known| query.takes(known)).collect();
        let turns = Semaphore::new(AT_ONCE);
        let told = known.iter().map(|known| async {
            let _turn = timeout_at(until, turns.acquire()).await;
            self.binds_of(known, &query, until).await
        });
        Ok(join_all(told).await)
    }

    async fn binds_of(&self, known: &Known, query: &Query, until: Instant) -> wire::PodBinds {
        let summary = explain::summary(known);
        let told = wire::PodBinds {
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
            return told;
        }
        let spoken = spoken_of(known, query);
        let place = Place {
            addresses: addresses(known),
            ztunnel: ztunnel(known),
        };
        let addresses = addresses_to(&place.addresses);
        match self.sockets(known, until).await {
            Ok(sockets) => wire::PodBinds {
                ports: spoken.seen(sockets, &place),
                addresses,
                ..told
            },
            Err(failure) => wire::PodBinds {
                ports: spoken.unseen(),
                failure: Some(Told {
                    message: failure.message.clone(),
                    ..(&failure).into()
                }),
                addresses,
                ..told
            },
        }
    }

    async fn sockets(&self, known: &Known, until: Instant) -> Result<Vec<Socket>, Failure> {
        let deadline = until.min(Instant::now() + EACH);
        if Instant::now() >= until {
            let message = "the caller's time was over before it was this pod's turn";
            return Err(Failure::new(Reason::DeadlineExceeded, message));
        }
        match known.current().filter(|record| !record.has_unknown_netns()) {
            Some(record) => self.clients().sockets(record, deadline).await,
            None => {
                let netns = self
                    .clients()
                    .locate(self.stranger(known)?, deadline)
                    .await?;
                self.clients().sockets_at(&netns, deadline).await
            }
        }
    }

    /// What is to be looked for of a pod that no verb was seen for. One that is to join is looked for by its task, which
    /// keeps what it finds.
    fn stranger(&self, known: &Known) -> Result<Record, Failure> {
        let awaited = |message: &str| Failure::new(Reason::SandboxAwaited, message);
        let pod = known.shown();
        let pod = pod.ok_or_else(|| awaited("no netns of the pod is known"))?;
        if should_be_enrolled(&self.shared, pod, true) {
            let message = "the pod is to join the mesh, and its netns is being looked for";
            return Err(awaited(message).retry_after(EACH));
        }
        if pod.addresses.is_empty() {
            return Err(awaited(
                "no verb was seen for the pod, and its status shows no address",
            ));
        }
        record_without_netns(pod)
    }
}

/// The ports that its containers declare and that Services lead to.
fn spoken_of(known: &Known, query: &Query) -> Spoken {
    let mut spoken = Spoken::default();
    let declared = known.shown().into_iter().flat_map(|pod| &pod.ports);
    declared.for_each(|port| spoken.declare(port));
    for (port, service) in query.ports.get(&known.pod).into_iter().flatten() {
        spoken.lead(*port, service.as_str());
    }
    spoken
}

/// All that are known: a runtime may name one that the status does not show yet.
fn addresses(known: &Known) -> Vec<IpAddr> {
    let recorded = known.current().into_iter();
    let recorded = recorded.flat_map(|record| &record.addresses);
    let shown = known.shown().into_iter().flat_map(|pod| &pod.addresses);
    let all: BTreeSet<_> = recorded.chain(shown).copied().collect();
    all.into_iter().collect()
}

fn ztunnel(known: &Known) -> Ztunnel {
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

    fn port(port: u32, protocol: wire::PortProtocol, service: &str) -> wire::ServicePort {
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
    fn what_cannot_be_asked_is_named() {
        let tcp = wire::PortProtocol::Tcp;
        for (odd, field) in [
            (port(0, tcp, "web"), "service_ports.port"),
            (port(65_536, tcp, "web"), "service_ports.port"),
            (
                port(80, wire::PortProtocol::Unspecified, "web"),
                "service_ports.protocol",
            ),
            (port(80, tcp, "Web/"), "service_ports.service"),
            (
                wire::ServicePort {
                    pod: None,
                    ..port(80, tcp, "web")
                },
                "service_ports.pod",
            ),
        ] {
            let request = wire::ListBindsRequest {
                service_ports: vec![odd],
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
            service_ports: vec![port(80, tcp, "web"); MOST_PORTS + 1],
            ..Default::default()
        };
        assert_eq!(refused(request), "service_ports");
    }

    #[test]
    fn services_are_told_of_the_pod_that_they_lead_to() {
        let request = wire::ListBindsRequest {
            labels: vec!["app=web".to_owned(), "empty=".to_owned()],
            service_ports: vec![
                port(80, wire::PortProtocol::Tcp, "web"),
                port(80, wire::PortProtocol::Udp, "web"),
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
