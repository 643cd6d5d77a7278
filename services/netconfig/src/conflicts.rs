//! Finds chains, ip rules and settings of other programs that can defeat inpod's rules.
//!
//! Foreign chains are judged by their hook, priority and policy, and by whether they have rules, but not by what the
//! rules are. Of iptables' legacy tables only their use is known.

mod chains;
mod drops;
mod environment;
mod listeners;
mod marks;

use std::net::IpAddr;

use inpod_linux::Netns;
use inpod_types::cgroup::PodKey;

pub(crate) use listeners::{VerifiedListeners, require_ztunnel};

use crate::{
    inspect::InspectError,
    legacy,
    marks::INBOUND_PLAINTEXT_PORT,
    netlink::KernelError,
    nftables::Nftables,
    rules::{Expr, InterfaceName, Table},
};

/// Limits the response: any process with NET_ADMIN in the netns can add chains and ip rules.
const MAX_FINDINGS: usize = 100;

/// A foreign chain, ip rule or setting that can defeat inpod's rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub kind: Kind,
    /// Table and chain, ip rule, interface or sysctl.
    pub subject: String,
    pub sentence: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Can translate connections before inpod's chain.
    NatChain,
    /// Drops packets by its policy.
    DropPolicy,
    /// The same, and certainly drops redirected connections.
    Drops,
    /// Containers behind a bridge of the pod cannot connect.
    Bridge,
    /// An ip rule matches ztunnel's mark.
    MarkedRule,
    /// Strict reverse path filtering drops packets from outside.
    RpFilter,
    LoopbackDown,
    Ipv6Disabled,
    Incumbent,
    /// iptables' legacy table nat is in use; its rules are unknown.
    LegacyNat,
    /// Rules lead to a port without a listener.
    ListenerMissing,
    /// An application listens on a port of ztunnel.
    ListenerTaken,
    /// Connections of the pod carry ztunnel's mark.
    MarkedConnection,
    /// Gives packets of the pod ztunnel's mark.
    MarkingChain,
}

/// The pod whose netns is searched for conflicts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) addresses: &'a [IpAddr],
    /// Set if the pod's processes outside of the netns are searched, too.
    pub(crate) pod: Option<PodKey>,
    pub(crate) verified: &'a VerifiedListeners,
}

impl Kind {
    /// Returns whether the finding stops or diverts the pod's traffic.
    pub(crate) fn blocks(self) -> bool {
        matches!(
            self,
            Self::Drops | Self::Bridge | Self::ListenerMissing | Self::ListenerTaken
        )
    }
}

/// Finds conflicts in the netns of a pod with these addresses.
pub fn find_conflicts(netns: &Netns, addresses: &[IpAddr]) -> Result<Vec<Finding>, InspectError> {
    let subject = Subject {
        addresses,
        pod: None,
        verified: &VerifiedListeners::default(),
    };
    find_conflicts_of(netns, subject)
}

pub(crate) fn find_conflicts_of(
    netns: &Netns,
    subject: Subject<'_>,
) -> Result<Vec<Finding>, InspectError> {
    let (nftables, reader, uses_legacy_nat) = netns.within(|| {
        (
            Nftables::open(),
            environment::Reader::open(),
            legacy::uses_nat(),
        )
    })?;
    let reader = reader.map_err(InspectError::reading("the interfaces"))?;
    let nftables = nftables.map_err(|error| KernelError::new("open a netlink socket", error));
    let mut nftables = nftables?;
    let tables = nftables.read()?.tables.into_iter();
    let tables: Vec<_> = tables.map(|observed| observed.table).collect();
    let mut found = listeners::findings(netns, &tables, subject.pod, subject.verified)?;
    let environment = reader.read()?;
    found.extend(environment::findings(&environment, subject.addresses));
    let ports = listeners::redirected_ports(&tables);
    if ports.contains(&INBOUND_PLAINTEXT_PORT) {
        let (addresses, covered) = (subject.addresses, virtual_interfaces(&tables));
        let bridges = environment::uncovered_bridges(&environment, addresses, &covered);
        found.extend(bridges);
    }
    let outlines = nftables.read_outlines()?;
    let dropped = drops::find_dropped(&mut nftables, &outlines, &ports)?;
    found.extend(chains::findings(&outlines, &dropped));
    if !ports.is_empty() {
        found.extend(marks::findings(&mut nftables, &outlines)?);
    }
    found.extend(uses_legacy_nat.then(legacy_nat));
    found.truncate(MAX_FINDINGS);
    Ok(found)
}

/// Returns the interfaces whose inbound connections the rules treat as outbound.
fn virtual_interfaces(tables: &[Table]) -> Vec<&InterfaceName> {
    let rules = tables.iter().flat_map(|table| &table.chains);
    let exprs = rules
        .flat_map(|chain| &chain.rules)
        .flat_map(|rule| &rule.0);
    let mut names = Vec::new();
    for expr in exprs {
        if let Expr::ArrivesBy(name) = expr {
            names.push(name);
        }
    }
    names
}

fn legacy_nat() -> Finding {
    Finding {
        kind: Kind::LegacyNat,
        subject: "legacy table nat".to_owned(),
        sentence: "iptables' legacy table nat is in use; its rules cannot be seen here, and may translate connections \
                   before inpod's do."
            .to_owned(),
    }
}

/// Escapes unprintable characters and cuts after 64: any process with NET_ADMIN in the netns can choose names.
fn printable(name: &str) -> String {
    name.chars().take(64).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests;
