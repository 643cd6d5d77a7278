//! Judges the sockets on ztunnel's ports. Each port to which inpod's rules lead needs a socket with ztunnel's mark. The
//! holder is no process of the pod: an application with NET_RAW can set the mark, too.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use anyhow::anyhow;
use inpod_linux::Netns;
use inpod_types::{Reason, cgroup::PodKey};
use parking_lot::Mutex;

use super::{Finding, Kind, printable};
use crate::{
    error::Failed,
    inspect::{self, InspectError, Listener, Process, Protocol},
    marks::{FROM_ZTUNNEL, INBOUND_HBONE_PORT, OUTBOUND_PORT, ZTUNNEL_DNS_PORT},
    netlink::Socket,
    rules::{Expr, Rule, Table, Transport},
};

/// A port of ztunnel in the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Port(Protocol, u16);

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = match self.0 {
            Protocol::Tcp => "TCP",
            Protocol::Udp => "UDP",
        };
        write!(f, "{protocol} port {}", self.1)
    }
}

/// The cookies of sockets without a holder in the pod at the last search. Such sockets need no further search.
#[derive(Debug, Default)]
pub(crate) struct VerifiedListeners(Mutex<BTreeSet<u64>>);

/// A port that ztunnel lacks or shares.
#[derive(Debug, PartialEq, Eq)]
enum Fault {
    Missing(Port),
    /// The process is `None` if none of the pod's processes seems to hold the socket.
    Taken(Port, Listener, Option<Process>),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(port @ Port(_, ZTUNNEL_DNS_PORT)) => write!(
                f,
                "ztunnel does not listen on {port}: its DNS proxy is off (ISTIO_META_DNS_CAPTURE), but the pod's DNS \
                 queries are redirected to it"
            ),
            Self::Missing(port) => write!(f, "ztunnel does not listen on {port}"),
            Self::Taken(port, listener, Some(Process { command, pid, .. })) => {
                let (command, uid) = (printable(command), listener.uid);
                write!(
                    f,
                    "{port} is held by {command} (pid {pid}, uid {uid}) instead of ztunnel"
                )
            }
            Self::Taken(port, listener, None) => {
                let uid = listener.uid;
                write!(
                    f,
                    "{port} is held by a socket of uid {uid} without ztunnel's mark"
                )
            }
        }
    }
}

/// Returns a finding for each needed port without a listener or with a foreign listener. A netns without rules for
/// ztunnel has no findings. `pod` finds processes of the pod outside of the netns.
pub(super) fn findings(
    netns: &Netns,
    tables: &[Table],
    pod: Option<PodKey>,
    verified: &VerifiedListeners,
) -> Result<Vec<Finding>, InspectError> {
    let needed = needed(tables);
    if needed.is_empty() {
        return Ok(Vec::new());
    }
    let listeners = inspect::listeners(netns)?;
    let holders = find_holders(netns, pod, &needed, &listeners, verified)?;
    let faults = judge(&needed, &listeners, &holders).into_iter();
    let mut found: Vec<_> = faults.map(|fault| describe(&fault)).collect();
    let ztunnels = cgroups_of_ztunnel(&needed, &listeners, &holders);
    if !ztunnels.is_empty() {
        let marked = inspect::marked_connections(netns, pod, &ztunnels)?;
        found.extend(marked.iter().map(describe_marked));
    }
    Ok(found)
}

/// Returns the cgroups of the processes that opened ztunnel's listeners.
fn cgroups_of_ztunnel(
    needed: &BTreeSet<Port>,
    listeners: &[Listener],
    holders: &BTreeMap<u32, Process>,
) -> BTreeSet<u64> {
    let is_ztunnels = |it: &&Listener| {
        let is_needed = needed.contains(&Port(it.protocol, it.port));
        is_needed && is_marked(it) && !holders.contains_key(&it.inode)
    };
    let listeners = listeners.iter().filter(is_ztunnels);
    listeners.filter_map(|it| it.cgroup).collect()
}

fn describe_marked((process, connections): (&Process, &usize)) -> Finding {
    let (command, pid) = (printable(&process.command), process.pid);
    let bypass = if *connections == 1 {
        "connection carries ztunnel's mark and bypasses"
    } else {
        "connections carry ztunnel's mark and bypass"
    };
    Finding {
        kind: Kind::MarkedConnection,
        subject: format!("mark {FROM_ZTUNNEL}"),
        sentence: format!("{connections} {bypass} ztunnel: {command} (pid {pid}) set the mark."),
    }
}

/// Checks that ztunnel alone listens where the redirection leads. Searches no processes: the application of a pod that
/// is being enrolled does not run yet, or is checked later.
///
/// A kernel that cannot list sockets passes the check.
pub(crate) fn require_ztunnel(sockets: &mut Socket, tables: &[Table]) -> Result<(), Failed> {
    let needed = needed(tables);
    let ports: Vec<_> = needed.iter().map(|port| (port.0, port.1)).collect();
    let listeners = match inspect::listeners_on(sockets, &ports) {
        Err(error) if inspect::lacks_sock_diag(&error) => return Ok(()),
        listeners => listeners?,
    };
    let mut faults = judge(&needed, &listeners, &BTreeMap::new()).into_iter();
    let Some(fault) = faults.next() else {
        return Ok(());
    };
    let reason = match fault {
        Fault::Missing(_) => Reason::ListenerLost,
        Fault::Taken(..) => Reason::ListenerTaken,
    };
    Err(Failed::new(reason, anyhow!("{fault}")))
}

fn describe(fault: &Fault) -> Finding {
    let (kind, port) = match fault {
        Fault::Missing(port) => (Kind::ListenerMissing, port),
        Fault::Taken(port, ..) => (Kind::ListenerTaken, port),
    };
    Finding {
        kind,
        subject: port.to_string(),
        sentence: format!("{fault}."),
    }
}

/// Returns the TCP ports to which redirected connections go.
pub(super) fn redirected_ports(tables: &[Table]) -> BTreeSet<u16> {
    let needed = needed(tables).into_iter();
    let tcp = needed.filter(|port| port.0 == Protocol::Tcp);
    tcp.map(|port| port.1).collect()
}

/// Returns the ports on which ztunnel has to listen: where rules redirect to, and HBONE's, to which peers connect
/// without redirection.
fn needed(tables: &[Table]) -> BTreeSet<Port> {
    if tables.iter().any(Table::matches_socket_owners) {
        // The ports are those of a sidecar's proxy.
        return BTreeSet::new();
    }
    let rules = tables.iter().flat_map(|table| &table.chains);
    let mut ports: BTreeSet<_> = rules
        .flat_map(|chain| &chain.rules)
        .filter_map(redirected_to)
        .collect();
    if ports.contains(&Port(Protocol::Tcp, OUTBOUND_PORT)) {
        ports.insert(Port(Protocol::Tcp, INBOUND_HBONE_PORT));
    }
    ports
}

fn redirected_to(rule: &Rule) -> Option<Port> {
    let port = rule.0.iter().find_map(|expr| {
        if let Expr::Redirect(port) = expr {
            Some(*port)
        } else {
            None
        }
    })?;
    let is_udp = rule.0.contains(&Expr::Protocol(Transport::Udp));
    Some(Port(
        if is_udp { Protocol::Udp } else { Protocol::Tcp },
        port,
    ))
}

/// Returns whether the socket carries ztunnel's mark, and `true` if the kernel does not report marks.
fn is_marked(listener: &Listener) -> bool {
    let is_ztunnels = |mark| mark & FROM_ZTUNNEL.mask() == FROM_ZTUNNEL.value();
    listener.mark.is_none_or(is_ztunnels)
}

fn judge(
    needed: &BTreeSet<Port>,
    listeners: &[Listener],
    holders: &BTreeMap<u32, Process>,
) -> Vec<Fault> {
    let is_ztunnels = |it: &&Listener| is_marked(it) && !holders.contains_key(&it.inode);
    let faults = needed.iter().filter_map(|port| {
        let is_on = |it: &&Listener| Port(it.protocol, it.port) == *port;
        let on_port: Vec<_> = listeners.iter().filter(is_on).collect();
        if on_port.is_empty() {
            return Some(Fault::Missing(*port));
        }
        let other = on_port.into_iter().find(|it| !is_ztunnels(it))?;
        let holder = holders.get(&other.inode).cloned();
        Some(Fault::Taken(*port, other.clone(), holder))
    });
    faults.collect()
}

/// Finds the processes of the pod with sockets on ztunnel's ports. Sockets without a holder at the last search are not
/// searched for again: no process gets a socket of ztunnel later.
fn find_holders(
    netns: &Netns,
    pod: Option<PodKey>,
    needed: &BTreeSet<Port>,
    listeners: &[Listener],
    verified: &VerifiedListeners,
) -> Result<BTreeMap<u32, Process>, InspectError> {
    let is_needed = |it: &&Listener| needed.contains(&Port(it.protocol, it.port));
    let on_ports: Vec<_> = listeners.iter().filter(is_needed).collect();
    let mut verified = verified.0.lock();
    let is_known = |it: &&Listener| is_marked(it) && verified.contains(&it.cookie);
    if on_ports.iter().all(is_known) {
        return Ok(BTreeMap::new());
    }
    let inodes = on_ports.iter().map(|it| it.inode).collect();
    let holders = inspect::socket_holders(netns, pod, &inodes)?;
    let free = on_ports
        .iter()
        .filter(|it| !holders.contains_key(&it.inode));
    *verified = free.map(|it| it.cookie).collect();
    Ok(holders)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Ambient;

    fn listener(Port(protocol, port): Port, mark: u32, inode: u32) -> Listener {
        Listener {
            protocol,
            port,
            address: "::".parse().unwrap(),
            dual_stack: true,
            uid: 1000,
            interface_index: None,
            mark: Some(mark),
            inode,
            cookie: inode.into(),
            cgroup: None,
        }
    }

    fn tcp(port: u16) -> Port {
        Port(Protocol::Tcp, port)
    }

    fn needed_by(change: impl FnOnce(&mut Ambient)) -> Vec<Port> {
        let mut settings = Ambient::default();
        change(&mut settings);
        let tables = crate::rules::ambient::ruleset(&settings).tables;
        needed(&tables).into_iter().collect()
    }

    #[test]
    fn each_port_to_which_rules_lead_is_needed() {
        let plain = [15001, 15006, 15008].map(tcp);
        assert_eq!(needed_by(|_| ()), plain);
        let dns = needed_by(|it| it.dns_capture = true);
        let udp = Port(Protocol::Udp, 15053);
        assert_eq!(dns, [&plain[..], &[tcp(15053), udp]].concat());
        let ingress = needed_by(|it| it.bypass_inbound_capture = true);
        assert_eq!(ingress, [15001, 15008].map(tcp));
        assert_eq!(needed(&crate::rules::ambient::drain().tables), [].into());
    }

    #[test]
    fn a_listener_is_ztunnels_by_mark_and_holder() {
        let needed: BTreeSet<_> = [tcp(15006)].into();
        let ztunnels = || listener(tcp(15006), 0x1539, 1);
        let unmarked = || listener(tcp(15006), 0, 2);
        let elsewhere = listener(tcp(80), 0, 3);
        let python = Process {
            start_time: 0,
            pid: 7,
            command: "python3".to_owned(),
            sandbox_own: false,
        };
        let nobody = BTreeMap::new();
        let held = |inode| BTreeMap::from([(inode, python.clone())]);
        let unknown = "TCP port 15006 is held by a socket of uid 1000 without ztunnel's mark";
        let known = "TCP port 15006 is held by python3 (pid 7, uid 1000) instead of ztunnel";
        for (listeners, holders, expected) in [
            (vec![ztunnels(), elsewhere], &nobody, None),
            (
                vec![],
                &nobody,
                Some("ztunnel does not listen on TCP port 15006"),
            ),
            (vec![unmarked()], &nobody, Some(unknown)),
            (vec![unmarked()], &held(2), Some(known)),
            // A thief that joined ztunnel's group of SO_REUSEPORT, and one that set the mark.
            (vec![ztunnels(), unmarked()], &nobody, Some(unknown)),
            (vec![ztunnels()], &held(1), Some(known)),
        ] {
            let faults = judge(&needed, &listeners, holders);
            let sentences: Vec<_> = faults.iter().map(ToString::to_string).collect();
            let expected: Vec<_> = expected.into_iter().collect();
            assert_eq!(sentences, expected, "{listeners:?}");
        }
    }
}
