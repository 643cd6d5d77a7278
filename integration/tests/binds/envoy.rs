//! The reachability table with a real Envoy, started as the injector's template starts
//! it: arguments, user, capabilities.

mod ending;

use std::{
    collections::BTreeMap,
    fs, io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, ensure};
use inpod_proto::netconfig::v1::InboundCapture;
use integration::{App, Pod, TIMEOUT, eventually};
use serde_json::{Value, json};

use crate::{
    bootstrap::{Endpoints, arguments, bootstrap, container, tproxy},
    bound::{BindAddress, Table, table, wanted},
    reachability::{BACKENDS, Fixture},
    sidecar::{either, redirect},
};

/// The port of an application outside of the pod.
const OUTSIDE_PORT: u16 = 7000;

fn program() -> PathBuf {
    let path = std::env::var_os("ENVOY").map(PathBuf::from);
    let path = path.filter(|path| path.is_file());
    path.context("ENVOY names no program: run ./integration/test netns, which fetches it")
        .unwrap()
}

/// Returns a command prefix with a container's security context.
fn as_contained(container: &Value) -> Vec<String> {
    let security = &container["securityContext"];
    assert_eq!(security["capabilities"]["drop"][0], "ALL");
    assert_eq!(security["allowPrivilegeEscalation"], false);
    let id = |key: &str| security[key].as_u64().unwrap();
    let added = security["capabilities"]["add"].as_array();
    let added = added.into_iter().flatten().map(|it| it.as_str().unwrap());
    let bounds: String = added.map(|it| format!(",+{}", it.to_lowercase())).collect();
    vec![
        "setpriv".to_owned(),
        format!("--reuid={}", id("runAsUser")),
        format!("--regid={}", id("runAsGroup")),
        "--clear-groups".to_owned(),
        "--no-new-privs".to_owned(),
        "--inh-caps=-all".to_owned(),
        format!("--bounding-set=-all{bounds}"),
    ]
}

fn get(from: &Pod, to: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    let url = format!("http://{to}{path}");
    let reported = from.exec(&[
        "curl",
        "-sgm",
        "5",
        "--path-as-is",
        "-w",
        "\n%{http_code}",
        &url,
    ])?;
    let (body, status) = reported.rsplit_once('\n').context("no status")?;
    Ok((status.parse()?, body.to_owned()))
}

/// The number of connections that each filter chain accepted.
type Accepted = BTreeMap<String, u64>;

struct Envoy<'a> {
    fixture: &'a Fixture,
    process: Child,
    log: PathBuf,
}

impl<'a> Envoy<'a> {
    fn start(fixture: &'a Fixture, annotations: &Value) -> Self {
        let container = container(fixture, annotations);
        let arguments = arguments(&container, fixture.server.v4.into());
        Self::with(fixture, &container, &arguments)
    }

    fn with(fixture: &'a Fixture, container: &Value, arguments: &[String]) -> Self {
        let log = fixture.node.manifests().with_file_name("envoy.log");
        let reported = fs::File::create(&log).unwrap();
        let process = Command::new("nsenter")
            .arg(format!("--net={}", fixture.server.path().display()))
            .args(as_contained(container))
            .arg(program())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(reported.try_clone().unwrap())
            .stderr(reported)
            .spawn()
            .unwrap();
        let envoy = Self {
            fixture,
            process,
            log,
        };
        eventually("Envoy is ready", TIMEOUT, || envoy.is_ready()).unwrap();
        envoy
    }

    /// Asks as the kubelet's probe does.
    fn is_ready(&self) -> anyhow::Result<()> {
        let to = SocketAddr::new(self.fixture.to(false, false), 15021);
        let reported = get(&self.fixture.client, to, "/healthz/ready");
        let reported =
            reported.with_context(|| fs::read_to_string(&self.log).unwrap_or_default())?;
        ensure!(reported.0 == 200, "{reported:?}");
        Ok(())
    }

    fn accepted(&self) -> Accepted {
        let to = SocketAddr::from(([127, 0, 0, 1], 15000));
        let path = "/stats?filter=^tcp.*downstream_cx_total$";
        let (_, text) = get(&self.fixture.server, to, path).unwrap();
        let chain = |line: &str| {
            let (name, count) = line.rsplit_once(": ")?;
            let name = name
                .strip_prefix("tcp.")?
                .strip_suffix(".downstream_cx_total")?;
            Some((name.to_owned(), count.parse().unwrap()))
        };
        let all: Accepted = text.lines().filter_map(chain).collect();
        assert!(!all.is_empty(), "{text}");
        all
    }

    /// Returns the filter chains that accepted connections during `act`.
    fn with_accepted<T>(&self, act: impl FnOnce() -> T) -> (T, Accepted) {
        let before = self.accepted();
        let done = act();
        let after = self.accepted().into_iter();
        let more = after.map(|(chain, count)| {
            let count = count - before[&chain];
            (chain, count)
        });
        (done, more.filter(|it| it.1 > 0).collect())
    }
}

impl Drop for Envoy<'_> {
    fn drop(&mut self) {
        // It has ended already, or ends now.
        self.process.kill().unwrap_or_default();
        self.process.wait().map(drop).unwrap_or_default();
    }
}

fn once(chain: &str) -> Accepted {
    Accepted::from([(chain.to_owned(), 1)])
}

fn inbound(v6: bool) -> &'static str {
    [
        "InboundPassthroughClusterIpv4",
        "InboundPassthroughClusterIpv6",
    ][usize::from(v6)]
}

/// Each connection must reach Envoy once, through its family's filter chain.
fn through(envoy: &Envoy<'_>, seen: impl Fn(bool, bool) -> IpAddr) -> anyhow::Result<Table> {
    let mut odd = Vec::new();
    let ask = |port, service, v6| {
        let (answer, taken) = envoy.with_accepted(|| envoy.fixture.ask(port, service, v6));
        if taken != once(inbound(v6)) {
            odd.push(format!("{port}, service: {service}: {taken:?}"));
        }
        answer
    };
    let table = table(ask, seen)?;
    ensure!(odd.is_empty(), "{odd:?}");
    Ok(table)
}

#[test]
fn through_an_envoy_who_reaches_an_application_is_the_same_by_every_backend() {
    for backend in BACKENDS {
        let fixture = Fixture::with(backend);
        redirect(&fixture, InboundCapture::Redirect);
        fixture.is_written_with(backend);
        let envoy = Envoy::start(&fixture, &json!({}));
        let table = through(&envoy, either("127.0.0.6", "::6"));
        assert_eq!(table.unwrap(), wanted(), "{backend}");
    }
}

#[test]
fn through_an_envoy_by_tproxy_the_application_sees_the_client_by_every_backend() {
    for backend in BACKENDS {
        let fixture = Fixture::with(backend);
        redirect(&fixture, InboundCapture::Tproxy);
        fixture.is_written_with(backend);
        let envoy = Envoy::start(&fixture, &tproxy());
        let table = through(&envoy, |service, v6| fixture.source(service, v6));
        assert_eq!(table.unwrap(), wanted(), "{backend}");
    }
}

#[test]
fn an_envoy_that_is_not_led_to_sees_nothing_and_it_is_noticed() {
    let fixture = Fixture::new();
    let envoy = Envoy::start(&fixture, &json!({}));
    let (answer, taken) =
        envoy.with_accepted(|| fixture.ask(BindAddress::Wildcard.port(), false, false));
    assert_eq!(answer.unwrap().1, fixture.source(false, false));
    assert_eq!(taken, Accepted::new());
    let error = through(&envoy, either("127.0.0.6", "::6")).unwrap_err();
    assert!(error.to_string().contains("it saw"), "{error:#}");
}

#[test]
fn what_an_application_sends_goes_through_an_envoy_to_its_target_from_the_pods_own_address() {
    for (capture, annotations) in [
        (InboundCapture::Redirect, json!({})),
        (InboundCapture::Tproxy, tproxy()),
    ] {
        let fixture = Fixture::new();
        redirect(&fixture, capture);
        let envoy = Envoy::start(&fixture, &annotations);
        let _there = App::start(&fixture.client.netns, OUTSIDE_PORT).unwrap();
        for (own, to) in fixture
            .server
            .addresses()
            .into_iter()
            .zip(fixture.client.addresses())
        {
            let to = SocketAddr::new(to, OUTSIDE_PORT);
            let (source, taken) =
                envoy.with_accepted(|| integration::ask(&fixture.server.netns, to));
            assert_eq!(source.unwrap(), own, "{capture:?}");
            assert_eq!(taken, once("PassthroughCluster"), "{capture:?}");
        }
    }
}

#[test]
fn an_endpoint_leads_its_port_elsewhere_through_an_envoy_and_no_other_port() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let endpoints = Endpoints::new();
    let container = container(&fixture, &endpoints.annotation);
    for (first, mark) in fixture
        .server
        .addresses()
        .into_iter()
        .zip(["127.0.0.6", "::6"])
    {
        let _envoy = Envoy::with(&fixture, &container, &arguments(&container, first));
        endpoints.assert_led(&fixture, mark);
    }
}

/// A probe that only connects (`tcpSocket`) therefore does not show whether the application listens.
#[test]
fn a_connection_to_a_port_that_nobody_serves_is_taken_by_an_envoy_and_ended() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let nobody = |v6| SocketAddr::new(fixture.to(false, v6), 7999);
    for v6 in [false, true] {
        integration::connect(&fixture.client.netns, nobody(v6)).unwrap_err();
    }
    let envoy = Envoy::start(&fixture, &json!({}));
    for v6 in [false, true] {
        let connect = || integration::connect(&fixture.client.netns, nobody(v6));
        let (stream, taken) = envoy.with_accepted(connect);
        assert_eq!(taken, once(inbound(v6)));
        assert_eq!(io::read_to_string(stream.unwrap()).unwrap(), "");
    }
}

#[test]
fn a_connection_to_an_envoys_own_listener_ends_there() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let envoy = Envoy::start(&fixture, &json!({}));
    for v6 in [false, true] {
        let asked = |port| envoy.with_accepted(|| fixture.ask(port, false, v6));
        let (answer, taken) = asked(15006);
        answer.unwrap_err();
        assert_eq!(taken, once("BlackHoleCluster"));
        let (answer, taken) = asked(15001);
        answer.unwrap_err();
        let both = [inbound(v6), "BlackHoleCluster"].map(|it| (it.to_owned(), 1));
        assert_eq!(taken, Accepted::from(both));
    }
}

/// Makes the proxy connect from its own address, which the rules redirect to it again; a limit of `most`
/// connections ends that loop.
fn unmarked(bootstrap: &mut String, most: u64) {
    let mut document: Value = serde_json::from_str(bootstrap).unwrap();
    let clusters = document.pointer_mut("/static_resources/clusters");
    for cluster in clusters.and_then(Value::as_array_mut).unwrap() {
        let own = cluster
            .as_object_mut()
            .unwrap()
            .remove("upstream_bind_config");
        if own.is_some() {
            cluster["circuit_breakers"]["thresholds"][0]["max_connections"] = most.into();
        }
    }
    *bootstrap = document.to_string();
}

#[test]
fn an_envoy_without_an_address_of_its_own_meets_itself_and_it_is_noticed() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let container = container(&fixture, &json!({}));
    let mut arguments = arguments(&container, fixture.server.v4.into());
    unmarked(bootstrap(&mut arguments), 8);
    let envoy = Envoy::with(&fixture, &container, &arguments);
    for v6 in [false, true] {
        let (answer, taken) =
            envoy.with_accepted(|| fixture.ask(BindAddress::Wildcard.port(), false, v6));
        answer.unwrap_err();
        assert!(taken[inbound(v6)] >= 8, "{taken:?}");
    }
}

#[test]
fn an_envoy_tells_others_whether_it_is_ready_and_its_metrics_and_nothing_else() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let _envoy = Envoy::start(&fixture, &json!({}));
    for v6 in [false, true] {
        let asked = |port, path| {
            let to = SocketAddr::new(fixture.to(false, v6), port);
            get(&fixture.client, to, path)
        };
        assert_eq!(asked(15021, "/healthz/ready").unwrap().0, 200);
        let (status, metrics) = asked(15090, "/stats/prometheus").unwrap();
        assert_eq!(status, 200);
        assert!(metrics.contains("\nenvoy_server_live"), "{metrics}");
        for (port, path) in [
            (15021, "/ready"),
            (15021, "/drain_listeners"),
            (15021, "/drain/"),
            (15021, "/quitquitquit"),
            (15021, "/healthz/ready/../../quitquitquit"),
            (15090, "/config_dump"),
        ] {
            assert_eq!(asked(port, path).unwrap().0, 404, "{port} {path}");
        }
        asked(15000, "/ready").unwrap_err();
    }
    let here = SocketAddr::from(([127, 0, 0, 1], 15000));
    assert_eq!(get(&fixture.server, here, "/ready").unwrap().0, 200);
}
