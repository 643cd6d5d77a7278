//! Sends real packets through real rules, in two netns that are made for it, and names what fails.
//!
//! One netns is a pod, with listeners where ztunnel has them; the other is the rest of the world. What is seen is the
//! socket at which a packet arrived, never only that something answered.

mod listeners;
mod world;

use std::{fmt, net::IpAddr};

use inpod_linux::Netns;
use inpod_types::SandboxRef;

use crate::{
    apply::Writer,
    backend::Backend,
    error::{ApplyError, InspectError, ProbeSetError},
    family::Family,
    inspect,
    marks::{DNS_PORT, INBOUND_HBONE_PORT},
    probes,
    rules::{Ambient, Ipv6, Redirection},
};
use listeners::{At, Listeners};
pub use world::WorldError;
use world::{APPLICATION, Packet, World};

/// What was tried, and how it went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Its name.
    pub name: String,
    /// What was seen; where it failed, what was expected besides.
    pub outcome: Result<String, String>,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What the rules were written with.
    pub backend: Backend,
    /// In order.
    pub checks: Vec<Check>,
}

/// Why nothing could be tried.
#[derive(Debug, thiserror::Error)]
pub enum SelfTestError {
    /// The two netns could not be made.
    #[error("cannot run the self-test")]
    World(#[from] WorldError),
    /// The rules could not be written.
    #[error("cannot run the self-test")]
    Apply(#[from] ApplyError),
    /// A pod's addresses could not be set_addresses.
    #[error("cannot run the self-test")]
    ProbeSet(#[from] ProbeSetError),
    /// A netns could not be looked into.
    #[error("cannot run the self-test")]
    Inspect(#[from] InspectError),
    /// A name of the test's is none; a defect.
    #[error("cannot run the self-test: {0}")]
    Name(#[from] inpod_types::InvalidIdentifier),
}

/// Makes the two netns, applies rules with everything on, and tries them.
///
/// # Errors
///
/// When there is nothing to try; what fails of the rules is in the report.
pub fn run(writer: &Writer, probe_sources: &[IpAddr]) -> Result<Report, SelfTestError> {
    run_after(writer, probe_sources, |_pod| ())
}

/// The same, after something was done to the pod's netns and the rules in it: how it is shown that a check can fail.
///
/// # Errors
///
/// As of [`run`].
pub fn run_after(
    writer: &Writer,
    probe_sources: &[IpAddr],
    interfere: impl FnOnce(&Netns),
) -> Result<Report, SelfTestError> {
    let world = World::new(probe_sources)?;
    let redirection = Redirection::Ambient(Ambient {
        dns_capture: true,
        ipv6: if world.has_ipv6 {
            Ipv6::Auto
        } else {
            Ipv6::Off
        },
        probe_sources: probe_sources.to_vec(),
        ..Ambient::default()
    });
    let applied = writer.apply(&world.pod, &redirection, &sandbox()?)?;
    interfere(&world.pod);
    let listeners = Listeners::open(&world).map_err(WorldError::from)?;
    let mut checks = Vec::new();
    for family in world.families() {
        checks.extend(try_family(&world, &listeners, *family, probe_sources));
    }
    checks.push(Check {
        name: "IPv6 of the node".to_owned(),
        outcome: Ok(if world.has_ipv6 {
            "the kernel has IPv6, and it was tested".to_owned()
        } else {
            "the kernel has no IPv6: there is nothing to capture".to_owned()
        }),
    });
    Ok(Report {
        backend: applied.backend,
        checks,
    })
}

/// Does what every ADD asks for, each half in a netns that is made for it, and sends nothing: what is refused here is
/// refused there.
///
/// # Errors
///
/// When an ADD would be refused, or no netns could be made.
pub(crate) fn preflight(
    writer: &Writer,
    probes: &probes::ProbeSettings,
) -> Result<(), SelfTestError> {
    let node = world::bare()?;
    let backend = probes::programs::backend_kind_for(writer.backend(), &writer.programs);
    node.within(|| probes::preflight(probes.clone(), backend))
        .map_err(WorldError::from)??;
    let pod = world::bare()?;
    inspect::all_addresses(&pod)?;
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
    world: &World,
    listeners: &Listeners,
    family: Family,
    probe_sources: &[IpAddr],
) -> Vec<Check> {
    let packets = packets(family, probe_sources);
    let check = |(name, packet, wanted): (&str, Packet, At)| Check {
        name: format!("{name} {family}"),
        outcome: listeners.judge(world.send(packet), wanted),
    };
    packets.into_iter().map(check).collect()
}

/// What is sent, and where it is to arrive.
fn packets(family: Family, probe_sources: &[IpAddr]) -> Vec<(&'static str, Packet, At)> {
    let (pod, peer) = (world::pod_address(family), world::peer_address(family));
    let (inside, outside) = ((pod, APPLICATION), (peer, APPLICATION));
    let ztunnels = |source, to| Packet::FromZtunnel { source, to };
    let from_peer = |source, to| Packet::FromPeer { source, to };
    let hbone = (pod, INBOUND_HBONE_PORT);
    let mut packets = vec![
        ("outbound", Packet::FromPod(outside), At::Outbound),
        ("outbound of ztunnel", ztunnels(None, outside), At::Peer),
        ("inbound", from_peer(None, inside), At::Plaintext),
        ("inbound from a ztunnel", from_peer(None, hbone), At::Hbone),
        ("pod to itself", Packet::FromPod(inside), At::Application),
        (
            "reply to ztunnel",
            ztunnels(Some(peer), inside),
            At::Application,
        ),
        ("DNS over TCP", Packet::FromPod((peer, DNS_PORT)), At::Names),
        (
            "DNS over UDP",
            Packet::Question((peer, DNS_PORT)),
            At::NamesOverUdp,
        ),
    ];
    let is_of_family = |source: &&IpAddr| Family::of(**source) == family;
    let source = probe_sources.iter().find(is_of_family);
    let probe = |source: &IpAddr| {
        (
            "host probe",
            from_peer(Some(*source), inside),
            At::Application,
        )
    };
    packets.extend(source.map(probe));
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
