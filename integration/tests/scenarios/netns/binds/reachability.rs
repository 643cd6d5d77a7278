//! Inbound forwarding (services/docs/facts/istio-sidecar.md, 7): three ways to bind, with a Service or without. The
//! same clients try without a mesh and in it, over IPv4 and IPv6.

use std::net::{IpAddr, SocketAddr};

use anyhow::ensure;
use inpod_proto::podevents::v1::{BindChange, PodState};
use integration::{Node, Pod, Spec};

use crate::netns::binds::{
    bound::{Bound, Table, answer, servers, table, wanted},
    report::{binds, listed},
};

/// The addresses of the Service, whose ports equal the pod's ports.
const SERVICE: [&str; 2] = ["10.96.0.10", "fd96::10"];

/// A pod of the same bridge sees these as a Service client's source.
const NODE_ADDRESSES: [&str; 2] = ["10.77.0.1", "fd77::1"];

/// Neither pod is in a mesh at first.
pub(crate) struct Fixture {
    pub(crate) node: Node,
    pub(crate) server: Pod,
    pub(crate) client: Pod,
    _servers: Vec<Bound>,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let node = Node::running().unwrap();
        let server = node.pod(Spec::new("server")).unwrap();
        let client = node.pod(Spec::new("client")).unwrap();
        let fixture = Self {
            _servers: servers(&server),
            node,
            server,
            client,
        };
        fixture.serve();
        fixture
    }

    /// Forwards a Service to the pod as kube-proxy does. A client on the same bridge is masqueraded; otherwise its
    /// answers would bypass the node.
    fn serve(&self) {
        let net = format!("--net={}", self.node.netns().path().display());
        let (v4, v6) = (self.server.v4, self.server.v6);
        let [service4, service6] = SERVICE;
        let rules = format!(
            "table inet services {{
               chain prerouting {{ type nat hook prerouting priority dstnat;
                 ip daddr {service4} dnat ip to {v4}
                 ip6 daddr {service6} dnat ip6 to {v6}
               }}
               chain postrouting {{ type nat hook postrouting priority srcnat; ct status dnat masquerade; }}
             }}"
        );
        for command in [
            &["sysctl", "-qw", "net.ipv4.ip_forward=1"][..],
            &["sysctl", "-qw", "net.ipv6.conf.all.forwarding=1"],
            &["nft", &rules],
        ] {
            integration::run("nsenter", &[&[net.as_str()], command].concat()).unwrap();
        }
    }

    pub(crate) fn join(&self) {
        let spec = self.server.spec.clone().ambient();
        self.node.write_manifest(&spec).unwrap();
        self.node.until_whole(&spec).unwrap();
    }

    /// Returns the address by which the pod is called.
    pub(crate) fn to(&self, service: bool, v6: bool) -> IpAddr {
        match (service, v6) {
            (true, _) => SERVICE[usize::from(v6)].parse().unwrap(),
            (false, false) => self.server.v4.into(),
            (false, true) => self.server.v6.into(),
        }
    }

    /// Returns the source that the application must see.
    pub(crate) fn source(&self, service: bool, v6: bool) -> IpAddr {
        match (service, v6) {
            (true, _) => NODE_ADDRESSES[usize::from(v6)].parse().unwrap(),
            (false, false) => self.client.v4.into(),
            (false, true) => self.client.v6.into(),
        }
    }

    pub(crate) fn ask(&self, port: u16, service: bool, v6: bool) -> anyhow::Result<(u16, IpAddr)> {
        answer(
            &self.client.netns,
            SocketAddr::new(self.to(service, v6), port),
        )
    }

    /// Expects each connection on the right path: in the mesh once at the pod's 15006, for the pod's own
    /// address and that port.
    fn table(&self, in_mesh: bool) -> anyhow::Result<Table> {
        let mut odd = Vec::new();
        let ask = |port, service, v6| {
            let before = self.node.accesses()?.len();
            let answer = self.ask(port, service, v6);
            let taken = self.node.accesses()?.split_off(before).into_iter();
            let taken = taken.filter(|it| it.event == "accepted");
            let taken: Vec<_> = taken
                .map(|it| (it.uid, it.listener, it.destination))
                .collect();
            let destination = SocketAddr::new(self.to(false, v6), port);
            let wanted = (self.server.spec.uid.clone(), 15006, Some(destination));
            let wanted: Vec<_> = in_mesh.then_some(wanted).into_iter().collect();
            if taken != wanted {
                odd.push(format!("{port}: took {taken:?}, not {wanted:?}"));
            }
            answer
        };
        let table = table(ask, |service, v6| self.source(service, v6))?;
        ensure!(odd.is_empty(), "{odd:?}");
        Ok(table)
    }
}

#[test]
fn who_reaches_an_application_is_the_same_without_a_mesh_and_in_it() {
    let fixture = Fixture::new();
    assert_eq!(fixture.table(false).unwrap(), wanted());
    fixture.join();
    assert_eq!(fixture.table(true).unwrap(), wanted());
}

#[test]
fn a_connection_that_misses_ztunnel_is_noticed_though_it_is_answered() {
    let fixture = Fixture::new();
    // Outside of the mesh the application answers over the wrong path.
    let error = fixture.table(true).unwrap_err();
    assert!(format!("{error:#}").contains("took []"), "{error:#}");
}

#[test]
fn what_enrollment_changes_for_a_socket_at_an_interface_is_reported_before_and_so() {
    let node = Node::running().unwrap();
    let server = node.pod(Spec::new("server")).unwrap();
    let client = node.pod(Spec::new("client")).unwrap();
    let at = |port| SocketAddr::new([0_u16; 8].into(), port);
    let _servers = [
        Bound::with(&server.netns, at(8081), true, None),
        Bound::with(&server.netns, at(8082), true, Some("eth0")),
        Bound::with(&server.netns, at(8083), true, Some("lo")),
    ];
    let reached = || {
        let ports = [8081, 8082, 8083].into_iter();
        let ports = ports.flat_map(|port| server.addresses().map(|to| SocketAddr::new(to, port)));
        let reached = ports.map(|to| answer(&client.netns, to).is_ok());
        reached.collect::<Vec<_>>()
    };
    let reported = || {
        let pod = binds(&node, &server.spec);
        let ports = pod.ports.iter();
        ports
            .map(|port| (port.port, port.changes().collect::<Vec<_>>()))
            .collect::<Vec<_>>()
    };
    let foretold = [
        (8081, vec![]),
        (8082, vec![BindChange::Lost]),
        (8083, vec![]),
    ];
    assert_eq!(reported(), foretold);
    assert_eq!(reached(), [true, true, true, true, false, false]);
    let spec = server.spec.clone().ambient();
    node.write_manifest(&spec).unwrap();
    node.until_whole(&spec).unwrap();
    assert_eq!(reached(), [true, true, false, false, false, false]);
    // ztunnel's own ports belong to no application.
    assert_eq!(reported(), foretold);
    let state = listed(&node, &spec).unwrap().state();
    assert_eq!(state, PodState::Enrolled);
}
