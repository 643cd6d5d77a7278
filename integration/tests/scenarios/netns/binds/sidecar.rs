use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::ensure;
use inpod_proto::{
    netconfig::v1::{
        ApplyRulesRequest, ClaimNetnsRequest, InboundCapture, NetworkSelection, PortSelection,
        Redirection, SidecarRedirection, netconfig_service_client::NetconfigServiceClient,
        redirection::Mode,
    },
    types::v1::{NetnsRef, SandboxRef},
};
use integration::{TIMEOUT, bin, eventually};
use tokio::runtime::Runtime;
use tonic::Request;

use crate::netns::binds::{
    bound::{BindAddress, Table, table, wanted},
    reachability::Fixture,
};

/// The ports of Istio's agent, which are never captured.
const EXCLUDED: [u32; 3] = [15020, 15021, 15090];

fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(Duration::from_secs(20));
    request
}

/// Redirects a pod to its own proxy, with the call that pod-events makes.
pub(crate) fn redirect(fixture: &Fixture, capture: InboundCapture) {
    let sandbox = SandboxRef {
        network_name: "podnet".into(),
        container_id: fixture.server.container_id.clone(),
        ifname: "eth0".into(),
    };
    let addresses = fixture.server.addresses().map(|it| it.to_string());
    let claim = ClaimNetnsRequest {
        sandbox: Some(sandbox.clone()),
        netns: Some(NetnsRef {
            path: fixture.server.path().display().to_string(),
            ..NetnsRef::default()
        }),
        addresses: addresses.to_vec(),
        ..ClaimNetnsRequest::default()
    };
    let sidecar = SidecarRedirection {
        inbound_capture: capture.into(),
        proxy_uids: vec![1337],
        proxy_gids: vec![1337],
        inbound_ports: Some(PortSelection {
            all: true,
            ..PortSelection::default()
        }),
        excluded_inbound_ports: EXCLUDED.into(),
        outbound_networks: Some(NetworkSelection {
            all: true,
            ..NetworkSelection::default()
        }),
        ..SidecarRedirection::default()
    };
    let apply = ApplyRulesRequest {
        sandbox: Some(sandbox),
        redirection: Some(Redirection {
            mode: Some(Mode::Sidecar(sidecar)),
        }),
        probe_addresses: Vec::new(),
        require_listeners: false,
    };
    let socket = inpod_service::socket(&fixture.node.run_dir(), "netconfig");
    Runtime::new().unwrap().block_on(async {
        let mut client = NetconfigServiceClient::new(inpod_service::channel(&socket));
        client.claim_netns(timed(claim)).await.unwrap();
        client.apply_rules(timed(apply)).await.unwrap();
    });
}

pub(crate) struct Proxy {
    process: Child,
    output: PathBuf,
}

impl Proxy {
    pub(crate) fn start(fixture: &Fixture, mode: &[&str]) -> Self {
        let output = fixture.node.manifests().with_file_name("sidecar.log");
        let process = Command::new("nsenter")
            .arg(format!("--net={}", fixture.server.path().display()))
            .arg(bin("sidecar").unwrap())
            .args(mode)
            .stdin(Stdio::null())
            .stdout(fs::File::create(&output).unwrap())
            .spawn()
            .unwrap();
        let proxy = Self { process, output };
        eventually("it listens", TIMEOUT, || {
            ensure!(proxy.text().starts_with("listening\n"), "not yet");
            anyhow::Ok(())
        })
        .unwrap();
        proxy
    }

    fn text(&self) -> String {
        fs::read_to_string(&self.output).unwrap()
    }

    pub(crate) fn connections(&self) -> Vec<(IpAddr, SocketAddr, String)> {
        let text = self.text();
        let line = |line: &str| {
            let words: Vec<_> = line.split(' ').collect();
            let [source, destination, outcome] = words[..] else {
                panic!("{line}");
            };
            let source: SocketAddr = source.parse().unwrap();
            (
                source.ip(),
                destination.parse().unwrap(),
                outcome.to_owned(),
            )
        };
        text.lines().skip(1).map(line).collect()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.process.kill().unwrap_or_default();
        self.process.wait().map(drop).unwrap_or_default();
    }
}

/// Each connection must reach the proxy once, from the client and for the pod's own address.
pub(crate) fn through(
    fixture: &Fixture,
    proxy: &Proxy,
    seen: impl Fn(bool, bool) -> IpAddr,
) -> anyhow::Result<Table> {
    let mut odd = Vec::new();
    let ask = |port, service, v6| {
        let before = proxy.connections().len();
        let answer = fixture.ask(port, service, v6);
        let outcome = if answer.is_ok() {
            "forwarded"
        } else {
            "refused"
        };
        let destination = SocketAddr::new(fixture.to(false, v6), port);
        let wanted = (fixture.source(service, v6), destination, outcome.to_owned());
        let taken = proxy.connections().split_off(before);
        if taken != [wanted] {
            odd.push(format!("{port}, service: {service}: {taken:?}"));
        }
        answer
    };
    let table = table(ask, seen)?;
    ensure!(odd.is_empty(), "{odd:?}");
    Ok(table)
}

pub(crate) fn either(v4: &str, v6: &str) -> impl Fn(bool, bool) -> IpAddr {
    let both = [v4, v6].map(|text| text.parse().unwrap());
    move |_, v6| both[usize::from(v6)]
}

#[test]
fn a_sidecar_that_connects_from_its_own_address_reaches_what_is_reached_without_it() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let proxy = Proxy::start(&fixture, &["original"]);
    let table = through(&fixture, &proxy, either("127.0.0.6", "::6")).unwrap();
    assert_eq!(table, wanted());
    // Each request reached the proxy exactly once.
    assert_eq!(proxy.connections().len(), table.len());
}

#[test]
fn by_tproxy_the_application_sees_the_client() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Tproxy);
    let proxy = Proxy::start(&fixture, &["transparent"]);
    let table = through(&fixture, &proxy, |service, v6| fixture.source(service, v6)).unwrap();
    assert_eq!(table, wanted());
    assert_eq!(proxy.connections().len(), table.len());
}

#[test]
fn by_tproxy_a_sidecar_whose_sockets_are_not_transparent_is_reached_by_nobody_and_it_is_noticed() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Tproxy);
    let proxy = Proxy::start(&fixture, &["original"]);
    for v6 in [false, true] {
        fixture
            .ask(BindAddress::Wildcard.port(), false, v6)
            .unwrap_err();
    }
    assert_eq!(proxy.connections(), []);
}

#[test]
fn a_sidecar_that_forwards_to_localhost_is_the_one_that_the_warnings_are_of() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let proxy = Proxy::start(&fixture, &["localhost"]);
    let table = through(&fixture, &proxy, either("127.0.0.1", "::1")).unwrap();
    let wanted: Table = wanted()
        .into_keys()
        .map(|row| (row, row.0 != BindAddress::PodIp))
        .collect();
    assert_eq!(table, wanted);
}

#[test]
fn a_sidecar_without_an_address_of_its_own_meets_itself_and_it_is_noticed() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let proxy = Proxy::start(&fixture, &["unmarked"]);
    for v6 in [false, true] {
        fixture
            .ask(BindAddress::Wildcard.port(), false, v6)
            .unwrap_err();
    }
    let outcomes: Vec<_> = proxy.connections().into_iter().map(|it| it.2).collect();
    let loops = outcomes.iter().filter(|outcome| *outcome == "loop").count();
    assert_eq!(loops, 2, "{outcomes:?}");
}

#[test]
fn without_the_rules_the_proxy_sees_nothing_and_it_is_noticed() {
    let fixture = Fixture::new();
    let proxy = Proxy::start(&fixture, &["original"]);
    let error = through(&fixture, &proxy, either("127.0.0.6", "::6")).unwrap_err();
    assert!(error.to_string().contains("it saw"), "{error:#}");
    assert_eq!(proxy.connections(), []);
}
