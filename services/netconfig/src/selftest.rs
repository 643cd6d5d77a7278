//! Executes all of an ADD in temporary netns, without packets, so that an error of an ADD occurs here first.

mod missing;

use inpod_linux::{CreateError, EnterError, Netns};
use inpod_types::SandboxRef;
use nix::sys::socket::SockProtocol;

use crate::{
    apply::Writer,
    error::{Failed, KernelCause},
    inspect,
    netlink::{KernelError, Socket},
    probes,
    rules::{Ambient, Redirection},
};

/// The index of `lo` in every netns.
const LOOPBACK: u32 = 1;

#[derive(Debug, thiserror::Error)]
enum TemporaryNetnsError {
    #[error("cannot create a netns")]
    Create(#[from] CreateError),
    #[error("cannot enter a temporary netns")]
    Enter(#[from] EnterError),
    #[error("cannot open a socket in a temporary netns")]
    Socket(#[from] std::io::Error),
    #[error("cannot set up a temporary netns")]
    Kernel(#[from] KernelError),
}

impl KernelCause for TemporaryNetnsError {}

/// Executes an ADD for two temporary netns, a node's and a pod's. The error names an option that the kernel lacks.
pub(crate) fn run(writer: &Writer, probes: &probes::ProbeSettings) -> Result<(), Failed> {
    try_add(writer, probes).map_err(|failed| {
        let option = missing::missing_option_here(&failed);
        let failed = failed.context("cannot run the self-test");
        match option {
            Some(option) => failed.context(format!(
                "the kernel lacks {option}, without which inpod cannot redirect a pod"
            )),
            None => failed,
        }
    })
}

fn try_add(writer: &Writer, probes: &probes::ProbeSettings) -> Result<(), Failed> {
    let node = netns_with_loopback()?;
    node.within(|| probes::preflight(probes))
        .map_err(TemporaryNetnsError::from)??;
    let pod = netns_with_loopback()?;
    inspect::all_addresses(&pod)?;
    inspect::captured_flows(&pod)?;
    let redirection = Redirection::Ambient(Ambient {
        probe_sources: probes.sources(),
        ..Ambient::default()
    });
    let sandbox = SandboxRef {
        network_name: "self-test".parse()?,
        container_id: "self-test".parse()?,
        ifname: "eth0".parse()?,
    };
    writer.apply(&pod, &redirection, &sandbox)?;
    Ok(())
}

fn netns_with_loopback() -> Result<Netns, TemporaryNetnsError> {
    let netns = Netns::create()?;
    let mut socket = netns.within(|| Socket::open(SockProtocol::NetlinkRoute))??;
    socket.set_up(LOOPBACK)?;
    Ok(netns)
}
