//! The reachability table with a real Envoy that has Istio's listeners and clusters, started with the user and
//! capabilities of Istio's container.

mod bootstrap;

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, ensure};
use inpod_proto::netconfig::v1::InboundCapture;
use integration::{App, Pod, TIMEOUT, eventually};

use crate::netns::binds::{
    bound::{BindAddress, Table, table, wanted},
    reachability::Fixture,
    sidecar::{either, redirect},
};

/// The port of an application outside of the pod.
const OUTSIDE_PORT: u16 = 7000;

/// Envoy's admin interface.
const ADMIN: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, bootstrap::ADMIN);

fn program() -> PathBuf {
    let path = std::env::var_os("ENVOY").map(PathBuf::from);
    let path = path.filter(|path| path.is_file());
    path.context("ENVOY names no program: run ./integration/test netns, which fetches it")
        .unwrap()
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
    fn start(fixture: &'a Fixture, capture: InboundCapture) -> Self {
        let log = fixture.node.manifests().with_file_name("envoy.log");
        let reported = fs::File::create(&log).unwrap();
        // Istio's container runs as root with TPROXY: transparent sockets need the capability.
        let (user, bounds) = match capture {
            InboundCapture::Tproxy => ("--reuid=0", "--bounding-set=-all,+net_admin"),
            InboundCapture::Redirect | InboundCapture::Unspecified => {
                ("--reuid=1337", "--bounding-set=-all")
            }
        };
        let process = Command::new("nsenter")
            .arg(format!("--net={}", fixture.server.path().display()))
            .args(["setpriv", user, "--regid=1337", "--clear-groups"])
            .args(["--no-new-privs", "--inh-caps=-all", bounds])
            .arg(program())
            .args(["--disable-hot-restart", "--concurrency", "2"])
            .args(["--config-yaml", &bootstrap::of(capture).to_string()])
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

    fn is_ready(&self) -> anyhow::Result<()> {
        let reported = get(&self.fixture.server, ADMIN.into(), "/ready");
        let reported =
            reported.with_context(|| fs::read_to_string(&self.log).unwrap_or_default())?;
        ensure!(reported.0 == 200, "{reported:?}");
        Ok(())
    }

    fn accepted(&self) -> Accepted {
        let path = "/stats?filter=^tcp.*downstream_cx_total$";
        let (_, text) = get(&self.fixture.server, ADMIN.into(), path).unwrap();
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
fn through_an_envoy_who_reaches_an_application_is_the_same() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Redirect);
    let envoy = Envoy::start(&fixture, InboundCapture::Redirect);
    let table = through(&envoy, either("127.0.0.6", "::6"));
    assert_eq!(table.unwrap(), wanted());
}

#[test]
fn through_an_envoy_by_tproxy_the_application_sees_the_client() {
    let fixture = Fixture::new();
    redirect(&fixture, InboundCapture::Tproxy);
    let envoy = Envoy::start(&fixture, InboundCapture::Tproxy);
    let table = through(&envoy, |service, v6| fixture.source(service, v6));
    assert_eq!(table.unwrap(), wanted());
}

#[test]
fn an_envoy_that_is_not_led_to_sees_nothing_and_it_is_noticed() {
    let fixture = Fixture::new();
    let envoy = Envoy::start(&fixture, InboundCapture::Redirect);
    let (answer, taken) =
        envoy.with_accepted(|| fixture.ask(BindAddress::Wildcard.port(), false, false));
    assert_eq!(answer.unwrap().1, fixture.source(false, false));
    assert_eq!(taken, Accepted::new());
    let error = through(&envoy, either("127.0.0.6", "::6")).unwrap_err();
    assert!(error.to_string().contains("it saw"), "{error:#}");
}

#[test]
fn what_an_application_sends_goes_through_an_envoy_to_its_target_from_the_pods_own_address() {
    for capture in [InboundCapture::Redirect, InboundCapture::Tproxy] {
        let fixture = Fixture::new();
        redirect(&fixture, capture);
        let envoy = Envoy::start(&fixture, capture);
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
