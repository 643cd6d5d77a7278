//! Pods' addresses in the probe set, by the service's calls.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use inpod_proto::netconfig::v1::{
    AmbientRedirection, ApplyRulesRequest, ApplyRulesResponse, ClaimNetnsRequest, Ipv6Capture,
    ProbeExemption, Redirection, RemovePhase, RemoveRulesRequest, WatchDriftRequest,
    redirection::Mode, watch_drift_response::Event,
};
use inpod_types::Reason;
use tokio::time::timeout;
use tonic::{Code, Status};

use crate::harness::{Netconfig, ambient, netns_ref, refusal, wire};
use crate::support::{Fresh, mark_as_ztunnel, plain};

const TIMEOUT: Duration = Duration::from_secs(20);
const SOURCE: &str = "169.254.7.127";
const POD: &str = "10.9.0.1";

/// A node and a pod, with the application's and ztunnel's listeners.
struct Place {
    node: Arc<Fresh>,
    pod: Fresh,
    application: TcpListener,
    ztunnel: TcpListener,
}

impl Place {
    fn new() -> Self {
        let (node, pod) = (Fresh::new(), Fresh::new());
        let task = pod.netns.path().to_str().unwrap();
        let task = task.split('/').nth(4).unwrap();
        node.ip(&format!(
            "link add pod type veth peer name eth0 netns {task}"
        ));
        for (fresh, interface, address) in
            [(&node, "pod", "10.9.0.2/24"), (&pod, "eth0", "10.9.0.1/24")]
        {
            fresh.ip(&format!("addr add {address} dev {interface}"));
            fresh.ip(&format!("link set {interface} up"));
        }
        pod.ip("route add default via 10.9.0.2");
        let listen = |port: u16| pod.run(move || TcpListener::bind(("0.0.0.0", port)).unwrap());
        let (application, ztunnel) = (listen(8080), listen(15006));
        mark_as_ztunnel(&ztunnel);
        for listener in [&application, &ztunnel] {
            listener.set_nonblocking(true).unwrap();
        }
        Self {
            node: Arc::new(node),
            pod,
            application,
            ztunnel,
        }
    }

    /// Returns the application's view of the source, or `None` if ztunnel accepted.
    fn probe(&self) -> Option<IpAddr> {
        let stream = self.node.run(dial);
        stream.unwrap();
        self.arrival()
    }

    fn arrival(&self) -> Option<IpAddr> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Ok((_, peer)) = self.application.accept() {
                return Some(peer.ip());
            }
            if self.ztunnel.accept().is_ok() {
                return None;
            }
            assert!(Instant::now() < deadline, "nobody took the connection");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn dial() -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&SocketAddr::new(POD.parse().unwrap(), 8080), TIMEOUT)
}

fn source() -> Option<IpAddr> {
    Some(SOURCE.parse().unwrap())
}

async fn apply(
    netconfig: &mut Netconfig,
    name: &str,
    redirection: Option<Redirection>,
    addresses: &[&str],
) -> Result<ApplyRulesResponse, Status> {
    let request = ApplyRulesRequest {
        sandbox: wire(name),
        redirection,
        probe_addresses: addresses.iter().map(ToString::to_string).collect(),
        require_listeners: false,
    };
    Ok(netconfig.client.apply_rules(request).await?.into_inner())
}

pub(super) fn elements(node: &Fresh) -> String {
    let listed = node.nft("list ruleset");
    let lines = listed
        .lines()
        .filter(|line| line.contains("comment \"net/"));
    lines.map(str::trim).collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn a_probe_reaches_a_pod_whose_rules_were_applied_until_they_are_removed() {
    let place = Place::new();
    let mut netconfig = Netconfig::start_on(Arc::clone(&place.node), &[]).await;
    netconfig.claim("c1", &place.pod).await.unwrap();
    let first = apply(&mut netconfig, "c1", ambient(), &[POD])
        .await
        .unwrap();
    let second = apply(&mut netconfig, "c1", ambient(), &[POD])
        .await
        .unwrap();
    assert_eq!((first.changed, second.changed), (true, false));
    assert_eq!(place.probe(), source());
    assert_eq!(
        elements(&place.node),
        "elements = { 10.9.0.1 comment \"net/c1/eth0\" }"
    );
    let third = apply(&mut netconfig, "c1", ambient(), &[]).await.unwrap();
    assert!(third.changed);
    assert_eq!(place.probe(), None);
    apply(&mut netconfig, "c1", ambient(), &[POD])
        .await
        .unwrap();
    for (phase, wanted) in [
        (RemovePhase::Drain, source()),
        (RemovePhase::Final, Some(NEAR)),
    ] {
        let request = RemoveRulesRequest {
            sandbox: wire("c1"),
            phase: phase.into(),
        };
        netconfig.client.remove_rules(request).await.unwrap();
        assert_eq!(place.probe(), wanted, "{phase:?}");
    }
    assert_eq!(elements(&place.node), "");
}

const NEAR: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 9, 0, 2));

#[tokio::test]
async fn a_claim_that_is_released_or_ends_by_itself_takes_its_addresses_along() {
    let mut place = Place::new();
    let mut netconfig = Netconfig::start_on(Arc::clone(&place.node), &[]).await;
    netconfig.claim("c1", &place.pod).await.unwrap();
    apply(&mut netconfig, "c1", ambient(), &[POD])
        .await
        .unwrap();
    assert!(netconfig.release("c1").await);
    assert_eq!(elements(&place.node), "");
    netconfig.claim("c2", &place.pod).await.unwrap();
    apply(&mut netconfig, "c2", ambient(), &[POD])
        .await
        .unwrap();
    assert!(elements(&place.node).contains("net/c2/eth0"));
    place.pod.abandon();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !elements(&place.node).is_empty() {
        assert!(
            Instant::now() < deadline,
            "the addresses of a dead pod stay"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(netconfig.claims().await.is_empty());
}

async fn claim(
    netconfig: &mut Netconfig,
    place: &Place,
    exemption: ProbeExemption,
    addresses: &[&str],
) -> Result<(), Status> {
    let request = ClaimNetnsRequest {
        sandbox: wire("c1"),
        netns: Some(netns_ref(&place.pod)),
        addresses: addresses.iter().map(ToString::to_string).collect(),
        probe_exemption: exemption.into(),
    };
    netconfig.client.claim_netns(request).await.map(drop)
}

#[tokio::test]
async fn claim_exempts_probes_before_rules_until_released() {
    let place = Place::new();
    let mut netconfig = Netconfig::start_on(Arc::clone(&place.node), &[]).await;
    let exempt = "elements = { 10.9.0.1 comment \"net/c1/eth0\" }";
    for (exemption, expected, seen) in [
        (ProbeExemption::Unspecified, "", Some(NEAR)),
        (ProbeExemption::On, exempt, source()),
        (ProbeExemption::Unspecified, exempt, source()),
        (ProbeExemption::Off, "", Some(NEAR)),
        (ProbeExemption::On, exempt, source()),
    ] {
        // The netns does not have the second address.
        claim(&mut netconfig, &place, exemption, &[POD, "10.9.0.9"])
            .await
            .unwrap();
        assert_eq!(elements(&place.node), expected, "{exemption:?}");
        assert_eq!(place.probe(), seen, "{exemption:?}");
    }
    assert!(netconfig.release("c1").await);
    assert_eq!(elements(&place.node), "");
}

#[tokio::test]
async fn claim_with_exemption_refuses_addresses_of_no_pod() {
    let place = Place::new();
    let mut netconfig = Netconfig::start_on(Arc::clone(&place.node), &[]).await;
    let addresses = [POD, "127.0.0.1"];
    let refused = claim(&mut netconfig, &place, ProbeExemption::On, &addresses).await;
    assert_eq!(
        refusal(&refused.unwrap_err()),
        (Code::InvalidArgument, Reason::InvalidField)
    );
    assert!(netconfig.claims().await.is_empty());
    assert_eq!(place.node.nft("list ruleset"), "");
}

/// The pod's previous addresses are restored too.
#[tokio::test]
async fn an_apply_that_fails_in_the_pod_leaves_the_nodes_set_as_it_was() {
    let place = Place::new();
    place
        .pod
        .command("sysctl", &["-qw", "net.ipv6.conf.all.disable_ipv6=1"]);
    let mut netconfig = Netconfig::start_on(Arc::clone(&place.node), &[]).await;
    netconfig.claim("c1", &place.pod).await.unwrap();
    let impossible = || {
        Some(Redirection {
            mode: Some(Mode::Ambient(AmbientRedirection {
                ipv6: Ipv6Capture::On.into(),
                ..AmbientRedirection::default()
            })),
        })
    };
    let status = apply(&mut netconfig, "c1", impossible(), &[POD])
        .await
        .unwrap_err();
    assert_eq!(
        refusal(&status),
        (Code::FailedPrecondition, Reason::Ipv6Unavailable)
    );
    assert_eq!(elements(&place.node), "");
    apply(&mut netconfig, "c1", ambient(), &[POD])
        .await
        .unwrap();
    let status = apply(&mut netconfig, "c1", impossible(), &["10.9.0.9"]).await;
    status.unwrap_err();
    assert_eq!(
        elements(&place.node),
        "elements = { 10.9.0.1 comment \"net/c1/eth0\" }"
    );
}

#[tokio::test]
async fn an_apply_fails_where_the_node_refuses_the_probe_set() {
    let place = Place::new();
    let mut netconfig = Netconfig::start_on(Arc::clone(&place.node), &[]).await;
    netconfig.claim("c1", &place.pod).await.unwrap();
    // A set of another type, which takes no address.
    place.node.nft("add table inet inpod-host");
    place
        .node
        .nft("add set inet inpod-host probes-v4 { type inet_service; }");
    let before = place.node.nft("list ruleset");
    let status = apply(&mut netconfig, "c1", ambient(), &[POD])
        .await
        .unwrap_err();
    assert_eq!(refusal(&status), (Code::Internal, Reason::KernelRefused));
    assert!(
        status.message().contains("the node's probe set"),
        "{status}"
    );
    assert_eq!(place.node.nft("list ruleset"), before);
    assert_eq!(plain().observe(&place.pod.netns).unwrap().tag, None);
    // Without addresses the node stays unchanged.
    apply(&mut netconfig, "c1", ambient(), &[]).await.unwrap();
}

#[tokio::test]
async fn what_is_no_pods_address_is_refused_before_anything_is_done() {
    let place = Place::new();
    let mut netconfig = Netconfig::start_on(Arc::clone(&place.node), &[]).await;
    netconfig.claim("c1", &place.pod).await.unwrap();
    for bad in [
        &["x"][..],
        &["127.0.0.1"],
        &["10.9.0.1/24"],
        &["10.9.0.1"; 17],
    ] {
        let status = apply(&mut netconfig, "c1", ambient(), bad)
            .await
            .unwrap_err();
        assert_eq!(
            refusal(&status),
            (Code::InvalidArgument, Reason::InvalidField)
        );
    }
    assert_eq!(place.node.nft("list ruleset"), "");
    assert_eq!(place.pod.nft("list ruleset"), "");
}

#[tokio::test]
async fn off_writes_nothing_on_the_node_and_spares_nothing_in_the_pod() {
    let place = Place::new();
    let settings = [("INPOD_PROBE_MATCH", "off")];
    let mut netconfig = Netconfig::start_on(Arc::clone(&place.node), &settings).await;
    netconfig.claim("c1", &place.pod).await.unwrap();
    apply(&mut netconfig, "c1", ambient(), &[POD])
        .await
        .unwrap();
    assert_eq!(place.node.nft("list ruleset"), "");
    let verified = plain().verify(&place.pod.netns, &crate::support::ambient());
    assert_eq!(verified.unwrap().differences, [""; 0]);
    assert_eq!(place.probe(), None);
}

#[tokio::test]
async fn the_sources_are_those_of_the_settings_on_the_node_and_in_the_pod() {
    let place = Place::new();
    let settings = [
        ("INPOD_PROBE_SOURCE_V4", "169.254.9.9"),
        ("INPOD_PROBE_SOURCE_V6", "fd00:9::9"),
    ];
    let mut netconfig = Netconfig::start_on(Arc::clone(&place.node), &settings).await;
    netconfig.claim("c1", &place.pod).await.unwrap();
    apply(&mut netconfig, "c1", ambient(), &[POD])
        .await
        .unwrap();
    assert_eq!(place.probe(), Some("169.254.9.9".parse().unwrap()));
    for fresh in [&*place.node, &place.pod] {
        let listed = fresh.nft("list ruleset");
        assert!(
            listed.contains("169.254.9.9") && listed.contains("fd00:9::9"),
            "{listed}"
        );
    }
}

/// No probe may fail or be captured, and each comes from the probe source address.
fn probe_until(stop: &AtomicBool, probes: &AtomicU32, place: &Place) {
    while !stop.load(Ordering::Relaxed) {
        dial().unwrap();
        assert_eq!(place.arrival(), source());
        probes.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(1));
    }
}

#[tokio::test]
async fn a_prober_at_constant_rate_sees_nothing_of_netconfig_being_killed_and_started_again() {
    let place = Arc::new(Place::new());
    let mut netconfig = Netconfig::start_on(Arc::clone(&place.node), &[]).await;
    netconfig.claim("c1", &place.pod).await.unwrap();
    apply(&mut netconfig, "c1", ambient(), &[POD])
        .await
        .unwrap();
    let (stop, probes) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU32::new(0)),
    );
    let prober = {
        let (at, stop, probes) = (Arc::clone(&place), Arc::clone(&stop), Arc::clone(&probes));
        let probe = move || probe_until(&stop, &probes, &at);
        place.node.run(move || thread::spawn(probe))
    };
    let mut starts = 0;
    while !prober.is_finished() && (starts < 10 || probes.load(Ordering::Relaxed) < 200) {
        // Dropping it sends SIGKILL.
        drop(netconfig);
        netconfig = Netconfig::start_on(Arc::clone(&place.node), &[]).await;
        // First unclaimed, then claimed and applied again; nothing is written.
        netconfig.claim("c1", &place.pod).await.unwrap();
        let again = apply(&mut netconfig, "c1", ambient(), &[POD])
            .await
            .unwrap();
        assert!(!again.changed);
        starts += 1;
    }
    stop.store(true, Ordering::Relaxed);
    prober.join().unwrap();
}

#[tokio::test]
async fn a_flush_of_the_nodes_rules_is_mended_counted_and_reported() {
    let place = Place::new();
    let mut netconfig = Netconfig::start_on(Arc::clone(&place.node), &[]).await;
    netconfig.claim("c1", &place.pod).await.unwrap();
    apply(&mut netconfig, "c1", ambient(), &[POD])
        .await
        .unwrap();
    let before = elements(&place.node);
    let flushed = Instant::now();
    place.node.nft("flush ruleset");
    while elements(&place.node) != before {
        assert!(flushed.elapsed() < Duration::from_secs(20), "not mended");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let metrics = inpod_service::metrics::fetch(&netconfig.socket())
        .await
        .unwrap();
    for line in [
        "inpod_netconfig_probe_elements 1",
        "inpod_netconfig_probe_restores_total 1",
        "inpod_netconfig_condition{name=\"probe-set\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    // A later watcher gets the repair, too, since pod-events may connect after the repair.
    let request = WatchDriftRequest {};
    let mut stream = netconfig
        .client
        .watch_drift(request)
        .await
        .unwrap()
        .into_inner();
    let repaired = loop {
        let message = timeout(TIMEOUT, stream.message()).await.expect("no repair");
        if let Some(Event::NodeRepaired(repaired)) = message.unwrap().unwrap().event {
            break repaired;
        }
    };
    assert_eq!(repaired.differences, ["the whole set is missing"]);
    let at = SystemTime::try_from(repaired.at.unwrap()).unwrap();
    assert!(at.elapsed().unwrap() <= flushed.elapsed());
}
