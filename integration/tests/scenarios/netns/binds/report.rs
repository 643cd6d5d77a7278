use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    process::{Command, Output, Stdio},
    time::Instant,
};

use anyhow::Context as _;
use inpod_proto::{
    podevents::v1::{BindKind, ListBindsRequest, PodBinds, PortProtocol, ServicePort},
    types::v1::{PodRef, PodSelector, Reason},
};
use integration::{Inhabitant, Node, Pod, Spec, TIMEOUT, bin, eventually};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::netns::binds::bound::{BindAddress, Bound, servers};

/// Lists all listeners of pods with this name.
pub(crate) fn listed(node: &Node, spec: &Spec) -> anyhow::Result<PodBinds> {
    let mut pods = node.api().binds(ListBindsRequest {
        pod: Some(PodSelector {
            namespace: spec.namespace.clone(),
            name: spec.name.clone(),
            uid: String::new(),
        }),
        ..Default::default()
    })?;
    pods.pop().context("no such pod")
}

pub(crate) fn binds(node: &Node, spec: &Spec) -> PodBinds {
    let pod = listed(node, spec).unwrap();
    assert_eq!(pod.failure, None);
    pod
}

fn kinds(pod: &PodBinds) -> Vec<(u32, BindKind)> {
    let ports = pod.ports.iter();
    ports.map(|port| (port.port, port.kind())).collect()
}

fn inpod(node: &Node, arguments: &[&str]) -> Output {
    let mut command = Command::new(bin("inpod").unwrap());
    command.arg("--run-dir").arg(node.run_dir());
    command.arg("binds").args(arguments).env_clear();
    command.stdin(Stdio::null()).output().unwrap()
}

fn words(text: &[u8]) -> Vec<String> {
    let line = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    String::from_utf8_lossy(text).lines().map(line).collect()
}

#[test]
fn each_way_to_bind_is_reported_before_enrollment_and_after_it() {
    let node = Node::running().unwrap();
    let server = node.pod(Spec::new("server")).unwrap();
    let _servers = servers(&server);
    let udp = server
        .netns
        .within(|| std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 5353)));
    let _udp = udp.unwrap().unwrap();
    let wanted = [
        (8081, BindKind::Wildcard),
        (8082, BindKind::Localhost),
        (8083, BindKind::PodIp),
        (9081, BindKind::Wildcard),
        (9082, BindKind::Localhost),
        (9083, BindKind::PodIp),
        (5353, BindKind::Wildcard),
    ];
    let before = binds(&node, &server.spec);
    assert_eq!(kinds(&before), wanted);
    assert_eq!(before.ports[6].protocol(), PortProtocol::Udp);
    let addresses = server.addresses().map(|it| it.to_string());
    assert_eq!(before.addresses, addresses);
    let wildcard = &before.ports[0].binds[..];
    assert!(
        matches!(wildcard, [bind] if bind.ipv4 && bind.ipv6 && bind.address == "::"),
        "{wildcard:?}"
    );
    assert_eq!(before.ports[2].binds.len(), 2);
    let spec = server.spec.clone().ambient();
    node.write_manifest(&spec).unwrap();
    node.until_whole(&spec).unwrap();
    assert_eq!(binds(&node, &spec).ports, before.ports);
}

#[test]
fn a_socket_of_ipv6_alone_takes_no_ipv4_also_in_the_report() {
    let node = Node::running().unwrap();
    let server = node.pod(Spec::new("server")).unwrap();
    let any = SocketAddr::new([0_u16; 8].into(), 8080);
    let _server = Bound::with(&server.netns, any, false, None);
    let pod = binds(&node, &server.spec);
    let bind = &pod.ports[0].binds[0];
    assert!(bind.ipv6 && !bind.ipv4, "{bind:?}");
    let text = words(&inpod(&node, &["shop/server"]).stdout);
    assert_eq!(
        text[1],
        "shop server 8080/TCP - wildcard :: (IPv6 only) unchanged -"
    );
}

#[test]
fn ports_that_services_lead_to_are_reported_with_what_nobody_listens_on() {
    let node = Node::running().unwrap();
    let server = node.pod(Spec::new("server")).unwrap();
    let _servers = servers(&server);
    let lead = |service: &str, port: u16, uid: &str| ServicePort {
        pod: Some(PodRef {
            namespace: "shop".into(),
            name: "server".into(),
            uid: uid.into(),
        }),
        service: service.into(),
        protocol: PortProtocol::Tcp.into(),
        port: port.into(),
    };
    let own = server.spec.uid.as_str();
    let pods = node.api().binds(ListBindsRequest {
        labels: vec!["app=server".into()],
        service_ports: vec![
            lead("a", BindAddress::PodIp.port(), own),
            lead("b", BindAddress::PodIp.port(), own),
            lead("c", 7000, own),
            // An earlier pod with the name has an endpoint.
            lead("d", 7001, "another"),
        ],
        ..Default::default()
    });
    let pods = pods.unwrap();
    assert_eq!(pods.len(), 1);
    let led: Vec<_> = pods[0]
        .ports
        .iter()
        .filter(|port| !port.services.is_empty())
        .collect();
    let services = |index: usize| led[index].services.join(" ");
    assert_eq!(
        (led.len(), led[0].port, led[0].kind()),
        (2, 7000, BindKind::NotFound)
    );
    assert_eq!(
        (services(0), services(1)),
        ("c".to_owned(), "a b".to_owned())
    );
    let none = node.api().binds(ListBindsRequest {
        labels: vec!["app=another".into()],
        ..Default::default()
    });
    assert_eq!(none.unwrap(), []);
}

#[test]
fn a_pod_that_cannot_be_inspected_hinders_no_other() {
    let node = Node::running().unwrap();
    let good = node.pod(Spec::new("good")).unwrap();
    let _server = servers(&good);
    let bad = node.pod(Spec::new("bad")).unwrap();
    bad.unmount().unwrap();
    node.write_manifest(&Spec::new("stranger")).unwrap();
    node.until_known(&Spec::new("stranger")).unwrap();
    let pods = node.api().binds(ListBindsRequest::default()).unwrap();
    let name = |pod: &PodBinds| pod.pod.clone().unwrap().name;
    let reported: Vec<_> = pods
        .iter()
        .map(|pod| {
            (
                name(pod),
                pod.failure.as_ref().map(|it| it.reason()),
                pod.ports.len(),
            )
        })
        .collect();
    let wanted = [
        ("bad".to_owned(), Some(Reason::NetnsMissing), 0),
        ("good".to_owned(), None, 6),
        ("stranger".to_owned(), Some(Reason::SandboxAwaited), 0),
    ];
    assert_eq!(reported, wanted);
    let output = inpod(&node, &[]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = words(&output.stdout);
    assert!(
        text.iter()
            .any(|line| line.starts_with("shop/bad: ") && line.ends_with("[NETNS_MISSING]")),
        "{text:?}"
    );
}

#[test]
fn a_netconfig_that_hangs_costs_two_seconds_and_not_the_answer() {
    let node = Node::running().unwrap();
    let server = node.pod(Spec::new("server")).unwrap();
    node.signal("netconfig", Signal::SIGSTOP).unwrap();
    let began = Instant::now();
    let pod = listed(&node, &server.spec);
    let took = began.elapsed();
    node.signal("netconfig", Signal::SIGCONT).unwrap();
    let failure = pod.unwrap().failure.unwrap();
    assert_eq!(failure.reason(), Reason::DeadlineExceeded, "{failure:?}");
    assert!(took < TIMEOUT, "{took:?}");
    eventually("it is seen again", TIMEOUT, || {
        let pod = listed(&node, &server.spec)?;
        anyhow::ensure!(pod.failure.is_none(), "{pod:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_taken_port_is_reported_before_the_pod_cannot_be_enrolled() {
    let node = Node::running().unwrap();
    let server = node.pod(Spec::new("server")).unwrap();
    let _server = Bound::to(&server.netns, SocketAddr::new([127, 0, 0, 1].into(), 15006));
    let output = inpod(&node, &["-n", "shop"]);
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    let text = words(&output.stdout);
    assert_eq!(
        text[1],
        "shop server 15006/TCP - localhost 127.0.0.1 port-taken -"
    );
    assert!(
        text[3].starts_with("port-taken: ztunnel needs the port"),
        "{text:?}"
    );
    let spec = server.spec.clone().ambient();
    node.write_manifest(&spec).unwrap();
    eventually("ztunnel refuses it", TIMEOUT, || {
        let known = node.explain(&spec)?;
        let failure = known.last_failure.context("no failure")?;
        anyhow::ensure!(failure.reason() == Reason::ZtunnelRefused, "{failure:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn declared_ports_are_reported_by_name_and_nothing_that_changes_is_no_error() {
    let node = Node::running().unwrap();
    let server = node.sandbox(Spec::new("server")).unwrap();
    let manifest = server.spec.manifest(node.name()).replace(
        "    image: app\n",
        "    image: app\n    ports:\n    - {name: http, containerPort: 8083}\n    - {name: admin, containerPort: 7000}\n",
    );
    let path = node.manifests().join("shop-server.yaml");
    fs::write(path, manifest).unwrap();
    node.add(&server).unwrap();
    let _server = Bound::to(&server.netns, SocketAddr::new(server.v4.into(), 8083));
    let output = inpod(&node, &["shop/server"]);
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
    let v4 = server.v4;
    assert_eq!(
        words(&output.stdout)[..3],
        [
            "NAMESPACE NAME PORT SOURCE BOUND TO ENROLLED WARNING".to_owned(),
            "shop server 7000/TCP container (admin) not found - unchanged -".to_owned(),
            format!(
                "shop server 8083/TCP container (http) pod IP {v4} unchanged localhost-forwarding-misses, family-missing"
            ),
        ]
    );
    let output = inpod(&node, &["shop/server", "-o", "json"]);
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    for (pointer, value) in [
        ("/pods/0/ports/1/kind", "BIND_KIND_POD_IP"),
        ("/pods/0/ports/1/names/0", "http"),
        (
            "/pods/0/ports/1/warnings/0",
            "BIND_WARNING_LOCALHOST_FORWARDING_MISSES",
        ),
        ("/pods/0/desired", "ENROLLMENT_NONE"),
    ] {
        assert_eq!(all.pointer(pointer).unwrap(), value, "{pointer}");
    }
    // The slices are missing, the rest is reported.
    let output = inpod(&node, &["shop/server", "--services", "/missing"]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("the ports of Services are missing: cannot use /missing: No such file"),
        "{said}"
    );
    assert!(words(&output.stdout)[2].contains("container (http)"));
}

/// Returns a pod that ran before inpod, without a CNI call to it.
fn undiscovered_pod(node: &Node) -> (Pod, Inhabitant) {
    // A cgroup contains the UID in Kubernetes' form.
    let mut spec = Spec::new("stranger");
    spec.uid = "5e1f0000-0000-1111-2222-333333333333".to_owned();
    let pod = node.sandbox(spec).unwrap();
    let inhabitant = Inhabitant::of(&pod).unwrap();
    let mut spec = pod.spec.clone();
    spec.addresses = pod.addresses().into();
    node.write_manifest(&spec).unwrap();
    (pod, inhabitant)
}

#[test]
fn a_pod_that_no_verb_was_seen_for_is_found_and_stays_unclaimed() {
    let cgroups = integration::Cgroups::new().unwrap();
    let node = Node::running().unwrap();
    let (pod, inhabitant) = undiscovered_pod(&node);
    cgroups.put(&pod, inhabitant.pid()).unwrap();
    let _servers = servers(&pod);
    eventually("it is seen", TIMEOUT, || {
        let found = listed(&node, &pod.spec)?;
        anyhow::ensure!(found.failure.is_none(), "{:?}", found.failure);
        anyhow::ensure!(kinds(&found).len() == 6, "{found:?}");
        anyhow::Ok(())
    })
    .unwrap();
    assert_eq!(node.api().claims().unwrap(), []);
}
