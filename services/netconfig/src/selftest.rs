//! Sends real packets through real rules, in two temporary netns.
//!
//! One netns is a pod with listeners on ztunnel's ports, the other netns is its peer. A check observes the socket
//! at which a packet arrives, which proves more than a reply would.

mod listeners;
mod missing;
mod network;

use std::{fmt, net::IpAddr};

use inpod_linux::Netns;
use inpod_types::SandboxRef;

use crate::{
    apply::Writer,
    error::{Failed, KernelCause},
    family::Family,
    inspect,
    marks::{DNS_PORT, INBOUND_HBONE_PORT},
    probes,
    rules::{Ambient, Ipv6, Redirection},
};
use listeners::{APP, Arrival, DNS, DNS_UDP, HBONE, Listeners, OUTBOUND, PEER, PLAINTEXT};
pub use network::TestNetworkError;
use network::{APPLICATION, Sender, TestNetwork};

/// The check that a listener without ztunnel's mark gets nothing.
const GUARD: &str = "only ztunnel answers";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    pub name: String,
    /// The observation; after a failure, also the expectation.
    pub outcome: Result<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub checks: Vec<Check>,
}

impl KernelCause for TestNetworkError {}

/// Adds the attempt, and names the kernel's option whose lack explains the error.
fn describe_failed(failed: Failed) -> Failed {
    let option = missing::missing_option_here(&failed);
    let failed = failed.context("cannot run the self-test");
    match option {
        Some(option) => failed.context(format!(
            "the kernel lacks {option}, without which inpod cannot redirect a pod"
        )),
        None => failed,
    }
}

/// Applies rules with all features between two netns, and checks the result. Failed checks are part of the report.
pub fn run(writer: &Writer, probe_sources: &[IpAddr]) -> Result<Report, Failed> {
    run_after(writer, probe_sources, |_pod| ()).map_err(describe_failed)
}

/// Runs the self-test with a hook between rules and checks, by which tests show that checks can fail.
pub fn run_after(
    writer: &Writer,
    probe_sources: &[IpAddr],
    interfere: impl FnOnce(&Netns),
) -> Result<Report, Failed> {
    let network = TestNetwork::new(probe_sources)?;
    let redirection = Redirection::Ambient(Ambient {
        dns_capture: true,
        ipv6: if network.has_ipv6 {
            Ipv6::Auto
        } else {
            Ipv6::Off
        },
        probe_sources: probe_sources.to_vec(),
        ..Ambient::default()
    });
    writer.apply(&network.pod, &redirection, &sandbox()?)?;
    interfere(&network.pod);
    let listeners = Listeners::open(&network).map_err(TestNetworkError::from)?;
    let mut checks = Vec::new();
    for family in network.families() {
        checks.extend(try_family(&network, &listeners, *family, probe_sources));
    }
    let missing = writer.missing_for_guard();
    checks.extend(try_guard(&network, &listeners, missing)?);
    checks.push(Check {
        name: "IPv6 of the node".to_owned(),
        outcome: Ok(if network.has_ipv6 {
            "the kernel has IPv6, and it was tested".to_owned()
        } else {
            "the kernel has no IPv6: there is nothing to capture".to_owned()
        }),
    });
    Ok(Report { checks })
}

/// Executes all of an ADD in temporary netns, without packets, so that an error of an ADD occurs here first. The
/// error names an option that the kernel lacks.
pub(crate) fn preflight(writer: &Writer, probes: &probes::ProbeSettings) -> Result<(), Failed> {
    try_add(writer, probes).map_err(describe_failed)
}

fn try_add(writer: &Writer, probes: &probes::ProbeSettings) -> Result<(), Failed> {
    let node = network::netns_with_loopback()?;
    node.within(|| probes::preflight(probes))
        .map_err(TestNetworkError::from)??;
    let pod = network::netns_with_loopback()?;
    inspect::all_addresses(&pod)?;
    inspect::captured_flows(&pod)?;
    let redirection = Redirection::Ambient(Ambient {
        probe_sources: probes.sources(),
        ..Ambient::default()
    });
    writer.apply(&pod, &redirection, &sandbox()?)?;
    Ok(())
}

fn sandbox() -> Result<SandboxRef, inpod_types::InvalidIdentifier> {
    Ok(SandboxRef {
        network_name: "self-test".parse()?,
        container_id: "self-test".parse()?,
        ifname: "eth0".parse()?,
    })
}

fn try_family(
    network: &TestNetwork,
    listeners: &Listeners,
    family: Family,
    probe_sources: &[IpAddr],
) -> Vec<Check> {
    let packets = packets(family, probe_sources).into_iter();
    let check = |(name, sender, to, wanted)| Check {
        name: format!("{name} {family}"),
        outcome: listeners.check_arrival(network.send(sender, to), wanted),
    };
    packets.map(check).collect()
}

/// Checks that only ztunnel answers on its port, once for each family.
fn try_guard(
    network: &TestNetwork,
    listeners: &Listeners,
    missing: Option<&str>,
) -> Result<Vec<Check>, TestNetworkError> {
    if let Some(option) = missing {
        let outcome = Ok(format!(
            "only in part: the kernel lacks {option}, so that another process gets DNS queries by UDP, and connections \
             to it time out"
        ));
        let name = GUARD.to_owned();
        return Ok(vec![Check { name, outcome }]);
    }
    listeners.unmark(OUTBOUND)?;
    let check = |family: &Family| Check {
        name: format!("{GUARD} {family}"),
        outcome: listeners.check_refusal(
            network.send(Sender::Pod, (network::peer_address(*family), APPLICATION)),
        ),
    };
    Ok(network.families().iter().map(check).collect())
}

/// A packet to send, with its name, the destination, and the expected place of arrival.
type Packet = (&'static str, Sender, (IpAddr, u16), Arrival);

fn packets(family: Family, probe_sources: &[IpAddr]) -> Vec<Packet> {
    let (pod, peer) = (network::pod_address(family), network::peer_address(family));
    let (inside, outside) = ((pod, APPLICATION), (peer, APPLICATION));
    let (hbone, dns) = ((pod, INBOUND_HBONE_PORT), (peer, DNS_PORT));
    let mut packets = vec![
        ("outbound", Sender::Pod, outside, OUTBOUND),
        ("outbound of ztunnel", Sender::Ztunnel(None), outside, PEER),
        ("inbound", Sender::Peer(None), inside, PLAINTEXT),
        ("inbound from a ztunnel", Sender::Peer(None), hbone, HBONE),
        ("pod to itself", Sender::Pod, inside, APP),
        ("reply to ztunnel", Sender::Ztunnel(Some(peer)), inside, APP),
        ("DNS over TCP", Sender::Pod, dns, DNS),
        ("DNS over UDP", Sender::PodUdp, dns, DNS_UDP),
    ];
    let is_of_family = |source: &IpAddr| Family::of(*source) == family;
    let source = probe_sources.iter().copied().find(is_of_family);
    packets.extend(source.map(|_| ("host probe", Sender::Peer(source), inside, APP)));
    packets
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.outcome {
            Ok(seen) => write!(f, "{}: {seen}", self.name),
            Err(why) => write!(f, "{} FAILED: {why}", self.name),
        }
    }
}
