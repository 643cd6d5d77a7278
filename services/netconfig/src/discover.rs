//! Finds a pod's netns by the cgroups of the pod's processes, without a CNI call.

use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::anyhow;
use inpod_linux::Netns;
use inpod_types::{
    ContainerId, NetnsRef, NetworkName, PodUid, Reason, SandboxRef,
    cgroup::{PodKey, find_container},
};

use crate::{
    claims::{
        Claim, Claims,
        validate::{self, ValidatedNetns},
    },
    error::{Context as _, Failed},
    inspect::{self, PROC, Process},
};

/// The name of a pod's first interface with every runtime.
const IFNAME: &str = "eth0";

#[derive(Debug)]
pub struct DiscoveredNetns {
    /// The pod's oldest process in the netns.
    pub process: Process,
    pub container_id: ContainerId,
    validated: ValidatedNetns,
    /// The largest number of users in a user namespace of the pod's processes in the netns.
    users: u64,
}

impl DiscoveredNetns {
    pub fn netns(&self) -> &Netns {
        &self.validated.netns
    }
}

/// Finds a pod's netns. Candidates are the netns of the pod's processes with one of `addresses` on an interface other
/// than `lo`, except the node's netns and netconfig's own. `proc` is the path of procfs.
///
/// A process can create a netns with any address in a new user namespace, which has fewer users than the pod's. Among
/// several candidates, the netns with the largest user namespace is returned, and two of the same size are refused. A
/// single candidate is returned without a comparison.
///
/// Scans all processes of the node, and may block.
pub fn find(proc: &Path, pod: &PodUid, addresses: &[IpAddr]) -> Result<DiscoveredNetns, Failed> {
    let scan = scan(proc, pod)
        .map_err(|error| Failed::new(Reason::KernelRefused, error))
        .context("cannot list the node's processes")?;
    let (mut others, mut failure) = (Vec::new(), None);
    let mut fitting = Vec::new();
    for netns in group_by_netns(scan.members) {
        match validate_group(netns, addresses) {
            Ok(Some(found)) => fitting.push(found),
            Ok(None) => {}
            Err(refusal) if refusal.reason == Reason::AddressMismatch => {
                others.push(refusal.to_string());
            }
            // A later candidate may still be the pod's netns.
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    let most = fitting.iter().map(|found| found.users).max();
    fitting.retain(|found| Some(found.users) == most);
    if let [first, second, ..] = fitting.as_slice() {
        // A netns that the pod made for itself resembles the pod's own.
        let (first, second) = (first.process.pid, second.process.pid);
        let cause = anyhow!(
            "pod {pod} has two netns with its address: of process {first} and of process {second}"
        );
        return Err(Failed::new(Reason::NetnsNotFound, cause));
    }
    if let Some(found) = fitting.pop() {
        return Ok(found);
    }
    Err(failure.unwrap_or_else(|| nowhere(pod, scan.hidden, &others)))
}

/// Returns the error of a pod without a netns, with a sentence per rejected netns.
fn nowhere(pod: &PodUid, hidden: usize, rejected: &[String]) -> Failed {
    let mut text = format!(
        "no process of pod {pod} is in a netns of its own that holds one of the pod's addresses"
    );
    for sentence in rejected {
        text = format!("{text}; {sentence}");
    }
    if hidden > 0 {
        let needed = "CAP_SYS_PTRACE is needed";
        text = format!("{text}; {hidden} of its processes cannot be inspected ({needed})");
    }
    Failed::new(Reason::NetnsNotFound, anyhow!(text))
}

/// Finds and claims a pod's netns for a sandbox named after the oldest process's container. A netns discovered
/// before keeps its sandbox, even if the container of the sandbox has ended.
pub(crate) fn find_and_claim(
    claims: &Claims,
    pod: &PodUid,
    addresses: &[IpAddr],
) -> Result<(Arc<Claim>, Process), Failed> {
    let found = find(Path::new(PROC), pod, addresses)?;
    let sandbox = match existing_discovery(claims, found.netns()) {
        Some(sandbox) => sandbox,
        None => discovered(found.container_id.clone())?,
    };
    let claim = claims.claim(&sandbox, found.validated)?;
    let (netns, path) = (claim.netns.id(), claim.netns.path().display());
    tracing::info!(%pod, %sandbox, %netns, %path, "Discovered and claimed a netns");
    let process = Process {
        sandbox_own: claim.sandbox.container_id == found.container_id,
        ..found.process
    };
    Ok((claim, process))
}

#[derive(Debug)]
struct Member {
    /// The first field, since the derived order is by start time, then pid.
    process: Process,
    path: PathBuf,
    /// The device and inode number of the netns.
    netns: (u64, u64),
    container_id: ContainerId,
}

#[derive(Debug, Default)]
struct Scan {
    members: Vec<Member>,
    /// The number of the pod's processes that netconfig could not inspect.
    hidden: usize,
}

/// Lists the pod's processes whose netns is neither the node's nor netconfig's, and omits processes that end
/// meanwhile.
fn scan(proc: &Path, pod: &PodUid) -> io::Result<Scan> {
    let mut scan = Scan::default();
    let Some(pod) = PodKey::from_uid(pod.as_str()) else {
        return Ok(scan);
    };
    let never = [proc.join("1/ns/net"), PathBuf::from("/proc/self/ns/net")];
    let never = never.map(|path| netns_at(&path).ok());
    for (pid, path) in inspect::process_directories(proc)? {
        match netns_at(&path.join("ns/net")) {
            Ok(netns) if never.contains(&Some(netns)) => {}
            Ok(netns) => scan.members.extend(member(pod, netns, pid, path)),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                scan.hidden += usize::from(container_of(pod, &path).is_some());
            }
            Err(_) => {}
        }
    }
    Ok(scan)
}

fn netns_at(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::metadata(path)?;
    Ok((found.dev(), found.ino()))
}

fn member(pod: PodKey, netns: (u64, u64), pid: u32, path: PathBuf) -> Option<Member> {
    let container_id = container_of(pod, &path)?;
    Some(Member {
        process: inspect::read_process(pid, &path, Some(container_id.as_str()))?,
        path,
        netns,
        container_id,
    })
}

/// Returns the container of a process if the process belongs to the pod. Decodes lossily, because a cgroup's name
/// may contain any bytes.
fn container_of(pod: PodKey, process: &Path) -> Option<ContainerId> {
    let cgroup = fs::read(process.join("cgroup")).ok()?;
    let place = find_container(&String::from_utf8_lossy(&cgroup))?;
    (place.pod == pod).then_some(place.container)
}

/// Groups processes by netns, so that each group and the list of groups start with the oldest process.
fn group_by_netns(mut members: Vec<Member>) -> Vec<Vec<Member>> {
    members.sort_by(|a, b| a.process.cmp(&b.process));
    let mut netns: BTreeMap<_, usize> = BTreeMap::new();
    let mut groups: Vec<Vec<Member>> = Vec::new();
    for member in members {
        let index = *netns.entry(member.netns).or_insert(groups.len());
        match groups.get_mut(index) {
            Some(group) => group.push(member),
            None => groups.push(vec![member]),
        }
    }
    groups
}

/// Validates a netns through the first member still running; returns `None` if no member is running.
fn validate_group(
    members: Vec<Member>,
    addresses: &[IpAddr],
) -> Result<Option<DiscoveredNetns>, Failed> {
    let users = members.iter().map(|member| users_of(&member.path));
    let users = users.max().unwrap_or_default();
    for member in members {
        let (device, inode) = member.netns;
        let wanted = NetnsRef {
            device: Some(device),
            inode: Some(inode),
            ..NetnsRef::from_path(member.path.join("ns/net"))
        };
        match validate::validate_discovered(&wanted, addresses.to_vec(), &[PROC.into()]) {
            Ok(validated) if is_same_process(&member) => {
                return Ok(Some(DiscoveredNetns {
                    users,
                    process: member.process,
                    container_id: member.container_id,
                    validated,
                }));
            }
            // The process ended or moved to another netns, or another process reuses its pid.
            Ok(_) => {}
            Err(refusal)
                if matches!(refusal.reason, Reason::NetnsMissing | Reason::NetnsMismatch) => {}
            Err(refusal) => return Err(refusal),
        }
    }
    Ok(None)
}

/// Returns the number of users in a process's user namespace: the sum of the lengths in uid_map (user_namespaces(7)).
fn users_of(process: &Path) -> u64 {
    let map = fs::read_to_string(process.join("uid_map")).unwrap_or_default();
    let lengths = map
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2));
    lengths
        .filter_map(|length| length.parse::<u64>().ok())
        .sum()
}

fn is_same_process(member: &Member) -> bool {
    let id = Some(member.container_id.as_str());
    inspect::read_process(member.process.pid, &member.path, id)
        .is_some_and(|now| now.start_time == member.process.start_time)
}

/// Returns the sandbox for which an earlier search claimed the netns.
fn existing_discovery(claims: &Claims, netns: &Netns) -> Option<SandboxRef> {
    let held = claims.list();
    let held = held.iter().find(|claim| claim.netns.same_as(netns))?;
    let is_discovered = held.sandbox.network_name == NetworkName::default();
    is_discovered.then(|| held.sandbox.clone())
}

fn discovered(container_id: ContainerId) -> Result<SandboxRef, Failed> {
    Ok(SandboxRef {
        network_name: NetworkName::default(),
        container_id,
        ifname: IFNAME.parse().context("cannot name the sandbox")?,
    })
}

#[cfg(test)]
mod tests;
